"""Run a trace through a simulated engine and report what its users would have seen.

Connects the parts and checks the options; the simulation itself is compiled (`ext/scheduler.pyx`,
`ext/replay.pyx`), and figures are made in `fpmsdk.replay.report`.
Source: engine-and-replay.md sections 4 to 6.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.replay import Replay
from fpmsdk._ext.scheduler import Refusal, Requests, Status
from fpmsdk.config.schema import shown
from fpmsdk.errors import ConfigError, KvForwardTooLargeError, ReplayError, ReplayInterrupted, TraceError
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.replay.coverage import coverage_on_failure, coverage_roles, replay_coverage
from fpmsdk.replay.latency import Sla
from fpmsdk.replay.options import check_integer, check_number
from fpmsdk.replay.pools import PoolPlan
from fpmsdk.replay.rejections import rejection_reasons
from fpmsdk.replay.report import ReplayReport
from fpmsdk.replay.system import planned_system
from fpmsdk.replay.trace import Trace

# Durations are counted in 64-bit seconds; figures of much later times would overflow.
MAX_TIME_MS = 2.0**64 * 1e3

# How reports name the pool of each worker type, in the order of `Role`.
_POOLS = {"aggregated": "agg", "prefill": "prefill", "decode": "decode"}

_RECORDED_COLUMNS = (
    "arrival_ms",
    "first_admit_ms",
    "first_token_ms",
    "second_token_ms",
    "last_token_ms",
    "end_ms",
    "reused_tokens",
    "first_reused_tokens",
    "num_admissions",
    "worker",
)
_TRANSFER_COLUMNS = (
    "prefill_worker",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_tokens",
)


def replay_trace(
    trace: Trace,
    *,
    launch: EngineLaunchConfig | Mapping[str, Any] | None = None,
    timing: Any = None,
    scheduler_rules: Literal["vllm", "simulator"] = "vllm",
    mixed_pass_pricing: Literal["composed", "separate"] = "composed",
    num_workers: int = 1,
    placement: Literal["round_robin", "kv_aware"] = "round_robin",
    prefill_launch: EngineLaunchConfig | Mapping[str, Any] | None = None,
    prefill_timing: Any = None,
    num_prefill_workers: int = 1,
    handoff_latency_ms: float = 0.0,
    arrival_speedup_ratio: float = 1.0,
    concurrency: int | None = None,
    max_sim_time_ms: float | None = None,
    sla: Sla | Mapping[str, float | None] | None = None,
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
    long_prefill_token_threshold: int = 0,
    long_prefill_token_threshold_adaptive: bool = False,
    vllm_version: str = "0.32",
    watermark: float = 0.0,
    scheduler_reserve_full_isl: bool = True,
    warm_prefix_cache: bool = False,
    exact_itl: bool = False,
    record_passes: bool = True,
    sample_interval_ms: float | None = None,
    allow_empty: bool = False,
) -> ReplayReport:
    """Serve a trace with simulated vLLM workers and return the report.

    Parameters
    ----------
    trace: the requests.
    launch: the engine, canonical or flat mapping or an `EngineLaunchConfig`; None is the default engine. A cache that
        it does not size follows from the profile of the timing model, where that has one.
    timing: what prices a pass: a `TimingModel`, an object whose method `timing_model()` returns one (a
        forward-pass model does: a frozen view of what it has learned), a mapping as the launch's
        `timing_model` (type fixed or polynomial), or an object with `predict_prefill_ms` and
        `predict_decode_ms`. None takes the `timing_model` of the launch.
    scheduler_rules: `vllm` decides as the real scheduler, `simulator` as the peer simulator.
    mixed_pass_pricing: `composed` prices prefill and decode of one pass as one forward where the timing model
        can, `separate` prices each part for itself.
    num_workers: identical workers, ready from the start; with `dp_size` ranks each at most 65,536 ranks.
    placement: `round_robin` over the workers, or `kv_aware`: where most of a prompt is cached and least waits.
        With prefill workers it places prompts; decode workers take turns.
    prefill_launch, prefill_timing, num_prefill_workers: disaggregated serving: workers that compute prompts (of
        worker_type prefill) and hand them over to those of `launch` (of worker_type decode).
    handoff_latency_ms: duration of every transfer when the prefill launch names no
        `kv_transfer_bytes_per_token` and `kv_transfer_bandwidth`.
    arrival_speedup_ratio: arrivals and delays are divided by it.
    concurrency: closed loop with at most so many active sessions; None follows the trace's timestamps.
    max_sim_time_ms: no event after this simulated time.
    sla: bounds in ms for goodput (`ttft_ms`, `itl_ms` or `e2e_ms`).
    scheduling_policy, long_prefill_token_threshold, long_prefill_token_threshold_adaptive, watermark,
        scheduler_reserve_full_isl: vLLM settings that a launch does not carry, with vLLM's defaults.
    vllm_version: selects the long-prefill rule; from 0.31 on a lone request is not cut.
    warm_prefix_cache: every worker (of disaggregated serving every prefill worker) has cached, before the first
        arrival, the prompt prefixes that several requests of the trace share, as far as they fit.
    exact_itl: percentiles of the stream of token gaps exactly, not those of a sketch that is good to 0.1 %.
    record_passes: keep a row per pass.
    sample_interval_ms: sample the state of every rank at its multiples, for `ReplayReport.series`; None for no samples.
    allow_empty: return a report also when no request completed; its distributions then have no samples.

    Raises
    ------
    TraceError: `trace` is no `Trace`.
    ConfigError: an option is out of range (`path` names it); LaunchConfigError for the launch.
    MissingCapabilityError: the launch asks for an engine that this release does not simulate.
    ReplayError: one forward needs more than a whole grouped KV cache; names the request and what to do.
    RequestNeverFitsError: nothing can happen any more while a request waits; names it.
    TimingError: the timing model is not ready or answered with an unusable latency.
    EmptyResultError: no request completed, and `allow_empty` is not set.
    ReplayInterrupted: Ctrl-C; its `report` has what was simulated so far.

    Source: engine-and-replay.md sections 4 to 6.

    >>> trace = Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3])
    >>> launch = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}}}
    >>> replay_trace(trace, launch=launch).summary["mean_ttft_ms"]
    13.0
    """
    if not isinstance(trace, Trace):
        raise TraceError(f"trace is {shown(trace)}; give a Trace, as Trace.read(path) returns")
    check_load(bool(trace.delay_ms.any()), arrival_speedup_ratio, concurrency, max_sim_time_ms)
    if sample_interval_ms is not None:
        check_number("sample_interval_ms", sample_interval_ms, sys.float_info.min)
    system = planned_system(
        launch=launch,
        timing=timing,
        scheduler_rules=scheduler_rules,
        mixed_pass_pricing=mixed_pass_pricing,
        num_workers=num_workers,
        placement=placement,
        prefill_launch=prefill_launch,
        prefill_timing=prefill_timing,
        num_prefill_workers=num_prefill_workers,
        handoff_latency_ms=handoff_latency_ms,
        sla=sla,
        scheduling_policy=scheduling_policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
        vllm_version=vllm_version,
        watermark=watermark,
        scheduler_reserve_full_isl=scheduler_reserve_full_isl,
    )
    plans = system.plans
    _check_warm_cache(warm_prefix_cache, trace, plans[0].launch)
    for pool in plans:
        check_dp_ranks(trace.request_ids, pool.launch, trace.dp_rank, trace.prefill_dp_rank)

    requests = Requests(trace.prompt_tokens, trace.output_tokens, trace.priority)
    recorder = Recorder(len(trace), record_passes, sample_interval_ms is not None)
    pools = [pool.build(trace, requests, recorder) for pool in plans]
    if warm_prefix_cache:
        pools[0].warm_prefix_caches()
    replay = Replay(
        requests,
        recorder,
        pools[-1],
        None if system.prefill is None else pools[0],
        **system.transfer,
        arrival_ms=sped_up(trace.arrival_ms, arrival_speedup_ratio),
        next_turn=_next_turns(trace),
        delay_ms=sped_up(trace.delay_ms, arrival_speedup_ratio),
        followers=_followers(trace) if len(trace.awaits) else None,
        concurrency=min(concurrency or 0, len(trace)),
        dp_rank=trace.dp_rank,
        prefill_dp_rank=trace.prefill_dp_rank,
        max_sim_time_ms=math.inf if max_sim_time_ms is None else max_sim_time_ms,
        sample_interval_ms=sample_interval_ms or 0.0,
        request_ids=trace.request_ids.tolist(),
    )
    started = time.perf_counter()
    interrupted = was_interrupted(replay.run, trace.request_ids, system.timings)
    wall_time_ms = (time.perf_counter() - started) * 1e3

    stopped = f"interrupted at {replay.now_ms:,.1f} ms of simulated time"
    if interrupted and Status.COMPLETED not in requests.of("status", slice(None)):
        raise ReplayInterrupted(f"{stopped}, before any request completed")
    gaps = recorder.gaps.array()
    arrived = ~np.isnan(recorder.column("arrival_ms"))
    columns = _request_columns(trace, requests, recorder, plans, scheduler_rules)
    roles = coverage_roles(*system.timings)
    report = ReplayReport(
        requests=columns if arrived.all() else {name: column[arrived] for name, column in columns.items()},
        admissions=_admission_columns(recorder.admissions.array(), arrived, len(plans) > 1),
        passes=_pass_columns(
            recorder.passes.array(), scheduler_rules == "simulator" and bool(system.main.launch.engine.kv_cache_groups)
        ),
        preemptions=_preemption_columns(trace, recorder.preemptions.array()),
        samples=_table_columns(recorder.samples.array()),
        sample_interval_ms=sample_interval_ms,
        dp_sizes={_POOLS[pool.launch.engine.worker_type]: pool.launch.dp_size for pool in plans},
        partial=interrupted,
        gap_ms=gaps["gap_ms"],
        gap_count=gaps["count"],
        committed_prefill_tokens=recorder.committed_prefill_tokens,
        clock_ms=replay.now_ms,
        wall_time_ms=wall_time_ms,
        **system.provision,
        options={**system.options}
        | load_options(arrival_speedup_ratio, concurrency, max_sim_time_ms, exact_itl)
        | {"warm_prefix_cache": warm_prefix_cache},
        sla=system.sla,
        exact_itl=exact_itl,
        allow_empty=allow_empty,
        fpm_query_coverage=replay_coverage(roles, completed=True)
        if (roles := coverage_roles(*system.timings))
        else None,
    )
    report.summary["composed_passes"] = sum(pool.pricer.num_composed for pool in plans)
    report.summary["mixed_passes_priced_separately"] = sum(pool.pricer.num_fallback for pool in plans)
    if interrupted:
        raise ReplayInterrupted(stopped, report)
    system.check_recordings_used()
    return report


def load_options(
    arrival_speedup_ratio: float, concurrency: int | None, max_sim_time_ms: float | None, exact_itl: bool
) -> dict[str, Any]:
    """Settings of the load and the figures, for a report."""
    return {
        "arrival_speedup_ratio": arrival_speedup_ratio,
        "concurrency": concurrency,
        "max_sim_time_ms": max_sim_time_ms,
        "exact_itl": exact_itl,
    }


def was_interrupted(
    run: Callable[[], None], request_ids: Sequence[str] | NDArray[np.object_], timings: list[Any]
) -> bool:
    """Run a replay; return whether Ctrl-C ended it."""
    with coverage_on_failure(*timings):
        try:
            run()
        except KvForwardTooLargeError as fault:
            raise ReplayError(fault.describe(repr(request_ids[fault.request]))) from fault
        except KeyboardInterrupt:
            return True
    return False


def check_load(
    has_delays: bool, arrival_speedup_ratio: float, concurrency: int | None, max_sim_time_ms: float | None
) -> None:
    """Raise ConfigError for options of the load that are out of range or have no effect."""
    check_number("arrival_speedup_ratio", arrival_speedup_ratio, sys.float_info.min)
    if max_sim_time_ms is not None:
        check_number("max_sim_time_ms", max_sim_time_ms, 0.0)
    if concurrency is None:
        return
    check_integer("concurrency", concurrency, 1)
    if arrival_speedup_ratio != 1.0 and not has_delays:
        raise ConfigError(
            "arrival_speedup_ratio has no effect with concurrency on requests that wait for nothing; leave one out",
            "arrival_speedup_ratio",
        )


def _check_warm_cache(is_warm: bool, trace: Trace, launch: EngineLaunchConfig) -> None:
    if is_warm and not (launch.engine.enable_prefix_caching and len(trace.hash_ids)):
        why = "hash_ids" if launch.engine.enable_prefix_caching else "engine.enable_prefix_caching"
        raise ConfigError(f"warm_prefix_cache has no effect without {why}; leave it out", "warm_prefix_cache")


def check_dp_ranks(
    request_ids: Sequence[str] | NDArray[np.object_],
    launch: EngineLaunchConfig,
    dp_rank: NDArray[np.int64],
    prefill_dp_rank: NDArray[np.int64],
) -> None:
    """Raise ConfigError when a request asks for an attention-DP rank that the launch has not."""
    is_prefill = launch.engine.worker_type == "prefill"
    name, ranks = ("prefill_dp_rank", prefill_dp_rank) if is_prefill else ("dp_rank", dp_rank)
    outside = np.flatnonzero(ranks >= launch.dp_size)
    if outside.size:
        row = int(outside[0])
        raise ConfigError(
            f"request {request_ids[row]!r}: {name} {ranks[row]} is out of range for dp_size {launch.dp_size}",
            name,
        )


def sped_up(times_ms: NDArray[np.float64], ratio: float) -> NDArray[np.float64]:
    """Times divided by a ratio; raises ConfigError where they become too large."""
    with np.errstate(over="ignore"):
        divided = times_ms / ratio
    if (divided >= MAX_TIME_MS).any():
        raise ConfigError(
            f"arrivals or delays divided by arrival_speedup_ratio = {ratio!r} lie beyond 2^64 s; give a larger ratio",
            "arrival_speedup_ratio",
        )
    return divided


def _next_turns(trace: Trace) -> NDArray[np.int64]:
    """The row of the next turn of each row's session, -1 for the last; turns of a session are neighbours."""
    rows = np.arange(len(trace))
    same_session = np.append(trace.session_index[1:] == trace.session_index[:-1], False)
    return np.where(same_session, rows + 1, -1)


