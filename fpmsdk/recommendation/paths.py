"""Values of a document by dotted path; documents share what they have in common.

Source: predict-recommend.md section 6.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.recommendation.parallelism import CONTEXT_SIZES, Sizes


def get(document: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none.

    >>> get({"a": {"b": 1}}, "a.b"), get({"a": 1}, "a.b")
    (1, None)
    """
    for name in path.split("."):
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def put(document: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The document with a value at a dotted path; only the mappings that lead there are copied.

    >>> put({"a": {"b": 1, "c": 2}}, "a.b", 3)
    {'a': {'b': 3, 'c': 2}}
    """
    first, _, rest = path.partition(".")
    changed = dict(document)
    if not rest:
        changed[first] = value
        return changed
    inner = document.get(first)
    changed[first] = put(inner if isinstance(inner, Mapping) else {}, rest, value)
    return changed


def put_sizes(document: Mapping[str, Any], role: str, sizes: Sizes) -> dict[str, Any]:
    """The document with the parallel sizes of a role; sizes of its contexts stay as they are."""
    path = f"engine.workers.{role}.parallelism"
    given = get(document, path)
    kept = {name: given[name] for name in CONTEXT_SIZES if name in given} if isinstance(given, Mapping) else {}
    return put(document, path, sizes.to_dict() | kept)
