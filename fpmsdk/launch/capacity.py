"""Cache capacity of a launch whose blocks are not given: from a resolved profile, else from the model's operators.

Source: fpm-interpolation.md section 7; engine-and-replay.md section 1.6; op-level.md section 6.
"""

import os
from collections.abc import Mapping
from typing import Any

from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.config.systems import HOW_TO_GET_DATA, resolve_systems_paths
from fpmsdk.errors import LaunchConfigError, UnknownSystemError
from fpmsdk.launch.cache_budget import estimate_cache_budget
from fpmsdk.launch.config import UNLIMITED, EngineLaunchConfig
from fpmsdk.launch.fields import BLOCK_SIZES

# The part of its memory that an engine uses by default, and what it is called.
FRACTION_OF = {
    "vllm": ("gpu_memory_utilization", 0.9),
    "sglang": ("mem_fraction_static", 0.88),
    "trtllm": ("free_gpu_memory_fraction", 0.9),
}
_MAX_NUM_TOKENS = 8192
_MAX_BATCH_SIZE = 1
_LIMITS = ("max_num_batched_tokens", "max_num_seqs")
MEMORY_INPUTS = (*(name for name, _ in FRACTION_OF.values()), "cuda_graph_reserved_bytes")


def derived_capacity(config: Mapping[str, Any], engine: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, Any]:
    """Engine fields that say how large the cache of one rank is.

    Parameters
    ----------
    config: canonical configuration of the timing model.
    engine: scheduler fields as written; what is left out has the defaults of a capacity estimate.
    memory: memory inputs as written: the backend's fraction, `cuda_graph_reserved_bytes`.

    Returns
    -------
    `num_gpu_blocks`, or `kv_cache_groups` and `kv_cache_capacity_bytes` of a grouped profile.

    Raises
    ------
    ConfigError: the profile does not support the launch, or the memory inputs are those of another backend.
    InfeasibleMemoryError: nothing is left for the cache; tells the bytes and the smallest tp that fits.
    LaunchConfigError: not even one block fits.
    """
    return capacity_of_estimate(memory_estimate(config, engine, memory), config, engine)


