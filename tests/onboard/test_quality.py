"""The quality marker of a finalisation: recomputed from evidence whenever it is used.

Source: onboarding.md sections 7 (collection_quality) and 9 (rows 16, 19).
"""

import json

import pytest

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.collection_gates import execution_gate, select_repeats
from fpmsdk.onboard.collection_source import verify_source
from fpmsdk.onboard.policy import ValidationPolicy
from fpmsdk.onboard.provenance import UNASSESSED
from fpmsdk.onboard.quality import check_collection_report, collection_quality, verify_finalized_quality
from fpmsdk.onboard.request import load_request, request_id
from fpmsdk.onboard.validate_collection import CollectionValidation, validate_collection
from tests.onboard.collected import systems
from tests.onboard.measured import Replays, measured

POINTS = 16
LOOSE = {
    "interpolation": {"max_p95_relative_error": 9.0, "max_unsupported_fraction": 1.0},
    "repeatability": {"samples": 2},
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("campaign")
        systems(place, patch)
        yield measured(place, points=POINTS)


@pytest.fixture(autouse=True)
def surroundings(collection, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(collection[0].parent / "installed-systems"))


def assess(collection, place, **options):
    """The path of an assessment; `options` as of `CollectionValidation`."""
    folder, file = collection
    output = place / "quality"
    validate_collection(CollectionValidation(config=file, folder=folder, output=output, **options))
    return output / "collection-validation.json"


def repeated(collection, place):
    """The path of an assessment with repetitions."""
    policy = place / "loose.json"
    policy.write_text(json.dumps(LOOSE))
    return assess(collection, place, policy=policy, execute=True, executors=lambda name: Replays(POINTS, run=2))


@pytest.fixture(scope="module")
def assessed(collection, tmp_path_factory):
    return repeated(collection, tmp_path_factory.mktemp("assessed"))


@pytest.fixture
def report(assessed, tmp_path):
    """A copy of the report to change; what it refers to is shared."""
    path = tmp_path / "collection-validation.json"
    path.write_bytes(assessed.read_bytes())
    return path


def marker(collection, report):
    folder, file = collection
    request = load_request(file)
    return collection_quality(
        request,
        folder,
        source_request_id=request_id(request),
        source_plan_sha256=verify_source(request, folder).plan.sha256,
        report=report,
    )


def manifest_of(collection, quality):
    folder, file = collection
    request = load_request(file)
    return {
        "source_directory": str(folder),
        "source_request_id": request_id(request),
        "source_collection_plan_sha256": verify_source(request, folder).plan.sha256,
        "collection_quality": quality,
    }


def test_an_intact_report_is_confirmed_by_its_evidence(collection, report):
    checked = check_collection_report(report)
    assert checked.report == read_document(report)
    assert checked.source.folder == collection[0]
    assert [cell["phase"] for cell in checked.frozen["cells"]] == ["prefill", "decode"]


def test_the_marker_names_report_policy_and_the_status_of_every_gate(collection, report):
    saved = read_document(report)
    assert marker(collection, report) == {
        "status": "incomplete",
        "accuracy": "not_assessed",
        "report": file_evidence(report),
        "policy": saved["policy"],
        "gates": {
            "point_validity": "passed",
            "execution": "incomplete",
            "repeatability": "incomplete",
            "interpolation": "passed",
        },
    }


def test_without_a_report_quality_is_not_assessed(collection):
    assert marker(collection, None) == {"status": "not_assessed", "accuracy": "not_assessed"}


def test_a_marker_is_verified_again_wherever_it_is_used(collection, report):
    quality = marker(collection, report)
    assert verify_finalized_quality(manifest_of(collection, quality)) == quality
    assert verify_finalized_quality(manifest_of(collection, dict(UNASSESSED))) == UNASSESSED


def test_finalisations_from_before_the_marker_stay_unassessed(collection):
    manifest = manifest_of(collection, None)
    del manifest["collection_quality"]
    assert verify_finalized_quality(manifest) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda quality: quality.update(status="passed"),
        lambda quality: quality.update(accuracy="qualified"),
        lambda quality: quality["gates"].update(repeatability="passed"),
        lambda quality: quality["policy"].update(sha256="0" * 64),
        lambda quality: quality.pop("gates"),
    ],
)
def test_a_changed_marker_is_refused(collection, report, change):
    quality = marker(collection, report)
    change(quality)
    with pytest.raises(EvidenceError, match="collection_quality: is not what its evidence gives"):
        verify_finalized_quality(manifest_of(collection, quality))


