"""What may stand at a place of a configuration, and which of the names there was probably meant.

Source: predict-recommend.md sections 2.1 and 15.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel


def closest(name: str, accepted: Iterable[str]) -> str:
    """A question with the name that was probably meant, or nothing when none is near.

    >>> closest("schedular", ["scheduler", "timing"])
    " (did you mean 'scheduler'?)"
    >>> closest("x", ["scheduler"])
    ''
    """
    near = difflib.get_close_matches(name, list(accepted), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def accepted_names(model: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    """Names of the fields at a place of a model.

    Parameters
    ----------
    location: as pydantic tells it, with the tags of unions.
    """
    models = [model]
    for part in location:
        tagged = [kind for kind in models if _tag(kind) == part]
        if tagged:
            models = tagged
            continue
        fields = [kind.model_fields[part] for kind in models if isinstance(part, str) and part in kind.model_fields]
        models = [found for field in fields for found in _models(field.annotation)] or models
    return sorted({name for kind in models for name in kind.model_fields})


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _models(part)


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("type")
    values = () if field is None else get_args(field.annotation)
    return values[0] if len(values) == 1 else None
