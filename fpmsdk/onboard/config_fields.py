"""Typed access to the fields of a `config.json`, under all names that checkpoints give them.

Source: onboarding.md section 3.1, item 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import OnboardError

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size",),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    "num_experts": _EXPERTS,
}
_NULLABLE = frozenset({"num_key_value_heads", "head_dim", "intermediate_size"})
# A layer without ordinary attention may state these as 0, once the cache is left to the runtime probe.
HEAD_FIELDS = frozenset({"num_key_value_heads", "head_dim"})
LATENT_FIELDS = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_head_dim",
    "index_n_heads",
)
EXPERT_FIELDS = ("moe_intermediate_size", "num_experts_per_tok")
# Tensors beside the plain decoder; 0 means none.
AUXILIARY_FIELDS = (
    "n_shared_experts",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "mtp_transformer_layers",
    "first_k_dense_replace",
)
# Read without a check of their type, so that they are looked through for numbers that are none.
_UNTYPED_FIELDS = (
    "quantization_config",
    "quant_algo",
    "kv_cache_quant_algo",
    "expert_dtype",
    "kv_lora_rank",
    "q_lora_rank",
    "compress_ratios",
    "attention_k_eq_v",
    "max_window_layers",
    "sliding_window_pattern",
    "hybrid_layer_pattern",
    "lm_head_bias",
    "use_qk_norm",
    "moe_router_dtype",
    "use_mtp",
)


def integer(value: Any, field: str, *, least: int = 1, most: int | None = None) -> int:
    """The integer that `value` is; booleans, floats and numeric text are none.

    >>> integer(8, "num_attention_heads")
    8
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        accepted = f"of at least {least}" if most is None else f"in {least}..{most}"
        raise OnboardError(f"{field} must be an integer {accepted}, found {value!r}", field)
    return value


def text(value: Any, field: str) -> str:
    """The text that `value` is, stripped; neither blank nor with NUL.

    >>> text(" bfloat16 ", "dtype")
    'bfloat16'
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise OnboardError(f"{field} must be text other than blanks, without NUL, found {value!r}", field)
    return value.strip()


def dimension(config: Mapping[str, Any], name: str, *, zero_heads: bool = False) -> int | None:
    """A dimension under whichever of its names it is given; None when under none.

    Parameters
    ----------
    zero_heads: whether `HEAD_FIELDS` may be 0.

    Raises
    ------
    OnboardError: no integer, or names that disagree.

    >>> dimension({"n_embd": 512, "hidden_size": 512}, "hidden_size")
    512
    """
    least = 0 if name == "num_experts" or (zero_heads and name in HEAD_FIELDS) else 1
    found = {
        key: integer(config[key], key, least=least)
        for key in ALIASES[name]
        if key in config and not (config[key] is None and name in _NULLABLE)
    }
    if len(set(found.values())) > 1:
        raise OnboardError(f"{name} is given under several names that disagree: {found}; keep one", name)
    return next(iter(found.values()), None)


def dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype of a checkpoint's tensors, None when it states none.

    >>> dtype({"torch_dtype": "torch.bfloat16"})
    'bfloat16'
    """
    found = {
        key: text(config[key], key).removeprefix("torch.")
        for key in ("dtype", "torch_dtype")
        if config.get(key) is not None
    }
    if len(set(found.values())) > 1:
        raise OnboardError(f"dtype and torch_dtype disagree: {found}; keep one", "dtype")
    return next(iter(found.values()), None)


def flag(config: Mapping[str, Any], name: str) -> bool | None:
    """A boolean field, None when it is absent.

    >>> flag({"use_sconv": True}, "use_sconv"), flag({}, "use_sconv")
    (True, None)
    """
    if name not in config:
        return None
    value = config[name]
    if type(value) is not bool:
        raise OnboardError(f"{name} must be true or false, found {value!r}", name)
    return value


def require_finite(config: Mapping[str, Any]) -> None:
    """Refuse Infinity and NaN in fields that are read; JSON text may hold them elsewhere."""
    for name in _UNTYPED_FIELDS:
        finite(config.get(name), name)


def finite(value: Any, field: str) -> None:
    """Refuse Infinity and NaN anywhere in `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise OnboardError(f"{field} must be a finite number, found {value!r}", field)
    if isinstance(value, dict):
        for key, item in value.items():
            finite(item, f"{field}.{key}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            finite(item, f"{field}[{place}]")
