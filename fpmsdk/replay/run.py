"""Run a trace through a simulated engine and report what its users would have seen.

Connects the parts and checks the options; the simulation itself is compiled (`ext/scheduler.pyx`,
`ext/replay.pyx`), and figures are made in `fpmsdk.replay.report`.
Source: engine-and-replay.md sections 4 to 6.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.pricing import FixedTiming, PassPricer, PolynomialTiming, PythonTiming, TimingModel
from fpmsdk._ext.replay import Recorder, Replay
from fpmsdk._ext.scheduler import Refusal, Requests, Scheduler, Status
from fpmsdk.config.schema import shown
from fpmsdk.errors import ConfigError, MissingCapabilityError, TimingError, TraceError
from fpmsdk.launch.config import EngineConfig, EngineLaunchConfig
from fpmsdk.replay.latency import Sla
from fpmsdk.replay.report import ReplayReport
from fpmsdk.replay.trace import Trace

# What a replay keeps in memory and visits at every event, and what fits its 64-bit sums of KV tokens.
MAX_RANKS = 65_536
MAX_KV_TOKENS = 2**62
# Durations are counted in 64-bit seconds; figures of much later times would overflow.
MAX_TIME_MS = 2.0**64 * 1e3

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


def replay_trace(
    trace: Trace,
    *,
    launch: EngineLaunchConfig | Mapping[str, Any] | None = None,
    timing: Any = None,
    scheduler_rules: Literal["vllm", "simulator"] = "vllm",
    mixed_pass_pricing: Literal["composed", "separate"] = "composed",
    num_workers: int = 1,
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
    record_passes: bool = True,
) -> ReplayReport:
    """Serve a trace with simulated vLLM workers and return the report.

    Parameters
    ----------
    trace: the requests.
    launch: the engine, canonical or flat mapping or an `EngineLaunchConfig`; None is the default engine.
    timing: what prices a pass: a `TimingModel`, an object whose method `timing_model()` returns one (a
        forward-pass model does: a frozen view of what it has learned), a mapping as the launch's
        `timing_model` (type fixed or polynomial), or an object with `predict_prefill_ms` and
        `predict_decode_ms`. None takes the `timing_model` of the launch.
    scheduler_rules: `vllm` decides as the real scheduler, `simulator` as the peer simulator.
    mixed_pass_pricing: `composed` prices prefill and decode of one pass as one forward where the timing model
        can, `separate` prices each part for itself.
    num_workers: identical workers behind a round robin, ready from the start; with `dp_size` ranks each at most
        65,536 ranks.
    arrival_speedup_ratio: arrivals and delays are divided by it.
    concurrency: closed loop with at most so many active sessions; None follows the trace's timestamps.
    max_sim_time_ms: no event after this simulated time.
    sla: bounds in ms for goodput (`ttft_ms`, `itl_ms` or `e2e_ms`).
    scheduling_policy, long_prefill_token_threshold, long_prefill_token_threshold_adaptive, watermark,
        scheduler_reserve_full_isl: vLLM settings that a launch does not carry, with vLLM's defaults.
    vllm_version: selects the long-prefill rule; from 0.31 on a lone request is not cut.
    record_passes: keep a row per pass.

    Raises
    ------
    TraceError: `trace` is no `Trace`.
    ConfigError: an option is out of range (`path` names it); LaunchConfigError for the launch.
    MissingCapabilityError: the launch asks for an engine that this release does not simulate.
    RequestNeverFitsError: nothing can happen any more while a request waits; names it.
    TimingError: the timing model is not ready or answered with an unusable latency.
    EmptyResultError: no request completed.

    >>> trace = Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3])
    >>> launch = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}}}
    >>> replay_trace(trace, launch=launch).summary["mean_ttft_ms"]
    13.0
    """
    if not isinstance(trace, Trace):
        raise TraceError(f"trace is {shown(trace)}; give a Trace, as Trace.read(path) returns")
    _check_choice("scheduler_rules", scheduler_rules, ("vllm", "simulator"))
    _check_choice("mixed_pass_pricing", mixed_pass_pricing, ("composed", "separate"))
    _check_integer("num_workers", num_workers, 1)
    _check_number("arrival_speedup_ratio", arrival_speedup_ratio, sys.float_info.min)
    if concurrency is not None:
        _check_integer("concurrency", concurrency, 1)
    if max_sim_time_ms is not None:
        _check_number("max_sim_time_ms", max_sim_time_ms, 0.0)
    if not isinstance(launch, EngineLaunchConfig):
        launch = EngineLaunchConfig.from_mapping({"engine": {}} if launch is None else launch)
    engine = launch.engine
    _check_simulated(engine, scheduler_rules)
    _check_size(launch, num_workers)
    bounds = sla if sla is None or isinstance(sla, Sla) else Sla.from_dict(sla)
    vllm_settings = {
        "scheduling_policy": scheduling_policy,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": long_prefill_token_threshold_adaptive,
        "vllm_version": vllm_version,
        "watermark": watermark,
        "scheduler_reserve_full_isl": scheduler_reserve_full_isl,
    }
    _check_vllm_settings(vllm_settings, engine, scheduler_rules)

    pricer = PassPricer(
        as_timing_model(engine.timing_model if timing is None else timing),
        mixed_pass_pricing == "composed",
        engine.speedup_ratio,
        engine.decode_speedup_ratio,
    )
    requests = Requests(trace.prompt_tokens, trace.output_tokens, trace.priority)
    replay = Replay(
        _schedulers(trace, requests, launch, num_workers, {"scheduler_rules": scheduler_rules, **vllm_settings}),
        pricer,
        dp_size=launch.dp_size,
        arrival_ms=_sped_up(trace.arrival_ms, arrival_speedup_ratio),
        next_turn=_next_turns(trace),
        delay_ms=_sped_up(trace.delay_ms, arrival_speedup_ratio),
        concurrency=min(concurrency or 0, len(trace)),
        max_sim_time_ms=math.inf if max_sim_time_ms is None else max_sim_time_ms,
        record_passes=record_passes,
        request_ids=trace.request_ids.tolist(),
    )
    started = time.perf_counter()
    replay.run()
    wall_time_ms = (time.perf_counter() - started) * 1e3

    gaps = replay.recorder.gaps.array()
    arrived = ~np.isnan(replay.recorder.column("arrival_ms"))
    report = ReplayReport(
        requests={
            name: column[arrived]
            for name, column in _request_columns(trace, requests, replay.recorder, engine, scheduler_rules).items()
        },
        admissions=_admission_columns(replay.recorder, arrived),
        passes=_columns(replay.recorder.passes.array()),
        gap_ms=gaps["gap_ms"],
        gap_count=gaps["count"],
        committed_prefill_tokens=replay.recorder.committed_prefill_tokens,
        clock_ms=replay.now_ms,
        wall_time_ms=wall_time_ms,
        num_workers=num_workers,
        gpus_per_worker=launch.tensor_parallel_size * launch.dp_size,
        options={
            "scheduler_rules": scheduler_rules,
            "mixed_pass_pricing": mixed_pass_pricing,
            "num_workers": num_workers,
            "arrival_speedup_ratio": arrival_speedup_ratio,
            "concurrency": concurrency,
            "max_sim_time_ms": max_sim_time_ms,
            **vllm_settings,
            "launch": launch.to_dict(),
        },
        sla=bounds,
    )
    report.summary["composed_passes"] = pricer.num_composed
    report.summary["mixed_passes_priced_separately"] = pricer.num_fallback
    return report


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


def _is_latency(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def _check_simulated(engine: EngineConfig, scheduler_rules: str) -> None:
    simulated = {"backend": "vllm", "worker_type": "aggregated", "aic_nextn": None, "kv_cache_groups": ()}
    for field, value in simulated.items():
        if getattr(engine, field) != value:
            raise MissingCapabilityError(
                f"engine.{field} = {getattr(engine, field)!r} cannot be replayed by this release; "
                f"it simulates {field} = {value!r}"
            )
    if scheduler_rules == "vllm" and engine.num_gpu_blocks < 2:
        raise ConfigError(
            "engine.num_gpu_blocks is 1; vLLM reserves one block, give at least 2", "engine.num_gpu_blocks"
        )


def _check_size(launch: EngineLaunchConfig, num_workers: int) -> None:
    if num_workers * launch.dp_size > MAX_RANKS:
        raise ConfigError(
            f"num_workers {shown(num_workers)} with dp_size {launch.dp_size} are too many ranks; "
            f"a replay simulates at most {MAX_RANKS:,}",
            "num_workers" if num_workers > 1 else "dp_size",
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
    _parsed_version(settings["vllm_version"])
    defaults = {"scheduling_policy": "fcfs", "long_prefill_token_threshold": 0, "watermark": 0.0}
    for name, default in defaults.items():
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


def _parsed_version(text: Any) -> tuple[int, int]:
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"vllm_version is {shown(text)}; give the text MAJOR.MINOR, as 0.32", "vllm_version")
    return int(match[1]), int(match[2])


def _schedulers(
    trace: Trace,
    requests: Requests,
    launch: EngineLaunchConfig,
    num_workers: int,
    settings: Mapping[str, Any],
) -> list[Scheduler]:
    engine = launch.engine
    keys = None
    if engine.enable_prefix_caching:
        keys = PrefixKeys(
            trace.prompt_tokens,
            trace.output_tokens,
            trace.hash_offsets,
            trace.hash_ids,
            trace.block_tokens,
            engine.block_size,
        )
    return [
        Scheduler(
            requests,
            num_gpu_blocks=engine.num_gpu_blocks,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            preemption_mode=engine.preemption_mode,
            keys=keys,
            # The cadence keeps the ranks of a group in step; a lone rank has nobody to wait for.
            prefill_schedule_interval=engine.prefill_schedule_interval if launch.dp_size > 1 else 1,
            **{**settings, "vllm_version": _parsed_version(settings["vllm_version"])},
        )
        for _ in range(num_workers * launch.dp_size)
    ]


def _next_turns(trace: Trace) -> NDArray[np.int64]:
    """The row of the next turn of each row's session, -1 for the last; turns of a session are neighbours."""
    rows = np.arange(len(trace))
    same_session = np.append(trace.session_index[1:] == trace.session_index[:-1], False)
    return np.where(same_session, rows + 1, -1)


