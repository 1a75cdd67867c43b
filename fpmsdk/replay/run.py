"""Run a trace through a simulated engine and report what its users would have seen.

Connects the parts and checks the options; the simulation itself is compiled (`ext/scheduler.pyx`,
`ext/replay.pyx`), and figures are made in `fpmsdk.replay.report`.
Source: engine-and-replay.md sections 4 to 6.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.pricing import FixedTiming, PassPricer, PolynomialTiming, PythonTiming, TimingModel
from fpmsdk._ext.replay import Replay
from fpmsdk._ext.scheduler import Refusal, Requests, Scheduler, Status
from fpmsdk.engine.launch import EngineConfig, EngineLaunchConfig
from fpmsdk.errors import ConfigError, MissingCapabilityError, TimingError
from fpmsdk.replay.latency import Sla
from fpmsdk.replay.report import ReplayReport
from fpmsdk.replay.trace import Trace

_STATUS_NAMES = {Status.COMPLETED: "completed", Status.REJECTED: "rejected"}


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
    num_workers: identical workers behind a round robin.
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
    ConfigError: an option is out of range (`path` names it); LaunchConfigError for the launch.
    MissingCapabilityError: the launch asks for an engine that this release does not simulate.
    RequestNeverFitsError: a running request outgrew the KV cache, names it.
    TimingError: the timing model is not ready or answered with an unusable latency.
    EmptyResultError: no request completed.

    >>> trace = Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3])
    >>> launch = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}}}
    >>> replay_trace(trace, launch=launch).summary["mean_ttft_ms"]
    13.0
    """
    resolved = (
        launch if isinstance(launch, EngineLaunchConfig) else EngineLaunchConfig.from_mapping(launch or {})
    )
    _check_simulated(resolved.engine)
    _check_options(locals())
    pricer = PassPricer(
        as_timing_model(resolved.engine.timing_model if timing is None else timing),
        mixed_pass_pricing == "composed",
        resolved.engine.speedup_ratio,
        resolved.engine.decode_speedup_ratio,
    )
    requests = Requests(trace.prompt_tokens, trace.output_tokens, trace.priority)
    keys = (
        PrefixKeys(
            trace.prompt_tokens,
            trace.output_tokens,
            trace.hash_offsets,
            trace.hash_ids,
            trace.block_tokens,
            resolved.engine.block_size,
        )
        if resolved.engine.enable_prefix_caching
        else None
    )
    schedulers = [
        Scheduler(
            requests,
            scheduler_rules,
            num_gpu_blocks=resolved.engine.num_gpu_blocks,
            block_size=resolved.engine.block_size,
            max_num_seqs=resolved.engine.max_num_seqs,
            max_num_batched_tokens=resolved.engine.max_num_batched_tokens,
            max_model_len=resolved.engine.max_model_len,
            enable_chunked_prefill=resolved.engine.enable_chunked_prefill,
            preemption_mode=resolved.engine.preemption_mode,
            scheduling_policy=scheduling_policy,
            keys=keys,
            # The cadence keeps the ranks of a group in step; a lone rank has nobody to wait for.
            prefill_schedule_interval=resolved.engine.prefill_schedule_interval
            if resolved.dp_size > 1
            else 1,
            long_prefill_token_threshold=long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
            vllm_version=_version(vllm_version),
            watermark=watermark,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
        )
        for _ in range(num_workers * resolved.dp_size)
    ]
    replay = Replay(
        schedulers,
        pricer,
        dp_size=resolved.dp_size,
        arrival_ms=trace.arrival_ms / arrival_speedup_ratio,
        next_turn=_next_turns(trace),
        delay_ms=trace.delay_ms / arrival_speedup_ratio,
        concurrency=concurrency or 0,
        max_sim_time_ms=math.inf if max_sim_time_ms is None else max_sim_time_ms,
        record_passes=record_passes,
        request_ids=trace.request_ids,
    )
    started = time.perf_counter()
    replay.run()
    wall_time_ms = (time.perf_counter() - started) * 1e3
    gaps = replay.recorder.gaps.array()
    passes = replay.recorder.passes.array()
    report = ReplayReport(
        requests=_request_columns(trace, requests, replay, resolved.engine, scheduler_rules),
        passes={name: np.ascontiguousarray(passes[name]) for name in passes.dtype.names},
        gap_ms=np.ascontiguousarray(gaps["gap_ms"]),
        gap_count=np.ascontiguousarray(gaps["count"]),
        committed_prefill_tokens=replay.recorder.committed_prefill_tokens,
        clock_ms=replay.now_ms,
        wall_time_ms=wall_time_ms,
        num_workers=num_workers,
        gpus_per_worker=resolved.tensor_parallel_size * resolved.dp_size,
        options={
            "scheduler_rules": scheduler_rules,
            "mixed_pass_pricing": mixed_pass_pricing,
            "num_workers": num_workers,
            "arrival_speedup_ratio": arrival_speedup_ratio,
            "concurrency": concurrency,
            "max_sim_time_ms": max_sim_time_ms,
            "scheduling_policy": scheduling_policy,
            "long_prefill_token_threshold": long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": long_prefill_token_threshold_adaptive,
            "vllm_version": vllm_version,
            "watermark": watermark,
            "scheduler_reserve_full_isl": scheduler_reserve_full_isl,
            "launch": resolved.to_dict(),
        },
        sla=sla if sla is None or isinstance(sla, Sla) else Sla.from_dict(sla),
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
    if kind == "fixed":
        return FixedTiming(timing["prefill_ms"], timing["decode_ms"])
    if kind == "external":
        raise TimingError(
            f"timing_model of provider {timing.get('provider')!r} is not resolved; give the model itself as timing="
        )
    raise TimingError(f"timing: type {kind!r} is unknown; give fixed or polynomial, or a model object")


def _check_simulated(engine: EngineConfig) -> None:
    for field, found, simulated in (
        ("backend", engine.backend, "vllm"),
        ("worker_type", engine.worker_type, "aggregated"),
        ("aic_nextn", engine.aic_nextn, None),
        ("kv_cache_groups", engine.kv_cache_groups, ()),
    ):
        if found != simulated:
            raise MissingCapabilityError(
                f"engine.{field} = {found!r} cannot be replayed by this release; it simulates {field} = {simulated!r}"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    for name, accepted in (
        ("scheduler_rules", ("vllm", "simulator")),
        ("mixed_pass_pricing", ("composed", "separate")),
        ("scheduling_policy", ("fcfs", "priority")),
    ):
        if options[name] not in accepted:
            raise ConfigError(f"{name} is {options[name]!r}; give {' or '.join(accepted)}", name)
    for name, lowest in (("num_workers", 1), ("concurrency", 1), ("long_prefill_token_threshold", 0)):
        value = options[name]
        if name == "concurrency" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(f"{name} is {value!r}; give an integer of at least {lowest}", name)
    ratio, cutoff, watermark = (
        options[name] for name in ("arrival_speedup_ratio", "max_sim_time_ms", "watermark")
    )
    if not (math.isfinite(ratio) and ratio > 0):
        raise ConfigError(
            f"arrival_speedup_ratio is {ratio}; give a finite number above 0", "arrival_speedup_ratio"
        )
    if cutoff is not None and not (math.isfinite(cutoff) and cutoff >= 0):
        raise ConfigError(
            f"max_sim_time_ms is {cutoff}; give finite milliseconds of at least 0", "max_sim_time_ms"
        )
    if not 0 <= watermark < 1:
        raise ConfigError(f"watermark is {watermark}; give a share of the blocks, 0 to below 1", "watermark")
    resolved: EngineLaunchConfig = options["resolved"]
    longest = resolved.engine.max_model_len
    if longest is not None and options["long_prefill_token_threshold"] > longest:
        raise ConfigError(
            f"long_prefill_token_threshold is {options['long_prefill_token_threshold']}; "
            f"give at most max_model_len = {longest}",
            "long_prefill_token_threshold",
        )
    vllm_only = ("scheduling_policy", "long_prefill_token_threshold", "watermark")
    if options["scheduler_rules"] == "simulator":
        for name, default in zip(vllm_only, ("fcfs", 0, 0.0), strict=True):
            if options[name] != default:
                raise ConfigError(f"{name} exists under scheduler_rules = 'vllm' only; leave it out", name)
    if options["scheduler_rules"] == "vllm" and resolved.engine.num_gpu_blocks < 2:
        raise ConfigError(
            "engine.num_gpu_blocks is 1; vLLM reserves one block, so give at least 2", "engine.num_gpu_blocks"
        )


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ConfigError(f"vllm_version is {text!r}; give MAJOR.MINOR, as 0.32", "vllm_version")
    return int(match[1]), int(match[2])


def _next_turns(trace: Trace) -> NDArray[np.int64]:
    """The row of the next turn of each row's session, -1 for the last; the turns of a session are neighbours."""
    following = np.arange(1, len(trace) + 1)
    following[:-1][trace.session_index[1:] != trace.session_index[:-1]] = -1
    following[-1] = -1
    return following


def _request_columns(
    trace: Trace, requests: Requests, replay: Replay, engine: EngineConfig, scheduler_rules: str
) -> dict[str, NDArray[Any]]:
    recorded = replay.recorder.column
    arrived = ~np.isnan(recorded("arrival_ms"))
    usable_blocks = engine.num_gpu_blocks - (scheduler_rules == "vllm")
    reasons = {
        Refusal.ACCEPTED: None,
        Refusal.MODEL_LENGTH: f"the prompt leaves no room below max_model_len = {engine.max_model_len}",
        Refusal.KV_CAPACITY: f"the prompt needs more than the {usable_blocks} usable KV blocks of "
        f"{engine.block_size} tokens",
        Refusal.UNCHUNKED_PROMPT: "the prompt exceeds max_num_batched_tokens = "
        f"{engine.max_num_batched_tokens} without chunked prefill",
    }
    status = [_STATUS_NAMES.get(Status(value), "unfinished") for value in requests.column("status")]
    columns = {
        "request_id": trace.request_ids,
        "session_id": trace.session_ids[trace.session_index],
        "turn_index": trace.turn_index,
        **{name: recorded(name) for name in _TIMES},
        "prompt_tokens": trace.prompt_tokens,
        "requested_output_tokens": trace.output_tokens,
        "output_tokens": requests.column("generated_tokens"),
        "reused_tokens": recorded("reused_tokens"),
        "first_reused_tokens": recorded("first_reused_tokens"),
        "num_admissions": recorded("num_admissions"),
        "num_preemptions": requests.column("num_preemptions"),
        "worker": recorded("worker"),
        "status": np.array(status, object),
        "rejection_reason": np.array(
            [reasons[Refusal(value)] for value in requests.column("refusal")], object
        ),
    }
    return {name: column[arrived] for name, column in columns.items()}


_TIMES = ("arrival_ms", "first_admit_ms", "first_token_ms", "second_token_ms", "last_token_ms", "end_ms")
