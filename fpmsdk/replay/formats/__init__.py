"""Trace file forms, one module each: read a file, return a `Trace`. A new form: a module and a line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats import azure, mooncake, recorded

if TYPE_CHECKING:
    from fpmsdk.replay.trace import Trace

Reader = Callable[["str | Path", int], "Trace"]

READERS: dict[str, Reader] = {
    "mooncake": mooncake.read,
    "azure": azure.read,
    "recorded": recorded.read,
}
ENDINGS = {".jsonl": "mooncake", ".csv": "azure", ".json": "recorded"}


def reader_for(path: str | Path, format: str | None) -> Reader:
    """The reader of a named form, or of the form that the file's ending says.

    >>> reader_for("trace.csv.gz", None) is azure.read
    True
    """
    if format is None:
        name = Path(path).name.removesuffix(".gz")
        format = ENDINGS.get(Path(name).suffix)
        if format is None:
            raise TraceError(
                f"{path}: the ending does not tell the trace format; known endings are {', '.join(ENDINGS)} "
                f"(and .gz after them), or name one of {', '.join(READERS)}",
                path=str(path),
            )
    if format not in READERS:
        raise TraceError(f"unknown trace format {format!r}; known are {', '.join(READERS)}", path=str(path))
    return READERS[format]
