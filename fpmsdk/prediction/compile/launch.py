"""The engine launch of a role: scheduler limits, cache, and how prompts are handed over.

Source: predict-recommend.md sections 2.4, 2.6, 4 and 5.3.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.launch.capacity import FRACTION_OF
from fpmsdk.prediction.compile.timing import canonical_timing, timing_config
from fpmsdk.prediction.config import PredictConfig

# What one rank schedules when neither the configuration nor a profile says; a prefill worker takes single prompts.
_MAX_BATCHED_TOKENS = 8192
_MAX_SEQUENCES = {"aggregated": 256, "prefill": 1, "decode": 256}


def launch_of(config: PredictConfig, role: str) -> dict[str, Any]:
    """The launch of one worker; its cache is sized where blocks are given, else it has the memory inputs.

    Raises
    ------
    ConfigError: the profile has no such deployment, or holds shorter sequences.
    """
    engine, worker = config.engine, config.roles[role]
    cache, capacity, sizes = worker.kv_cache, worker.kv_cache.capacity, worker.parallelism
    tokens, sequences, context = limits_of(config, role)
    rank: dict[str, Any] = {
        "backend": engine.backend,
        "worker_type": role,
        "block_size": cache.block_size,
        "enable_prefix_caching": cache.prefix_caching,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": sequences,
        "max_model_len": context,
        "prefill_schedule_interval": worker.scheduler.prefill_schedule_interval,
    }
    if engine.enable_chunked_prefill is not None and role != "decode":
        rank["enable_chunked_prefill"] = engine.enable_chunked_prefill
    if engine.kv_transfer is not None:
        rank |= _transfer(config, role)
    if engine.speculation is not None and role != "prefill":
        rank |= _drafts(engine.speculation.acceptance_rates, engine.speculation.seed)
    elif engine.nextn and role != "prefill":
        assert engine.nextn_accepted is not None
        rank |= _drafts(_rates_of(engine.nextn, engine.nextn_accepted), 42)
    launch: dict[str, Any] = {
        "engine": rank,
        "dp_size": sizes.attention_data,
        "tensor_parallel_size": sizes.tensor,
    }
    if worker.startup_seconds:
        launch["startup_time"] = worker.startup_seconds
    if (blocks := cache.num_blocks) is not None:
        rank["num_gpu_blocks"] = blocks
        return launch
    name, default = FRACTION_OF[engine.backend]
    launch[name] = default if capacity.memory_fraction is None else capacity.memory_fraction
    if capacity.cuda_graph_reserved_bytes:
        launch["cuda_graph_reserved_bytes"] = capacity.cuda_graph_reserved_bytes
    return launch


def limits_of(config: PredictConfig, role: str) -> tuple[int, int, int | None]:
    """Tokens and sequences of a pass, and the context length in tokens (None: as long as the model takes)."""
    engine, worker = config.engine, config.roles[role]
    tokens, sequences = _MAX_BATCHED_TOKENS, _MAX_SEQUENCES[role]
    context = worker.context_length or (None if engine.context_length == "max" else engine.context_length)
    if engine.fpm_profile is not None:
        profile = load_fpm_profile(engine.fpm_profile)
        canonical = canonical_timing(timing_config(config, role))
        resources = select_deployment(profile, canonical).resources
        tokens, sequences = resources.max_num_tokens, resources.max_batch_size
        context = profile.context_length if context is None else context
    scheduler = worker.scheduler
    return scheduler.max_batched_tokens or tokens, scheduler.max_sequences or sequences, context


def _transfer(config: PredictConfig, role: str) -> dict[str, Any]:
    transfer = config.engine.kv_transfer
    assert transfer is not None
    if transfer.bandwidth_gb_per_second is None:
        return {}
    return {
        "kv_transfer_bytes_per_token": _bytes_per_token(config),
        "kv_transfer_bandwidth": transfer.bandwidth_gb_per_second,
        "kv_transfer_timing_mode": transfer.timing_mode,
    }


def _bytes_per_token(config: PredictConfig) -> int:
    """What a token takes in the cache of a prefill worker, in bytes."""
    transfer, worker = config.engine.kv_transfer, config.roles["prefill"]
    assert transfer is not None
    for given in (transfer.bytes_per_token, worker.kv_cache.bytes_per_token):
        if given != "auto":
            return given
    canonical = canonical_timing(timing_config(config, "prefill"))
    if config.engine.fpm_profile is not None:
        resources = select_deployment(load_fpm_profile(config.engine.fpm_profile), canonical).resources
        if resources.kv_bytes_per_token is not None:
            return int(resources.kv_bytes_per_token)
    from fpmsdk.launch.capacity import model_bytes_per_token  # the op graph loads where no rate is given

    return model_bytes_per_token(canonical)


def _drafts(rates: list[float], seed: int) -> dict[str, Any]:
    return {
        "aic_nextn": len(rates),
        "aic_nextn_accept_rates": ",".join(repr(rate) for rate in rates),
        "aic_mtp_seed": seed,
    }


def _rates_of(nextn: int, accepted: float) -> list[float]:
    """Acceptance of each draft, the next only after the last, so that `accepted` are taken on average."""
    return [min(1.0, max(0.0, accepted - i)) for i in range(nextn)]
