"""From the flat engine arguments of a deployment to the canonical launch of one role.

Backend, role, parallel sizes and timing model are made to agree; the result is an ordinary launch mapping.
Source: engine-and-replay.md section 1.6.
"""

from collections.abc import Mapping
from typing import Any

from fpmsdk.config import check_config
from fpmsdk.config.fields import CONFIG
from fpmsdk.config.schema import describe
from fpmsdk.errors import LaunchConfigError
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.launch.fields import NATIVE_PROVIDERS

MEMORY_FRACTIONS = ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction")
MEMORY_INPUTS = (*MEMORY_FRACTIONS, "cuda_graph_reserved_bytes")
MAX_EXACT_BYTES = 2**53


def materialize_engine_launch_config(
    backend: str,
    backend_version: str,
    parallel_config: Mapping[str, Any],
    engine_args: Mapping[str, Any],
    worker_type: str,
) -> dict[str, Any]:
    """Return the canonical launch mapping of one role of a deployment.

    Parameters: `backend` and `worker_type` are forced on the engine; `parallel_config` may hold `tp` and
    `attention_dp`, prefixed `prefill_` or `decode_` for those roles, which must agree; `engine_args` is
    flat, or nests the scheduler fields under `rank`. Sizes that a native timing model implies may be left
    out.
    Returns: every field of the canonical form; a native timing model carries provider `ais` and its canonical
    configuration. Blocks that are not given follow from memory: `num_gpu_blocks`, or for a profile with cache groups
    `kv_cache_groups` and `kv_cache_capacity_bytes`; memory fractions are null when the block count is explicit.
    Raises: `LaunchConfigError` for arguments that disagree or break a launch rule, `ConfigError` for the
    timing configuration, `InfeasibleMemoryError` where nothing is left for the cache.
    Source: engine-and-replay.md section 1.6.

    >>> args = {"num_gpu_blocks": 64, "dp_size": 2, "timing_model": {"type": "polynomial"}}
    >>> launch = materialize_engine_launch_config("vllm", "0.1", {}, args, "decode")
    >>> launch["engine"]["worker_type"], launch["dp_size"], launch["num_gpu_blocks_is_explicit"]
    ('decode', 2, True)
    """
    args = dict(engine_args)
    for name in ("engine_type", "aic_backend", "backend"):
        _require_equal(f"{name}={args.get(name)!r}", args.pop(name, backend), f"backend={backend!r}", backend)
    args.pop("worker_type", None)
    sizes = {
        "tensor_parallel_size": _one_value(args, "tensor_parallel_size", "aic_tp_size"),
        "dp_size": _one_value(args, "dp_size", "aic_attention_dp_size"),
    }
    startup_time = args.pop("startup_time", 0.0)
    if startup_time is None:
        raise LaunchConfigError("startup_time must be finite and non-negative", "startup_time")
    memory = {name: args.pop(name) for name in MEMORY_INPUTS if args.get(name) is not None}
    rank = _rank(args)
    explicit = "num_gpu_blocks" in rank
    config = _native_config(rank.get("timing_model"), worker_type)
    if config is not None:
        rank["timing_model"] = {"type": "external", "provider": "ais", "config": config}
        for name, canonical in (("tensor_parallel_size", config["tp"]), ("dp_size", config["attention_dp"])):
            if sizes[name] not in (None, canonical):
                raise LaunchConfigError(f"{name} conflicts with canonical timing topology", name)
            sizes[name] = canonical
    elif memory and not explicit:
        raise LaunchConfigError(f"{', '.join(memory)}: memory inputs need num_gpu_blocks or a native timing_model")
    _check_parallel(parallel_config, sizes, worker_type)
    document = {
        "engine": {**rank, "backend": backend, "worker_type": worker_type},
        **{name: size for name, size in sizes.items() if size is not None},
        "startup_time": startup_time,
        **{name: memory[name] for name in MEMORY_FRACTIONS if name in memory},
        "cuda_graph_reserved_bytes": None if config is None else _reserved_bytes(memory),
    }
    launch = EngineLaunchConfig.from_mapping(document)
    if config is not None and not explicit:
        from fpmsdk.launch.capacity import derived_capacity  # profiles load with the first launch that needs one

        version = config["backend_version"] or backend_version
        capacity = derived_capacity({**config, "backend_version": version}, rank, memory)
        engine = {**document["engine"], **capacity}
        launch = EngineLaunchConfig.from_mapping({**document, "engine": engine, "num_gpu_blocks_is_explicit": False})
    made = launch.to_dict()
    return {**made, **dict.fromkeys(MEMORY_FRACTIONS)} if explicit else made


