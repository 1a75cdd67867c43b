"""Strict reading of JSON text: no repeated keys, no numbers that JSON cannot carry.

It knows nothing of any document; faults carry the dotted path of the object they are in.
"""

import math
from typing import Any

# Deep enough for every document, and shallow enough for whatever walks one.
MAX_DEPTH = 100


class JsonFault(ValueError):
    """The text is no JSON document; `path` is empty unless a key is repeated inside some object."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.path = path


class _RepeatedKeys(dict[str, Any]):
    """An object in which some key was written more than once; `pairs` keeps all of them in order."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def read_json(text: str) -> Any:
    """Return the value of `text`.

    Raises: `JsonFault` for malformed text, a key given twice, `NaN` or `Infinity` literals, numbers beyond
    float64, and nesting beyond `MAX_DEPTH`.

    >>> read_json('{"tp": 2}')
    {'tp': 2}
    >>> read_json('{"tp": 2, "tp": 2}')
    Traceback (most recent call last):
        ...
    fpmsdk.config.jsontext.JsonFault: duplicate field `tp`
    """
    import json  # most configurations come as mappings

    try:
        value = json.loads(text, object_pairs_hook=_object, parse_float=_finite_float, parse_constant=_refuse_constant)
        _refuse_repeated(value, "", 0)
    except RecursionError:
        raise _too_deep() from None
    except JsonFault:
        raise
    except ValueError as fault:
        raise JsonFault(str(fault)) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else _RepeatedKeys(pairs)


def _too_deep() -> JsonFault:
    return JsonFault(f"nested too deeply, more than {MAX_DEPTH} levels")


def _refuse_repeated(value: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_repeated(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, dict):
        seen = set()
        for key, item in value.pairs if isinstance(value, _RepeatedKeys) else value.items():
            if key in seen:
                raise JsonFault(f"duplicate field `{key}`", path)
            seen.add(key)
            _refuse_repeated(item, f"{path}.{key}" if path else key, depth + 1)


def _finite_float(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise JsonFault(f"number out of range: {literal}")
    return value


def _refuse_constant(literal: str) -> float:
    raise JsonFault(f"{literal} is not a JSON number")
