"""Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens, without prompt contents.

Source: engine-and-replay.md section 5.2; Azure/AzurePublicDataset, AzureLLMInferenceTrace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.fields import token_count
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import row_error
from fpmsdk.replay.formats.table import Table
from fpmsdk.replay.rows import Clock, LeftOut, Row

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_SECOND = timedelta(seconds=1)
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


class AzureReader(Reader):
    """Rows in any order; the times of all have a zone or none has."""

    form = "azure"

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.clock = Clock.NANOSECONDS
        self._table = Table(path, COLUMNS, "an Azure trace")
        self._zoned: bool | None = None

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """The rows below the header."""
        return self._table.rows()

    def parse(self, line: int, record: list[str]) -> Iterator[Row | LeftOut]:
        """One request."""
        fault = partial(row_error, self.path, line)
        at, prompt, output = self._table.cells(line, record)
        time_ns, has_zone = _nanoseconds(self.path, line, at)
        if self._zoned not in (None, has_zone):
            raise fault(f"TIMESTAMP {shown(at)} mixes times with and without a zone; use one form", "TIMESTAMP")
        self._zoned = has_zone
        yield Row(
            line,
            token_count(fault, "ContextTokens", prompt, 1),
            token_count(fault, "GeneratedTokens", output, 0),
            at=time_ns,
        )


def _nanoseconds(path: str | Path, line: int, text: str) -> tuple[int, bool]:
    # datetime keeps microseconds only and the traces have 100 ns, so the fraction is read apart.
    match = _TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        seconds, fraction, zone = match.groups()
        moment = datetime.fromisoformat(seconds + (zone or ""))
    except ValueError:
        raise _no_timestamp(path, line, text) from None
    whole = (moment - (_EPOCH_UTC if zone else _EPOCH)) // _SECOND
    time_ns = whole * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
    if abs(time_ns) >= 2**63:
        raise _no_timestamp(path, line, text)
    return time_ns, zone is not None


def _no_timestamp(path: str | Path, line: int, text: str) -> TraceError:
    return row_error(
        path, line, f"TIMESTAMP is {shown(text)}; give YYYY-MM-DD HH:MM:SS.fffffff, from 1678 to 2262", "TIMESTAMP"
    )
