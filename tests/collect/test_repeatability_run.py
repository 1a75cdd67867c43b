"""Repetitions of a campaign: what is launched, kept, gone on with and refused. Launches are replays of recorded ones.

Source: collector.md section 7.4.
"""

import json
from types import SimpleNamespace

import pytest

import fpmsdk.collect.__main__ as collector_entry
from fpmsdk.collect import repeatability_evidence, repeatability_run
from fpmsdk.collect.plan import plan_digest
from fpmsdk.collect.repeatability_assess import assess
from fpmsdk.collect.repeatability_plan import RepeatPolicy, freeze, launch_plan, read_deployment, read_source
from fpmsdk.collect.repeatability_run import repeat_campaign
from fpmsdk.documents.canonical import digest, read_document
from fpmsdk.documents.evidence import file_evidence, manifest
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from tests.collect.native import DECODE, PLAN, PREFILL
from tests.collect.repetitions import INPUTS, POINTS, Launches, campaign, change_artifact, keep

TWO = RepeatPolicy(samples=2)


@pytest.fixture
def source(tmp_path):
    return campaign(tmp_path)


@pytest.fixture
def launches(monkeypatch):
    scripted = Launches()
    monkeypatch.setattr(repeatability_run, "run_campaign", scripted)
    monkeypatch.setattr(repeatability_run, "source_revision", lambda: PLAN.document["aic_revision"])
    return scripted


class Executor:
    """Ends what launches have left, or cannot."""

    def __init__(self, fault=None):
        self.cleaned, self._fault = [], fault

    def __call__(self, launch):
        return SimpleNamespace(cleanup=lambda: self._clean(launch.folder))

    def _clean(self, folder):
        if self._fault is not None:
            raise self._fault
        self.cleaned.append(folder)


def repeat(source, policy=TWO, executor=None, **options):
    root, checkpoint = source
    output = options.pop("output", root.parent / "repeats")
    return repeat_campaign(
        PLAN,
        campaign_root=root,
        checkpoint=checkpoint,
        output_dir=output,
        executor=executor or Executor(),
        policy=policy,
        **options,
    )


def attempts(report, cell=PREFILL):
    return [attempt for slot in report["samples"][cell.cell_id] for attempt in slot["attempts"]]


# --- the frozen plan ---


def test_the_same_files_freeze_to_the_same_plan(source):
    assert freeze(PLAN, *source, RepeatPolicy()) == freeze(PLAN, *source, RepeatPolicy())


def test_a_full_plan_has_every_published_point(source):
    frozen = freeze(PLAN, *source, RepeatPolicy())
    assert [len(cell["points"]) for cell in frozen["cells"]] == [POINTS, POINTS]
    assert frozen["sampling"] == "independent_native_full_sweep_launches"
    assert frozen["observation_evidence_version"] == 2
    assert {tuple(point["selection_reasons"]) for cell in frozen["cells"] for point in cell["points"]} == {
        ("full_native_sweep",)
    }


def test_a_bounded_plan_has_no_more_points_than_allowed(source):
    frozen = freeze(PLAN, *source, RepeatPolicy(comparison_mode="bounded", max_points_per_cell=7))
    assert [len(cell["points"]) for cell in frozen["cells"]] == [7, 7]
    assert [len(cell["benchmark_points"]["prefill"]) for cell in frozen["cells"]] == [7, 0]


def test_an_older_observation_version_is_not_named_in_the_plan(source):
    assert "observation_evidence_version" not in freeze(PLAN, *source, RepeatPolicy(), evidence_version=1)


# What the upstream collector makes of the same plan, and of one point of each phase.
PEER_PLANS = {
    ("prefill", "full_grid"): "728a6d0ade893f328ea6cb301d238aee437ba1fd8605747e0ba4d427abc26558",
    ("prefill", "bounded"): "59efb0c8070a997608f6f579ba6dfe138cc0ab5979f56a8f974448b75b195f58",
    ("decode", "full_grid"): "95cdcbb335d74f3d28d5e6ded1987268f1642d02bb281cc85197af137d5a9b4e",
    ("decode", "bounded"): "62274fafd6ff50ebe558d27a611fc487db2700f72738818b0e81d722f8f88270",
}


