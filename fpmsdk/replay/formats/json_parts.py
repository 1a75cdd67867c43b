"""The parts of a JSON document one after the other, each with its place; not their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import ijson

# Places deeper than this are of no interest, and documents deeper than that are no documents.
_DEEPEST_PLACE = 8
_DEEPEST = 500
_FAR_INSIDE = "..."

NOT_JSON = (ijson.JSONError, UnicodeDecodeError, RecursionError)


def json_parts(content: IO[bytes] | Any) -> Iterator[tuple[str, str, Any]]:
    """Place, event and value of every part, as `ijson.parse` gives them; far inside the place is left out.

    Raises one of `NOT_JSON` when the document is damaged or nested too deeply.

    >>> import io
    >>> [part for part in json_parts(io.BytesIO(b'{"a": [1]}')) if part[1] == "number"]
    [('a.item', 'number', 1)]
    """
    labels: list[str] = []  # where each open container is: at a key, or at an item
    for event, value in ijson.basic_parse(content, use_float=True):
        if event in ("end_map", "end_array"):
            labels.pop()
        depth = len(labels) - (event == "map_key")
        yield ".".join(labels[:depth]) if depth <= _DEEPEST_PLACE else _FAR_INSIDE, event, value
        if event == "map_key":
            labels[-1] = value
        elif event in ("start_map", "start_array"):
            labels.append("item")
            if len(labels) > _DEEPEST:
                raise RecursionError(f"nested more than {_DEEPEST} levels deep")
