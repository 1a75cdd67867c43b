"""The qualification of an onboarding: three gates, each assessed again from its evidence.

Source: onboarding.md section 8.5 (combined validation).
"""

import json

import pytest

from fpmsdk.collect.executors import executor_factory
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from fpmsdk.onboard import serving
from fpmsdk.onboard.quality import check_collection_report
from fpmsdk.onboard.serving_expected import expected_execution
from fpmsdk.onboard.serving_replay import check_replay
from fpmsdk.onboard.validate_collection import CollectionValidation, validate_collection
from fpmsdk.onboard.validate_fpm import validate_fpm
from tests.cli.test_commands import run
from tests.onboard.collected import PLAY, systems, trace_file
from tests.onboard.measured import faked
from tests.onboard.serving_run import RUNTIME, ServingRun

POLICY = {
    "interpolation": {"max_p95_relative_error": 1.0, "max_unsupported_fraction": 1.0},
    "repeatability": {"samples": 2, "max_cv": 0.9, "max_source_relative_difference": 0.9},
}
PLAY = PLAY | {"requests": [row | {"model": "m"} for row in PLAY["requests"]]}
IMAGE = "sha256:" + "1" * 64


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A collection that passed every gate of its validation, and a covered replay of one play."""
    place = tmp_path_factory.mktemp("qualified")
    with pytest.MonkeyPatch.context() as patch:
        systems(place, patch)
        patch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
        folder, file = faked(place)
        (place / "policy.json").write_text(json.dumps(POLICY))
        validation = CollectionValidation(
            config=file,
            folder=folder,
            output=place / "quality",
            policy=place / "policy.json",
            execute=True,
            executors=executor_factory,
        )
        assert validate_collection(validation)["status"] == "passed"
        trace = trace_file(place, PLAY)
        assert validate_fpm(file, folder, trace, place / "replay")[1] == 0
        yield place


@pytest.fixture(scope="module")
def checked(place):
    return check_collection_report(place / "quality/collection-validation.json")


@pytest.fixture(scope="module")
def execution(checked):
    """What the collection ran with; the fake engine has no image, and its phases differ in what they resolve."""
    found = expected_execution(checked.request, checked.source, checked.frozen)
    assert (found["image_digest"], found["runtime_config"]) == (None, None)
    return found | {"image_digest": IMAGE, "runtime_config": RUNTIME}


@pytest.fixture(autouse=True)
def one_engine(monkeypatch, execution):
    monkeypatch.setattr(serving, "expected_execution", lambda *_arguments: execution)


def asked(place, output, **changes):
    reports = {
        "collection_report": place / "quality/collection-validation.json",
        "replay_report": place / "replay/validation.json",
    }
    return serving.ServingValidation(output=output, **reports | changes)


def tokenizer(folder):
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text("{}")
    return folder / "tokenizer"


def prepared(place, tmp_path):
    options = {"endpoint": "http://localhost:8000", "tokenizer": tokenizer(tmp_path)}
    return serving.prepare(asked(place, tmp_path / "serving", **options))


def served(place, folder, **options):
    """The files of a serving run of the replayed play."""
    report = read_document(place / "replay/validation.json")
    paths = [place / "plays.jsonl", place / "replay/predict.yaml", place / "replay/prediction/prediction.json"]
    assert report["trace"]["path"] == str(paths[0])
    return ServingRun(folder, replayed=(PLAY, *paths), expected=dict(serving.expected_execution()), **options)


def assessed(place, tmp_path, run_of, **changes):
    options = {"recipe": run_of.recipe_path, "execution_evidence": run_of.execution}
    return serving.assess(asked(place, tmp_path / "assessment", **options | changes))


def statuses(combined):
    return {name: gate["status"] for name, gate in combined["gates"].items()}


def test_a_preparation_passes_collection_and_replay_and_leaves_serving_open(place, tmp_path):
    combined = prepared(place, tmp_path)
    assert statuses(combined) == {"collection": "passed", "replay": "passed", "serving": "incomplete"}
    assert (combined["status"], combined["accuracy"]) == ("incomplete", "not_qualified")
    assert read_document(tmp_path / "serving/validation.json") == combined
    recipe = read_document(combined["recipe"]["path"])
    assert recipe["timing_subset"] == "zero_recorded_api_time"
    assert recipe["issues"] == ["--aiperf-python is needed to make the requests in the environment of the benchmark"]
    assert recipe["expected_execution"]["image_digest"] == IMAGE
    assert read_document(tmp_path / "serving/policy.json")["repeatability"]["samples"] == 2


def test_only_three_passed_gates_qualify(place, tmp_path):
    combined = assessed(place, tmp_path, served(place, tmp_path / "run"))
    assert statuses(combined) == dict.fromkeys(("collection", "replay", "serving"), "passed")
    assert (combined["status"], combined["accuracy"]) == ("passed", "qualified_for_evaluated_scope")
    assert combined["limitations"]


def test_a_slow_server_is_not_qualified(place, tmp_path):
    combined = assessed(place, tmp_path, served(place, tmp_path / "run", slower=2.0))
    assert (combined["gates"]["serving"]["status"], combined["status"]) == ("failed", "failed")
    assert combined["accuracy"] == "not_qualified"


def test_missing_serving_evidence_is_incomplete(place, tmp_path):
    run_of = served(place, tmp_path / "run")
    run_of.receipt_path.unlink()
    combined = assessed(place, tmp_path, run_of)
    assert statuses(combined) == {"collection": "passed", "replay": "passed", "serving": "incomplete"}


def changed(place, name, output, change):
    """A copy of a report with a change, in a folder of its own."""
    document = read_document(place / name)
    change(document)
    output.mkdir()
    write_document(output / "report.json", document)
    return output / "report.json"


@pytest.mark.parametrize(
    ("option", "name", "change", "gate", "status"),
    [
        (
            "collection_report",
            "quality/collection-validation.json",
            lambda document: document["gates"]["execution"].update(status="failed"),
            "collection",
            "failed",
        ),
        (
            "collection_report",
            "quality/collection-validation.json",
            lambda document: document["selection"].update(path="/absent/selection.json"),
            "collection",
            "incomplete",
        ),
    ],
)
def test_a_report_that_its_evidence_contradicts_fails_its_gate(place, tmp_path, option, name, change, gate, status):
    run_of = served(place, tmp_path / "run")
    report = changed(place, name, tmp_path / "reports", change)
    combined = assessed(place, tmp_path, run_of, **{option: report})
    assert combined["gates"][gate]["status"] == status
    assert combined["accuracy"] == "not_qualified"


def gate_of(place, checked, report):
    formal = checked.report["inputs"]["formal_data"]
    return check_replay(report, checked.request, checked.source.folder, formal)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda document: document.update(collection_id="onboarding-other"), EvidenceError, "of another collection"),
        (lambda document: document["fpm_artifacts"].pop(), EvidenceError, "of another collection or table"),
        (lambda document: document["trace"].update(sha256="0" * 64), EvidenceError, "evidence was changed"),
        (lambda document: document["prediction_evidence"].update(sha256="0" * 64), EvidenceError, "was changed"),
        (lambda document: document.update(coverage_report="/other"), EvidenceError, "coverage_report is not the file"),
        (lambda document: document.pop("coverage_evidence"), KeyError, "coverage_evidence"),
    ],
)
def test_a_replay_report_that_its_evidence_contradicts_is_refused(place, checked, tmp_path, change, error, words):
    report = changed(place, "replay/validation.json", tmp_path / "reports", change)
    with pytest.raises(error, match=words):
        gate_of(place, checked, report)


def test_a_replay_that_did_not_end_well_leaves_its_gate_incomplete(place, checked, tmp_path):
    assert gate_of(place, checked, place / "replay/validation.json")["status"] == "passed"
    failed = changed(
        place, "replay/validation.json", tmp_path / "a", lambda document: document.update(prediction_exit_code=4)
    )
    gate = gate_of(place, checked, failed)
    assert (gate["status"], len(gate["issues"])) == ("incomplete", 1)


def test_a_recipe_of_another_replay_is_refused(place, tmp_path):
    run_of = served(place, tmp_path / "run")
    run_of.change(run_of.recipe_path, prediction_config={"path": "/other", "sha256": "0" * 64, "size_bytes": 1})
    gate = assessed(place, tmp_path, run_of)["gates"]["serving"]
    assert gate["status"] == "failed" and "prediction_config differ" in gate["issues"][0]


def test_the_output_is_apart_from_every_input(place, tmp_path):
    for output in (place, place / "quality/new", place / "collection/new", place / "replay"):
        with pytest.raises(OnboardError, match="must be apart from"):
            serving.prepare(asked(place, output, endpoint="http://localhost", tokenizer=place))
    # Also when the report does not exist yet.
    with pytest.raises(OnboardError, match="must be apart from"):
        serving.prepare(
            asked(place, tmp_path, collection_report=tmp_path / "a/none.json", endpoint="http://x", tokenizer=place)
        )
    assert not (place / "quality/new").exists()


def test_a_run_is_checked_and_not_driven(place, tmp_path):
    run_of = served(place, tmp_path / "run")
    with pytest.raises(CollectionError, match="does not drive a live engine"):
        serving.run(run_of.recipe_path, tmp_path / "python")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--action", "run"], "needs --recipe and --aiperf-python"),
        (["--action", "assess"], "needs --validation-output-dir, --collection-report and --replay-report"),
        (["--action", "prepare", "--recipe", "r.json"], "needs --validation-output-dir"),
    ],
)
def test_what_an_action_needs_is_named_with_exit_code_2(options, words):
    ran = run("onboard", "validate-serving", *options)
    assert ran.exit_code == 2
    assert words in ran.stderr and "Traceback" not in ran.stderr


def test_a_preparation_that_is_not_ready_ends_with_1(place, tmp_path):
    reports = ("--collection-report", str(place / "quality/collection-validation.json"))
    reports += ("--replay-report", str(place / "replay/validation.json"))
    options = ("--endpoint", "http://localhost:8000", "--tokenizer", str(tokenizer(tmp_path)))
    output = ("--validation-output-dir", str(tmp_path / "serving"))
    ran = run("onboard", "validate-serving", "--action", "prepare", *reports, *options, *output)
    assert ran.exit_code == 1, ran.output
    assert ran.stdout.startswith("Onboarding validation: incomplete; accuracy: not_qualified. Saved ")