def capacity_of_estimate(
    estimate: Mapping[str, Any], config: Mapping[str, Any], engine: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of `derived_capacity` of an estimate; raises LaunchConfigError when not even one block fits."""
    if estimate.get("cache_layout") == "grouped":
        return {
            "kv_cache_groups": estimate["cache_groups"],
            "kv_cache_capacity_bytes": estimate["total_kv_size_bytes"],
        }
    block_size = engine.get("block_size") or BLOCK_SIZES[config["backend"]]
    return {"num_gpu_blocks": _at_least_one(estimate["total_kv_size_tokens"] // block_size, block_size)}


def memory_estimate(config: Mapping[str, Any], engine: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, Any]:
    """How the memory of one rank is shared out: `memory_breakdown` in bytes and what is left for the cache.

    Parameters and errors are those of `derived_capacity`.
    """
    backend = config["backend"]
    name, default = FRACTION_OF[backend]
    others = [other for other, _ in FRACTION_OF.values() if other != name and other in memory]
    if others:
        raise LaunchConfigError(f"{others[0]} is not a memory input of backend {backend}; use {name}", others[0])
    asked = {
        "memory_fraction_value": memory.get(name, default),
        "max_num_tokens": engine.get("max_num_batched_tokens") or _MAX_NUM_TOKENS,
        "cuda_graph_reserved_bytes": memory.get("cuda_graph_reserved_bytes", 0),
    }
    if config["fpm_profile"] is None or backend != "vllm" or config["pp"] != 1:
        estimate: dict[str, Any] = _estimate_of_model(config, asked).to_dict()
        return estimate
    return estimate_cache_budget(
        config,
        asked
        | {
            "total_gpu_capacity_bytes": _gpu_bytes(_system(config)[1], config["system"]),
            "memory_fraction_kind": "of_total",
            "max_batch_size": engine.get("max_num_seqs") or _MAX_BATCH_SIZE,
            "context_length": engine.get("max_model_len"),
        },
    )


def check_system(config: Mapping[str, Any]) -> None:
    """Check that some systems root describes the system of a configuration, and knows the version of its backend.

    Parameters
    ----------
    config: canonical configuration of the timing model.

    Raises
    ------
    UnknownSystemError: no root describes it; names the nearest.
    UnlistedVersionError: the version is none that may be queried; names those that may.
    SystemsPathError: a root is no directory.
    """
    root, _ = _system(config)
    root.resolve_version(config["system"], config["backend"], config["backend_version"])


def sized_launch(launch: EngineLaunchConfig, config: Mapping[str, Any]) -> EngineLaunchConfig:
    """A launch with the cache that the profile of its timing model leaves room for; unchanged without a profile.

    Parameters
    ----------
    launch: what is to be replayed; its scheduler limits, memory fraction and graph reservation decide.
    config: canonical configuration of the timing model.

    Returns
    -------
    The launch with `num_gpu_blocks` of a linear profile, unless they are explicit and the profile only declares its
    memory; with `kv_cache_groups` and `kv_cache_capacity_bytes` of a grouped one.

    Raises
    ------
    ConfigError: the memory of the profile is pending, or it does not support the launch.
    InfeasibleMemoryError: nothing is left for the cache; tells the bytes and the smallest tp that fits.
    LaunchConfigError: blocks, groups or bytes are given that contradict the profile.
    """
    if config["fpm_profile"] is None or launch.engine.backend != "vllm" or config["pp"] != 1:
        return launch
    resources = select_deployment(load_fpm_profile(config["fpm_profile"]), config).resources
    resources.require_memory()
    if launch.num_gpu_blocks_is_explicit:
        if resources.cache_layout == "linear" and resources.runtime_memory is None:
            return launch
        what = "grouped FPM cache" if resources.cache_layout == "grouped" else "runtime FPM memory"
        raise LaunchConfigError(
            f"{what} cannot use fixed num_gpu_blocks; use the profile byte budget: leave num_gpu_blocks out",
            "engine.num_gpu_blocks",
        )
    written = launch.to_dict()
    engine = written["engine"]
    limits = {name: UNLIMITED if engine[name] is None else engine[name] for name in _LIMITS}
    given = {name: written[name] for name in MEMORY_INPUTS if written[name] is not None}
    capacity = derived_capacity(config, {**engine, **limits}, given)
    for name in ("kv_cache_groups", "kv_cache_capacity_bytes"):
        if engine.get(name) not in (None, capacity.get(name)):
            raise LaunchConfigError(
                f"{name} {engine[name]} contradicts the profile of the timing model, which gives "
                f"{capacity.get(name)}; leave it out",
                f"engine.{name}",
            )
    return EngineLaunchConfig.from_mapping({**written, "engine": {**engine, **capacity}})


def model_bytes_per_token(config: Mapping[str, Any]) -> int:
    """What one token takes in the cache of one rank, in bytes, by the operators of the model.

    Parameters
    ----------
    config: canonical configuration.

    Raises
    ------
    InfeasibleMemoryError, UnsupportedModelError, UnknownSystemError: there is no such estimate.
    """
    asked = {
        "memory_fraction_value": FRACTION_OF[config["backend"]][1],
        "max_num_tokens": _MAX_NUM_TOKENS,
        "cuda_graph_reserved_bytes": 0,
    }
    size: int = _estimate_of_model(config, asked).kv_size_per_token_bytes
    return size


def _estimate_of_model(config: Mapping[str, Any], asked: Mapping[str, Any]) -> Any:
    # The op graph loads with the first launch that needs it.
    from fpmsdk.opgraph import Deployment, build_graph, read_model_config
    from fpmsdk.opgraph.memory import FRACTION_KINDS, MemoryRequest, SystemMemory, estimate_kv_cache

    root, hardware = _system(config)
    resolved = root.resolve_version(config["system"], config["backend"], config["backend_version"])
    model = read_model_config(config["model"], [os.path.join(os.path.dirname(root.path), "model_configs")])
    deployment = Deployment.from_config(
        config, backend_version=resolved.version, sm_version=hardware.sm_version, systems_path=root.path
    )
    return estimate_kv_cache(
        model,
        deployment,
        build_graph(model, deployment, lambda _kind, _table: ()),
        SystemMemory(_gpu_bytes(hardware, config["system"]), hardware.nccl_mem_bytes, hardware.other_mem_bytes),
        MemoryRequest(memory_fraction_kind=FRACTION_KINDS[config["backend"]], **asked),
    )


def _system(config: Mapping[str, Any]) -> tuple[Any, Any]:
    # The first root that describes the system.
    from fpmsdk.perfdb import open_root

    failure: Exception = UnknownSystemError(f"failed to find performance data roots; {HOW_TO_GET_DATA}")
    for path in resolve_systems_paths(config["systems_paths"]):
        root = open_root(path)
        try:
            return root, root.spec(config["system"])
        except UnknownSystemError as error:
            failure = error
    raise failure


def _gpu_bytes(hardware: Any, system: str) -> int:
    if hardware.mem_capacity_bytes is None:
        raise LaunchConfigError(f"system {system!r} states no gpu.mem_capacity; give num_gpu_blocks", "num_gpu_blocks")
    capacity: int = hardware.mem_capacity_bytes
    return capacity


def _at_least_one(num_blocks: int, block_size: int) -> int:
    if num_blocks < 1:
        raise LaunchConfigError(
            f"the memory left for the cache holds no block of {block_size} tokens; raise the memory fraction or use a "
            "larger tp",
            "num_gpu_blocks",
        )
    return num_blocks
