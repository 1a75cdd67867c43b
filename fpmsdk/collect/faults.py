"""Checks of what an engine wrote: each names the file, the field, what was found and what is accepted.

Such a fault is a failed collection, not bad input: the engine had run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import CollectionError

_WAY_OUT = "run the attempt again"


def fault(where: str, found: Any, accepted: str) -> CollectionError:
    """The error of a field that holds something else than it may."""
    text = repr(found)
    return CollectionError(
        f"{where}: expected {accepted}, found {text if len(text) <= 120 else text[:117] + '...'}; {_WAY_OUT}"
    )


def require(holds: bool, where: str, found: Any, accepted: str) -> None:
    """Raise `fault` unless the field holds what it may."""
    if not holds:
        raise fault(where, found, accepted)


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        raise fault(where, value, "an object")
    return value


def sequence(value: Any, where: str) -> list[Any]:
    """The value, which must be a list."""
    if not isinstance(value, list):
        raise fault(where, value, "a list")
    return value


def text(value: Any, where: str) -> str:
    """The value, which must be non-empty text."""
    if not isinstance(value, str) or not value:
        raise fault(where, value, "non-empty text")
    return value


def whole(value: Any, where: str, minimum: int = 0) -> int:
    """The value, which must be an integer of at least `minimum`; truth values are none."""
    if type(value) is not int or value < minimum:
        raise fault(where, value, f"an integer of at least {minimum}")
    return value


def seconds(value: Any, where: str, *, positive: bool = False) -> float:
    """The value, which must be a finite number that is not negative."""
    accepted = "a positive finite number" if positive else "a finite number that is not negative"
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise fault(where, value, accepted)
    return float(value)


def is_close(left: float, right: float) -> bool:
    """Whether two times of one thing agree: within 1e-9 of the larger, or 1e-12 s.

    >>> is_close(1.0, 1.0 + 1e-10), is_close(1.0, 1.0 + 1e-8)
    (True, False)
    """
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
