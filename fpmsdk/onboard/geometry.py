"""Sizes of a decoder on one rank of a topology, and the topologies that they do not divide into.

Source: onboarding.md section 3.3 (local_kv).
"""

from __future__ import annotations

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.config_fields import ALIASES, HEAD_FIELDS, dimension
from fpmsdk.onboard.intake import ModelConfig
from fpmsdk.onboard.layouts import DENSE, FULL_ATTENTION, is_grouped
from fpmsdk.onboard.request import SupportRequest

MIXTRAL = "MixtralForCausalLM"
# The architectures whose tensors are counted.
COUNTED = DENSE | {MIXTRAL}


class RequestFieldError(OnboardError):
    """The model contradicts one field of a request that another value would correct; `path` names it."""


def check_heads(heads: int, shared: int | None, tensor_parallel: int, what: str = "") -> int | None:
    """Key-value heads of one rank; heads are divided, or repeated when there are more ranks. None when unknown.

    Raises
    ------
    RequestFieldError: they do not divide evenly.

    >>> check_heads(32, 8, 16)
    1
    """
    if heads % tensor_parallel:
        raise RequestFieldError(
            f"tensor_parallel {tensor_parallel} does not divide the {heads} {what}num_attention_heads; choose a size "
            "that does",
            "tensor_parallel",
        )
    if not shared:
        return None
    if shared % tensor_parallel and tensor_parallel % shared:
        raise RequestFieldError(
            f"tensor_parallel {tensor_parallel} neither divides the {shared} {what}num_key_value_heads nor is a "
            "multiple of them; choose another size",
            "tensor_parallel",
        )
    return max(1, shared // tensor_parallel)


def rank_geometry(
    config: ModelConfig, architecture: str | None, pending: bool, request: SupportRequest | None
) -> dict[str, int]:
    """Dimensions of the decoder, with `local_kv_heads` of one rank once the topology is known.

    Parameters
    ----------
    architecture: that of the decoder, declared or stated.
    pending: whether the cache is left to the runtime probe, so that nothing is computed from its dimensions.

    Raises
    ------
    OnboardError: contradictory dimensions.
    RequestFieldError: the topology does not divide them.
    """
    raw = config.raw
    found = {name: dimension(raw, name, zero_heads=pending) for name in ALIASES}
    sizes = {name: size for name, size in found.items() if size is not None}
    if not pending and architecture not in FULL_ATTENTION and not is_grouped(raw, architecture):
        return sizes
    heads, hidden = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    tensor = request.search.tensor_parallel if request else None
    if pending:
        if tensor and heads:
            check_heads(heads, None, tensor)
        # 0 says that there is no such attention.
        return {name: size for name, size in sizes.items() if size or name not in HEAD_FIELDS}
    if "head_dim" not in sizes and heads and hidden:
        if hidden % heads:
            raise OnboardError(f"head_dim is missing and {heads} heads do not divide hidden_size {hidden}", "head_dim")
        sizes["head_dim"] = hidden // heads
    if request is None or not heads:
        return sizes
    local = check_heads(heads, sizes.get("num_key_value_heads"), request.search.tensor_parallel)
    if local:
        sizes["local_kv_heads"] = local
    _check_intermediate(architecture, sizes.get("intermediate_size"), request)
    return sizes


def _check_intermediate(architecture: str | None, size: int | None, request: SupportRequest) -> None:
    tensor, _, moe_tensor, _ = request.topology_sizes()
    name, width = ("moe_tensor_parallel", moe_tensor) if architecture == MIXTRAL else ("tensor_parallel", tensor)
    if architecture in COUNTED and size and size % width:
        raise RequestFieldError(
            f"{name} {width} does not divide intermediate_size {size}; choose a size that does", name
        )
