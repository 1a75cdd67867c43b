"""A collection is validated, finalised with its report, and the marker is verified wherever the result is used.

Source: onboarding.md sections 7 (collection_quality) and 9 (row 16).
"""

import json

import pytest

from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import EvidenceError
from fpmsdk.onboard.finalize import finalize
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.provenance import json_object
from fpmsdk.onboard.request import load_request
from fpmsdk.onboard.validate_collection import CollectionValidation, validate_collection
from tests.onboard.collected import systems
from tests.onboard.finished import finished_in, with_blocks

ROOM = {
    "interpolation": {"max_p95_relative_error": 9.0, "max_unsupported_fraction": 1.0},
    "repeatability": {"samples": 2, "max_cv": 0.5, "max_source_relative_difference": 0.9},
}


@pytest.fixture(scope="module")
def finalised(tmp_path_factory):
    """Request and folder of a collection, the report of its validation, and the folder of its finalisation."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("finished")
        patch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
        systems(place, patch)
        request, folder = finished_in(place)
        report = validated(place, place / "quality", ROOM, execute=True)
        outcome = finalize(request, folder, place / "resolved", collection_report=report)
        assert (outcome["collection_quality"], outcome["accuracy"]) == ("passed", "not_assessed")
        yield request, folder, report, place / "resolved"


@pytest.fixture(autouse=True)
def surroundings(finalised, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(finalised[1].parent / "installed-systems"))


def validated(place, output, policy, **options):
    """The report of a validation."""
    path = output.with_name("policy.json")
    path.write_text(json.dumps(policy))
    validation = CollectionValidation(
        config=place / "request.yaml",
        folder=place / "collection",
        output=output,
        policy=path,
        executors=lambda name: with_blocks,
        **options,
    )
    validate_collection(validation)
    return output / "collection-validation.json"


def test_the_marker_is_in_the_manifest_and_in_the_profile(finalised):
    resolved = finalised[3]
    quality = read_document(resolved / "finalization.json")["collection_quality"]
    assert quality["status"] == "passed"
    assert set(quality["gates"].values()) == {"passed"}
    request = load_request(resolved / "request.yaml")
    assert json_object(request.fpm_profile.provenance)["collection_quality"] == quality
    check_plan(request, resolved)


def test_a_failed_collection_may_be_finalised_and_says_so(finalised, tmp_path):
    request, folder, first, _ = finalised
    strict = ROOM | {"interpolation": {"max_p95_relative_error": 0.0}}
    report = validated(folder.parent, tmp_path / "strict", strict, repeats=first.with_name("repeatability"))
    outcome = finalize(request, folder, tmp_path / "resolved", collection_report=report)
    assert outcome["collection_quality"] == "failed"
    quality = read_document(tmp_path / "resolved" / "finalization.json")["collection_quality"]
    assert (quality["gates"]["interpolation"], quality["gates"]["repeatability"]) == ("failed", "passed")


@pytest.mark.parametrize("pattern", ["collection-validation.json", "samples/**/benchmark.json", "holdout-plan.json"])
def test_evidence_that_changes_later_is_found_when_the_finalised_plan_is_used(finalised, pattern):
    _, _, report, resolved = finalised
    place = next(report.parent.rglob(pattern))
    before = place.read_bytes()
    place.write_text("{}")
    try:
        with pytest.raises(EvidenceError):
            check_plan(load_request(resolved / "request.yaml"), resolved)
    finally:
        place.write_bytes(before)


def test_a_report_of_another_collection_leaves_no_target(finalised, tmp_path):
    request, folder, report, _ = finalised
    document = read_document(report)
    document["inputs"]["collection_directory"] = str(tmp_path)
    foreign = tmp_path / "collection-validation.json"
    foreign.write_text(json.dumps(document))
    with pytest.raises(EvidenceError, match="is not of the collection"):
        finalize(request, folder, tmp_path / "resolved", collection_report=foreign)
    assert not (tmp_path / "resolved").exists()