@pytest.mark.parametrize(("phase", "mode"), PEER_PLANS)
def test_the_plan_of_a_launch_is_that_of_the_peer(phase, mode):
    cell = PREFILL if phase == "prefill" else DECODE
    point = {"batch_size": 1, "total_kv_read_tokens": 64} | ({"total_prefill_tokens": 16} if phase == "prefill" else {})
    manifest = {"schema_version": 3, "prefill": [], "decode": []} | {phase: [point]}
    frozen_cell = {"cell_id": cell.cell_id, "benchmark_points": manifest}
    assert launch_plan(PLAN, frozen_cell, RepeatPolicy(comparison_mode=mode)).sha256 == PEER_PLANS[phase, mode]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda document: document.update(plan_sha256="0" * 64), "of the plan"),
        (lambda document: document.update(schema="v2"), "checkpoint-v3"),
        (lambda document: document["cells"][DECODE.cell_id].update(status="failed"), "has not passed.*'failed'"),
        (lambda document: document["cells"].pop(PREFILL.cell_id), "has not passed"),
        (lambda document: document["cells"][PREFILL.cell_id].update(attempt_id="0" * 32), "attempt"),
    ],
)
def test_only_a_passed_campaign_is_repeated(source, change, reason):
    _, checkpoint = source
    document = json.loads(checkpoint.read_text())
    change(document)
    checkpoint.write_text(json.dumps(document))
    with pytest.raises((EvidenceError, CollectionError), match=reason):
        freeze(PLAN, *source, RepeatPolicy())


def test_a_campaign_of_schema_10_is_not_repeated(source):
    root, _ = source
    document = {**PLAN.document, "schema_version": 10}
    document["cells"] = [
        {name: value for name, value in cell.items() if name not in ("execution_identity", "input_text_sha256")}
        for cell in document["cells"]
    ]
    document["sha256"] = plan_digest(document)
    (root / "collection-plan.json").write_text(json.dumps(document))
    with pytest.raises(OnboardError, match="schema 11"):
        read_source(root)


def test_the_deployment_inputs_are_those_of_the_plan(source):
    root, _ = source
    assert read_deployment(PLAN, root) == INPUTS
    (root / "generator-overrides.json").write_text(json.dumps({**INPUTS, "generator_dynamo_version": "1.6.1"}))
    assert read_deployment(PLAN, root)["generator_dynamo_version"] == "1.6.1"
    (root / "generator-overrides.json").write_text("{}")
    with pytest.raises(EvidenceError, match="other deployment inputs"):
        read_deployment(PLAN, root)
    (root / "generator-overrides.json").unlink()
    with pytest.raises(EvidenceError, match="not archived"):
        read_deployment(PLAN, root)


# --- launches ---


def test_every_sample_of_every_cell_is_a_launch_of_its_own(source, launches):
    report = repeat(source)
    assert launches.count == 4
    runs = [attempt["evidence"]["runtime_run_id"] for cell in PLAN.cells for attempt in attempts(report, cell)]
    assert runs == ["run-1", "run-2", "run-3", "run-4"]
    assert {attempt["status"] for cell in PLAN.cells for attempt in attempts(report, cell)} == {"passed"}
    assert attempts(report)[1]["directory"] == f"samples/{PREFILL.cell_id}/sample-02/attempt-01"


def test_artifacts_without_a_protocol_leave_all_points_unestablished(source, launches):
    report = repeat(source)
    assert report["repeatability"]["point_counts"] == {"unestablished": 2 * POINTS}
    assert report["status"] == "incomplete"
    assert {point["raw_sample_count"] for point in report["points"]} == {2}


def test_the_report_on_disk_is_the_one_returned_and_names_its_aggregate(source, launches):
    report = repeat(source)
    root = source[0].parent / "repeats"
    assert read_document(root / "repeatability.json") == report
    assert report["aggregate"]["path"].startswith(str(root / "repeatability-aggregate-"))
    aggregates = list(root.glob("repeatability-aggregate-*.json"))
    assert len(aggregates) == 5  # one a save that changed the points; older ones stay
    assert all(read_document(path)["formal_source_replaced"] is False for path in aggregates)


def test_other_points_than_frozen_are_refused(source, launches):
    launches.script = [change_artifact(keep(POINTS - 1))]
    report = repeat(source)
    [attempt] = attempts(report)
    assert (attempt["status"], attempt["failure_kind"]) == ("failed", "validation_failed")
    assert "exactly the frozen points: 1 are missing" in attempt["error"]
    assert launches.count == 1


