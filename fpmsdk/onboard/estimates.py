"""Planning estimates of the bytes of one rank: weights, activations, cache of a token.

Each is a number with the sentence that says how it came about, or None with the reason why there is none. They plan;
they measure nothing. Source: onboarding.md section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.onboard.config_fields import AUXILIARY_FIELDS
from fpmsdk.onboard.geometry import COUNTED, MIXTRAL
from fpmsdk.onboard.hardware import find_system_file
from fpmsdk.onboard.layouts import DENSE, FULL_ATTENTION
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.sidecar import kv_scheme
from fpmsdk.opgraph.quantization import CACHE_BYTES

Estimate = tuple[int | None, str]

_QWEN2, _QWEN3, _LLAMA = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "local_kv_heads",
    "vocab_size",
)
_VOCABULARY_PADDING = 64  # with which a runtime pads vocabularies that are no multiple of it
_BF16_BYTES = 2
_ACTIVATION_FLOOR = 70 * 2**20
# Activation elements of a token and element of attention width, by tensor-parallel size.
_DENSE_ACTIVATIONS = {1: 11.0, 2: 6.5, 4: 5.0, 8: 5.0}
_MOE_ACTIVATIONS = {1: 22.0, 2: 13.0, 4: 10.0, 8: 10.0}


def weight_bytes(
    raw: Mapping[str, Any],
    values: Mapping[str, Any],
    sizes: Mapping[str, int],
    architecture: str | None,
    request: SupportRequest | None,
) -> Estimate:
    """Weights of one rank, of unquantised bfloat16 checkpoints whose tensors are known.

    Parameters
    ----------
    raw: the decoder's configuration in use.
    values: profile fields resolved so far.
    sizes: as from `rank_geometry`.
    """
    if reason := _uncounted(raw, values, sizes, architecture, request):
        return None, f"{reason}; state weights_bytes of one rank"
    assert request is not None
    hidden, inter, layers, heads, head, local_kv, vocabulary = (sizes[name] for name in _SHAPE)
    tensor, _, moe_tensor, expert = request.topology_sizes()
    queries, keys = heads * head // tensor, local_kv * head
    attention = 2 * hidden * (queries + keys)
    if raw.get("attention_bias", architecture == _QWEN2):
        attention += queries + 2 * keys
    if architecture == _LLAMA and raw.get("attention_bias"):
        attention += hidden
    norms = 2 * hidden + (2 * head if architecture == _QWEN3 else 0)
    if architecture == MIXTRAL:
        experts = values["num_experts"]
        mlp = 3 * hidden * (inter // moe_tensor) * (experts // expert)
        mlp += hidden * experts  # every rank has the whole router
    else:
        mlp = 3 * hidden * (inter // tensor)
        if raw.get("mlp_bias"):
            mlp += 2 * inter // tensor + hidden
    tables = (vocabulary // tensor) * hidden * (1 if raw.get("tie_word_embeddings") else 2)
    elements = tables + layers * (attention + mlp + norms) + hidden
    return _BF16_BYTES * elements, (
        f"estimate: bfloat16 tensors of {architecture}, TP {tensor}, MoE TP {moe_tensor}, EP {expert}; no padding, no "
        "allocator"
    )


def _uncounted(
    raw: Mapping[str, Any],
    values: Mapping[str, Any],
    sizes: Mapping[str, int],
    architecture: str | None,
    request: SupportRequest | None,
) -> str:
    """Why the tensors cannot be counted; empty when they can."""
    tensor = request.search.tensor_parallel if request else 1
    modes = ("gemm_quant_mode", "moe_quant_mode") if architecture == MIXTRAL else ("gemm_quant_mode",)
    vocabulary = sizes.get("vocab_size", 0)
    extra = [name for name in (*AUXILIARY_FIELDS, "lm_head_bias") if raw.get(name)]
    reasons = {
        "packing and scales of quantised tensors are not estimated": any(
            raw.get(name) is not None for name in ("quantization_config", "hf_quant_config", "quant_algo")
        ),
        "the tensors of this architecture are not counted": architecture not in COUNTED,
        "identity and topology are not complete": request is None,
        "only unquantised bfloat16 deployments are counted": any(values.get(mode) != "bfloat16" for mode in modes),
        f"{', '.join(name for name in _SHAPE if name not in sizes)} unknown": any(name not in sizes for name in _SHAPE),
        f"{', '.join(extra)} add tensors that are not counted": bool(extra),
        f"use_qk_norm adds tensors to {architecture}": architecture != _QWEN3 and bool(raw.get("use_qk_norm")),
        "attention_bias of Qwen2 is given, which is fixed there": architecture == _QWEN2 and "attention_bias" in raw,
        f"attention_bias adds tensors to {architecture}": architecture not in (_LLAMA, _QWEN2, _QWEN3)
        and bool(raw.get("attention_bias")),
        f"mlp_bias adds tensors to {architecture}": architecture != _LLAMA and bool(raw.get("mlp_bias")),
        f"how a vocabulary of {vocabulary} is padded for TP {tensor} is not known": bool(
            vocabulary % _VOCABULARY_PADDING or vocabulary % tensor
        ),
        "num_experts is unknown": architecture == MIXTRAL and values.get("num_experts") is None,
        "the router has another dtype": architecture == MIXTRAL
        and raw.get("moe_router_dtype") not in (None, "bfloat16"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def activation_bytes(
    values: Mapping[str, Any], sizes: Mapping[str, int], architecture: str | None, request: SupportRequest | None
) -> Estimate:
    """Activations of one rank under its token limit, of full attention in 16 bits."""
    if architecture not in FULL_ATTENTION or request is None:
        return None, "no activation estimate for this layout or topology; memory is observed while collecting"
    if values.get("fmha_quant_mode") not in ("bfloat16", "float16"):
        return None, "activations are estimated of 16-bit attention; memory is observed while collecting"
    if "num_attention_heads" not in sizes or "head_dim" not in sizes:
        return None, "the width of attention is unknown; memory is observed while collecting"
    tensor, tokens = request.search.tensor_parallel, values["max_num_tokens"]
    factors = _DENSE_ACTIVATIONS if architecture in DENSE else _MOE_ACTIVATIONS
    if tensor not in factors:
        return None, f"no activation estimate for TP {tensor}; memory is observed while collecting"
    width = sizes["num_attention_heads"] * sizes["head_dim"]
    estimate = max(_ACTIVATION_FLOOR, tokens * width * int(2 * factors[tensor]))
    return estimate, (
        f"estimate: at least 70 MiB, else 2 * {tokens} tokens * attention width {width} * {factors[tensor]:g}; no "
        "speculation"
    )


def is_plain_cache(raw: Mapping[str, Any]) -> bool:
    """Whether cache elements have one static scale a tensor at most, so that dtypes tell their bytes."""
    scheme = kv_scheme(raw.get("quantization_config") or {})
    return scheme.get("dynamic") is not True and scheme.get("strategy") in (None, "tensor")


def kv_bytes_per_token(raw: Mapping[str, Any], values: Mapping[str, Any], sizes: Mapping[str, int]) -> Estimate:
    """Cache bytes of a token on one rank, of full attention in all layers."""
    if not is_plain_cache(raw):
        return None, "scales and packing of this cache are not counted; state the bytes of a token, scales included"
    needed = ("num_hidden_layers", "local_kv_heads", "head_dim")
    if any(name not in sizes for name in needed) or "kv_cache_dtype" not in values:
        return None, "needs kv_cache_dtype, the geometry of layers and heads and the topology; or state it"
    layers, heads, size = (sizes[name] for name in needed)
    element = CACHE_BYTES[values["kv_cache_dtype"]]
    return int(2 * layers * heads * size * element), (
        f"exact: keys and values of {layers} layers, {heads} heads of this rank, size {size}, {element} bytes each"
    )


def hardware_bytes(request: SupportRequest | None) -> dict[str, tuple[int, str]]:
    """Reservations of one rank that the described hardware states; empty for a system that is not described.

    Raises
    ------
    OnboardError: the description is malformed.
    """
    file = None if request is None else find_system_file(request.identity.gpu)
    if request is None or file is None:
        return {}
    source = f"estimate: {file.path.name}, sha256 {file.sha256}; reserved by a rank without CUDA graphs"
    found = {}
    if file.other_mem_bytes is not None:
        found["runtime_overhead_bytes"] = file.other_mem_bytes, f"{source}, misc.other_mem"
    tensor, data, _, expert = request.topology_sizes()
    if data == expert == 1 and tensor in file.nccl_mem_bytes:
        found["comm_overhead_bytes"] = file.nccl_mem_bytes[tensor], f"{source}, misc.nccl_mem[{tensor}] of pure TP"
    return found
