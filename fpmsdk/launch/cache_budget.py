"""KV-cache budget of a measured deployment: bytes left for the cache, and what one request takes of it.

Pure arithmetic over a profile; nothing is estimated from a model. Source: fpm-interpolation.md section 7.
"""

import math
from collections.abc import Mapping
from typing import Any

from fpmsdk.config.profile import (
    DECLARED_FIELDS,
    MAX_BYTES,
    CacheGroup,
    DeploymentProfile,
    FpmModelProfile,
    Resources,
    load_fpm_profile,
)
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.config.schema import Choice, Count, Field, Nullable, Number, Record, SchemaFault
from fpmsdk.errors import ConfigError, InfeasibleMemoryError

_REQUEST = Record(
    Field("total_gpu_capacity_bytes", Count()),
    Field("memory_fraction_kind", Choice(("of_total",))),
    Field("memory_fraction_value", Number()),
    Field("max_num_tokens", Count()),
    Field("max_batch_size", Count()),
    Field("context_length", Nullable(Count()), None),
    Field("request_occupancy_tokens", Nullable(Count()), None),
    Field("cuda_graph_reserved_bytes", Count(), 0),
    Field("tolerance_fraction", Nullable(Number()), None),
)


def estimate_cache_budget(config: Mapping[str, Any], budget: Mapping[str, Any]) -> dict[str, Any]:
    """The cache budget of the deployment that a configuration selects from its profile.

    Parameters
    ----------
    config: canonical configuration with an `fpm_profile`.
    budget: `total_gpu_capacity_bytes`, `memory_fraction_kind` (`of_total`), `memory_fraction_value` in [0, 1],
        `max_num_tokens` and `max_batch_size` of one rank; optionally `context_length` in tokens,
        `request_occupancy_tokens`, `cuda_graph_reserved_bytes`, `tolerance_fraction` in [0, 1).

    Raises
    ------
    ConfigError: the request is malformed or beyond what the profile states.
    InfeasibleMemoryError: nothing is left for the cache; tells the bytes and the smallest tp that fits.

    Example: `ForwardPassPerfModel.estimate_cache_budget`.
    """
    try:
        request = _REQUEST.read(budget)
    except SchemaFault as fault:
        raise ConfigError(f"invalid cache budget: {fault}", fault.path) from None
    if config["fpm_profile"] is None:
        raise _fault("needs a configuration with an fpm_profile")
    _require(config["backend"] == "vllm" and config["pp"] == 1, "needs backend vllm and pp 1")
    _require(config["nextn"] == 0 and config["speculation"] is None, "takes neither nextn nor speculation")
    profile = load_fpm_profile(config["fpm_profile"])
    deployment = select_deployment(profile, config)
    resources = deployment.resources
    resources.require_memory()
    context = _check_request(request, profile, resources)
    require_fit(profile, deployment, _usable(request), request["cuda_graph_reserved_bytes"])
    total, breakdown = _total_bytes(request, resources, context)
    per_token = resources.kv_bytes_per_token
    tolerance = request["tolerance_fraction"]
    adjusted = None
    if tolerance is not None:
        kept = math.floor(total * (1.0 - tolerance))
        tokens = None if per_token is None else math.floor(total // per_token * (1.0 - tolerance))
        adjusted = {"tolerance_fraction": tolerance, "total_kv_size_bytes": kept, "total_kv_size_tokens": tokens}
    answer = {
        "total_gpu_capacity_bytes": request["total_gpu_capacity_bytes"],
        "total_kv_size_bytes": total,
        "kv_size_per_token_bytes": per_token,
        "total_kv_size_tokens": None if per_token is None else total // per_token,
        "source": "profile",
        "memory_breakdown": breakdown,
        "tolerance_adjusted": adjusted,
        "resource_provenance": resources.provenance,
        "cache_layout": resources.cache_layout,
        "cache_groups": [group.model_dump(mode="json") for group in resources.cache_groups],
        "request_peak_cache_bytes": request_bytes(resources, context, request["max_num_tokens"]),
    }
    if request["request_occupancy_tokens"] is not None:
        answer["request_occupancy_cache_bytes"] = request_bytes(resources, request["request_occupancy_tokens"], 1)
    return answer


def _fault(reason: str, path: str = "") -> ConfigError:
    return ConfigError(f"invalid cache budget: {reason}", path)


def _require(holds: bool, reason: str, path: str = "") -> None:
    if not holds:
        raise _fault(reason, path)


def _check_request(request: Mapping[str, Any], profile: FpmModelProfile, resources: Resources) -> int:
    """Check ranges; the context length in tokens."""
    capacity, fraction = request["total_gpu_capacity_bytes"], request["memory_fraction_value"]
    _require(1 <= capacity <= MAX_BYTES, f"total_gpu_capacity_bytes must be in 1..={MAX_BYTES}, found {capacity}")
    _require(0 <= fraction <= 1, f"memory_fraction_value must be in [0, 1], found {fraction}")
    for name in ("max_num_tokens", "max_batch_size"):
        bound = getattr(resources, name)
        _require(
            1 <= request[name] <= bound,
            f"{name} must be in 1..={bound}, what the profile states for one rank, found {request[name]}",
            name,
        )
    context = profile.context_length if request["context_length"] is None else request["context_length"]
    bound = profile.context_length
    _require(1 <= context <= bound, f"context_length must be in 1..={bound}, found {context}", "context_length")
    occupied, tolerance = request["request_occupancy_tokens"], request["tolerance_fraction"]
    _require(
        occupied is None or 1 <= occupied <= context,
        f"request_occupancy_tokens must be in 1..={context}, found {occupied}",
        "request_occupancy_tokens",
    )
    _require(tolerance is None or 0 <= tolerance < 1, f"tolerance_fraction must be in [0, 1), found {tolerance}")
    return context


def _usable(request: Mapping[str, Any]) -> int:
    capacity: int = request["total_gpu_capacity_bytes"]
    fraction: float = request["memory_fraction_value"]
    return math.floor(capacity * fraction)


def _total_bytes(request: Mapping[str, Any], resources: Resources, context: int) -> tuple[int, dict[str, int] | None]:
    graphs = request["cuda_graph_reserved_bytes"]
    if resources.runtime_memory is None:
        parts = dict(zip(DECLARED_FIELDS, (value or 0 for value in resources.declared()), strict=True))
        return _usable(request) - sum(parts.values()) - graphs, parts | {"cuda_graph_reserved_bytes": graphs}
    memory = resources.runtime_memory
    for name in ("max_num_tokens", "max_batch_size"):
        recorded = getattr(resources, name)
        _require(
            request[name] == recorded,
            f"{name} must be the recorded {recorded}, found {request[name]}; measure memory anew for other settings",
            name,
        )
    _require(
        context <= memory.max_model_len,
        f"context_length {context} is beyond the recorded max_model_len {memory.max_model_len}",
        "context_length",
    )
    _require(
        request["memory_fraction_value"] == memory.gpu_memory_utilization,
        f"memory_fraction_value must be the recorded gpu_memory_utilization {memory.gpu_memory_utilization}, found "
        f"{request['memory_fraction_value']}",
        "memory_fraction_value",
    )
    _require(graphs == 0, "cuda_graph_reserved_bytes must be 0: runtime memory already leaves them out")
    return memory.kv_cache_bytes, None


# --- what fits ---

# Beyond this size nobody divides the weights of one model.
_LARGEST_TP = 1024


def require_fit(
    profile: FpmModelProfile, deployment: DeploymentProfile, usable_bytes: int, graph_bytes: int = 0
) -> None:
    """Check that a deployment leaves room for its cache.

    Parameters
    ----------
    deployment: one of `profile`, with known memory.
    usable_bytes: what one rank may use of its GPU.
    graph_bytes: reserved for CUDA graphs.

    Raises
    ------
    InfeasibleMemoryError: it does not.
    """
    needed = _needed(deployment.resources, graph_bytes)
    if usable_bytes >= needed:
        return
    smallest = _smallest_tp(profile, deployment, usable_bytes, graph_bytes)
    if smallest is None:
        advice = "no tensor-parallel size fits; use GPUs with more memory or raise the memory fraction"
    else:
        tp, recorded = smallest
        advice = f"the smallest tensor-parallel size that fits is {tp}" + (
            "" if recorded else ", if its weights divide evenly; the profile records none"
        )
    runtime = deployment.resources.runtime_memory is not None
    what = "the recorded cache needs" if runtime else "weights, activations, overheads, CUDA graphs and a cache need"
    raise InfeasibleMemoryError(
        f"invalid cache budget: tp {deployment.tp} does not fit: {what} {needed} bytes of one rank, {usable_bytes} are "
        f"available; {advice}",
        needed,
        usable_bytes,
        None if smallest is None else smallest[0],
    )


def _needed(resources: Resources, graph_bytes: int) -> int:
    # At least one byte is left to the cache.
    if resources.runtime_memory is not None:
        return resources.runtime_memory.kv_cache_bytes
    return sum(value or 0 for value in resources.declared()) + graph_bytes + 1


def _smallest_tp(
    profile: FpmModelProfile, deployment: DeploymentProfile, usable_bytes: int, graph_bytes: int
) -> tuple[int, bool] | None:
    # The smallest that the profile records, else by dividing the declared weights; and whether it is recorded.
    place = (deployment.system, deployment.backend, deployment.backend_version, deployment.worker_type)
    recorded = [
        other.tp
        for other in profile.deployments
        if (other.system, other.backend, other.backend_version, other.worker_type) == place
        and other.resources.memory_source != "pending"
        and usable_bytes >= _needed(other.resources, graph_bytes)
    ]
    if recorded:
        return min(recorded), True
    weights = deployment.resources.weights_bytes
    if deployment.resources.memory_source != "declared" or weights is None:
        return None
    others, tp = _needed(deployment.resources, graph_bytes) - weights, 2 * deployment.tp
    while tp <= _LARGEST_TP:
        if usable_bytes >= others + -(-weights * deployment.tp // tp):
            return tp, False
        tp *= 2
    return None


# --- pages ---


def request_bytes(resources: Resources, tokens: int, chunk_tokens: int) -> int:
    """Cache bytes that one request of `tokens` holds at most, when it is computed `chunk_tokens` at a time.

    Raises: `ConfigError` beyond 2**53.

    >>> resources = Resources(cache_layout="linear", kv_bytes_per_token=10, max_num_tokens=8, max_batch_size=1,
    ...                       provenance="by hand")
    >>> request_bytes(resources, 4096, 8)
    40960
    """
    if resources.kv_bytes_per_token is not None:
        held = tokens * resources.kv_bytes_per_token
    else:
        held = sum(peak_pages(group, tokens, chunk_tokens) * group.page_size_bytes for group in resources.cache_groups)
    _require(held <= MAX_BYTES, f"the cache of a request of {tokens} tokens takes more than {MAX_BYTES} bytes")
    return held


def peak_pages(group: CacheGroup, tokens: int, chunk_tokens: int) -> int:
    """Pages of a group that a request of `tokens` holds at most.

    >>> group = CacheGroup(name="g", kind="attention", num_layers=2, block_size_tokens=16, page_size_bytes=160,
    ...                    sliding_window=32)
    >>> peak_pages(group, 4096, 128), peak_pages(group, 1152, 1)
    (11, 3)
    """
    size = group.block_size_tokens
    everything = -(-tokens // size)
    if group.sliding_window is None:
        return everything
    return min(everything, -(-(group.sliding_window - 1 + chunk_tokens + size - 1) // size))


def live_blocks(group: CacheGroup, computed_tokens: int, target_tokens: int) -> range:
    """Blocks of a request that must be present while it goes from `computed_tokens` to `target_tokens`.

    >>> group = CacheGroup(name="g", kind="attention", num_layers=2, block_size_tokens=16, page_size_bytes=160,
    ...                    sliding_window=32)
    >>> live_blocks(group, 512, 640), live_blocks(group, 32, 33)
    (range(30, 40), range(0, 3))
    """
    first = 0
    if group.sliding_window is not None:
        first = max(computed_tokens - (group.sliding_window - 1), 0) // group.block_size_tokens
    return range(first, -(-target_tokens // group.block_size_tokens))
