"""Replays of the public peer, reproduced to the last bit.

Traces and synthetic runs with fixed or polynomial timing: sessions, closed loop, attention-DP groups,
preemption, prefix caching, MTP, disaggregation, KV-aware placement, grouped caches.
Source: engine-and-replay.md section 7.
"""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import ReplayError
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
    "prefill_worker_idx": "prefill_worker",
    "prefill_admit_ms": "first_admit_ms",
    "source_held_ms": "source_held_ms",
    "destination_reserved_ms": "destination_reserved_ms",
    "destination_activated_ms": "destination_activated_ms",
    "decode_admit_ms": "decode_admit_ms",
    "source_released_ms": "source_released_ms",
    "decode_reused_input_tokens": "decode_reused_tokens",
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
    # `mtp_nextn1_rate1` follows older rules than all other recordings of vLLM ranks.
    return [s["name"] for s in scenarios if not s["name"].startswith("mtp_") and "error" not in s]


TRACES = load_vectors("replay_peer")["trace_scenarios"]
SYNTHETIC = load_vectors("replay_peer")["synthetic_scenarios"]
ADVANCED = load_vectors("replay_advanced_peer")["scenarios"]
# Reduced from random runs, one for each rule that they have shown; the note of each says which.
RULES = load_vectors("replay_rules_peer")["scenarios"]


def scenario_of(scenarios, name):
    return next(scenario for scenario in scenarios if scenario["name"] == name)


def launches(scenario):
    if "prefill_launch" in scenario:
        return {"launch": scenario["decode_launch"], "prefill_launch": scenario["prefill_launch"]}
    return {"launch": {"engine": {}} | scenario["launch"]}


def replay(trace, scenario, options):
    sla = {name.removeprefix("sla_"): bound for name, bound in options.items() if name.startswith("sla_")}
    return replay_trace(
        trace,
        **launches(scenario),
        num_workers=options.get("num_workers", 1),
        arrival_speedup_ratio=options.get("arrival_speedup_ratio", 1.0),
        concurrency=options.get("replay_concurrency"),
        max_sim_time_ms=options.get("max_sim_time_ms"),
        sla=sla or None,
        **PEER,
    )


def trace_of(scenario):
    rows = scenario["trace_rows"]
    names = [f"row {number}" for number in range(len(rows))]
    return Trace.from_arrays(
        [row.get("timestamp", 0.0) for row in rows],
        [row["input_length"] for row in rows],
        [row["output_length"] for row in rows],
        request_ids=names,
        session_ids=[row.get("session_id", names[number]) for number, row in enumerate(rows)],
        delay_ms=[float(row.get("delay", 0.0)) for row in rows],
        hash_ids=[row["hash_ids"] for row in rows],
        block_tokens=scenario["trace_block_size"],
    )


def test_a_forward_larger_than_the_whole_grouped_cache_ends_the_replay():
    scenario = scenario_of(TRACES, "grouped_oversized_chunk_error")
    with pytest.raises(ReplayError) as failure:
        replay(trace_of(scenario), scenario, {})
    # The peer's own identifiers stand between "request" and "grouped".
    assert str(failure.value).partition(" grouped ")[2] == scenario["error"].partition(" grouped ")[2]


@pytest.mark.parametrize("name", simulated(TRACES))
def test_a_trace_replay_equals_the_peer(name):
    scenario = scenario_of(TRACES, name)
    report = replay(trace_of(scenario), scenario, scenario["options"])
    # Rows that the peer could not tell apart have no number; they are compared by the summary.
    recorded = [(f"row {r['row']}", r) for r in scenario["per_request"] if r["row"] is not None]
    assert_requests_equal(report, recorded)
    assert_summary_equal(report, scenario["summary"])


def test_a_trtllm_rank_keeps_the_older_rules_of_mtp():
    scenario = scenario_of(TRACES, "mtp_nextn1_rate1")
    launch = {"engine": scenario["launch"]["engine"] | {"backend": "trtllm"}}
    report = replay(trace_of(scenario), scenario | {"launch": launch}, {})
    assert_requests_equal(report, [("row 0", scenario["per_request"][0])])
    assert_summary_equal(report, scenario["summary"])


def synthetic_trace_of(scenario):
    """The workload that the peer made; random arrivals come from a generator of its own and are as recorded."""
    trace = Trace.synthetic(
        scenario["request_count"],
        scenario["input_tokens"],
        scenario["output_tokens"],
        arrival_interval_ms=scenario["options"].get("arrival_interval_ms"),
    )
    if "request_rate" in scenario["options"]:
        arrivals = np.array([request["arrival_time_ms"] for request in scenario["per_request"]])
        return dataclasses.replace(trace, arrival_ms=arrivals)
    return trace


