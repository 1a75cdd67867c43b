"""What an assessment of a serving run says: passed, failed by a contradiction, incomplete without evidence.

Source: onboarding.md section 8.5.
"""

import json
import re

import pytest

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.policy import ServingPolicy
from fpmsdk.onboard.serving_assess import assess_serving, check_serving_report
from tests.onboard.serving_run import START_NS, ServingRun


@pytest.fixture
def run(tmp_path):
    return ServingRun(tmp_path / "run")


def assessed(run, **options):
    return assess_serving(
        run.recipe_path, prediction_report=run.prediction, execution_evidence=run.execution, **options
    )


def test_a_run_close_to_its_prediction_with_all_evidence_passes(run):
    report = assessed(run)
    assert (report["status"], report["missing_evidence"], report["failures"]) == ("passed", [], [])
    assert report["metrics"]["ttft"]["p95_relative_error"] == pytest.approx(1 - 1 / 1.05, rel=1e-9)
    assert report["metrics"]["tpot"]["sample_count"] == 3
    assert report["forward"] == {"status": "unavailable", "issue": "no forward passes were timed in serving"}
    assert [sample["turn_index"] for sample in report["samples"]] == [0, 1, 2]
    assert report["samples"][2]["load_timing"]["completion_gap_ms"] == pytest.approx(10.0)


def test_a_run_beyond_the_policy_fails_and_other_limits_are_another_verdict(tmp_path):
    run = ServingRun(tmp_path / "run", slower=1.5)
    report = assessed(run)
    assert (report["status"], report["metrics"]["ttft"]["status"]) == ("failed", "failed")
    loose = ServingPolicy(max_latency_p95_relative_error=0.5, max_throughput_relative_error=0.5)
    assert assessed(run, policy=loose)["status"] == "passed"


def worker_of_another_rank(run):
    run.change(run.worker_path, dp_rank=1)
    run.write_receipt()
    run.change(run.execution, sources=[file_evidence(run.worker_path)])


MISSING = {
    "no receipt": lambda run: run.receipt_path.unlink(),
    "no execution evidence": lambda run: run.execution.unlink(),
    "an unfilled field": lambda run: run.change(
        run.execution, observed_execution=run.expected | {"image_digest": None}
    ),
    "an unfilled scope": lambda run: run.change(run.execution, scope=run.scope | {"cache_storage": None}),
    "no sources": lambda run: run.change(run.execution, sources=[]),
    "a source that is gone": lambda run: run.worker_path.unlink(),
    "no worker files": lambda run: run.write_receipt(runtime_observations=[]),
    "a rank that is missing": worker_of_another_rank,
    "no server tokens": lambda run: run.write_receipt(server_tokenization=None),
    "no records": lambda run: run.write_receipt(artifacts=[file_evidence(run.summary)]),
    "a benchmark that failed": lambda run: run.write_receipt(status="failed", exit_code=1),
    "a benchmark of other sources": lambda run: run.write_receipt(installation={}),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_evidence_leaves_the_result_incomplete(run, case):
    MISSING[case](run)
    report = assessed(run)
    assert report["missing_evidence"]
    assert (report["status"], report["failures"]) == ("incomplete", [])


def other_tokens(run):
    document = read_document(run.server_tokens)
    document["requests"][1]["response"]["tokens"][0] = 99
    write_document(run.server_tokens, document)
    run.write_receipt()


def swapped_worker(run):
    run.change(run.worker_path, attention_groups=[])
    run.write_receipt()
    run.change(run.execution, sources=[file_evidence(run.worker_path)])


FAILURES = {
    "a command of its own": (lambda run: run.write_receipt(command=["python", "-m", "aiperf"]), "benchmark command"),
    "another image": (
        lambda run: run.change(run.execution, observed_execution=run.expected | {"image_digest": "other"}),
        "execution image_digest",
    ),
    "a warm cache": (
        lambda run: run.change(run.execution, scope=run.scope | {"cache_state_at_start": "warm"}),
        "scope cache_state_at_start",
    ),
    "other prompts": (other_tokens, "request 1: the server makes other tokens"),
    "another worker": (swapped_worker, "attention_groups of a worker"),
    "a request that was cancelled": (lambda run: run.change_record(1, was_cancelled=True), "request 1"),
    "a request measured twice": (lambda run: run.change_record(1, turn_index=0), "request 0 was measured twice"),
    "a request of another play": (lambda run: run.change_record(1, conversation_id="b"), "of no request of the play"),
    "a late dispatch": (
        lambda run: run.change_record(0, request_end_ns=START_NS + 1),
        "sent .* ms off its time",
    ),
    "records that changed": (
        lambda run: run.records.write_text(run.records.read_text() + "\n"),
        "evidence was changed",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_contradiction_fails_the_run_and_names_it(run, case):
    change, words = FAILURES[case]
    change(run)
    report = assessed(run)
    assert report["status"] == "failed"
    assert any(re.search(words, text) for text in report["failures"])


def test_a_recipe_whose_files_changed_is_refused(run):
    run.trace.write_text(run.trace.read_text() + " ")
    with pytest.raises(EvidenceError, match="play-source"):
        assessed(run)


def test_a_recipe_that_is_not_ready_is_refused_with_its_issues(run):
    run.change(run.recipe_path, status="incomplete", issues=["no tokenizer"])
    with pytest.raises(OnboardError, match="incomplete: no tokenizer; prepare a new one"):
        assessed(run)


@pytest.mark.parametrize(
    ("measured_ms", "requests", "status"),
    [
        (2.19, {"num_prefill_requests": 1, "sum_prefill_tokens": 64, "sum_prefill_kv_tokens": 0}, "passed"),
        (9.0, {"num_prefill_requests": 1, "sum_prefill_tokens": 64, "sum_prefill_kv_tokens": 0}, "failed"),
        (2.19, {"num_prefill_requests": 1, "sum_prefill_tokens": 3, "sum_prefill_kv_tokens": 0}, "incomplete"),
        (2.19, {"num_decode_requests": 1, "sum_decode_kv_tokens": 64}, "incomplete"),
    ],
)
def test_forward_evidence_may_fail_the_run_and_its_absence_may_not(run, measured_ms, requests, status):
    evidence = run.place / "forward.json"
    sample = {"unit": "ms", "measured_ms": measured_ms, "scheduled_requests": requests}
    write_document(
        evidence,
        {"recipe": run.recipe, "sources": [file_evidence(run.trace)], "samples": {"prefill": [sample]}},
    )
    report = assessed(run, forward_evidence=evidence)
    assert (report["forward"]["status"], report["status"]) == (status, status)
    assert report["forward"]["phases"]["decode"]["status"] == "unavailable"


def test_a_saved_assessment_is_taken_only_when_it_comes_out_the_same(run):
    report = assessed(run)
    saved = run.place / "serving-validation.json"
    write_document(saved, report)
    assert check_serving_report(saved) == report
    write_document(saved, json.loads(json.dumps(report)) | {"status": "incomplete"})
    with pytest.raises(EvidenceError, match="another assessment"):
        check_serving_report(saved)
    write_document(saved, report)
    run.records.write_text(run.records.read_text() + "\n")
    with pytest.raises(EvidenceError):
        check_serving_report(saved)
