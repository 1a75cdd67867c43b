"""Run a trace through a simulated engine and report what its users would have seen.

Connects the parts and checks the options; the simulation itself is compiled (`ext/scheduler.pyx`,
`ext/replay.pyx`), and figures are made in `fpmsdk.replay.report`.
Source: engine-and-replay.md sections 4 to 6.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.pricing import FixedTiming, PassPricer, PolynomialTiming, PythonTiming, TimingModel
from fpmsdk._ext.recorded import RecordedTiming
from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.replay import Replay
from fpmsdk._ext.scheduler import Refusal, Requests, Status
from fpmsdk.config.schema import shown
from fpmsdk.errors import (
    ConfigError,
    KvForwardTooLargeError,
    MissingCapabilityError,
    ReplayError,
    ReplayInterrupted,
    TimingError,
    TraceError,
)
from fpmsdk.launch.config import EngineConfig, EngineLaunchConfig
from fpmsdk.replay.coverage import coverage_on_failure, coverage_roles, replay_coverage
from fpmsdk.replay.latency import Sla
from fpmsdk.replay.pools import VLLM_DEFAULTS, PoolPlan, check_simulated, parsed_version
from fpmsdk.replay.rejections import rejection_reasons
from fpmsdk.replay.report import ReplayReport
from fpmsdk.replay.trace import Trace

# What a replay keeps in memory and visits at every event, and what fits its 64-bit sums of KV tokens.
MAX_RANKS = 65_536
MAX_KV_TOKENS = 2**62
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

    Raises
    ------
    TraceError: `trace` is no `Trace`.
    ConfigError: an option is out of range (`path` names it); LaunchConfigError for the launch.
    MissingCapabilityError: the launch asks for an engine that this release does not simulate.
    ReplayError: one forward needs more than a whole grouped KV cache; names the request and what to do.
    RequestNeverFitsError: nothing can happen any more while a request waits; names it.
    TimingError: the timing model is not ready or answered with an unusable latency.
    EmptyResultError: no request completed.
    ReplayInterrupted: Ctrl-C; its `report` has what was simulated so far.

    Source: engine-and-replay.md sections 4 to 6.

    >>> trace = Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3])
    >>> launch = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}}}
    >>> replay_trace(trace, launch=launch).summary["mean_ttft_ms"]
    13.0
    """
    _check_options(
        trace,
        scheduler_rules,
        mixed_pass_pricing,
        num_workers,
        placement,
        num_prefill_workers,
        handoff_latency_ms,
        arrival_speedup_ratio,
        concurrency,
        max_sim_time_ms,
        sample_interval_ms,
    )
    launch = _sized(_launch_config(launch), timing)
    bounds = sla if sla is None or isinstance(sla, Sla) else Sla.from_dict(sla)
    vllm_settings = {
        "scheduling_policy": scheduling_policy,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": long_prefill_token_threshold_adaptive,
        "vllm_version": vllm_version,
        "watermark": watermark,
        "scheduler_reserve_full_isl": scheduler_reserve_full_isl,
    }

    recordings: list[RecordedTiming] = []

    def plan(
        launch: EngineLaunchConfig, num_workers: int, timing: Any, placement: str, workers_name: str = "num_workers"
    ) -> PoolPlan:
        engine = launch.engine
        check_simulated(engine, scheduler_rules)
        _check_size(launch, num_workers, workers_name)
        _check_vllm_settings(vllm_settings, engine, scheduler_rules)
        model = as_timing_model(engine.timing_model if timing is None else timing)
        pricer = PassPricer(model, mixed_pass_pricing == "composed", engine.speedup_ratio, engine.decode_speedup_ratio)
        if isinstance(model, RecordedTiming):  # durations as they came out, whole passes each
            recordings.append(model)
            pricer = PassPricer(model, True, 1.0, 1.0)
        settings = {"scheduler_rules": scheduler_rules, **vllm_settings}
        return PoolPlan(launch, num_workers, pricer, placement, settings)

    prefill = None
    if prefill_launch is not None:
        prefill = plan(
            _sized(_launch_config(prefill_launch), prefill_timing),
            num_prefill_workers,
            prefill_timing,
            placement,
            "num_prefill_workers",
        )
        placement = "round_robin"
    _check_topology(launch, prefill, prefill_timing, num_prefill_workers, handoff_latency_ms)
    _check_warm_cache(warm_prefix_cache, trace, launch if prefill is None else prefill.launch)
    main = plan(launch, num_workers, timing, placement)
    plans = [main] if prefill is None else [prefill, main]
    for pool in plans:
        _check_dp_ranks(trace, pool.launch)

    requests = Requests(trace.prompt_tokens, trace.output_tokens, trace.priority)
    recorder = Recorder(len(trace), record_passes, sample_interval_ms is not None)
    source = launch if prefill is None else prefill.launch
    pools = [pool.build(trace, requests, recorder) for pool in plans]
    if warm_prefix_cache:
        pools[0].warm_prefix_caches()
    replay = Replay(
        requests,
        recorder,
        pools[-1],
        None if prefill is None else pools[0],
        transfer_bytes_per_token=float(source.engine.kv_transfer_bytes_per_token or 0),
        transfer_bytes_per_s=(source.engine.kv_transfer_bandwidth or 0.0) * 1e9,
        handoff_ms=handoff_latency_ms,
        transfers_missing_only=source.engine.kv_transfer_timing_mode == "destination_missing",
        arrival_ms=_sped_up(trace.arrival_ms, arrival_speedup_ratio),
        next_turn=_next_turns(trace),
        delay_ms=_sped_up(trace.delay_ms, arrival_speedup_ratio),
        followers=_followers(trace) if len(trace.awaits) else None,
        concurrency=min(concurrency or 0, len(trace)),
        dp_rank=trace.dp_rank,
        prefill_dp_rank=trace.prefill_dp_rank,
        max_sim_time_ms=math.inf if max_sim_time_ms is None else max_sim_time_ms,
        sample_interval_ms=sample_interval_ms or 0.0,
        request_ids=trace.request_ids.tolist(),
    )
    started = time.perf_counter()
    timings = [timing] if prefill_timing is None or prefill_timing is timing else [prefill_timing, timing]
    interrupted = _was_interrupted(replay, trace, timings)
    wall_time_ms = (time.perf_counter() - started) * 1e3

    stopped = f"interrupted at {replay.now_ms:,.1f} ms of simulated time"
    if interrupted and Status.COMPLETED not in requests.column("status"):
        raise ReplayInterrupted(f"{stopped}, before any request completed")
    gaps = recorder.gaps.array()
    arrived = ~np.isnan(recorder.column("arrival_ms"))
    columns = _request_columns(trace, requests, recorder, plans, scheduler_rules)
    report = ReplayReport(
        requests=columns if arrived.all() else {name: column[arrived] for name, column in columns.items()},
        admissions=_admission_columns(recorder.admissions.array(), arrived, len(plans) > 1),
        passes=_pass_columns(
            recorder.passes.array(), scheduler_rules == "simulator" and bool(launch.engine.kv_cache_groups)
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
        num_workers=num_workers,
        gpus_per_worker=main.num_gpus_per_worker,
        num_prefill_workers=0 if prefill is None else num_prefill_workers,
        prefill_gpus_per_worker=0 if prefill is None else prefill.num_gpus_per_worker,
        options={
            "scheduler_rules": scheduler_rules,
            "mixed_pass_pricing": mixed_pass_pricing,
            "num_workers": num_workers,
            "placement": plans[0].placement,
            "arrival_speedup_ratio": arrival_speedup_ratio,
            "concurrency": concurrency,
            "max_sim_time_ms": max_sim_time_ms,
            "warm_prefix_cache": warm_prefix_cache,
            "exact_itl": exact_itl,
            **vllm_settings,
            "launch": launch.to_dict(),
            **(
                {}
                if prefill is None
                else {
                    "prefill_launch": prefill.launch.to_dict(),
                    "num_prefill_workers": num_prefill_workers,
                    "handoff_latency_ms": handoff_latency_ms,
                }
            ),
        },
        sla=bounds,
        exact_itl=exact_itl,
        fpm_query_coverage=replay_coverage(roles, completed=True) if (roles := coverage_roles(*timings)) else None,
    )
    report.summary["composed_passes"] = sum(pool.pricer.num_composed for pool in plans)
    report.summary["mixed_passes_priced_separately"] = sum(pool.pricer.num_fallback for pool in plans)
    if interrupted:
        raise ReplayInterrupted(stopped, report)
    _check_recordings_used(recordings)
    return report


def _check_options(
    trace: Any,
    scheduler_rules: Any,
    mixed_pass_pricing: Any,
    num_workers: Any,
    placement: Any,
    num_prefill_workers: Any,
    handoff_latency_ms: Any,
    arrival_speedup_ratio: Any,
    concurrency: Any,
    max_sim_time_ms: Any,
    sample_interval_ms: Any,
) -> None:
    if not isinstance(trace, Trace):
        raise TraceError(f"trace is {shown(trace)}; give a Trace, as Trace.read(path) returns")
    _check_choice("scheduler_rules", scheduler_rules, ("vllm", "simulator"))
    _check_choice("mixed_pass_pricing", mixed_pass_pricing, ("composed", "separate"))
    _check_integer("num_workers", num_workers, 1)
    _check_load(trace, arrival_speedup_ratio, concurrency, max_sim_time_ms)
    if sample_interval_ms is not None:
        _check_number("sample_interval_ms", sample_interval_ms, sys.float_info.min)
    _check_choice("placement", placement, ("round_robin", "kv_aware"))
    _check_integer("num_prefill_workers", num_prefill_workers, 1)
    _check_number("handoff_latency_ms", handoff_latency_ms, 0.0)


def _was_interrupted(replay: Replay, trace: Trace, timings: list[Any]) -> bool:
    """Run the replay; return whether Ctrl-C ended it."""
    with coverage_on_failure(*timings):
        try:
            replay.run()
        except KvForwardTooLargeError as fault:
            raise ReplayError(fault.describe(repr(trace.request_ids[fault.request]))) from fault
        except KeyboardInterrupt:
            return True
    return False


def as_timing_model(timing: Any) -> TimingModel:
    """Return the compiled timing model that a `timing` argument stands for.

    Raises TimingError when it stands for none.

    >>> as_timing_model({"type": "fixed", "prefill_ms": 10, "decode_ms": 1})
    FixedTiming(prefill_ms=10.0, decode_ms=1.0)
    """
    if isinstance(timing, TimingModel):
        return timing
    if callable(getattr(timing, "timing_model", None)):
        return as_timing_model(timing.timing_model())
    if not isinstance(timing, Mapping):
        return PythonTiming(timing)
    kind = timing.get("type")
    if kind == "polynomial":
        return PolynomialTiming()
    if kind == "fixed" and {"prefill_ms", "decode_ms"} <= timing.keys():
        for phase in ("prefill_ms", "decode_ms"):
            if not _is_latency(timing[phase]):
                raise TimingError(f"fixed timing: {phase} is {shown(timing[phase])}; give finite ms of at least 0")
        return FixedTiming(timing["prefill_ms"], timing["decode_ms"])
    if kind == "external":
        raise TimingError(
            f"timing_model of provider {timing.get('provider')!r} is a configuration, not a model; "
            "build the model and give it as timing="
        )
    raise TimingError(
        f"timing is {shown(dict(timing))}; give {{type: polynomial}}, {{type: fixed, prefill_ms, decode_ms}} or a model"
    )


def _check_recordings_used(recordings: list[RecordedTiming]) -> None:
    for recording in recordings:
        for rank, unused in enumerate(recording.unused_passes()):
            if unused:
                raise ReplayError(
                    f"the replay differs from the recording that prices it: {unused} recorded passes of rank {rank} "
                    "did not happen; replay the trace, launch and options that were recorded"
                )


def _is_latency(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def _launch_config(launch: EngineLaunchConfig | Mapping[str, Any] | None) -> EngineLaunchConfig:
    if isinstance(launch, EngineLaunchConfig):
        return launch
    return EngineLaunchConfig.from_mapping({"engine": {}} if launch is None else launch)


def _sized(launch: EngineLaunchConfig, timing: Any) -> EngineLaunchConfig:
    # A model with a profile of its deployment knows how large the cache is.
    resize = getattr(timing, "sized_launch", None)
    sized: EngineLaunchConfig = resize(launch) if callable(resize) else launch
    return sized


def _check_topology(
    launch: EngineLaunchConfig,
    prefill: PoolPlan | None,
    prefill_timing: Any,
    num_prefill_workers: int,
    handoff_latency_ms: float,
) -> None:
    expected = {"launch": (launch, "aggregated")}
    if prefill is not None:
        expected = {"launch": (launch, "decode"), "prefill_launch": (prefill.launch, "prefill")}
    for name, (given, worker_type) in expected.items():
        if given.engine.worker_type != worker_type:
            with_or_without = "without" if prefill is None else "with"
            raise ConfigError(
                f"{name}.engine.worker_type is {given.engine.worker_type!r}; {with_or_without} prefill_launch it must "
                f"be {worker_type!r}",
                f"{name}.engine.worker_type",
            )
    if prefill is not None:
        if any(given.engine.backend == "trtllm" for given, _ in expected.values()):
            raise MissingCapabilityError("disaggregated workers of backend trtllm cannot be replayed by this release")
        engine = prefill.launch.engine
        if handoff_latency_ms != 0.0 and engine.kv_transfer_bytes_per_token and engine.kv_transfer_bandwidth:
            raise ConfigError(
                "handoff_latency_ms has no effect when the prefill launch sets kv_transfer_bytes_per_token and "
                "kv_transfer_bandwidth; leave it out",
                "handoff_latency_ms",
            )
        return
    given_options = {
        "prefill_timing": prefill_timing is not None,
        "num_prefill_workers": num_prefill_workers != 1,
        "handoff_latency_ms": handoff_latency_ms != 0.0,
    }
    for option, is_given in given_options.items():
        if is_given:
            raise ConfigError(f"{option} has no effect without prefill_launch; leave it out", option)


def _check_load(
    trace: Trace, arrival_speedup_ratio: float, concurrency: int | None, max_sim_time_ms: float | None
) -> None:
    _check_number("arrival_speedup_ratio", arrival_speedup_ratio, sys.float_info.min)
    if max_sim_time_ms is not None:
        _check_number("max_sim_time_ms", max_sim_time_ms, 0.0)
    if concurrency is None:
        return
    _check_integer("concurrency", concurrency, 1)
    if arrival_speedup_ratio != 1.0 and not trace.delay_ms.any():
        raise ConfigError(
            "arrival_speedup_ratio has no effect with concurrency on requests that wait for nothing; leave one out",
            "arrival_speedup_ratio",
        )


def _check_warm_cache(is_warm: bool, trace: Trace, launch: EngineLaunchConfig) -> None:
    if is_warm and not (launch.engine.enable_prefix_caching and len(trace.hash_ids)):
        why = "hash_ids" if launch.engine.enable_prefix_caching else "engine.enable_prefix_caching"
        raise ConfigError(f"warm_prefix_cache has no effect without {why}; leave it out", "warm_prefix_cache")


def _check_dp_ranks(trace: Trace, launch: EngineLaunchConfig) -> None:
    name = "prefill_dp_rank" if launch.engine.worker_type == "prefill" else "dp_rank"
    ranks = getattr(trace, name)
    outside = np.flatnonzero(ranks >= launch.dp_size)
    if outside.size:
        row = int(outside[0])
        raise ConfigError(
            f"request {trace.request_ids[row]!r}: {name} {ranks[row]} is out of range for dp_size {launch.dp_size}",
            name,
        )


def _check_size(launch: EngineLaunchConfig, num_workers: int, workers_name: str) -> None:
    if num_workers * launch.dp_size > MAX_RANKS:
        raise ConfigError(
            f"{workers_name} {shown(num_workers)} with dp_size {launch.dp_size} are too many ranks; "
            f"a replay simulates at most {MAX_RANKS:,}",
            workers_name if num_workers > 1 else "dp_size",
        )
    engine = launch.engine
    if engine.num_gpu_blocks * engine.block_size > MAX_KV_TOKENS:
        largest = "num_gpu_blocks" if engine.num_gpu_blocks > engine.block_size else "block_size"
        raise ConfigError(
            f"engine.num_gpu_blocks {engine.num_gpu_blocks} of engine.block_size {engine.block_size} hold too many "
            f"tokens; a replay simulates a KV cache of at most {MAX_KV_TOKENS}",
            f"engine.{largest}",
        )


def _sped_up(times_ms: NDArray[np.float64], ratio: float) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        divided = times_ms / ratio
    if (divided >= MAX_TIME_MS).any():
        raise ConfigError(
            f"arrivals or delays divided by arrival_speedup_ratio = {ratio!r} lie beyond 2^64 s; give a larger ratio",
            "arrival_speedup_ratio",
        )
    return divided


def _check_vllm_settings(settings: Mapping[str, Any], engine: EngineConfig, scheduler_rules: str) -> None:
    _check_choice("scheduling_policy", settings["scheduling_policy"], ("fcfs", "priority"))
    _check_number("watermark", settings["watermark"], 0.0, below=1.0)
    threshold = settings["long_prefill_token_threshold"]
    _check_integer("long_prefill_token_threshold", threshold, 0, engine.max_model_len)
    parsed_version(settings["vllm_version"])
    if settings["long_prefill_token_threshold_adaptive"] and not threshold:
        raise ConfigError(
            "long_prefill_token_threshold_adaptive has no effect without long_prefill_token_threshold; give both",
            "long_prefill_token_threshold_adaptive",
        )
    for name, default in VLLM_DEFAULTS.items():
        if scheduler_rules == "simulator" and settings[name] != default:
            raise ConfigError(
                f"{name} is {settings[name]!r}, but scheduler_rules 'simulator' know no such setting; "
                "leave it out or take 'vllm'",
                name,
            )


def _check_choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise ConfigError(f"{name} is {shown(value)}; give {' or '.join(accepted)}", name)


def _check_integer(name: str, value: Any, lowest: int, highest: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest or value > (highest or value):
        limit = "" if highest is None else f" and at most {highest}"
        raise ConfigError(f"{name} is {shown(value)}; give an integer of at least {lowest}{limit}", name)


def _check_number(name: str, value: Any, lowest: float, below: float = math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not lowest <= value < below or value > sys.float_info.max:
        limit = "" if below == math.inf else f" and below {below}"
        raise ConfigError(f"{name} is {shown(value)}; give a finite number of at least {lowest}{limit}", name)


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
    outcomes = np.full(len(Status), "unfinished", object)
    outcomes[Status.COMPLETED], outcomes[Status.REJECTED] = "completed", "rejected"
    reasons = rejection_reasons(plans[0].launch.engine, scheduler_rules)
    status = requests.column("status")
    was_with_decoder = ~np.isnan(recorder.column("destination_reserved_ms")) | (len(plans) == 1)
    return {
        "request_id": trace.request_ids,
        "session_id": _session_names(trace),
        "turn_index": trace.turn_index,
        "prompt_tokens": trace.prompt_tokens,
        "requested_output_tokens": trace.output_tokens,
        # The token of a prefill worker is hidden.
        "output_tokens": np.where(was_with_decoder, requests.column("generated_tokens"), 0),
        "num_preemptions": requests.column("num_preemptions"),
        "status": outcomes[status],
        # One that a time limit cuts off in the pass of its rejection is not rejected yet.
        "rejection_reason": reasons[
            np.where(status == Status.REJECTED, requests.column("refusal"), int(Refusal.ACCEPTED))
        ],
        **{name: recorder.column(name) for name in _RECORDED_COLUMNS},
        **({name: recorder.column(name) for name in _TRANSFER_COLUMNS} if len(plans) > 1 else {}),
    }


def _admission_columns(
    rows: NDArray[np.void], arrived: NDArray[np.bool_], is_disaggregated: bool
) -> dict[str, NDArray[Any]]:
    columns = _table_columns(rows)
    if not is_disaggregated:
        del columns["pool"]
    row_of_request = np.cumsum(arrived) - 1
    return columns | {"request": row_of_request[columns["request"]]}
