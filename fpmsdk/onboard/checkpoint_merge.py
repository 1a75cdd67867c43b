"""Merge patches of JSON documents. Source: onboarding.md section 6.1 (RFC 7386)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def merge_patch(document: Any, patch: Any) -> Any:
    """The outcome of an RFC 7386 merge patch: null removes, arrays replace; neither argument is changed.

    >>> merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": [4]}})
    {'b': {'c': [4], 'd': 3}}
    """
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(dict(document)) if isinstance(document, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged
