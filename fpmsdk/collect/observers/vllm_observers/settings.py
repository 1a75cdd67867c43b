"""The settings that an engine resolved, as an observation writes them.

Source: collector.md sections 8.2 and 8.5 (`resolved_config`).
"""

from __future__ import annotations

from typing import Any

QUANTISATION_FIELDS = ("activation_scheme", "weight_block_size", "quant_method")


def class_name(kind: type) -> str:
    """Module and name of a class.

    >>> class_name(type(None))
    'builtins.NoneType'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


def resolved_config(config: Any) -> dict[str, Any]:
    """The settings of an engine that decide what its cache is.

    Parameters
    ----------
    config: its `VllmConfig`; only read.
    """
    model, parallel, quantisation = config.model_config, config.parallel_config, config.quant_config
    return {
        "model_config": {
            **_fields(model, "model", "revision", "quantization", "max_model_len", "enforce_eager"),
            "dtype": str(model.dtype),
            "loaded_config_commit_hash": getattr(model.hf_config, "_commit_hash", None),
        },
        "cache_config": _fields(
            config.cache_config,
            *("cache_dtype", "gpu_memory_utilization", "enable_prefix_caching"),
            *("kv_cache_memory_bytes", "num_gpu_blocks_override"),
        ),
        "scheduler_config": _fields(
            config.scheduler_config, "max_num_batched_tokens", "max_num_seqs", "async_scheduling"
        ),
        "parallel_config": {
            **_fields(parallel, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
            **_fields(parallel, "enable_expert_parallel", "enable_eplb", "decode_context_parallel_size"),
            "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1),
        },
        "kernel_config": {"moe_backend": getattr(config.kernel_config, "moe_backend", "auto")},
        "compilation_config": compilation(config.compilation_config),
        "quantization_config": None if quantisation is None else _quantisation(quantisation),
        "offload_config": _offload(config.offload_config),
        "speculative_config": _present(config.speculative_config),
        "kv_transfer_config": _present(config.kv_transfer_config),
    }


def compilation(config: Any) -> dict[str, Any]:
    """The compilation settings of an engine; modes by name. An engine that captures nothing has a largest size of 0."""
    sizes = list(config.cudagraph_capture_sizes or ())
    largest = config.max_cudagraph_capture_size
    return {
        "mode": _name(config.mode),
        "cudagraph_mode": _name(config.cudagraph_mode),
        "cudagraph_capture_sizes": sizes,
        "max_cudagraph_capture_size": 0 if largest is None and not sizes else largest,
    }


def _fields(section: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


def _name(value: Any) -> Any:
    return getattr(value, "name", value)


def _present(section: Any) -> str | None:
    # What such a configuration holds does not matter: with any of them there is no supported observation.
    return None if section is None else class_name(type(section))


def _quantisation(config: Any) -> dict[str, Any]:
    told = {name: getattr(config, name) for name in QUANTISATION_FIELDS if hasattr(config, name)}
    return {"type": class_name(type(config)), **{name: _plain(value) for name, value in told.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _offload(config: Any) -> dict[str, Any]:
    return {
        "offload_backend": config.offload_backend,
        "uva": _fields(config.uva, "cpu_offload_gb"),
        "prefetch": _fields(config.prefetch, "offload_group_size", "offload_num_in_group", "offload_prefetch_step"),
    }