def canonical_performance_config(config: Mapping[str, Any], *, worker_type: str) -> dict[str, Any]:
    """Return the canonical forward-pass configuration of a timing configuration for one role.

    Parameters: `config`, canonical fields or their older spellings (`model_path`, `systems_path`,
    `shared_layer`, a method name under `fpm_interpolation`, `fpm_parquet_path`); memory inputs are dropped.
    Without `worker_type` it is taken for this role, and its mode is `op_level` unless written.
    Returns: defaults filled in and rules checked; the method is not resolved.
    Raises: `ConfigError`, also for another role.
    Source: engine-and-replay.md section 1.6.

    >>> timing = {"model_path": "m", "system": "s", "backend": "vllm"}
    >>> config = canonical_performance_config(timing, worker_type="decode")
    >>> config["model"], config["worker_type"], config["estimation_mode"]
    ('m', 'decode', 'op_level')
    """
    document = {key: value for key, value in config.items() if key not in MEMORY_INPUTS}
    if document.setdefault("worker_type", worker_type) != worker_type:
        raise LaunchConfigError("estimator worker_type does not match replay role", "worker_type")
    if "worker_type" not in config and "forward_model" not in config:
        document.setdefault("estimation_mode", "op_level")
    for old, name in (("model_path", "model"), ("shared_layer", "enable_shared_layer")):
        if old in document:
            if name in document:
                raise LaunchConfigError(f"duplicate field `{name}`", name)
            document[name] = document.pop(old)
    if (root := document.pop("systems_path", None)) is not None:
        document.setdefault("systems_paths", [root])
    interpolation = {
        name: document.pop(old)
        for old, name in (("fpm_interpolation", "method"), ("fpm_parquet_path", "fpm_parquet_path"))
        if document.get(old) is not None
    }
    if interpolation:
        estimator = _object(document.get("estimator_config", {}), "estimator_config")
        written = _object(estimator.get("fpm_interpolation", {}), "estimator_config.fpm_interpolation")
        document["estimator_config"] = {**estimator, "fpm_interpolation": {**written, **interpolation}}
    return CONFIG.write(check_config(document))


def _native_config(timing: Any, worker_type: str) -> dict[str, Any] | None:
    if timing is None:
        raise LaunchConfigError("engine arguments need a timing_model", "timing_model")
    native = isinstance(timing, Mapping) and timing.get("provider") in NATIVE_PROVIDERS
    if not native or timing.get("type") != "external":
        return None
    return canonical_performance_config(_object(timing.get("config"), "timing_model.config"), worker_type=worker_type)


def _rank(args: dict[str, Any]) -> dict[str, Any]:
    nested = args.pop("rank", None)
    if nested is None:
        return args
    if args:
        raise LaunchConfigError(f"rank cannot be mixed with other scheduler fields: {', '.join(args)}", "rank")
    return dict(_object(nested, "rank"))


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise LaunchConfigError(f"{name} must be an object, found {describe(value)}", name)
    return value


def _one_value(args: dict[str, Any], name: str, alias: str) -> Any:
    value, other = args.pop(name, None), args.pop(alias, None)
    if value is not None and other is not None and value != other:
        label = name.removesuffix("_size").replace("_", " ")
        raise LaunchConfigError(f"engine config has conflicting {label} aliases: {value!r} and {other!r}", name)
    return other if value is None else value


def _check_parallel(parallel: Mapping[str, Any], sizes: Mapping[str, Any], worker_type: str) -> None:
    prefix = "" if worker_type == "aggregated" else f"{worker_type}_"
    for key, name in (("tp", "tensor_parallel_size"), ("attention_dp", "dp_size")):
        declared = parallel.get(prefix + key)
        size = 1 if sizes[name] is None else sizes[name]
        if declared is not None:
            _require_equal(f"parallel_config.{prefix}{key}={declared}", declared, f"{name}={size}", size)


def _require_equal(left: str, value: Any, right: str, expected: Any) -> None:
    if value != expected:
        raise LaunchConfigError(f"{left} conflicts with {right}")


def _reserved_bytes(memory: Mapping[str, Any]) -> int:
    reserved: int = memory.get("cuda_graph_reserved_bytes", 0)
    if isinstance(reserved, int) and reserved > MAX_EXACT_BYTES:
        raise LaunchConfigError("cuda_graph_reserved_bytes must be at most 2^53", "cuda_graph_reserved_bytes")
    return reserved
