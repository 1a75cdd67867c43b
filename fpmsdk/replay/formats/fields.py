"""Fields that several forms share: token counts and times in text, and the value that a decoder refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import MAX_TOKENS

_COUNT = re.compile(r"[0-9]{1,18}")  # int() refuses thousands of digits in its own words
_SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")

Fault = Callable[[str, str], TraceError]


def token_count(fault: Fault, name: str, text: str, low: int) -> int:
    """A number of tokens in text, at least `low`; raises what `fault` makes."""
    cell = text.strip()
    if not _COUNT.fullmatch(cell) or not low <= int(cell) <= MAX_TOKENS:
        raise fault(f"{name} is {shown(text)}; give an integer from {low} to {MAX_TOKENS}", name)
    return int(cell)


def nanoseconds(fault: Fault, name: str, text: str) -> int:
    """Decimal seconds in text, exactly; raises what `fault` makes."""
    cell = text.strip()
    time_ns = round(Decimal(cell) * 1_000_000_000) if _SECONDS.fullmatch(cell) else -1
    if not 0 <= time_ns < 2**63:
        raise fault(f"{name} is {shown(text)}; give seconds of at least 0, below 2^63 ns", name)
    return time_ns


def refused_field(fault: Exception) -> str:
    """The path of the field that a decoder refused, as `hash_ids[1]`; empty for the whole record."""
    return str(fault).rpartition("$.")[2].rstrip("`") if "$." in str(fault) else ""


def found_in(text: bytes, field: str) -> str:
    """What stands in a record where a decoder refused a field: `, found 3.5`, or nothing."""
    try:
        value: Any = msgspec.json.decode(text)
        for part in re.findall(r"[^.\[\]]+", field):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return f", found {msgspec.json.encode(value).decode()}"
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, ValueError, RecursionError):
        return ""