def test_another_execution_regime_is_refused(source, launches):
    def pad(document):
        for entries in (document["results"], document["iteration_groups"]):
            for entry in entries:
                entry["point"]["padding_tokens"] = 7

    launches.script = [change_artifact(pad)]
    [attempt] = attempts(repeat(source))
    assert attempt["failure_kind"] == "validation_failed"
    assert "KV seed, launch mode, captured size, padding" in attempt["error"]


def test_a_launch_under_the_identity_of_another_one_is_refused(source, launches):
    launches.script = [None, change_artifact(lambda document: document.update(run_id="run-1"))]
    attempt = attempts(repeat(source))[-1]
    assert attempt["failure_kind"] == "validation_failed"
    assert "not independent" in attempt["error"]


# --- failures and resumption ---


def missing_results(launch):
    (launch.folder / "raw" / "node0000" / "benchmark.json").unlink()


def collection_failed(launch):
    launch.entry["status"] = "failed"
    launch.errors.append({"error_type": "CollectionError", "error_message": "engine ended early"})
    missing_results(launch)


def teardown_failed(launch):
    launch.entry.update(status="cleanup_failed", cleanup_error="resources left")
    launch.errors.append({"error_type": "RuntimeError", "error_message": "resources left"})


def postprocessing_failed(launch):
    launch.entry.update(status="failed", error="disk full")


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (missing_results, "missing_evidence"),
        (collection_failed, "missing_evidence"),
        (CollectionError("no allocation"), "collection_error"),
        (OSError(28, "No space left on device"), "collection_error"),
        (teardown_failed, "cleanup_failed"),
        (postprocessing_failed, "postprocessing_failed"),
        (change_artifact(lambda document: document.update(status="partial")), "validation_failed"),
    ],
)
def test_a_failure_is_named_kept_and_stops_the_repetition(source, launches, event, kind):
    launches.script = [event]
    report = repeat(source)
    [attempt] = attempts(report)
    assert (attempt["status"], attempt["failure_kind"]) == ("failed", kind)
    assert launches.count == 1
    assert report["status"] in ("incomplete", "failed")
    assert (
        repeat(source, resume=True)["samples"]
        == read_document(source[0].parent / "repeats/repeatability.json")["samples"]
    )
    assert launches.count == 1


def test_a_failed_sample_without_evidence_is_launched_again_when_asked(source, launches):
    launches.script = [missing_results]
    repeat(source)
    executor = Executor()
    report = repeat(source, executor=executor, resume=True, retry_failed=True)
    assert [attempt["status"] for attempt in attempts(report)] == ["failed", "passed", "passed"]
    assert attempts(report)[1]["directory"].endswith("sample-01/attempt-02")
    assert len(executor.cleaned) == 1  # nothing of the failed attempt may run any more
    assert launches.count == 5


def test_attempts_of_a_sample_are_bounded(source, launches):
    launches.script = [missing_results, missing_results]
    repeat(source)
    repeat(source, resume=True, retry_failed=True)
    with pytest.raises(CollectionError, match="all 2 attempts"):
        repeat(source, resume=True, retry_failed=True)
    assert launches.count == 2


def test_a_valid_measurement_is_never_replaced_only_its_teardown_is_repeated(source, launches):
    launches.script = [teardown_failed]
    before = repeat(source)
    report = repeat(source, resume=True, retry_failed=True)
    first = attempts(report)[0]
    assert first["status"] == "passed"
    assert first["evidence"] == attempts(before)[0]["evidence"]
    assert [trial["status"] for trial in first["cleanup_attempts"]] == ["passed"]
    assert len(first["cleanup_file_history"]) == 1
    assert launches.count == 4


def test_a_teardown_that_fails_again_leaves_the_sample_failed(source, launches):
    launches.script = [teardown_failed]
    repeat(source)
    stubborn = Executor(CollectionError("still there"))
    first = attempts(repeat(source, executor=stubborn, resume=True, retry_failed=True))[0]
    assert first["status"] == "failed"
    assert first["cleanup_attempts"] == [{"status": "failed", "error": "CollectionError: still there"}]
    assert launches.count == 1


def test_post_processing_is_repeated_without_a_launch(source, launches):
    launches.script = [postprocessing_failed]
    repeat(source)
    report = repeat(source, resume=True, retry_failed=True)
    first = attempts(report)[0]
    assert first["status"] == "passed"
    [trial] = first["postprocessing_attempts"]
    assert trial["artifact_recovery"]["original_status"] == "failed"
    checkpoint = source[0].parent / "repeats" / first["directory"] / "checkpoint" / "fpm_forward.json"
    assert read_document(checkpoint)["cells"][PREFILL.cell_id]["status"] == "failed"
    assert launches.count == 4


