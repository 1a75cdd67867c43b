"""Strict reading of JSON text into plain values that still show a key given twice.

It knows nothing of any document; the schema walker reports what it finds with a path.
"""

import json
import math
from typing import Any


class RepeatedKeys(dict[str, Any]):
    """An object in which some key was written more than once; `pairs` keeps all of them in order."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def read_json(text: str) -> Any:
    """Return the value of `text`.

    Raises `ValueError` for malformed text, `NaN` or `Infinity` literals and numbers beyond float64.

    >>> read_json('{"tp": 2}')
    {'tp': 2}
    >>> read_json('{"tp": 1e999}')
    Traceback (most recent call last):
        ...
    ValueError: number out of range: 1e999
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_float=_finite_float, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else RepeatedKeys(pairs)


def _finite_float(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"number out of range: {literal}")
    return value


def _refuse_constant(literal: str) -> float:
    raise ValueError(f"{literal} is not a JSON number")
