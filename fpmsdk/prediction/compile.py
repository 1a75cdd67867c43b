"""What a configuration asks of the simulation: requests, engine launch, timing model and load.

Source: predict-recommend.md sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.launch.capacity import FRACTION_OF
from fpmsdk.perfmodel.model import ForwardPassPerfModel
from fpmsdk.prediction.config import (
    ConcurrencyLoad,
    PredictConfig,
    SyntheticSource,
    TimestampsLoad,
    Worker,
)
from fpmsdk.replay.trace import Trace

# What one rank schedules when neither the configuration nor a profile says.
_MAX_BATCHED_TOKENS, _MAX_SEQUENCES = 8192, 256


@dataclass(frozen=True)
class ReplayInputs:
    """Arguments of `replay_trace`, but for the model that `timing` describes."""

    trace: Trace
    launch: Mapping[str, Any]
    timing: Mapping[str, Any]
    options: Mapping[str, Any]


def compile_config(config: PredictConfig) -> ReplayInputs:
    """The simulation that a configuration describes.

    Raises
    ------
    ConfigError: the profile does not support the deployment.
    TraceError: the trace cannot be read.
    """
    timing = timing_config(config)
    return ReplayInputs(_trace(config), _launch(config, timing), timing, _options(config))


def timing_config(config: PredictConfig) -> dict[str, Any]:
    """The canonical configuration of the model that prices the passes."""
    engine, worker = config.engine, config.engine.workers.aggregated
    sizes = worker.parallelism
    experts = (sizes.moe_tensor, sizes.moe_expert) if sizes.moe_tensor * sizes.moe_expert > 1 else (None, None)
    given: dict[str, Any] = {
        "model": engine.model,
        "system": engine.hardware,
        "backend": engine.backend,
        "backend_version": engine.backend_version,
        "worker_type": "aggregated",
        "tp": sizes.tensor,
        "attention_dp": sizes.attention_data,
        "moe_tp_size": experts[0],
        "moe_ep_size": experts[1],
        "fpm_profile": engine.fpm_profile,
    }
    for name in ("estimation_mode", "fallback_policy", "estimator_config", "systems_paths"):
        own = getattr(worker.timing, name)
        given[name] = getattr(engine, name) if own is None else own
    if given["systems_paths"] == "default":
        given["systems_paths"] = ["default"]
    return {name: value for name, value in given.items() if value is not None}


def _trace(config: PredictConfig) -> Trace:
    source = config.traffic.source
    if isinstance(source, SyntheticSource):
        prefix = {"cached_prefix_tokens": source.cached_prefix_tokens} if source.cached_prefix_tokens else {}
        return Trace.synthetic(_request_count(config), source.input_tokens, source.output_tokens, **prefix)
    if source.format == "weka":
        return Trace.read(source.paths[0], "weka", nested_timestamps=source.nested_timestamp_basis)
    return Trace.read(source.paths[0], source.format, block_tokens=source.block_size)


def _request_count(config: PredictConfig) -> int:
    stop, load = config.traffic.stop, config.traffic.load
    assert stop is not None and isinstance(load, ConcurrencyLoad)
    if stop.requests is not None:
        return stop.requests
    assert stop.requests_per_load_unit is not None
    return max(1, round(stop.requests_per_load_unit * load.concurrency))


def _launch(config: PredictConfig, timing: Mapping[str, Any]) -> dict[str, Any]:
    engine, worker = config.engine, config.engine.workers.aggregated
    cache, capacity = worker.kv_cache, worker.kv_cache.capacity
    tokens, sequences, context = _limits(config, worker, timing)
    rank = {
        "backend": engine.backend,
        "worker_type": "aggregated",
        "block_size": cache.block_size,
        "enable_prefix_caching": cache.prefix_caching,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": sequences,
        "max_model_len": context,
    }
    launch: dict[str, Any] = {
        "engine": rank,
        "dp_size": worker.parallelism.attention_data,
        "tensor_parallel_size": worker.parallelism.tensor,
    }
    if capacity.blocks is not None:
        rank["num_gpu_blocks"] = capacity.blocks
        return launch
    name, default = FRACTION_OF[engine.backend]
    launch[name] = default if capacity.memory_fraction is None else capacity.memory_fraction
    if capacity.cuda_graph_reserved_bytes:
        launch["cuda_graph_reserved_bytes"] = capacity.cuda_graph_reserved_bytes
    return launch


def _limits(config: PredictConfig, worker: Worker, timing: Mapping[str, Any]) -> tuple[int, int, int | None]:
    """Tokens and sequences of a pass, and the context length in tokens."""
    tokens, sequences = _MAX_BATCHED_TOKENS, _MAX_SEQUENCES
    context = None if config.engine.context_length == "max" else config.engine.context_length
    if config.engine.fpm_profile is not None:
        profile = load_fpm_profile(config.engine.fpm_profile)
        resources = select_deployment(profile, ForwardPassPerfModel.normalize_config(timing)).resources
        tokens, sequences = resources.max_num_tokens, resources.max_batch_size
        context = profile.context_length if context is None else context
    return worker.scheduler.max_batched_tokens or tokens, worker.scheduler.max_sequences or sequences, context


def _options(config: PredictConfig) -> dict[str, Any]:
    load, bounds = config.traffic.load, config.evaluation.sla
    options: dict[str, Any] = {
        "num_workers": config.engine.workers.aggregated.parallelism.replicas,
        "scheduler_rules": config.execution.scheduler_rules,
        "mixed_pass_pricing": config.execution.mixed_pass_pricing,
        "sla": None if bounds is None else bounds.model_dump(),
    }
    if isinstance(load, TimestampsLoad):
        # Plays have no common clock: a lane takes the next one when its last has settled.
        return options | {"arrival_speedup_ratio": load.speedup, "concurrency": load.agentic_lanes}
    return options | {"concurrency": load.concurrency}
