"""A database on disk for what is too much for the memory; it vanishes with its connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fpmsdk.errors import TraceError

_CACHE_KIB = 4096


def scratch_database() -> sqlite3.Connection:
    """A private database that sorts on disk; in memory are a few MiB of it."""
    database = sqlite3.connect("")
    for pragma in (f"cache_size = -{_CACHE_KIB}", "journal_mode = off", "synchronous = off", "temp_store = file"):
        database.execute(f"pragma {pragma}")
    return database


@contextmanager
def full_disk_told(path: str | Path) -> Iterator[None]:
    """Make what goes wrong with a database an error of the trace whose rows are in it."""
    try:
        yield
    except sqlite3.Error as fault:
        text = f"{path}: its rows cannot be kept on disk meanwhile: {fault}; make room, or set TMPDIR to where there is"
        raise TraceError(text, path=str(path)) from fault
