"""Bytes of a trace file, whatever compresses them; not their meaning."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from fpmsdk.errors import TraceError

_GZIP_MAGIC = b"\x1f\x8b"


def read_bytes(path: str | Path) -> bytes:
    """The content of a file, uncompressed when it is gzip data by its first bytes.

    Raises
    ------
    TraceError: the file cannot be read, or its compressed data are cut short or damaged.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as fault:
        raise TraceError(f"{path}: cannot read the trace: {fault.strerror}", path=str(path)) from fault
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise TraceError(
            f"{path}: the gzip data are cut short or damaged ({fault}); copy the file again", path=str(path)
        ) from fault


def row_error(path: str | Path, line: int, text: str, field: str = "") -> TraceError:
    """A fault of one line, in the wording that every form shares: `<file>: trace line N <text>`."""
    return TraceError(f"{path}: trace line {line} {text}", path=str(path), line=line, field=field)


def no_requests(path: str | Path) -> TraceError:
    """A file without a single request is a fault, not an empty trace."""
    return TraceError(
        f"trace file {path} did not contain any requests; check that it is the right file", path=str(path)
    )
