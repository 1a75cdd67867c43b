"""Trace file forms, one module each: a reader of rows, and for two of them a writer.

A new form is a module and a line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fpmsdk.errors import TraceError
from fpmsdk.replay.builder import TraceBuilder
from fpmsdk.replay.formats.detect import detected_form
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import no_requests
from fpmsdk.replay.rows import Row

__all__ = ["READERS", "WRITERS", "ReadOptions", "Reader", "open_trace", "read_trace", "writing", "written_form"]

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import IO

    from fpmsdk.replay.rows import PlacedRow
    from fpmsdk.replay.trace import Trace

# The module and class of each reader; pyarrow loads with the form that needs it.
READERS = {
    "mooncake": ("mooncake", "MooncakeReader"),
    "mooncake-delta": ("mooncake_delta", "MooncakeDeltaReader"),
    "dynamo": ("dynamo", "DynamoReader"),
    "aiperf": ("aiperf", "AiperfReader"),
    "azure": ("azure", "AzureReader"),
    "burstgpt": ("burstgpt", "BurstGptReader"),
    "guidellm": ("guidellm", "GuidellmReader"),
    "weka": ("weka", "WekaReader"),
    "recorded": ("recorded", "RecordedReader"),
    "parquet": ("parquet", "ParquetReader"),
}
WRITERS = {"parquet": ("parquet", "ParquetWriter"), "mooncake": ("mooncake", "MooncakeWriter")}
_WRITTEN_ENDINGS = {".parquet": "parquet", ".jsonl": "mooncake"}


class Writer(Protocol):
    """What writes rows of a trace to a file."""

    def __init__(self, file: IO[bytes], block_tokens: int) -> None:
        """Begin a file."""

    def write(self, rows: Iterable[PlacedRow]) -> None:
        """Append rows."""

    def close(self) -> None:
        """End the file."""


def open_trace(path: str | Path, format: str | None = None, options: ReadOptions | None = None) -> Reader:
    """A reader of a file, in a named form or in the one that the file shows.

    >>> open_trace("trace.csv.gz", "azure").form
    'azure'
    """
    if format is None:
        format = detected_form(path)
    if format not in READERS:
        raise TraceError(f"unknown trace format {format!r}; known are {', '.join(READERS)}", path=str(path))
    module, name = READERS[format]
    reader: Reader = getattr(import_module(f"fpmsdk.replay.formats.{module}"), name)(path, options or ReadOptions())
    return reader


def read_trace(path: str | Path, format: str | None, options: ReadOptions) -> Trace:
    """Read a whole file into a `Trace`."""
    reader = open_trace(path, format, options)
    timeline = reader.timeline()
    builder: TraceBuilder | None = None
    for row in reader.rows():
        if isinstance(row, Row):
            # Only now the reader knows how many tokens a block has.
            builder = builder or TraceBuilder(reader.clock, reader.keeps_clock, reader.block_tokens)
            builder.add(row, *timeline.place(row))
    if builder is None:
        raise no_requests(path)
    return builder.trace(str(path))


def written_form(path: str | Path, format: str | None) -> str:
    """The form to write a file in: a named one, or the one of its ending.

    >>> written_form("trace.parquet", None)
    'parquet'
    """
    if format is None:
        format = _WRITTEN_ENDINGS.get(Path(path).suffix)
        if format is None:
            raise TraceError(
                f"{path}: the ending does not tell the form to write; known endings are {', '.join(_WRITTEN_ENDINGS)}, "
                f"or name one of {', '.join(WRITERS)}",
                path=str(path),
            )
    if format not in WRITERS:
        raise TraceError(f"cannot write traces of form {format!r}; give {' or '.join(WRITERS)}", path=str(path))
    return format


@contextmanager
def writing(path: str | Path, format: str, block_tokens: int) -> Iterator[Writer]:
    """A writer of a file that takes the place of `path` when the block ends, and never when it fails."""
    from fpmsdk.files import whole_file

    module, name = WRITERS[format]
    with whole_file(path) as file:
        writer: Writer = getattr(import_module(f"fpmsdk.replay.formats.{module}"), name)(file, block_tokens)
        yield writer
        writer.close()
