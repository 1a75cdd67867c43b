"""Lists of layers in `config.json` that contradict its number of layers.

Source: onboarding.md section 3.1, item 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import OnboardError


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
