"""Bytes and lines of a trace file, whatever compresses them; not their meaning."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fpmsdk.errors import TraceError

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def opened(path: str | Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """A stream over the content of a file, uncompressed when it is gzip data by its first bytes.

    Raises
    ------
    TraceError: the file cannot be read, or its compressed data are cut short or damaged.
    """
    try:
        with open(path, "rb") as file:
            if file.peek(2)[:2] != _GZIP_MAGIC:
                yield file
                return
            with gzip.GzipFile(fileobj=file) as content:
                yield content
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise TraceError(
            f"{path}: the gzip data are cut short or damaged ({fault}); copy the file again", path=str(path)
        ) from fault
    except OSError as fault:
        raise TraceError(f"{path}: cannot read the trace: {fault.strerror or fault}", path=str(path)) from fault


def read_bytes(path: str | Path) -> bytes:
    """The whole content of a file, for forms that are one document.

    Raises
    ------
    TraceError: as `opened` does.
    """
    with opened(path) as content:
        return content.read()


def lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, counted from 1, one at a time.

    Raises
    ------
    TraceError: as `opened` does.
    """
    with opened(path) as content:
        for number, text in enumerate(content, 1):
            if text.strip():
                yield number, text


def csv_rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file in UTF-8 that are not blank, each with its last line.

    Raises
    ------
    TraceError: as `opened` does, or names the line that is no text or no CSV.
    """
    with opened(path) as content:
        rows = csv.reader(_text_lines(path, content))
        while True:
            try:
                cells = next(rows, None)
            except csv.Error as fault:
                raise row_error(path, rows.line_num, f"is not CSV: {fault}") from fault
            if cells is None:
                return
            if cells:
                yield rows.line_num, cells


def _text_lines(path: str | Path, content: Iterable[bytes]) -> Iterator[str]:
    for number, text in enumerate(content, 1):
        try:
            yield text.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as fault:
            raise row_error(path, number, f"is not UTF-8 text: {fault}") from fault


def row_error(path: str | Path, line: int, text: str, field: str = "") -> TraceError:
    """A fault of one line, in the wording that every form shares: `<file>: trace line N <text>`."""
    return TraceError(f"{path}: trace line {line} {text}", path=str(path), line=line, field=field)


def no_requests(path: str | Path) -> TraceError:
    """A file without a single request is a fault, not an empty trace."""
    return TraceError(
        f"trace file {path} did not contain any requests; check that it is the right file", path=str(path)
    )