def _followers(
    trace: Trace,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of sessions that branch: who waits for each row, for how many rows each waits, and its session."""
    rows = np.arange(len(trace))
    steps = np.diff(trace.awaits_offsets)
    # A later turn that names none waits for the row before it.
    waits_for_last = (steps == 0) & (trace.turn_index > 0)
    follower = np.concatenate([np.repeat(rows, steps), rows[waits_for_last]])
    awaited = np.concatenate([np.repeat(rows, steps) - trace.awaits, rows[waits_for_last] - 1])
    order = np.lexsort((follower, awaited))
    offsets = np.zeros(len(trace) + 1, np.int64)
    np.cumsum(np.bincount(awaited, minlength=len(trace)), out=offsets[1:])
    return offsets, follower[order], np.bincount(follower, minlength=len(trace)), trace.session_index


def _table_columns(rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {name: rows[name] for name in rows.dtype.names or ()}
    columns["pool"] = np.array(list(_POOLS.values()), object)[columns.pop("role")]
    return columns


def _pass_columns(rows: NDArray[np.void], counts_bytes: bool) -> dict[str, NDArray[Any]]:
    columns = _table_columns(rows)
    if not counts_bytes:
        del columns["kv_cache_used_bytes"]
    return columns


def _preemption_columns(trace: Trace, rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    columns = _table_columns(rows)
    return {"request_id": trace.request_ids[columns.pop("request")], **columns}


def _session_names(trace: Trace) -> NDArray[np.object_]:
    """The session of each row; None for a request that is a session of its own."""
    names = trace.session_ids[trace.session_index]
    names[np.bincount(trace.session_index)[trace.session_index] == 1] = None
    return names


def _request_columns(
    trace: Trace, requests: Requests, recorder: Recorder, plans: list[PoolPlan], scheduler_rules: str
) -> dict[str, NDArray[Any]]:
    return {
        "request_id": trace.request_ids,
        "session_id": _session_names(trace),
        "turn_index": trace.turn_index,
        "prompt_tokens": trace.prompt_tokens,
        "requested_output_tokens": trace.output_tokens,
        **outcome_columns(requests, recorder, plans, scheduler_rules, slice(None)),
    }


def outcome_columns(
    requests: Requests,
    recorder: Recorder,
    plans: list[PoolPlan],
    scheduler_rules: str,
    chosen: slice | NDArray[np.int64],
) -> dict[str, NDArray[Any]]:
    """What became of chosen requests, as columns of a report."""
    outcomes = np.full(len(Status), "unfinished", object)
    outcomes[Status.COMPLETED], outcomes[Status.REJECTED] = "completed", "rejected"
    outcomes[Status.CANCELED], outcomes[Status.FAILED] = "canceled", "failed"
    reasons = rejection_reasons(plans[0].launch.engine, scheduler_rules)
    status = requests.of("status", chosen)
    refusal = requests.of("refusal", chosen)
    # One that a time limit cuts off in the pass of its rejection is not rejected yet.
    said = reasons[np.where(status == Status.REJECTED, refusal, int(Refusal.ACCEPTED))]
    if len(plans) > 1:
        reasons = rejection_reasons(plans[1].launch.engine, scheduler_rules)
        of_decoder = np.array([reason and f"{reason} of a decode worker" for reason in reasons], object)
        said = np.where(status == Status.FAILED, of_decoder[refusal], said)
    was_with_decoder = ~np.isnan(recorder.column("destination_reserved_ms")[chosen]) | (len(plans) == 1)
    names = (*_RECORDED_COLUMNS, *(_TRANSFER_COLUMNS if len(plans) > 1 else ()))
    return {
        # The token of a prefill worker is hidden.
        "output_tokens": np.where(was_with_decoder, requests.of("generated_tokens", chosen), 0),
        "num_preemptions": requests.of("num_preemptions", chosen),
        "status": outcomes[status],
        "rejection_reason": said,
        **{name: recorder.column(name)[chosen] for name in names},
    }


def _admission_columns(
    rows: NDArray[np.void], arrived: NDArray[np.bool_], is_disaggregated: bool
) -> dict[str, NDArray[Any]]:
    columns = _table_columns(rows)
    if not is_disaggregated:
        del columns["pool"]
    row_of_request = np.cumsum(arrived) - 1
    return columns | {"request": row_of_request[columns["request"]]}
