"""What is wrong with a value of a configuration, in words that say what to do.

Source: predict-recommend.md section 15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.prediction.suggestions import closest

_OF_NUMBERS = ("int_type", "int_parsing", "float_type")


def reason_of(fault: Mapping[str, Any], found: Any) -> str:
    """The reason of a fault that pydantic tells.

    Parameters
    ----------
    fault: one of `ValidationError.errors()`.
    found: the value of the document at its place.

    >>> reason_of({"type": "int_type", "msg": "Input should be a valid integer"}, "8")
    "must be a number, found the text '8'; remove the quotes"
    """
    kind, message = fault["type"], fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if kind == "union_tag_invalid":
        tag, tags = fault["ctx"]["tag"], fault["ctx"]["expected_tags"]
        reason = f"type must be {tags}, found {tag!r}" + closest(tag, tags.replace("'", "").split(", "))
    elif kind in _OF_NUMBERS and isinstance(found, str):
        reason = f"must be a number, found the text {found!r}{'; remove the quotes' if _is_number(found) else ''}"
    elif isinstance(found, Mapping) and ("choices" in found or "range" in found):
        reason = "is a domain, and this takes one value; only `fpmsdk recommend` searches, and not every field"
    elif kind == "model_type":
        reason = f"must be a mapping of fields, found {_shown(found)}"
    elif kind == "value_error":
        reason = message
    else:
        reason = {"missing": "is required", "union_tag_not_found": "needs a type"}.get(kind, "")
    return reason or f"{message}, found {_shown(found)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
