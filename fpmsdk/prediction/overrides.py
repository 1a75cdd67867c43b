"""`--set PATH=YAML`: values of a configuration that are given on the command line.

Source: predict-recommend.md section 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fpmsdk.errors import OnboardError


def apply_overrides(document: dict[str, Any], items: Sequence[str], *, forbidden: Sequence[str] = ()) -> dict[str, Any]:
    """The document with values replaced or added; missing mappings on the way are made.

    Parameters
    ----------
    items: `PATH=YAML` each, applied in order; the path is dotted.
    forbidden: sections that no path may begin with.

    Raises
    ------
    OnboardError: an item without `=`, with an empty part or a list index, of a forbidden section, through a value that
        is no mapping, or with a value that is no YAML.

    >>> apply_overrides({"a": {"b": 1}}, ["a.b=2", "a.c.d=[x]"])
    {'a': {'b': 2, 'c': {'d': ['x']}}}
    """
    for item in items:
        path, equals, text = item.partition("=")
        parts = path.strip().split(".")
        if not equals:
            raise _fault(item, "must be PATH=YAML, such as engine.context_length=4096")
        if not all(parts):
            raise _fault(item, "the path has an empty part")
        if index := next((part for part in parts if part.isdigit()), None):
            raise _fault(item, f"{index} is a list index; replace the whole list")
        if parts[0] in forbidden:
            raise _fault(item, f"section {parts[0]} belongs to a search; run `fpmsdk recommend`")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise _fault(item, f"the value is no YAML: {' '.join(str(error).split())}") from None
        document = _placed(document, parts, value, item)
    return document


def _placed(document: Mapping[str, Any], parts: Sequence[str], value: Any, item: str) -> dict[str, Any]:
    name, *rest = parts
    if not rest:
        return {**document, name: value}
    inner = document.get(name)
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise _fault(item, f"{name} is {inner!r}, which has no fields")
    return {**document, name: _placed(inner, rest, value, item)}


def _fault(item: str, reason: str) -> OnboardError:
    return OnboardError(f"--set {item}: {reason}", "--set")
