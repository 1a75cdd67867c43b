"""Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens, without prompt contents.

Source: engine-and-replay.md section 5.2; Azure/AzurePublicDataset, AzureLLMInferenceTrace.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from fpmsdk.config.schema import shown
from fpmsdk.replay.formats.source import no_requests, read_bytes, row_error
from fpmsdk.replay.trace import MAX_TOKENS, Trace

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_COUNT = re.compile(r"[0-9]{1,18}")  # int() refuses thousands of digits in its own words
_SECOND = timedelta(seconds=1)
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def read(path: str | Path, block_tokens: int) -> Trace:
    """Read an Azure trace; the earliest arrival becomes 0 and rows may be in any order.

    Raises
    ------
    TraceError: names the file, the line and the column.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise row_error(path, 1, f"is not UTF-8 text: {fault}") from fault
    rows = _rows(path, text)
    _, header = next(rows, (0, None))
    if header is None:
        raise no_requests(path)
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise row_error(path, 1, f"lacks the column {missing[0]}; an Azure trace has {', '.join(_COLUMNS)}", missing[0])
    at, context, generated = (header.index(name) for name in _COLUMNS)

    times_ns: list[int] = []
    zoned: bool | None = None
    prompts: list[int] = []
    outputs: list[int] = []
    request_ids: list[str] = []
    for line, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            raise row_error(path, line, f"has {len(cells)} cells, the header {len(header)}; is the file cut short?")
        time_ns, has_zone = _nanoseconds(path, line, cells[at])
        if zoned not in (None, has_zone):
            raise row_error(
                path,
                line,
                f"TIMESTAMP {shown(cells[at])} mixes times with and without a zone; use one form",
                "TIMESTAMP",
            )
        zoned = has_zone
        times_ns.append(time_ns)
        prompts.append(_tokens(path, line, "ContextTokens", cells[context], 1))
        outputs.append(_tokens(path, line, "GeneratedTokens", cells[generated], 0))
        request_ids.append(f"request_{line}")
    if not prompts:
        raise no_requests(path)
    origin = min(times_ns)
    return Trace.from_arrays(
        [(time_ns - origin) / 1e6 for time_ns in times_ns],
        prompts,
        outputs,
        request_ids=request_ids,
        block_tokens=block_tokens,
    )


def _rows(path: str | Path, text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(text.splitlines())
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as fault:
            raise row_error(path, reader.line_num, f"is not CSV: {fault}") from fault
        if cells is None:
            return
        yield reader.line_num, cells


def _nanoseconds(path: str | Path, line: int, text: str) -> tuple[int, bool]:
    # datetime keeps microseconds only and the traces have 100 ns, so the fraction is read apart.
    match = _TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        seconds, fraction, zone = match.groups()
        moment = datetime.fromisoformat(seconds + (zone or ""))
    except ValueError:
        raise row_error(
            path, line, f"TIMESTAMP is {shown(text)}; give YYYY-MM-DD HH:MM:SS.fffffff", "TIMESTAMP"
        ) from None
    whole = (moment - (_EPOCH_UTC if zone else _EPOCH)) // _SECOND
    return whole * 1_000_000_000 + int((fraction or "").ljust(9, "0")), zone is not None


def _tokens(path: str | Path, line: int, name: str, text: str, low: int) -> int:
    cell = text.strip()
    if not _COUNT.fullmatch(cell) or not low <= int(cell) <= MAX_TOKENS:
        raise row_error(path, line, f"{name} is {shown(text)}; give an integer from {low} to {MAX_TOKENS}", name)
    return int(cell)
