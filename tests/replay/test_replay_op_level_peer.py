"""Replays priced by op-level models on the peer's own data, equal to its recorded runs to the nanosecond.

Source: engine-and-replay.md 4.3 and 7 (AIS-timed scenarios).
"""

import math
import os

import pytest

from fpmsdk import ForwardPassPerfModel, Trace, replay_trace
from tests.vectors import load_vectors

SCENARIOS = load_vectors("replay_ais_peer")["scenarios"]
COLUMNS = (
    "request_id",
    "arrival_ms",
    "first_admit_ms",
    "ttft_ms",
    "ttst_ms",
    "e2e_latency_ms",
    "reused_tokens",
    "num_admissions",
    "output_tokens",
    "status",
)


@pytest.mark.peer_data
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_replay_with_op_level_timing_equals_the_peer(name):
    spec, recorded = SCENARIOS[name]["spec"], SCENARIOS[name]["result"]
    engine, requests = spec["engine"], spec["requests"]
    rank = dict(engine["rank"])
    config = rank.pop("timing_model")["config"]
    model = ForwardPassPerfModel.best_available(
        config | {"fallback_policy": "deny", "systems_paths": [os.environ["FPMSDK_TEST_SYSTEMS_013"]]}
    )
    prompts = [request.get("input_token_ids") for request in requests]
    trace = Trace.from_arrays(
        [request["arrival_time_ms"] for request in requests],
        [request["input_tokens"] for request in requests],
        [request["output_tokens"] for request in requests],
        request_ids=[request["id"] for request in requests],
        hash_ids=prompts if all(prompts) else None,
        block_tokens=1,
    )
    report = replay_trace(
        trace,
        launch={"engine": rank, "tensor_parallel_size": engine["tensor_parallel_size"]},
        timing=model,
        num_workers=spec["topology"]["workers"]["initial_workers"],
        concurrency=spec["max_in_flight"],
        scheduler_rules="simulator",
        mixed_pass_pricing="separate",
    )
    found = [[row[column] for column in COLUMNS] for row in report.requests.to_pylist()]
    assert sorted(found) == sorted(recorded["per_request"])
    assert math.isclose(report.summary["duration_ms"], recorded["summary"]["duration_ms"], rel_tol=1e-12)
