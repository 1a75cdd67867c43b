"""Replays of one execution specification by the public peer and by fpmsdk, with everything a request went through.

A case is the peer's own execution specification (a JSON document), so that a differing one can be kept as it is.
"""

import json
from typing import Any

import aisimulate._runtime as peer_runtime

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import EmptyResultError, ReplayError, RequestNeverFitsError

Spec = dict[str, Any]
Rows = dict[str, dict[str, Any]]

# What both sides say about a request, in the peer's names; one that never happened is null there and here.
FIELDS = {
    "arrival_time_ms": "arrival_ms",
    "first_admit_ms": "first_admit_ms",
    "ttft_ms": "ttft_ms",
    "ttst_ms": "ttst_ms",
    "itl_ms": "itl_ms",
    "e2e_latency_ms": "e2e_latency_ms",
    "first_token_ms": "first_token_ms",
    "last_token_ms": "last_token_ms",
    "terminal_time_ms": "end_ms",
    "output_length": "output_tokens",
    "reused_input_tokens": "reused_tokens",
    "first_admission_reused_input_tokens": "first_reused_tokens",
    "admission_count": "num_admissions",
    "terminal_status": "status",
    "decode_worker_idx": "worker",
}
TRANSFER_FIELDS = {
    "prefill_worker_idx": "prefill_worker",
    "source_held_ms": "source_held_ms",
    "destination_reserved_ms": "destination_reserved_ms",
    "destination_activated_ms": "destination_activated_ms",
    "decode_admit_ms": "decode_admit_ms",
    "source_released_ms": "source_released_ms",
    "decode_reused_input_tokens": "decode_reused_tokens",
}
# A run in which nothing can happen any more; the peer's rank is then of no use.
STUCK = "effect-free zero-duration pass"
GROUPED_FORWARD = "grouped KV forward needs"
NOTHING_COMPLETED = "no request completed"


def aggregated(rank: Spec, requests: list[Spec], *, workers: int = 1, dp_size: int = 1, **options: Any) -> Spec:
    """An execution specification of one pool."""
    role = _role(rank, dp_size)
    topology = {"kind": "aggregated", "workers": _workers(workers)}
    return _specification(topology, role, requests, options)


def disaggregated(
    prefill: Spec,
    decode: Spec,
    requests: list[Spec],
    *,
    prefill_workers: int = 1,
    workers: int = 1,
    prefill_dp_size: int = 1,
    dp_size: int = 1,
    handoff_latency_ms: float = 0.0,
    **options: Any,
) -> Spec:
    """An execution specification of a prefill and a decode pool."""
    topology = {
        "kind": "disaggregated",
        "prefill": _workers(prefill_workers),
        "decode": _workers(workers),
        "handoff_latency_ms": handoff_latency_ms,
    }
    roles = {
        "prefill": _role(prefill | {"worker_type": "prefill"}, prefill_dp_size),
        "decode": _role(decode | {"worker_type": "decode"}, dp_size),
    }
    return _specification(topology, roles, requests, options)


def _workers(count: int) -> Spec:
    return {"initial_workers": count, "startup_delay_ms": 0.0}


def _role(rank: Spec, dp_size: int) -> Spec:
    return {
        "dp_size": dp_size,
        "tensor_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "num_gpu_blocks_is_explicit": True,
        "rank": rank,
    }


def _specification(topology: Spec, engine: Spec, requests: list[Spec], options: Spec) -> Spec:
    adapters = {name: {"provider": provider, "config": None} for name, provider in _ADAPTERS.items()}
    return {"version": 1, "topology": topology, "engine": engine, "adapters": adapters, "requests": requests, **options}


_ADAPTERS = {"placement": "round_robin", "scaling": "none"}


def peer_replay(spec: Spec) -> tuple[Rows, Spec] | str:
    """What the peer says: rows by request and the summary, or why there are none."""
    try:
        text = peer_runtime.run_replay_json(json.dumps({"spec": spec, "determinism": "canonical_v1"}))
    except RuntimeError as failure:
        for kind in (STUCK, GROUPED_FORWARD):
            if kind in str(failure):
                return kind
        return str(failure)
    report = json.loads(text)
    if report["completed_requests"] == 0:
        return NOTHING_COMPLETED
    names = {*FIELDS, *(TRANSFER_FIELDS if "prefill" in spec["engine"] else ())}
    rows = {}
    for row in report.pop("per_request"):
        rows[row["request_id"]] = {name: row[name] for name in names} | {
            "admissions": [[entry["at_ms"], entry["reused_input_tokens"]] for entry in row["admission_history"]]
        }
    return rows, report


