"""Rough KV-cache estimate from a bare `config.json`, for models without an operator graph.

Counts parameters by rule of thumb and reserves a part of what the weights leave; meant as a conscious last resort.
Source: op-level.md section 6.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fpmsdk.errors import ConfigError, InfeasibleMemoryError, ModelConfigError
from fpmsdk.opgraph.deployment import Deployment
from fpmsdk.opgraph.memory import KvCacheEstimate, MemoryRequest, check_request, does_not_fit, size_cache
from fpmsdk.opgraph.model_config import language_config, read_raw_config

RESERVATION = 0.80

_DTYPE_BYTES = {"float32": 4, "fp32": 4}
_DEFAULT_DTYPE_BYTES = 2


class Geometry(NamedTuple):
    """Sizes of a model, zeros where they do not apply; `latent` counts the cached elements of latent attention."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    latent: int
    hidden: int
    inter: int
    vocab: int
    experts: int
    expert_inter: int
    window: int
    windowed_layers: int
    dtype_bytes: int


def estimate_kv_cache_naively(
    model: str,
    deployment: Deployment,
    request: MemoryRequest,
    search: Sequence[str | Path] = (),
    reservation: float = RESERVATION,
) -> KvCacheEstimate:
    """Size the KV cache of one rank without a graph; the requested memory fraction is not used.

    Parameters
    ----------
    request: needs `capacity_bytes`, because nothing else is known of the system.
    reservation: part of the memory after the weights that becomes cache, in [0, 1].

    Raises
    ------
    ConfigError: no capacity, a reservation out of range or of nothing.
    InfeasibleMemoryError: the weights alone do not fit; tells the bytes and the smallest tp that fits.
    ModelConfigError: the configuration lacks a size that the estimate needs; all of them are listed.
    """
    check_request(deployment.backend, request)
    if not 0.0 <= reservation <= 1.0:
        raise ConfigError(f"the reservation must be finite and in [0, 1], found {reservation!r}", "reservation")
    if not request.capacity_bytes or request.capacity_bytes <= 0:
        raise ConfigError("an estimate without a graph needs the GPU capacity in bytes", "capacity_bytes")
    shape = geometry(language_config(read_raw_config(model, search)), model)
    per_layer = _kv_bytes_per_layer(shape, deployment.tp)
    occupied = _weight_bytes(shape, deployment) + request.cuda_graph_reserved_bytes
    if occupied >= request.capacity_bytes:
        raise _infeasible(model, shape, deployment, request, request.capacity_bytes, occupied)
    return size_cache(
        request,
        capacity=request.capacity_bytes,
        budget=(request.capacity_bytes - occupied) * reservation,
        per_token=per_layer * shape.layers,
        tokens_of=_capacity(shape, per_layer),
        kvcache_quant_mode=None,
        source="naive_fallback",
        breakdown=None,
    )


def _first(config: Mapping[str, Any], *spellings: str) -> int:
    """The first spelling that holds a positive whole number, 0 when there is none."""
    for name in spellings:
        value = config.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def geometry(config: Mapping[str, Any], model: str) -> Geometry:
    """Sizes of a model from a document of any architecture.

    Raises `ModelConfigError` with all sizes that are missing; `model` is what the message calls the document.
    """
    hidden = _first(config, "hidden_size", "n_embd", "n_embed")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts")
    inter = _first(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if not inter and not experts:
        # Dense families that leave it out use four times the hidden size.
        inter = 4 * hidden
    kv_heads = _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads") or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    latent_rank, rope = _first(config, "kv_lora_rank"), _first(config, "qk_rope_head_dim")
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    window, windowed_layers = _window(config, layers)
    shape = Geometry(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=_first(config, "head_dim", "attention_head_dim") or (hidden // heads if heads else 0),
        latent=latent_rank + rope if latent_rank and rope else 0,
        hidden=hidden,
        inter=inter or _first(config, "moe_intermediate_size"),
        vocab=_first(config, "vocab_size"),
        experts=experts,
        expert_inter=_first(config, "moe_intermediate_size") or inter,
        window=0 if latent_rank else window,
        windowed_layers=windowed_layers,
        dtype_bytes=_dtype_bytes(config),
    )
    missing = [name for name in ("layers", "hidden", "vocab", "inter") if not getattr(shape, name)]
    if latent_rank and not rope:
        missing.append("qk_rope_head_dim")
    if not latent_rank:
        missing += [name for name in ("kv_heads", "head_size") if not getattr(shape, name)]
    if missing:
        raise ModelConfigError(model, [f"no usable value for {name}" for name in missing])
    return shape


def _window(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Window in tokens and number of layers that have it; zeros where the layout is not declared."""
    window = _first(config, "sliding_window", "sliding_window_size")
    types, period = config.get("layer_types"), _first(config, "sliding_window_pattern")
    if isinstance(types, list) and types:
        return window, sum(1 for kind in types if "sliding" in str(kind).lower())
    if window and period:
        return window, layers - layers // period
    return 0, 0


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    name = str(config.get("torch_dtype") or config.get("dtype") or "").lower()
    if any(eight_bit in name for eight_bit in ("fp8", "float8", "int8")):
        return 1
    return _DTYPE_BYTES.get(name, _DEFAULT_DTYPE_BYTES)


def _kv_bytes_per_layer(geometry: Geometry, tp: int) -> int:
    if geometry.latent:
        return geometry.latent * geometry.dtype_bytes
    return 2 * -(-geometry.kv_heads // tp) * geometry.head_size * geometry.dtype_bytes


def _weight_bytes(geometry: Geometry, deployment: Deployment) -> int:
    hidden, layers, tp, pp = geometry.hidden, geometry.layers, deployment.tp, deployment.pp
    always = 2 * geometry.vocab * hidden + layers * 4 * hidden * hidden
    if not geometry.experts:
        return (always + layers * 3 * hidden * geometry.inter) * geometry.dtype_bytes // (tp * pp)
    experts = geometry.experts * 3 * hidden * geometry.expert_inter // (deployment.moe_tp * deployment.moe_ep)
    return always * geometry.dtype_bytes // (tp * pp) + layers * experts * geometry.dtype_bytes // pp


def _infeasible(
    model: str, shape: Geometry, deployment: Deployment, request: MemoryRequest, capacity: int, occupied: int
) -> InfeasibleMemoryError:
    smallest, tp = None, 2 * deployment.tp
    while smallest is None and shape.heads >= tp:
        larger = msgspec.structs.replace(deployment, tp=tp)
        if shape.experts:
            larger = msgspec.structs.replace(larger, moe_tp_size=tp // deployment.tp * deployment.moe_tp)
        if _weight_bytes(shape, larger) + request.cuda_graph_reserved_bytes < capacity:
            smallest = tp
        tp *= 2
    what = f"{model} at tp {deployment.tp} leaves no memory for the KV cache: one rank needs"
    return does_not_fit(what, occupied + 1, capacity, smallest)


def _capacity(geometry: Geometry, per_layer: int) -> Callable[[float], int]:
    """Bytes to tokens; layers with a window stop growing there."""
    window, growing = geometry.window, geometry.layers - geometry.windowed_layers
    full = per_layer * geometry.layers
    if not window or not geometry.windowed_layers:
        return lambda budget: int(budget // full)

    def tokens(budget: float) -> int:
        if budget <= full * window:
            return int(budget // full)
        if not growing:
            return window
        return window + int((budget - full * window) // (per_layer * growing))

    return tokens
