"""What is wrong with a candidate is an outcome with a reason on one line. Source: predict-recommend.md section 6.5."""

import copy

import pytest

from fpmsdk.errors import FpmNoCellError, InfeasibleMemoryError
from fpmsdk.recommendation import evaluate
from fpmsdk.recommendation.evaluate import evaluate_document, used_gpus

THROUGHPUT = {"target": "throughput"}
TIMESTAMPS = {"type": "trace_timestamps"}
DOCUMENT = {
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 64, "output_tokens": 3},
        "load": {"type": "concurrency", "concurrency": 2},
        "stop": {"requests": 4},
    },
    "engine": {
        "mode": "aggregated",
        "model": "org/model",
        "hardware": "any",
        "workers": {
            "aggregated": {
                "parallelism": {"replicas": 2},
                "kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 64}},
                "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
            }
        },
    },
}


def changed(path, value):
    document = copy.deepcopy(DOCUMENT)
    *parents, last = path.split(".")
    part = document
    for name in parents:
        part = part[name]
    part[last] = value
    return document


def test_a_candidate_that_serves_has_figures_gpus_and_provenance():
    outcome = evaluate_document(DOCUMENT, THROUGHPUT)
    assert (outcome.status, outcome.reason, outcome.used_gpus) == ("feasible", None, 2)
    # A prompt of 10 ms and two tokens of 1 ms each, twice in a row on each worker.
    assert outcome.metrics["duration_ms"] == 24.0
    assert outcome.metrics["output_throughput_tok_s"] == 500.0
    assert outcome.provenance["aggregated"]["estimator"] == "fixed"


def test_figures_do_not_depend_on_the_host():
    first, second = (evaluate_document(DOCUMENT, THROUGHPUT) for _ in range(2))
    assert first == second
    assert "wall_time_ms" not in first.metrics


@pytest.mark.parametrize(
    ("document", "objective", "status", "category", "reason"),
    [
        # not one request fits the cache of a rank
        (
            changed("engine.workers.aggregated.kv_cache.capacity.blocks", 2),
            THROUGHPUT,
            "infeasible",
            "no_samples",
            "no request completed",
        ),
        (
            changed("traffic.load", {"type": "kv_capacity_fraction", "fraction": 0.5})
            | {
                "engine": changed("engine.workers.aggregated.kv_cache.capacity.blocks", 1)["engine"],
            },
            THROUGHPUT,
            "infeasible",
            "kv_capacity",
            "holds no request of 65 tokens",
        ),
        (
            changed("evaluation", {"sla": {"ttft_ms": 5.0}}),
            {"target": "throughput", "strict_sla": True},
            "infeasible",
            "sla_constraint",
            "mean_ttft_ms 10 is over sla.ttft_ms 5",
        ),
        (
            changed("engine.workers.aggregated.scheduler", {"max_sequences": 0}),
            THROUGHPUT,
            "failed",
            "candidate_materialization",
            "candidate: engine.workers.aggregated.scheduler.max_sequences: ",
        ),
        (
            DOCUMENT | {"traffic": {"source": {"type": "trace", "paths": ["/nowhere/t.jsonl"]}, "load": TIMESTAMPS}},
            THROUGHPUT,
            "failed",
            "candidate_materialization",
            "/nowhere/t.jsonl",
        ),
        # no SLA, so that there is no goodput
        (DOCUMENT, {"target": "goodput"}, "failed", "invalid_metrics", "goodput_output_throughput_tok_s"),
        (DOCUMENT, {"target": "speed"}, "failed", "unknown", "ValueError: optimization.target: found 'speed'"),
    ],
)
def test_every_failure_has_its_status_category_and_one_line(document, objective, status, category, reason):
    outcome = evaluate_document(document, objective)
    assert (outcome.status, outcome.reason_category) == (status, category), outcome.reason
    assert reason in outcome.reason
    assert "\n" not in outcome.reason
    assert outcome.used_gpus == 2


@pytest.mark.parametrize(
    ("fault", "status", "category", "reason"),
    [
        (InfeasibleMemoryError("too\nlarge", 2, 1, None), "infeasible", "kv_capacity", "too large"),
        (FpmNoCellError("no cell"), "unsupported", "backend_topology", "no cell"),
        (MemoryError("more"), "resource_limited", "resource_limit", "MemoryError: more"),
        (KeyError("x"), "failed", "unknown", "KeyError: 'x'"),
    ],
)
def test_an_exception_of_the_simulation_is_an_outcome(fault, status, category, reason, monkeypatch):
    def fails(*_, **__):
        raise fault

    monkeypatch.setattr(evaluate, "simulate", fails)
    outcome = evaluate_document(DOCUMENT, THROUGHPUT)
    assert (outcome.status, outcome.reason_category, outcome.reason) == (status, category, reason)


def test_an_interruption_is_no_outcome(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate_document(DOCUMENT, THROUGHPUT)


def test_gpus_are_those_of_the_workers_that_the_mode_has():
    workers = {
        "prefill": {"parallelism": {"replicas": 3, "tensor": 2}},
        "decode": {"parallelism": {"tensor": 2, "attention_data": 4, "moe_expert": 8}},
        "aggregated": {"parallelism": {"replicas": 9}},
    }
    assert used_gpus({"engine": {"mode": "disaggregated", "workers": workers}}) == 3 * 2 + 2 * 4
    assert used_gpus({"engine": {"mode": "aggregated", "workers": workers}}) == 9