def our_replay(spec: Spec) -> tuple[Rows, Spec] | str:
    """The same of fpmsdk, under the peer's rules."""
    requests = spec["requests"]
    ids = [request.get("input_token_ids") for request in requests]
    trace = Trace.from_arrays(
        [request["arrival_time_ms"] for request in requests],
        [request["input_tokens"] for request in requests],
        [request["output_tokens"] for request in requests],
        request_ids=[request["id"] for request in requests],
        dp_rank=[_rank_of(request, "dp_rank") for request in requests],
        prefill_dp_rank=[_rank_of(request, "prefill_dp_rank", "dp_rank") for request in requests],
        hash_ids=ids if all(ids) else None,
        block_tokens=1,
    )
    try:
        report = replay_trace(
            trace,
            **system(spec),
            concurrency=spec.get("max_in_flight"),
            max_sim_time_ms=spec.get("max_sim_time_ms"),
            scheduler_rules="simulator",
            mixed_pass_pricing="separate",
        )
    except RequestNeverFitsError:
        return STUCK
    except EmptyResultError:
        return NOTHING_COMPLETED
    except ReplayError as failure:
        return GROUPED_FORWARD if GROUPED_FORWARD in str(failure) else str(failure)
    fields = FIELDS | (TRANSFER_FIELDS if "prefill" in spec["engine"] else {})
    rows = {
        row["request_id"]: {name: row[ours] for name, ours in fields.items()} | {"admissions": []}
        for row in report.requests.to_pylist()
        if row["status"] != "unfinished"  # the peer reports none that a time limit has cut off
    }
    for row in rows.values():
        if "decode_reused_input_tokens" in row and row["destination_reserved_ms"] is None:
            row["decode_reused_input_tokens"] = None
    for admission in report.admissions.to_pylist():
        if admission["request_id"] in rows:
            rows[admission["request_id"]]["admissions"].append([admission["at_ms"], admission["reused_tokens"]])
    return rows, report.summary


def _rank_of(request: Spec, *names: str) -> int:
    ranks = [request[name] for name in names if request.get(name) is not None]
    return ranks[0] if ranks else -1


def system(spec: Spec) -> dict[str, Any]:
    """The launches and worker counts of a specification, as `replay_trace` takes them."""
    engine, topology = spec["engine"], spec["topology"]
    if topology["kind"] == "aggregated":
        return {"launch": _launch(engine), "num_workers": topology["workers"]["initial_workers"]}
    return {
        "launch": _launch(engine["decode"]),
        "prefill_launch": _launch(engine["prefill"]),
        "num_workers": topology["decode"]["initial_workers"],
        "num_prefill_workers": topology["prefill"]["initial_workers"],
        # It has no effect where the transfer is modelled, and is refused there.
        "handoff_latency_ms": 0.0 if _models_transfer(engine["prefill"]) else topology["handoff_latency_ms"],
    }


def _models_transfer(role: Spec) -> bool:
    return {"kv_transfer_bytes_per_token", "kv_transfer_bandwidth"} <= role["rank"].keys()


def _launch(role: Spec) -> Spec:
    return {
        "engine": role["rank"],
        "dp_size": role["dp_size"],
        "tensor_parallel_size": role["tensor_parallel_size"],
    }


def first_difference(spec: Spec) -> str | None:
    """In words, the first thing that the two sides do not agree on; None when they agree on everything."""
    peer, ours = peer_replay(spec), our_replay(spec)
    if isinstance(peer, str) or isinstance(ours, str):
        shown = [side if isinstance(side, str) else "a report" for side in (peer, ours)]
        return None if peer == ours else f"peer: {shown[0]}; fpmsdk: {shown[1]}"
    if peer[0].keys() != ours[0].keys():
        return f"requests {sorted(peer[0].keys() ^ ours[0].keys())} are reported by one side only"
    for name, expected in sorted(peer[0].items(), key=lambda item: item[1]["terminal_time_ms"] or 0.0):
        found = ours[0][name]
        for field in expected:
            if expected[field] != found[field]:
                return f"{name}: {field} is {expected[field]} at the peer, {found[field]} here"
    for key in ("duration_ms", "committed_prefill_tokens", "completed_requests", "num_requests"):
        if peer[1][key] != ours[1][key]:
            return f"summary: {key} is {peer[1][key]} at the peer, {ours[1][key]} here"
    return None