def test_post_processing_follows_a_teardown_that_had_failed_too(source, launches):
    def both(launch):
        launch.entry.update(status="failed", error="disk full", cleanup_error="resources left")

    launches.script = [both]
    assert attempts(repeat(source))[0]["failure_kind"] == "cleanup_failed"
    first = attempts(repeat(source, resume=True, retry_failed=True))[0]
    assert first["status"] == "passed"
    assert [first[f"{what}_attempts"][0]["status"] for what in ("cleanup", "postprocessing")] == ["passed", "passed"]


def test_an_interruption_is_kept_and_the_completed_launch_is_found_again(source, launches, monkeypatch):
    # Killed after the launch had ended and before its evidence was taken.
    record = repeatability_run._Run._record
    monkeypatch.setattr(repeatability_run._Run, "_record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        repeat(source)
    root = source[0].parent / "repeats"
    [attempt] = attempts(read_document(root / "repeatability.json"))
    assert attempt["status"] == "interrupted"
    monkeypatch.setattr(repeatability_run._Run, "_record", record)
    report = repeat(source, resume=True)
    assert [attempt["status"] for attempt in attempts(report)] == ["passed", "passed"]
    assert launches.count == 4


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_repetition_that_was_killed_before_its_first_report_begins_again(source, launches, monkeypatch):
    save = repeatability_run._Run.save
    monkeypatch.setattr(repeatability_run._Run, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        repeat(source)
    monkeypatch.setattr(repeatability_run._Run, "save", save)
    assert len(attempts(repeat(source, resume=True))) == 2


# --- refusals ---


def test_another_collector_version_launches_nothing(source, launches, monkeypatch):
    monkeypatch.setattr(repeatability_run, "source_revision", lambda: "installed:other")
    with pytest.raises(OnboardError, match="aic_revision"):
        repeat(source)
    assert launches.count == 0


def test_a_source_that_ran_something_else_launches_nothing(source, launches, monkeypatch):
    failed = {"status": "failed", "observed_workers": [], "native_graph_config": []}
    monkeypatch.setattr(repeatability_evidence, "inspect_execution", lambda *_, **__: failed)
    report = repeat(source)
    assert report["status"] == report["execution"]["status"] == "failed"
    assert launches.count == 0


def test_the_output_is_apart_fresh_or_resumed(source, launches):
    root, _ = source
    with pytest.raises(OnboardError, match="apart"):
        repeat(source, output=root / "repeats")
    with pytest.raises(OnboardError, match="no repetition to go on with"):
        repeat(source, resume=True)
    repeat(source)
    with pytest.raises(OnboardError, match="not empty"):
        repeat(source)
    with pytest.raises(OnboardError, match="needs --resume"):
        repeat(source, retry_failed=True)


def test_another_policy_or_a_changed_source_cannot_go_on(source, launches):
    repeat(source)
    with pytest.raises(EvidenceError, match="source or policy changed"):
        repeat(source, RepeatPolicy(samples=3), resume=True)
    raw = source[0] / "cells" / PREFILL.cell_id / "raw" / "node0000"
    (raw / "note.txt").write_text("added")
    with pytest.raises(EvidenceError, match="source or policy changed"):
        repeat(source, resume=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda report: report.update(output_dir="/elsewhere"), "output_dir"),
        (lambda report: report["policy"].update(cv_threshold=0.5), "policy"),
        (lambda report: report["samples"].pop(DECODE.cell_id), "other cells"),
        (lambda report: report["samples"][PREFILL.cell_id].pop(), "numbered 1 to 2"),
        (lambda report: attempts(report)[0].update(directory="samples/x"), "not in"),
        (lambda report: attempts(report)[0].update(status="fine"), "unknown status"),
        (lambda report: attempts(report)[0]["files"].popitem(), "files changed"),
        (lambda report: attempts(report)[0]["evidence"].update(runtime_run_id="x"), "evidence changed"),
        (lambda report: attempts(report)[0]["evidence"].pop("points"), "evidence changed"),
        (lambda report: report["samples"][PREFILL.cell_id][0]["attempts"].append({}), "followed by another"),
        (lambda report: report["aggregate"].update(sha256="0" * 64), "aggregate"),
        (lambda report: report.update(plan_sha256="0" * 64), "report of plan"),
    ],
)
def test_a_changed_report_cannot_go_on(source, launches, change, reason):
    report = repeat(source)
    change(report)
    (source[0].parent / "repeats" / "repeatability.json").write_text(json.dumps(report))
    with pytest.raises(EvidenceError, match=reason):
        repeat(source, resume=True)


