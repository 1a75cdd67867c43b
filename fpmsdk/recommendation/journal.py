"""What a sweep has found so far, in a file that survives its process: a head, then one line a candidate, then the end.

The head says which sweep it is, so that lines are never taken for those of another one. A line that the process was
writing when it died is dropped; any other damage is an error.
Source: predict-recommend.md section 8.5.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from msgspec import Struct, field

from fpmsdk.errors import EvidenceError, OnboardError

JOURNAL = "candidates.jsonl"
SCHEMA = "fpmsdk-candidates/1"


class Journal(Struct):
    """The content of a journal.

    head: which sweep and which part of it.
    entries: by index in suggestion order: `{index, fingerprint, sample, outcome}`.
    end: why the sweep ended (`complete`, `time_budget`); None while it goes on, or when it was interrupted.
    size_bytes: up to the end of the last whole line.
    """

    head: dict[str, Any]
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: str | None = None
    size_bytes: int = 0


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """What a journal holds; a torn last line is left out.

    Raises
    ------
    EvidenceError: no journal, or a damaged line; names file and line.
    OSError: it cannot be read.

    Source: predict-recommend.md section 8.5.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / JOURNAL
    >>> with JournalWriter(place, {"input": "a"}) as writer:
    ...     writer.add([{"index": 0, "outcome": {}}])
    >>> read_journal(place).entries
    {0: {'index': 0, 'outcome': {}}}
    """
    content = Path(path).read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines()
    if not lines:
        raise EvidenceError(f"{path}: holds no line; pass --overwrite to begin anew", os.fspath(path))
    head = _line(lines[0], path, 1)
    if head.get("schema") != SCHEMA:
        raise EvidenceError(f"{path}:1: found schema {head.get('schema')!r}, accepted is {SCHEMA!r}", os.fspath(path))
    journal = Journal(head, size_bytes=len(whole))
    for number, line in enumerate(lines[1:], start=2):
        record = _line(line, path, number)
        if "end" in record:
            journal.end = record["end"]
            continue
        index = record.get("index")
        if not isinstance(index, int):
            raise EvidenceError(f"{path}:{number}: a candidate without index; restore the file", os.fspath(path))
        journal.entries[index] = record  # a candidate that timed out is tried again; the last try counts
        journal.end = None
    return journal


def _line(content: bytes, path: str | os.PathLike[str], number: int) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise EvidenceError(
            f"{path}:{number}: not a line of a journal; restore the file, or pass --overwrite to begin anew",
            os.fspath(path),
        )
    return record


class JournalWriter:
    """Appends to a journal; what was added is on the disk when the call returns.

    Parameters
    ----------
    path: the file, in an existing folder.
    head: which sweep it is.
    continued: the journal that is there; None begins one, where nothing is yet.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / JOURNAL
    >>> with JournalWriter(place, {"input": "a"}) as writer:
    ...     writer.close_sweep("complete")
    >>> read_journal(place).end
    'complete'
    """

    def __init__(self, path: str | os.PathLike[str], head: Mapping[str, Any], continued: Journal | None = None) -> None:
        if continued is None:
            self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - closed by __exit__
            self._write([{"schema": SCHEMA, **head}])
        else:
            self._file = open(path, "r+b")  # noqa: SIM115 - likewise
            self._file.truncate(continued.size_bytes)
            self._file.seek(continued.size_bytes)

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Append candidates."""
        self._write(entries)

    def close_sweep(self, reason: str) -> None:
        """Append why the sweep ended."""
        self._write([{"end": reason}])

    def _write(self, records: Iterable[Mapping[str, Any]]) -> None:
        # Keys in their order: what is read again has to be what was never written.
        lines = (json.dumps(record, separators=(",", ":"), allow_nan=False) for record in records)
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> JournalWriter:
        """The writer itself."""
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Close the file."""
        self._file.close()


_RESTORE = "restore that, name another --output-dir, or pass --overwrite to begin anew"


def same_sweep(
    found: Mapping[str, Any], expected: Mapping[str, Any], path: str | os.PathLike[str], remedy: str = _RESTORE
) -> None:
    """Refuse a journal of another sweep.

    Parameters
    ----------
    found: the head of a journal.
    expected: the head that this sweep writes.
    path: the journal, for the message.
    remedy: what to do, for the message.

    Raises
    ------
    OnboardError: naming every field that differs.

    >>> same_sweep({"shard": "1/2"}, {"shard": "2/2"}, "candidates.jsonl")
    Traceback (most recent call last):
        ...
    fpmsdk.errors.OnboardError: candidates.jsonl: is of another sweep: shard is 1/2 there, 2/2 here; restore that, \
name another --output-dir, or pass --overwrite to begin anew
    """
    differences = sorted(_differences("", dict(found), dict(expected)))
    if differences:
        raise OnboardError(f"{path}: is of another sweep: {'; '.join(differences)}; {remedy}", os.fspath(path))


def _differences(place: str, found: Any, expected: Any) -> Iterable[str]:
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for name in sorted({*found, *expected} - {"schema"}):
            where = f"{place}.{name}" if place else name
            yield from _differences(where, found.get(name), expected.get(name))
    elif found != expected:
        yield f"{place} is {_shown(found)} there, {_shown(expected)} here"


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
