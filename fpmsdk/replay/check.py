"""What is wrong or strange with a trace file, all of it, with lines; and what an engine would say to its requests.

Reads a file row by row as `Trace.read` does, but goes on after a fault. Arrivals go to disk; in memory are the names
that the file gives to requests and sessions, and requests of the same time.
Source: engine-and-replay.md sections 2.5 and 5.2.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fpmsdk.errors import TraceError
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.replay.builder import check_span
from fpmsdk.replay.formats import open_trace, read_trace
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.pools import refusals
from fpmsdk.replay.rejections import rejection_reasons
from fpmsdk.replay.rows import Clock, LeftOut, Row
from fpmsdk.replay.sorting import FirstSeen

_EXAMPLES = 5
# Fewer rows show no pattern.
_ENOUGH_ROWS = 20
_JUMP = 200.0
_USUAL_RATE_RPS = 1000.0
_HOLE_MS = 60_000.0
_HOLE_GAPS = 20.0
_ROWS_PER_STEP = 1000


@dataclass(slots=True)
class Finding:
    """One kind of thing that was found.

    Attributes
    ----------
    level: `fault` (`Trace.read` refuses the file, or an engine the request), `warning` (probably not meant) or `note`.
    kind: `row`, `units`, `order`, `hole`, `zero_output`, `duplicate`, `blocks`, `left_out`, `rejected` or `cut_output`.
    text: what, and what to do.
    count: how often.
    lines: the first lines where.
    """

    level: Literal["fault", "warning", "note"]
    kind: str
    text: str
    count: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, line: int | None) -> None:
        """Count one more."""
        self.count += 1
        if line is not None and len(self.lines) < _EXAMPLES:
            self.lines.append(line)


@dataclass(frozen=True, slots=True)
class TraceCheck:
    """The outcome of a check.

    Attributes
    ----------
    path, format: the file and its form.
    block_tokens: prompt tokens per hash id.
    num_requests, num_sessions: rows without fault.
    findings: worst first.
    """

    path: str
    format: str
    block_tokens: int
    num_requests: int
    num_sessions: int
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return all(finding.level != "fault" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The check as plain data."""
        return asdict(self) | {"ok": self.ok}


def check_trace(
    path: str | Path,
    format: str | None = None,
    *,
    options: ReadOptions | None = None,
    launch: EngineLaunchConfig | Mapping[str, Any] | None = None,
    scheduler_rules: Literal["vllm", "simulator"] = "vllm",
    advance: Callable[[int], None] = lambda rows: None,
) -> TraceCheck:
    """Check a trace file as a whole.

    Parameters
    ----------
    path, format, options: as `Trace.read` takes them.
    launch: also say what this engine would reject, and why; only when the file has no fault.
    scheduler_rules: those of the engine.
    advance: called with the number of rows read since its last call.

    Raises
    ------
    TraceError: the file cannot be read at all.
    LaunchConfigError: the launch is none.

    Example
    -------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "t.csv"
    >>> _ = file.write_text("Timestamp,Request tokens,Response tokens\\n7,472,18\\n5,x,230\\n6,9,1\\n")
    >>> [(finding.kind, finding.lines) for finding in check_trace(file).findings]
    [('row', [3]), ('order', [4])]
    """
    config = launch
    if launch is not None and not isinstance(launch, EngineLaunchConfig):
        config = EngineLaunchConfig.from_mapping(launch)
    reader = open_trace(path, format, options)
    with closing(_Survey(reader)) as survey:
        for number, (line, record) in enumerate(reader.records(), 1):
            survey.take(line, record)
            if number % _ROWS_PER_STEP == 0:
                advance(_ROWS_PER_STEP)
        survey.conclude()
    findings = survey.findings
    if isinstance(config, EngineLaunchConfig) and survey.num_requests and survey.is_sound():
        findings += _outcomes(path, reader, options or ReadOptions(), config, scheduler_rules)
    levels = ("fault", "warning", "note")
    return TraceCheck(
        str(path),
        reader.form,
        reader.block_tokens,
        survey.num_requests,
        survey.num_sessions,
        sorted((found for found in findings if found.count), key=lambda found: levels.index(found.level)),
    )