def test_changed_artifacts_of_a_launch_cannot_go_on(source, launches):
    report = repeat(source)
    place = source[0].parent / "repeats" / attempts(report)[0]["directory"]
    next(place.rglob("benchmark.json")).write_text("{}")
    with pytest.raises(EvidenceError, match="files changed"):
        repeat(source, resume=True)


# --- reassessment ---


def test_other_thresholds_are_applied_to_the_same_launches(source, launches):
    report = repeat(source)
    frozen = read_document(source[0].parent / "repeats" / "repeatability-plan.json")
    assessed = assess(frozen, report, cv_threshold=0.5)
    assert assessed["assessment"] == {
        "source_report_sha256": assessed["assessment"]["source_report_sha256"],
        "cv_threshold": 0.5,
        "source_agreement_threshold": 0.05,
    }
    assert assessed["repeatability"]["cv_threshold"] == 0.5
    assert assessed["samples"] == report["samples"]
    assert launches.count == 4


def test_a_changed_source_or_plan_cannot_be_reassessed(source, launches):
    report = repeat(source)
    frozen = read_document(source[0].parent / "repeats" / "repeatability-plan.json")
    with pytest.raises(EvidenceError, match="not of this frozen plan"):
        assess({**frozen, "sha256": "0" * 64}, report, cv_threshold=0.1)
    with pytest.raises(EvidenceError, match="changed since it was frozen"):
        assess({**frozen, "sampling": "other"}, report, cv_threshold=0.1)
    with pytest.raises(OnboardError, match="cv_threshold"):
        assess(frozen, report, cv_threshold=-1.0)
    (source[0] / "cells" / PREFILL.cell_id / "raw" / "note.txt").write_text("added")
    with pytest.raises(EvidenceError, match="campaign changed"):
        assess(frozen, report, cv_threshold=0.1)


def test_a_report_of_schema_1_is_shown_and_never_upgraded(source):
    root, checkpoint = source
    output = root.parent / "old"
    (output / "first").mkdir(parents=True)
    frozen = {
        "schema_version": 1,
        "source_campaign_dir": str(root),
        "source_checkpoint": file_evidence(checkpoint),
        "cells": [
            {"cell_id": cell.cell_id, "source_files": manifest(root / "cells" / cell.cell_id / "raw")}
            for cell in PLAN.cells
        ],
    }
    frozen["sha256"] = digest(frozen)
    report = {
        "schema_version": 1,
        "plan_sha256": frozen["sha256"],
        "output_dir": str(output),
        "status": "passed",
        "samples": {"cell": [{"attempts": [{"directory": "first", "files": {}}]}]},
    }
    assessed = assess(frozen, report, cv_threshold=0.1)
    assert assessed["status"] == "incomplete"
    assert assessed["historical_assessment"] == {"status": "passed"}
    assert assessed["source_qualification"]["status"] == "unestablished"
    (output / "first" / "new").write_text("")
    with pytest.raises(EvidenceError, match="files changed"):
        assess(frozen, report, cv_threshold=0.1)


# --- the collector's own entry ---


def collector(source, *options):
    root, checkpoint = source
    return collector_entry.main(
        [
            *("--repeatability-source-campaign", str(root), "--repeatability-source-checkpoint", str(checkpoint)),
            *("--repeatability-output-dir", str(root.parent / "repeats"), "--repeatability-samples", "2", *options),
        ]
    )


def test_the_collector_prints_the_frozen_plan_when_asked_for_it(source, capsys):
    assert collector(source, "--plan-only") == 0
    assert json.loads(capsys.readouterr().out) == freeze(PLAN, *source, TWO)
    assert not (source[0].parent / "repeats").exists()


def test_the_collector_exits_with_0_only_when_a_repetition_passed(source, launches, monkeypatch, capsys):
    monkeypatch.setattr(collector_entry, "chosen_executor", lambda name: Executor())
    assert collector(source) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "incomplete"
    assert launches.count == 4
    assert collector(source) == 2
    assert "not empty" in capsys.readouterr().err


def test_the_collector_refuses_an_executor_that_it_cannot_drive(source, capsys):
    assert collector(source) == 2
    assert "executor kubernetes" in capsys.readouterr().err
