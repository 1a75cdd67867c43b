"""Profile fields that a person states: which there are, what they take, how they are read.

Source: onboarding.md sections 1.1 and 3.3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fpmsdk.config.modes import COMM_MODES, GEMM_MODES, KV_CACHE_MODES, MOE_MODES, RECORDED_FMHA_MODES
from fpmsdk.config.profile import DECLARED_FIELDS, MAX_BYTES, CacheGroup
from fpmsdk.documents.strict import checked
from fpmsdk.documents.yaml_files import parse_yaml, read_mapping
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.config_fields import integer, text

MODEL_FIELDS = ("architecture", "context_length", "num_experts")
PRECISION_FIELDS = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "kv_cache_dtype")
DEPLOYMENT_FIELDS = (*PRECISION_FIELDS, "moe_backend", "attention_backend")
RESOURCE_FIELDS = (
    *DECLARED_FIELDS,
    "kv_bytes_per_token",
    "cache_layout",
    "cache_groups",
    "max_num_tokens",
    "max_batch_size",
)
OVERRIDE_FIELDS = frozenset((*MODEL_FIELDS, *DEPLOYMENT_FIELDS, *RESOURCE_FIELDS, "cache_block_sizes", "provenance"))
# What an override may claim of a cache that only a probe can measure; an import checks it.
CLAIMED_GEOMETRY = ("cache_layout", "cache_groups", "kv_bytes_per_token")
# Of one rank, so that no other topology can take it over.
RANK_FIELDS = (*DECLARED_FIELDS, "kv_bytes_per_token")
GROUP_NAMES = ("full_attention", "sliding_attention", "full_convolution", "sliding_convolution")

CHOICES: dict[str, tuple[str, ...]] = {
    "gemm_quant_mode": GEMM_MODES,
    "moe_quant_mode": MOE_MODES,
    "fmha_quant_mode": RECORDED_FMHA_MODES,
    "comm_quant_mode": COMM_MODES,
    "kv_cache_dtype": KV_CACHE_MODES,
    "cache_layout": ("linear", "grouped"),
}
_MAY_BE_ZERO = frozenset({"num_experts", *DECLARED_FIELDS})
_INTEGERS = frozenset({"context_length", "num_experts", "max_num_tokens", "max_batch_size", *RANK_FIELDS})


def load_overrides(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The flat mapping of an overrides file, its names checked and its values not yet; empty without a file.

    Raises
    ------
    OnboardError: no such mapping, or unknown fields; names the file.
    OSError: it cannot be read.
    """
    if path is None:
        return {}
    found = read_mapping(path)
    _check_names(found, f"{path}: ")
    return found


def check_overrides(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Every stated value, checked on its own and against the others.

    Raises
    ------
    OnboardError: names the field, what it takes and what was found.

    >>> check_overrides({"fmha_quant_mode": "bfloat16", "max_num_tokens": 4096})
    {'fmha_quant_mode': 'bfloat16', 'max_num_tokens': 4096}
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise OnboardError(f"overrides must be a flat mapping, found {overrides!r}", "resource_overrides")
    _check_names(overrides)
    found = {name: _checked(name, value) for name, value in overrides.items()}
    layout = found.get("cache_layout")
    if "cache_groups" in found and ("kv_bytes_per_token" in found or layout == "linear"):
        raise OnboardError(
            "cache_groups contradict kv_bytes_per_token and cache_layout linear; keep one of them", "cache_groups"
        )
    if "kv_bytes_per_token" in found and layout == "grouped":
        raise OnboardError("kv_bytes_per_token contradicts cache_layout grouped; leave one out", "kv_bytes_per_token")
    check_total_bytes(found)
    return found


def _check_names(overrides: Mapping[str, Any], where: str = "") -> None:
    if unknown := sorted(str(name) for name in overrides if name not in OVERRIDE_FIELDS):
        known = ", ".join(sorted(OVERRIDE_FIELDS))
        raise OnboardError(f"{where}unknown override fields: {', '.join(unknown)}; known are {known}", unknown[0])


def check_total_bytes(values: Mapping[str, Any]) -> None:
    """Refuse bytes beyond what a profile can hold, one by one and in total."""
    for name in RANK_FIELDS:
        if name in values:
            integer(values[name], name, least=0 if name in _MAY_BE_ZERO else 1, most=MAX_BYTES)
    total = sum(values.get(name, 0) for name in DECLARED_FIELDS)
    if total > MAX_BYTES:
        raise OnboardError(f"{', '.join(DECLARED_FIELDS)} add up to {total}, more than {MAX_BYTES}", DECLARED_FIELDS[0])


def _checked(name: str, value: Any) -> Any:
    if name == "cache_groups":
        if not isinstance(value, list) or not value:
            raise OnboardError(f"{name} must be a list of groups, found {value!r}", name)
        groups = [checked(CacheGroup, group, f"{name}[{place}]") for place, group in enumerate(value)]
        if len({group.name for group in groups}) < len(groups):
            raise OnboardError(f"{name}: names must be unique", name)
        return [group.model_dump(mode="json") for group in groups]
    if name == "cache_block_sizes":
        if not isinstance(value, dict) or not value or set(value) - set(GROUP_NAMES):
            raise OnboardError(
                f"{name} must map some of {', '.join(GROUP_NAMES)} to tokens of a block, found {value!r}", name
            )
        return {group: integer(size, f"{name}.{group}") for group, size in value.items()}
    if name in _INTEGERS:
        most = MAX_BYTES if name in RANK_FIELDS else None
        return integer(value, name, least=0 if name in _MAY_BE_ZERO else 1, most=most)
    stated = text(value, name)
    if stated not in CHOICES.get(name, (stated,)):
        raise OnboardError(f"{name} must be one of {', '.join(CHOICES[name])}, found {stated!r}", name)
    return stated


# --- answers at a prompt ---

_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B", re.IGNORECASE)


def is_bytes(name: str) -> bool:
    """Whether a field is a number of bytes.

    >>> is_bytes("kv_bytes_per_token"), is_bytes("max_num_tokens")
    (True, False)
    """
    return name in RANK_FIELDS


def read_answer(name: str, answer: str) -> Any:
    """The value of a field as a person types it, checked.

    Bytes are integers or have a unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.

    Raises
    ------
    OnboardError: no such value; names the field.

    >>> read_answer("weights_bytes", "1.5 GiB")
    1610612736
    """
    if name in ("cache_groups", "cache_block_sizes"):
        value = parse_yaml(answer, name)
    elif name in _INTEGERS:
        value = _bytes(name, answer) if is_bytes(name) else _integer(name, answer)
    else:
        value = answer
    return check_overrides({name: value})[name]


def _integer(name: str, answer: str) -> int:
    try:
        return int(answer)
    except ValueError:
        raise OnboardError(f"{name} must be an integer, found {answer!r}", name) from None


def _bytes(name: str, answer: str) -> int:
    found = _QUANTITY.fullmatch(answer.strip())
    if found is None:
        try:
            return int(answer)
        except ValueError:
            raise OnboardError(
                f"{name} must be bytes or a quantity such as 512 MiB or 70 GiB, found {answer!r}", name
            ) from None
    number, prefix, binary = found.groups()
    size = Fraction(number) * (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper())
    if size.denominator != 1:
        raise OnboardError(f"{name} must be a whole number of bytes, found {answer!r}", name)
    return int(size)