@pytest.mark.parametrize("name", [scenario["name"] for scenario in SYNTHETIC])
def test_a_synthetic_replay_equals_the_peer(name):
    scenario = scenario_of(SYNTHETIC, name)
    options = {key: value for key, value in scenario["options"].items() if key == "replay_concurrency"}
    report = replay(synthetic_trace_of(scenario), scenario, options)
    recorded = scenario["per_request"]
    assert_requests_equal(report, [(f"synthetic-{number}", request) for number, request in enumerate(recorded)])
    assert_summary_equal(report, scenario["summary"])


def system(spec):
    """The launches, worker counts and placement of an execution spec."""
    engine, topology = spec["engine"], spec["topology"]
    if topology["kind"] == "aggregated":
        return {
            "launch": {"engine": engine["rank"], "dp_size": engine["dp_size"]},
            "num_workers": topology["workers"]["initial_workers"],
            "placement": {"kv_router": "kv_aware"}.get(spec["adapters"]["placement"]["provider"], "round_robin"),
        }
    return {
        "launch": {"engine": engine["decode"]["rank"], "dp_size": engine["decode"]["dp_size"]},
        "prefill_launch": {"engine": engine["prefill"]["rank"], "dp_size": engine["prefill"]["dp_size"]},
        "num_workers": topology["decode"]["initial_workers"],
        "num_prefill_workers": topology["prefill"]["initial_workers"],
        # The peer ignores it when the rank says how fast prompts move; we refuse it then.
        "handoff_latency_ms": 0.0
        if engine["prefill"]["rank"].get("kv_transfer_bandwidth")
        else topology["handoff_latency_ms"],
    }


def relabelled(rows):
    """Workers numbered in order of first use: among idle ones the peer's router chooses at random."""
    labels = {}
    return [{**row, "worker_idx": labels.setdefault(row["worker_idx"], len(labels))} for row in rows]


@pytest.mark.parametrize("name", [scenario["name"] for scenario in ADVANCED + RULES])
def test_a_replay_of_combined_features_equals_the_peer(name):
    scenario = scenario_of(ADVANCED + RULES, name)
    spec, requests = scenario["spec"], scenario["spec"]["requests"]
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
        **system(spec),
        concurrency=spec["max_in_flight"],
        max_sim_time_ms=spec.get("max_sim_time_ms"),
        **PEER,
    )
    recorded = [dict(zip(scenario["columns"], row, strict=True)) for row in scenario["per_request"]]
    assert_requests_equal(report, [(request["request_id"], request) for request in recorded])
    assert_summary_equal(report, scenario["summary"])
    if "bursts" in scenario:
        assert_bursts_equal(report, scenario)
    if "passes" not in scenario:
        return
    recorded, found = recorded_passes(scenario), replayed_passes(report, spec)
    if name.startswith("kv_router"):  # its passes keep the peer's own numbers of workers
        recorded, found = without_workers(recorded), without_workers(found)
    missing, extra = recorded - found, found - recorded
    # The peer does not observe the last pass of a run: one row for each rank that took part in it.
    assert not missing
    assert extra.total() <= sum(role["dp_size"] for role in roles(spec).values())


def without_workers(passes):
    merged = Counter()
    for (pool, _, rank, *row), times in passes.items():
        merged[pool, rank, *row] += times
    return merged


def roles(spec):
    return {"agg": spec["engine"]} if "rank" in spec["engine"] else spec["engine"]


def assert_bursts_equal(report, scenario):
    recorded, found = Counter(), Counter()
    for bursts in scenario["bursts"].values():
        for at_ms, tokens in bursts:
            recorded[at_ms] += tokens
    for row in report.passes.to_pylist():
        found[row["end_ms"]] += row["emitted_tokens"]
    assert +found == recorded


PASS_FIELDS = load_vectors("replay_advanced_peer")["pass_columns"][4:]


def recorded_passes(scenario):
    return Counter(
        (pool, worker, rank, round(wall_time_ms, 6), *telemetry)
        for pool, worker, rank, wall_time_ms, *telemetry in scenario["passes"]
    )


def replayed_passes(report, spec):
    return Counter(
        (
            row["pool"],
            *divmod(row["worker"], roles(spec)[row["pool"]]["dp_size"]),
            round(row["end_ms"] - row["start_ms"], 6),
            *(row[field] for field in PASS_FIELDS),
        )
        for row in report.passes.to_pylist()
    )