class _Survey:
    """What the rows of a file show."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._timeline = reader.timeline()
        self.num_requests = self.num_sessions = 0
        self._arrivals = _Arrivals(reader.clock)
        self._moment: set[int] = set()  # the rows of the last time
        self._least_block, self._most_block = 1, math.inf
        self._row_faults: dict[str, Finding] = {}
        self._left_out: dict[str, Finding] = {}
        self._order = Finding("note", "order", "rows lie before the row above them; they are put in order")
        self._zero_output = Finding("note", "zero_output", "requests ask for no output: they end with their prefill")
        self._duplicates = Finding("note", "duplicate", "rows repeat another one of the same time")
        self._surplus = Finding("warning", "blocks", "")
        self._others: list[Finding] = []

    @property
    def findings(self) -> list[Finding]:
        """All kinds, also those that did not occur."""
        several = (self._row_faults.values(), self._left_out.values())
        counted = (self._surplus, self._order, self._duplicates, self._zero_output)
        return [*several[0], *self._others, *counted, *several[1]]

    def is_sound(self) -> bool:
        """Whether `Trace.read` reads the file."""
        return not any(finding.level == "fault" for finding in self.findings)

    def take(self, line: int, record: Any) -> None:
        """One record."""
        try:
            for row in self._reader.parse(line, record):
                if isinstance(row, LeftOut):
                    text = f"records are left out: {row.reason}"
                    self._left_out.setdefault(row.reason, Finding("note", "left_out", text)).add(row.line)
                else:
                    self._observe_blocks(row)
                    self._reader.check_blocks(row)
                    self._observe(row)
        except TraceError as fault:
            # Faults of one kind differ in their figures only.
            kind = fault.field or str(fault).partition(": ")[0]
            self._row_faults.setdefault(kind, Finding("fault", "row", str(fault))).add(fault.line)

    def _observe(self, row: Row) -> None:
        _, turn, _ = self._timeline.place(row)
        self.num_requests += 1
        if row.output_tokens == 0:
            self._zero_output.add(row.line)
        if turn:
            return
        self.num_sessions += 1
        at = row.at or 0
        before = self._arrivals.last_at
        if before is not None and at < before:
            self._order.add(row.line)
        if at != before:
            self._moment.clear()
        likeness = hash((row.prompt_tokens, row.output_tokens, tuple(row.hash_ids)))
        if likeness in self._moment:
            self._duplicates.add(row.line)
        self._moment.add(likeness)
        self._arrivals.add(at, row.line)

    def _observe_blocks(self, row: Row) -> None:
        count = len(row.hash_ids)
        if not count:
            return
        # A block size that needs exactly so many blocks for this prompt.
        self._least_block = max(self._least_block, -(-row.prompt_tokens // count))
        if count > 1:
            self._most_block = min(self._most_block, -(-row.prompt_tokens // (count - 1)) - 1)
        if count > -(-row.prompt_tokens // self._reader.block_tokens):
            self._surplus.add(row.line)

    def conclude(self) -> None:
        """What only shows when all rows are there."""
        size = self._reader.block_tokens
        if not self._least_block <= size <= self._most_block:
            fits = "no one block size fits all of them"
            if self._least_block <= self._most_block:
                fits = f"blocks of {self._least_block} to {self._most_block:g} tokens fit all rows"
                fits = fits.replace(f" to {self._least_block:g} tokens", " tokens")
            self._surplus.text = f"rows have more hash ids than blocks of {size} tokens need; {fits}"
            if not self._surplus.count and math.isfinite(self._most_block):
                for fault in self._row_faults.values():
                    fault.text += f"; {fits}" if "capacity" in fault.text else ""
        if self.num_sessions:
            self._others += self._arrivals.findings(str(self._reader.path))

    def close(self) -> None:
        """Give the disk back."""
        self._arrivals.close()


class _Arrivals:
    """When sessions arrive, and on which line; whether the times are in one unit, and where nothing arrives."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        value_type = np.int64 if clock is Clock.NANOSECONDS else np.float64
        self._seen = FirstSeen(value_type=value_type)
        self._fresh: list[tuple[float, int]] = []
        self._count = 0
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self.last_at: float | None = None
        text = f"times jump by a factor of more than {_JUMP:g} from one row to the next; are two units mixed?"
        self._jumps = Finding("warning", "units", text)

    def add(self, at: float, line: int) -> None:
        """One more arrival, in the order of the file."""
        if self._count >= _ENOUGH_ROWS and at and self.last_at:
            ratio = abs(float(at) / float(self.last_at))
            if ratio > _JUMP or ratio < 1 / _JUMP:
                self._jumps.add(line)
        if self._first is None or at < self._first[0]:
            self._first = at, line
        if self._last is None or at > self._last[0]:
            self._last = at, line
        self.last_at = at
        self._count += 1
        self._fresh.append((at, line))
        if len(self._fresh) == _ROWS_PER_STEP:
            self._put_away()

    def _put_away(self) -> None:
        at, lines = zip(*self._fresh, strict=True)
        self._seen.add(np.array(at, self._seen.dtype["value"]), np.array(lines))
        self._fresh.clear()

    def findings(self, path: str) -> list[Finding]:
        """What is found; there is at least one arrival."""
        assert self._first is not None and self._last is not None
        (first, first_line), (last, last_line) = self._first, self._last
        span_ms = self._clock.to_ms(last - first)
        try:
            check_span(path, span_ms, first_line, last_line)
        except TraceError as fault:
            return [Finding("fault", "units", str(fault), 1, [first_line, last_line])]
        if self._count < _ENOUGH_ROWS or span_ms == 0:
            return []
        found = []
        rate = (self._count - 1) / span_ms * 1e3
        if self._clock is Clock.MILLISECONDS and rate > _USUAL_RATE_RPS:
            text = f"in ms these are {rate:,.0f} requests/s; are the times seconds?"
            found.append(Finding("warning", "units", text, 1))
        return [*found, self._jumps, self._holes(first, span_ms)]

    def _holes(self, first: float, span_ms: float) -> Finding:
        longest = max(_HOLE_MS, _HOLE_GAPS * span_ms / (self._count - 1))
        if self._fresh:
            self._put_away()
        hole = Finding("warning", "hole", "")
        widest: list[tuple[float, float, int]] = []
        before_ms = 0.0
        for block in self._seen.blocks():
            times_ms = self._clock.all_to_ms(block["value"] - first)
            gaps = np.diff(times_ms, prepend=before_ms)
            before_ms = float(times_ms[-1])
            wide = np.flatnonzero(gaps > longest)
            hole.count += len(wide)
            # The widest first, of equally wide ones the earliest.
            some = zip((-gaps[wide]).tolist(), times_ms[wide].tolist(), block["count"][wide].tolist(), strict=True)
            widest = heapq.nsmallest(_EXAMPLES, [*widest, *some])
        if widest:
            text = (
                f"gaps of more than {longest / 1e3:.0f} s without an arrival, the widest of {-widest[0][0] / 1e3:.0f} s"
            )
            hole.text = f"{text}; lines are those after them"
            hole.lines = [line for _, _, line in widest]
        return hole

    def close(self) -> None:
        """Give the disk back."""
        self._seen.close()


def _outcomes(
    path: str | Path, reader: Reader, options: ReadOptions, launch: EngineLaunchConfig, scheduler_rules: str
) -> list[Finding]:
    """What the engine says to each request."""
    trace = read_trace(path, reader.form, options)
    said = refusals(trace, launch, scheduler_rules)
    findings = []
    for number, reason in enumerate(rejection_reasons(launch.engine, scheduler_rules)):
        rejected = np.flatnonzero(said == number)
        if reason is None or not rejected.size:
            continue
        names = ", ".join(trace.request_ids[rejected[:_EXAMPLES]])
        text = f'requests would be rejected: "{reason}" ({names}{", …" if rejected.size > _EXAMPLES else ""})'
        findings.append(Finding("fault", "rejected", text, len(rejected)))
    limit = launch.engine.max_model_len
    if limit is not None:
        is_cut = (trace.prompt_tokens < limit) & (trace.prompt_tokens + trace.output_tokens > limit)
        text = f"requests would be stopped by max_model_len = {limit} before their last token"
        findings.append(Finding("note", "cut_output", text, int(is_cut.sum())))
    return findings