def _columns(rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    return {name: rows[name] for name in rows.dtype.names or ()}


def _session_names(trace: Trace) -> NDArray[np.object_]:
    """The session of each row; None for a request that is a session of its own."""
    names = trace.session_ids[trace.session_index]
    names[np.bincount(trace.session_index)[trace.session_index] == 1] = None
    return names


def _request_columns(
    trace: Trace, requests: Requests, recorder: Recorder, engine: EngineConfig, scheduler_rules: str
) -> dict[str, NDArray[Any]]:
    outcomes = np.full(len(Status), "unfinished", object)
    outcomes[Status.COMPLETED], outcomes[Status.REJECTED] = "completed", "rejected"
    usable_blocks = engine.num_gpu_blocks - (scheduler_rules == "vllm")
    reasons = np.full(len(Refusal), None, object)
    reasons[Refusal.MODEL_LENGTH] = f"its prompt leaves no room below max_model_len = {engine.max_model_len}"
    reasons[Refusal.KV_CAPACITY] = (
        f"its prompt needs more than the {usable_blocks} usable KV blocks of {engine.block_size} tokens"
    )
    reasons[Refusal.UNCHUNKED_PROMPT] = (
        f"its prompt exceeds max_num_batched_tokens = {engine.max_num_batched_tokens} without chunked prefill"
    )
    return {
        "request_id": trace.request_ids,
        "session_id": _session_names(trace),
        "turn_index": trace.turn_index,
        "prompt_tokens": trace.prompt_tokens,
        "requested_output_tokens": trace.output_tokens,
        "output_tokens": requests.column("generated_tokens"),
        "num_preemptions": requests.column("num_preemptions"),
        "status": outcomes[requests.column("status")],
        "rejection_reason": reasons[requests.column("refusal")],
        **{name: recorder.column(name) for name in _RECORDED_COLUMNS},
    }


def _admission_columns(recorder: Recorder, arrived: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    columns = _columns(recorder.admissions.array())
    row_of_request = np.cumsum(arrived) - 1
    return columns | {"request": row_of_request[columns["request"]]}
