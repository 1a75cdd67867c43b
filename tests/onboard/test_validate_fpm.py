"""Replaying a trace on a finished collection: covered, incomplete with the missing points, or refused.

Source: onboarding.md section 8.4, fpm-interpolation.md section 8.
"""

import copy
import json
import os

import pytest
import yaml

from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import OnboardError
from fpmsdk.onboard import validate_fpm as module
from fpmsdk.onboard.request import request_id
from fpmsdk.onboard.validate_fpm import completion_issues, validate_fpm
from tests.onboard.collected import PLAY, checkpoint, collected, request_of, systems, trace_file

LONG = PLAY | {"id": "play-b", "requests": [{"type": "n", "t": 0.0, "in": 3, "out": 2, "hash_ids": [9]}]}


@pytest.fixture
def place(tmp_path, monkeypatch):
    systems(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def finished(place):
    folder, file = collected(place, request_of(checkpoint(place)))
    return folder, file, trace_file(place)


def test_a_trace_whose_queries_are_all_answered_is_covered(place, finished):
    folder, file, trace = finished
    report, exit_code = validate_fpm(file, folder, trace, place / "replay")
    assert (report["status"], exit_code, report["issues"]) == ("covered", 0, [])
    assert json.loads((place / "replay/validation.json").read_text()) == report
    assert report["accuracy"] == report["fpm_query_coverage"]["accuracy"] == "not_assessed"
    assert report["agentic_graph"] == {"node_count": 2, "play_count": 1}
    assert report["fpm_query_coverage"]["queries"]["unsupported"] == 0
    assert report["trace"] == file_evidence(trace)
    assert [entry["path"].rsplit("/", 1)[1] for entry in report["fpm_artifacts"]] == [
        "fpm_forward_perf.metadata.json",
        "fpm_forward_perf.parquet",
    ]
    assert report["prediction_evidence"] == file_evidence(place / "replay/prediction/prediction.json")
    assert (place / "replay/prediction/requests.jsonl").read_text().count("\n") == 2


def test_only_the_evaluation_of_the_pilot_is_replaced(place, finished):
    folder, file, trace = finished
    validate_fpm(file, folder, trace, place / "replay")
    pilot = yaml.safe_load((folder / "predict/pilot.yaml").read_text())
    replayed = yaml.safe_load((place / "replay/predict.yaml").read_text())
    timing = replayed["engine"]["workers"]["aggregated"]["timing"]
    assert timing.pop("estimator_config") == {"fpm_interpolation": {"method": "direct", "collect_coverage": True}}
    pilot["engine"]["workers"]["aggregated"]["timing"].pop("estimator_config")
    assert replayed["engine"] == pilot["engine"]
    assert replayed["traffic"]["load"] == {"type": "trace_timestamps", "agentic_lanes": 1}
    assert replayed["evaluation"] == {}


def test_a_query_without_a_point_is_incomplete_and_its_coordinates_are_kept(place, finished):
    folder, file, _ = finished
    report, exit_code = validate_fpm(file, folder, trace_file(place, PLAY, LONG), place / "replay")
    assert (report["status"], exit_code) == ("incomplete", 4)
    assert not (place / "replay/prediction/prediction.json").exists()
    (gap,) = report["fpm_query_coverage"]["roles"][0]["coverage"]["gaps"]
    assert (gap["phase"], gap["coordinates"]["total_prefill_tokens"]) == ("prefill", 3.0)


def test_an_earlier_validation_is_replaced_only_on_request(place, finished):
    folder, file, trace = finished
    validate_fpm(file, folder, trace_file(place, PLAY, LONG), place / "replay")
    (place / "replay/notes.txt").write_text("kept")
    trace_file(place)
    with pytest.raises(OnboardError, match="not empty"):
        validate_fpm(file, folder, trace, place / "replay")
    report, exit_code = validate_fpm(file, folder, trace, place / "replay", overwrite=True)
    assert (report["status"], exit_code) == ("covered", 0)
    assert (place / "replay/notes.txt").read_text() == "kept"


@pytest.mark.parametrize("where", ["collection", "collection/replay", ".", "plays.jsonl"])
def test_the_output_is_apart_from_every_input(place, finished, where):
    folder, file, trace = finished
    before = sorted(path for path in place.rglob("*") if path.name != ".support.lock")
    with pytest.raises(OnboardError, match="must be apart from"):
        validate_fpm(file, folder, trace, place / where, overwrite=True)
    assert sorted(path for path in place.rglob("*") if path.name != ".support.lock") == before


def test_pending_memory_and_single_roles_are_refused_before_anything_is_written(place):
    for role, memory, words in ((None, {}, "memory of the deployment is pending"), ("decode", {}, "only aggregated")):
        root = place / str(role)
        root.mkdir()
        folder, file = collected(root, request_of(checkpoint(place), role=role, memory=memory))
        with pytest.raises(OnboardError, match=words):
            validate_fpm(file, folder, trace_file(place), place / "replay")
    assert not (place / "replay").exists()


@pytest.mark.parametrize("name", ["absent.json", "plays.txt"])
def test_the_trace_is_a_file_of_json(place, finished, name):
    folder, file, _ = finished
    (place / "plays.txt").write_text("")
    with pytest.raises(OnboardError, match="--trace"):
        validate_fpm(file, folder, place / name, place / "replay")


def test_a_table_or_trace_that_changes_meanwhile_is_an_issue(place, finished, monkeypatch):
    folder, file, trace = finished
    real = module.predict

    def meddling(*arguments, **options):
        prediction = real(*arguments, **options)
        trace.write_text(trace.read_text() + "\n")
        os.utime(trace)
        table = next((folder / "systems/data").rglob("*.parquet"))
        table.write_bytes(table.read_bytes() + b"x")
        return prediction

    monkeypatch.setattr(module, "predict", meddling)
    report, exit_code = validate_fpm(file, folder, trace, place / "replay")
    assert (report["status"], exit_code) == ("incomplete", 1)
    assert report["issues"] == ["the trace changed during the validation", "the tables changed during the validation"]


def test_an_interrupted_replay_leaves_an_incomplete_report(place, finished, monkeypatch):
    folder, file, trace = finished

    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        validate_fpm(file, folder, trace, place / "replay")
    report = json.loads((place / "replay/validation.json").read_text())
    assert (report["status"], report["issues"]) == ("incomplete", ["the replay was interrupted"])


def test_a_modified_plan_is_refused(place, finished):
    folder, file, trace = finished
    (folder / "predict/pilot.yaml").write_text("{}")
    with pytest.raises(OnboardError, match=r"pilot\.yaml: this generated file was modified"):
        validate_fpm(file, folder, trace, place / "replay")
    assert not (place / "replay").exists()


COMPLETE = {
    "agentic_graph": {"node_count": 1, "play_count": 1},
    "completed_requests": 1,
    "per_request": [{"terminal_status": "completed", "output_length": 2, "requested_output_length": 2}],
    "agentic_play_outcomes": [{"play_id": "a", "status": "completed", "settled_at_ms": 3.0}],
}


@pytest.mark.parametrize(
    ("change", "issue"),
    [
        (lambda report: None, None),
        (lambda report: report.update(agentic_graph={}), "no requests of plays"),
        (lambda report: report.update(completed_requests=0), "0 of 1 requests completed"),
        (lambda report: report["per_request"].clear(), "0 of 1 requests are recorded"),
        (lambda report: report["per_request"][0].update(output_length=1), "ended before its recorded output"),
        (lambda report: report["per_request"][0].update(terminal_status="rejected"), "a request failed"),
        (lambda report: report["agentic_play_outcomes"][0].update(settled_at_ms=None), "not every play has settled"),
        (lambda report: report["agentic_play_outcomes"].clear(), "not every play has settled"),
    ],
)
def test_a_replay_is_complete_when_every_request_and_play_ended_as_recorded(change, issue):
    report = copy.deepcopy(COMPLETE)
    change(report)
    issues = completion_issues(report)
    assert issues == [] if issue is None else issue in issues[0]


def test_the_collection_is_named_by_its_request(place, finished):
    folder, file, trace = finished
    report, _ = validate_fpm(file, folder, trace, place / "replay")
    assert report["collection_id"] == request_id(request_of(checkpoint(place)))
    assert report["collection_plan"] == file_evidence(folder / "support-plan.json")