def test_a_claim_without_a_report_is_refused(collection):
    with pytest.raises(EvidenceError, match="collection_quality"):
        verify_finalized_quality(manifest_of(collection, {"status": "passed", "accuracy": "not_assessed"}))
    with pytest.raises(OnboardError, match="expected an object"):
        verify_finalized_quality(manifest_of(collection, "passed"))


@pytest.mark.parametrize("name", ["report", "directory"])
def test_a_report_of_another_collection_is_refused(collection, report, tmp_path, name):
    folder, file = collection
    request = load_request(file)
    if name == "report":
        request = request.replaced({"search": {"seed": 7}})
    else:
        folder = tmp_path / "elsewhere"
    with pytest.raises(EvidenceError, match="is not of the collection"):
        collection_quality(
            request, folder, source_request_id=request_id(request), source_plan_sha256="0" * 64, report=report
        )


def test_a_report_of_another_plan_is_refused(collection, report):
    folder, file = collection
    request = load_request(file)
    with pytest.raises(EvidenceError, match="not of the finalised plan"):
        collection_quality(
            request, folder, source_request_id=request_id(request), source_plan_sha256="0" * 64, report=report
        )


def gate(name, **changes):
    return lambda document: document["gates"][name].update(changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (gate("point_validity", status="failed"), "point_validity"),
        (gate("execution", status="passed"), "execution"),
        (gate("execution", cells=[]), "execution"),
        (gate("repeatability", status="passed"), "repeatability"),
        (gate("interpolation", status="failed"), "interpolation"),
        (lambda document: document.update(status="passed"), "status must be incomplete"),
        (lambda document: document["inputs"]["formal_data"].reverse(), "formal data changed"),
        (lambda document: document["selection"].update(sha256="0" * 64), "repeatability-selection.json"),
        (lambda document: document["inputs"]["checkpoint"].update(sha256="0" * 64), "fpm_forward.json"),
        (lambda document: document["policy"].update(sha256="0" * 64), "policy.json"),
        (lambda document: document["gates"].pop("execution"), "gates must be"),
        (lambda document: document.update(schema_version="v0"), "no aisimulate-collection-validation/v1"),
        (lambda document: document.pop("selection"), "lacks selection"),
    ],
)
def test_a_report_that_its_evidence_contradicts_is_refused(report, change, reason):
    document = json.loads(report.read_text())
    change(document)
    report.write_text(json.dumps(document))
    with pytest.raises(OnboardError, match=reason):
        check_collection_report(report)


def test_repetitions_that_were_changed_afterwards_are_refused(collection, tmp_path):
    report = repeated(collection, tmp_path)
    path = next((report.parent / "repeatability" / "samples").rglob("benchmark.json"))
    path.write_text("{}")
    with pytest.raises(EvidenceError, match="files changed"):
        check_collection_report(report)


def test_a_report_holds_under_its_own_policy_only(report):
    with pytest.raises(OnboardError, match="another policy"):
        check_collection_report(report, ValidationPolicy())
    loose = ValidationPolicy.model_validate(LOOSE | {"serving": {"max_dispatch_delay_ms": 1.0}})
    assert check_collection_report(report, loose).report["status"] == "incomplete"


def test_an_assessment_without_repetitions_is_confirmed_too(collection, tmp_path):
    checked = check_collection_report(assess(collection, tmp_path))
    assert "directory" not in checked.report["gates"]["repeatability"]


def test_an_older_observation_version_is_kept_when_history_is_read_again(collection, tmp_path):
    folder, file = collection
    path = assess(collection, tmp_path)
    selection = path.with_name("repeatability-selection.json")
    source = verify_source(load_request(file), folder)
    old = select_repeats(source, ValidationPolicy(), 1)
    assert "observation_evidence_version" not in old
    write_document(selection, old)
    document = read_document(path)
    document["selection"] = file_evidence(selection)
    document["gates"]["execution"] = execution_gate(old)
    write_document(path, document)
    checked = check_collection_report(path)
    assert checked.frozen["cells"][0]["source_measurement"]["schema_version"] == 1
