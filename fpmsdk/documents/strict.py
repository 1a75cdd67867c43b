"""Strict pydantic models of workflow documents, and their faults as one line a field.

Source: onboarding.md section 0 (strict models, errors).
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fpmsdk.errors import OnboardError


class StrictDocument(BaseModel):
    """Base of every workflow document: no unknown fields, no coercion, finite numbers, immutable.

    >>> class Limits(StrictDocument):
    ...     max_batch_size: int
    >>> checked(Limits, {"max_batch_size": "4"}, "limits.yaml")
    Traceback (most recent call last):
        ...
    fpmsdk.errors.OnboardError: limits.yaml: max_batch_size: Input should be a valid integer, found '4'
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


Document = TypeVar("Document", bound=BaseModel)


def checked(kind: type[Document], value: Any, where: str) -> Document:
    """The document that a plain value holds.

    Parameters
    ----------
    kind: the model of the document.
    value: what was read.
    where: the file or option it was read from, for the message.

    Raises
    ------
    OnboardError: with one line for every faulty field.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as fault:
        raise OnboardError("\n".join(f"{where}: {line}" for line in faults(fault)), where) from None


def faults(error: ValidationError) -> list[str]:
    """One line for every fault: dotted field, what is wrong, what was found."""
    lines = []
    for fault in error.errors(include_url=False):
        place = ""
        for part in fault["loc"]:
            place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
        reason = fault["msg"].removeprefix("Value error, ")
        found = "" if fault["type"] in ("missing", "value_error") else f", found {_shown(fault['input'])}"
        lines.append(f"{place}: {reason}{found}" if place else f"{reason}{found}")
    return lines


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
