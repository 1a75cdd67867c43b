"""Signs in `config.json` of a cache layout that it cannot describe, so that only a running engine can.

Source: onboarding.md section 3.1, item 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import OnboardError

_RECURRENT_FIELDS = (
    "ssm_cfg",
    "mamba_d_state",
    "linear_conv_kernel_dim",
    "linear_attn_config",
    "ssm_state_size",
    "mamba_num_heads",
)
_RECURRENT_NAMES = ("mamba", "jamba", "rwkv")
_SPARSE = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM")
_FULL_ATTENTION = 1


def cache_layout_markers(config: Mapping[str, Any], architecture: str | None) -> tuple[str, ...]:
    """The signs, sorted; empty when the configuration describes its cache. Malformed lists are no signs.

    Parameters
    ----------
    config: the part of the configuration that describes the decoder.
    architecture: its architecture.

    Example
    -------
    >>> cache_layout_markers({"layer_types": ["full_attention", "linear_attention", "linear_attention"]}, "X")
    ('layer_types linear_attention x2',)
    """
    known = {"full_attention", "sliding_attention"}
    if architecture in _SPARSE:
        known.add("deepseek_sparse_attention")
    types, kinds = config.get("layer_types"), config.get("attn_type_list")
    names = [name for name in types if isinstance(name, str) and name.strip()] if isinstance(types, list) else []
    numbers = [number for number in kinds if type(number) is int] if isinstance(kinds, list) else []
    signs = [f"layer_types {name} x{count}" for name, count in Counter(names).items() if name not in known]
    signs += [f"attn_type_list {kind} x{count}" for kind, count in Counter(numbers).items() if kind != _FULL_ATTENTION]
    signs += [f"recurrent-state field {name}" for name in _RECURRENT_FIELDS if config.get(name) is not None]
    if any(name in (architecture or "").lower() for name in _RECURRENT_NAMES):
        signs.append(f"recurrent architecture {architecture}")
    return tuple(sorted(signs))


def check_layer_declarations(config: Mapping[str, Any], *, has_markers: bool = False) -> None:
    """Refuse layer lists that contradict the number of layers.

    Parameters
    ----------
    has_markers: whether the layout is left to the engine; then windows and attention kinds are looked at too.

    Raises
    ------
    OnboardError: names the field.
    """
    spellings = ("num_hidden_layers", "n_layer", "num_layers") if has_markers else ("num_hidden_layers",)
    counts = _agreeing(config, spellings, 1)
    if has_markers:
        _agreeing(config, ("sliding_window", "sliding_window_size"), 0, nullable=True)
    for name, kind in (("layer_types", str), ("attn_type_list", int)):
        values = config.get(name)
        if name not in config or (kind is int and not has_markers):
            continue
        if not isinstance(values, list) or (counts is not None and len(values) != counts):
            _refuse(name, f"expected one entry for each of the {counts} layers")
        elif any(type(value) is not kind or not str(value).strip() for value in values):
            _refuse(name, "expected " + ("names" if kind is str else "integers"))


def _agreeing(config: Mapping[str, Any], names: tuple[str, ...], least: int, *, nullable: bool = False) -> int | None:
    found = {name: config[name] for name in names if name in config and not (nullable and config[name] is None)}
    for name, value in found.items():
        if type(value) is not int or value < least:
            _refuse(name, f"expected an integer of at least {least}, found {value!r}")
    if len(set(found.values())) > 1:
        _refuse(next(iter(found)), f"contradicting values {found}")
    return next(iter(found.values()), None)


def _refuse(name: str, reason: str) -> None:
    raise OnboardError(f"config.json: {name}: {reason}", name)
