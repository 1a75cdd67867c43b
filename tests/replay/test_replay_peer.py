"""Replays of the public peer, reproduced to the last bit.

Traces and synthetic runs with fixed or polynomial timing: sessions, closed loop, attention-DP groups,
preemption, prefix caching; not the disaggregated, grouped, KV-routed and MTP scenarios of the same files.
Source: engine-and-replay.md section 7.
"""

import math
from collections import Counter

import pytest

from fpmsdk import Trace, replay_trace
from tests.vectors import load_vectors

PEER = {"scheduler_rules": "simulator", "mixed_pass_pricing": "separate"}

# Names in the recordings and ours; one recorded as null does not exist and is NaN here.
REQUEST_FIELDS = {
    "arrival_time_ms": "arrival_ms",
    "first_admit_ms": "first_admit_ms",
    "first_token_ms": "first_token_ms",
    "second_token_ms": "second_token_ms",
    "last_token_ms": "last_token_ms",
    "terminal_time_ms": "end_ms",
    "ttft_ms": "ttft_ms",
    "ttst_ms": "ttst_ms",
    "itl_ms": "itl_ms",
    "e2e_latency_ms": "e2e_latency_ms",
    "output_length": "output_tokens",
    "reused_input_tokens": "reused_tokens",
    "admission_count": "num_admissions",
    "terminal_status": "status",
    "decode_worker_idx": "worker",
    "worker_idx": "worker",
}


def assert_requests_equal(report, recorded):
    rows = {row["request_id"]: row for row in report.requests.to_pylist()}
    for name, expected in recorded:
        known = {field: ours for field, ours in REQUEST_FIELDS.items() if field in expected}
        assert known
        found = {field: rows[name][ours] for field, ours in known.items()}
        assert found == {field: expected[field] for field in known}, name


def assert_summary_equal(report, recorded):
    names = (recorded.keys() & report.summary.keys()) - {"wall_time_ms"}
    assert {"duration_ms", "completed_requests", "mean_ttft_ms", "prefix_cache_reused_ratio"} <= names
    for name in sorted(names):
        expected, found = recorded[name], report.summary[name]
        if isinstance(expected, float):
            assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9), name
        else:
            assert found == expected, name


def simulated(scenarios):
    return [
        scenario["name"]
        for scenario in scenarios
        if "launch" in scenario and not scenario["name"].startswith(("grouped_", "mtp_"))
    ]


TRACES = load_vectors("replay_peer")["trace_scenarios"]
SYNTHETIC = load_vectors("replay_peer")["synthetic_scenarios"]
ADVANCED = load_vectors("replay_advanced_peer")["scenarios"]


def scenario_of(scenarios, name):
    return next(scenario for scenario in scenarios if scenario["name"] == name)


def replay(trace, launch, options):
    sla = {name.removeprefix("sla_"): bound for name, bound in options.items() if name.startswith("sla_")}
    return replay_trace(
        trace,
        launch=launch,
        num_workers=options.get("num_workers", 1),
        arrival_speedup_ratio=options.get("arrival_speedup_ratio", 1.0),
        concurrency=options.get("replay_concurrency"),
        max_sim_time_ms=options.get("max_sim_time_ms"),
        sla=sla or None,
        **PEER,
    )


@pytest.mark.parametrize("name", simulated(TRACES))
def test_a_trace_replay_equals_the_peer(name):
    scenario = scenario_of(TRACES, name)
    rows = scenario["trace_rows"]
    names = [f"row {number}" for number in range(len(rows))]
    trace = Trace.from_arrays(
        [row.get("timestamp", 0.0) for row in rows],
        [row["input_length"] for row in rows],
        [row["output_length"] for row in rows],
        request_ids=names,
        session_ids=[row.get("session_id", names[number]) for number, row in enumerate(rows)],
        delay_ms=[float(row.get("delay", 0.0)) for row in rows],
        hash_ids=[row["hash_ids"] for row in rows],
        block_tokens=scenario["trace_block_size"],
    )
    report = replay(trace, scenario["launch"], scenario["options"])
    # Rows that the peer could not tell apart have no number; they are compared by the summary.
    recorded = [(f"row {r['row']}", r) for r in scenario["per_request"] if r["row"] is not None]
    assert_requests_equal(report, recorded)
    assert_summary_equal(report, scenario["summary"])


@pytest.mark.parametrize("name", [scenario["name"] for scenario in SYNTHETIC])
def test_a_synthetic_replay_equals_the_peer(name):
    scenario = scenario_of(SYNTHETIC, name)
    recorded = scenario["per_request"]
    trace = Trace.from_arrays(
        [request["arrival_time_ms"] for request in recorded],
        [scenario["input_tokens"]] * len(recorded),
        [scenario["output_tokens"]] * len(recorded),
        request_ids=[request["uuid"] for request in recorded],
    )
    options = {key: value for key, value in scenario["options"].items() if key == "replay_concurrency"}
    report = replay(trace, {"engine": {}} | scenario["launch"], options)
    assert_requests_equal(report, [(request["uuid"], request) for request in recorded])
    assert_summary_equal(report, scenario["summary"])


def is_simulated(scenario):
    spec = scenario["spec"]
    return (
        spec["topology"]["kind"] == "aggregated"
        and spec["adapters"]["placement"]["provider"] == "round_robin"
        and spec["engine"]["rank"].get("aic_nextn") is None
    )


@pytest.mark.parametrize("name", [scenario["name"] for scenario in ADVANCED if is_simulated(scenario)])
def test_a_replay_of_combined_features_equals_the_peer(name):
    scenario = scenario_of(ADVANCED, name)
    spec, requests = scenario["spec"], scenario["spec"]["requests"]
    engine = spec["engine"]
    trace = Trace.from_arrays(
        [request.get("arrival_time_ms") or 0.0 for request in requests],
        [request["input_tokens"] for request in requests],
        [request["output_tokens"] for request in requests],
        request_ids=[request["id"] for request in requests],
        session_ids=[request.get("_session", request["id"]) for request in requests],
        delay_ms=[float(request.get("_delay") or 0.0) for request in requests],
        hash_ids=[request["input_token_ids"] for request in requests],
        block_tokens=1,
    )
    report = replay_trace(
        trace,
        launch={"engine": engine["rank"], "dp_size": engine["dp_size"]},
        num_workers=spec["topology"]["workers"]["initial_workers"],
        concurrency=spec["max_in_flight"],
        **PEER,
    )
    recorded = [dict(zip(scenario["columns"], row, strict=True)) for row in scenario["per_request"]]
    assert_requests_equal(report, [(request["request_id"], request) for request in recorded])
    assert_summary_equal(report, scenario["summary"])
    missing = recorded_passes(scenario) - replayed_passes(report, engine["dp_size"])
    extra = replayed_passes(report, engine["dp_size"]) - recorded_passes(scenario)
    # The peer does not observe the last pass of a run: one row for each rank that took part in it.
    assert not missing
    assert extra.total() <= engine["dp_size"]


PASS_FIELDS = load_vectors("replay_advanced_peer")["pass_columns"][4:]


def recorded_passes(scenario):
    return Counter(
        (worker, rank, round(wall_time_ms, 6), *telemetry)
        for _, worker, rank, wall_time_ms, *telemetry in scenario["passes"]
    )


def replayed_passes(report, dp_size):
    return Counter(
        (
            *divmod(row["worker"], dp_size),
            round(row["end_ms"] - row["start_ms"], 6),
            *(row[field] for field in PASS_FIELDS),
        )
        for row in report.passes.to_pylist()
    )
