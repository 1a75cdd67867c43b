"""What serves the requests of a replay: pools of workers, their timing, and the settings that say how.

Checks what does not depend on the requests; nothing runs here. Source: engine-and-replay.md sections 4 to 6.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fpmsdk._ext.pricing import FixedTiming, PassPricer, PolynomialTiming, PythonTiming, TimingModel
from fpmsdk._ext.recorded import RecordedTiming
from fpmsdk.config.schema import shown
from fpmsdk.errors import ConfigError, MissingCapabilityError, ReplayError, TimingError
from fpmsdk.launch.config import EngineConfig, EngineLaunchConfig
from fpmsdk.replay.latency import Sla
from fpmsdk.replay.options import check_choice, check_integer, check_number
from fpmsdk.replay.pools import VLLM_DEFAULTS, PoolPlan, check_simulated, parsed_version

# What a replay keeps in memory and visits at every event, and what fits its 64-bit sums of KV tokens.
MAX_RANKS = 65_536
MAX_KV_TOKENS = 2**62


class System(Struct, frozen=True):
    """Pools of workers and how they serve.

    Attributes
    ----------
    main: aggregated workers, or those that decode.
    prefill: workers that compute prompts, None without.
    timings: the timing arguments, which may count what they are asked.
    transfer: how prompts move, as `Replay` takes it.
    sla: bounds for goodput.
    options: the settings that the figures depend on, for reports; those of the requests' load are added to them.
    """

    main: PoolPlan
    prefill: PoolPlan | None
    timings: list[Any]
    transfer: Mapping[str, Any]
    sla: Sla | None
    options: Mapping[str, Any]
    recordings: list[RecordedTiming]

    @property
    def plans(self) -> list[PoolPlan]:
        """The pools, that of the prompts first."""
        return [self.main] if self.prefill is None else [self.prefill, self.main]

    @property
    def scheduler_rules(self) -> str:
        """`vllm` or `simulator`."""
        rules: str = self.options["scheduler_rules"]
        return rules

    @property
    def provision(self) -> dict[str, int]:
        """How many workers of how many GPUs, as reports take it."""
        prefill = self.prefill
        return {
            "num_workers": self.main.num_workers,
            "gpus_per_worker": self.main.num_gpus_per_worker,
            "num_prefill_workers": 0 if prefill is None else prefill.num_workers,
            "prefill_gpus_per_worker": 0 if prefill is None else prefill.num_gpus_per_worker,
        }

    def check_recordings_used(self) -> None:
        """Raise ReplayError when recorded passes were left over."""
        for recording in self.recordings:
            for rank, unused in enumerate(recording.unused_passes()):
                if unused:
                    raise ReplayError(
                        f"the replay differs from the recording that prices it: {unused} recorded passes of rank "
                        f"{rank} did not happen; replay the trace, launch and options that were recorded"
                    )


def planned_system(
    *,
    launch: EngineLaunchConfig | Mapping[str, Any] | None,
    timing: Any,
    scheduler_rules: str,
    mixed_pass_pricing: str,
    num_workers: int,
    placement: str,
    prefill_launch: EngineLaunchConfig | Mapping[str, Any] | None,
    prefill_timing: Any,
    num_prefill_workers: int,
    handoff_latency_ms: float,
    sla: Sla | Mapping[str, float | None] | None,
    scheduling_policy: str,
    long_prefill_token_threshold: int,
    long_prefill_token_threshold_adaptive: bool,
    vllm_version: str,
    watermark: float,
    scheduler_reserve_full_isl: bool,
) -> System:
    """Check the options of `replay_trace` that describe the system, and plan its pools; raises what that raises."""
    check_choice("scheduler_rules", scheduler_rules, ("vllm", "simulator"))
    check_choice("mixed_pass_pricing", mixed_pass_pricing, ("composed", "separate"))
    check_integer("num_workers", num_workers, 1)
    check_choice("placement", placement, ("round_robin", "kv_aware"))
    check_integer("num_prefill_workers", num_prefill_workers, 1)
    check_number("handoff_latency_ms", handoff_latency_ms, 0.0)
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
    first_placement = placement
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
    main = plan(launch, num_workers, timing, placement)
    source = (launch if prefill is None else prefill.launch).engine
    disaggregation = (
        {}
        if prefill is None
        else {
            "prefill_launch": prefill.launch.to_dict(),
            "num_prefill_workers": num_prefill_workers,
            "handoff_latency_ms": handoff_latency_ms,
        }
    )
    return System(
        main,
        prefill,
        [timing] if prefill_timing is None or prefill_timing is timing else [prefill_timing, timing],
        {
            "transfer_bytes_per_token": float(source.kv_transfer_bytes_per_token or 0),
            "transfer_bytes_per_s": (source.kv_transfer_bandwidth or 0.0) * 1e9,
            "handoff_ms": handoff_latency_ms,
            "transfers_missing_only": source.kv_transfer_timing_mode == "destination_missing",
        },
        bounds,
        {
            "scheduler_rules": scheduler_rules,
            "mixed_pass_pricing": mixed_pass_pricing,
            "num_workers": num_workers,
            "placement": first_placement,
            **vllm_settings,
            "launch": launch.to_dict(),
            **disaggregation,
        },
        recordings,
    )


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


def _check_vllm_settings(settings: Mapping[str, Any], engine: EngineConfig, scheduler_rules: str) -> None:
    check_choice("scheduling_policy", settings["scheduling_policy"], ("fcfs", "priority"))
    check_number("watermark", settings["watermark"], 0.0, below=1.0)
    threshold = settings["long_prefill_token_threshold"]
    check_integer("long_prefill_token_threshold", threshold, 0, engine.max_model_len)
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
