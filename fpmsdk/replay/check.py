"""What is wrong or strange with a trace file, all of it, with lines; and what an engine would say to its requests.

Reads a file row by row as `Trace.read` does, but goes on after a fault. Rows go to disk, where the rules that look at
several of them find them in the order that they need.
Source: engine-and-replay.md sections 2.5 and 5.2.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fpmsdk.errors import TraceError
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.replay.builder import check_span
from fpmsdk.replay.checked_rows import CheckedRows
from fpmsdk.replay.formats import open_trace
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.pools import refusals
from fpmsdk.replay.rejections import rejection_reasons
from fpmsdk.replay.rows import Clock, LeftOut, Row
from fpmsdk.replay.scratch import full_disk_told
from fpmsdk.replay.spool import Spool
from fpmsdk.replay.timeline import Timeline

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

    Memory does not grow with the number of requests; a form that is one document (`recorded`) and a single Weka play
    are decoded whole.

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
    with full_disk_told(path), closing(CheckedRows()) as rows:
        findings = _findings(reader, rows, advance)
        num_requests, num_sessions = rows.count(), rows.count_sessions()
    is_sound = not any(finding.level == "fault" and finding.count for finding in findings)
    if isinstance(config, EngineLaunchConfig) and num_requests and is_sound:
        again = open_trace(path, reader.form, options)
        findings += _outcomes(again, config, scheduler_rules)
    levels = ("fault", "warning", "note")
    return TraceCheck(
        str(path),
        reader.form,
        reader.block_tokens,
        num_requests,
        num_sessions,
        sorted((found for found in findings if found.count), key=lambda found: levels.index(found.level)),
    )


def _findings(reader: Reader, rows: CheckedRows, advance: Callable[[int], None]) -> list[Finding]:
    """What every rule finds, one after the other; a rule does not see rows that one before it refuses."""
    reading = _Reading(reader, advance)
    rows.fill(reading.sound_rows())
    refused = reading.refused
    if reading.has_names:
        _refuse_repeated_names(reader, rows, refused)
    _refuse_contradicting_turns(reader, rows, refused)
    return [
        *refused.findings(reading.blocks.hint()),
        *_units(reader, rows),
        reading.blocks.surplus(),
        _note("order", "rows lie before the row above them; they are put in order", rows.before_the_last()),
        _note("duplicate", "rows repeat another one of the same time", rows.copies()),
        _note("zero_output", "requests ask for no output: they end with their prefill", rows.without_output()),
        *reading.left_out.values(),
    ]


def _note(kind: str, text: str, lines: Iterable[int]) -> Finding:
    return _counted(Finding("note", kind, text), lines)


def _counted(finding: Finding, lines: Iterable[int]) -> Finding:
    for line in lines:
        finding.add(line)
    return finding


class _Refused:
    """Faults of rows, in whatever order they are found; of each kind the first ones of the file are kept."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, list[tuple[int, int | None, str]]] = {}

    def add(self, place: int, fault: TraceError) -> None:
        """Count a fault of the row at a place."""
        # Faults of one kind differ in their figures only.
        kind = fault.field or str(fault).partition(": ")[0]
        self._counts[kind] += 1
        first = self._first.setdefault(kind, [])
        insort(first, (place, fault.line, str(fault)))
        del first[_EXAMPLES:]

    def findings(self, block_hint: str) -> list[Finding]:
        """One for each kind."""
        found = []
        for kind, first in sorted(self._first.items(), key=lambda item: item[1][0][0]):
            text = first[0][2]
            lines = [line for _, line, _ in first if line is not None]
            found.append(
                Finding("fault", "row", text + block_hint if "capacity" in text else text, self._counts[kind], lines)
            )
        return found


class _Reading:
    """The rows of a file one by one, and what each shows alone."""

    def __init__(self, reader: Reader, advance: Callable[[int], None]) -> None:
        self._reader = reader
        self._advance = advance
        self.refused = _Refused()
        self.left_out: dict[str, Finding] = {}
        self.blocks = _Blocks(reader)
        self.has_names = False

    def sound_rows(self) -> Iterator[tuple[int, Row]]:
        """Rows with ascending numbers."""
        place = 0
        for number, (line, record) in enumerate(self._reader.records(), 1):
            try:
                for row in self._reader.parse(line, record):
                    place += 1
                    if isinstance(row, LeftOut):
                        text = f"records are left out: {row.reason}"
                        self.left_out.setdefault(row.reason, Finding("note", "left_out", text)).add(row.line)
                        continue
                    self.blocks.add(row)
                    self._reader.check_blocks(row)
                    self.has_names = self.has_names or bool(row.request_id)
                    yield place, row
            except TraceError as fault:
                place += 1
                self.refused.add(place, fault)
            if number % _ROWS_PER_STEP == 0:
                self._advance(_ROWS_PER_STEP)


class _Blocks:
    """Which sizes of blocks explain how many hash ids the prompts have."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._least, self._most = 1, math.inf
        self._surplus = Finding("warning", "blocks", "")

    def add(self, row: Row) -> None:
        """Look at one more row."""
        count = len(row.hash_ids)
        if not count or row.describes_output:
            return
        # A block size that needs exactly so many blocks for this prompt.
        self._least = max(self._least, -(-row.prompt_tokens // count))
        if count > 1:
            self._most = min(self._most, -(-row.prompt_tokens // (count - 1)) - 1)
        if count > -(-row.prompt_tokens // self._reader.block_tokens):
            self._surplus.add(row.line)

    def surplus(self) -> Finding:
        """Rows with more hash ids than they need, unless the size at hand explains them all."""
        size = self._reader.block_tokens
        self._surplus.text = f"rows have more hash ids than blocks of {size} tokens need; {self._fits}"
        return self._surplus

    def hint(self) -> str:
        """What to add to a fault of too few hash ids."""
        explains = self._least <= self._reader.block_tokens <= self._most
        return "" if explains or self._surplus.count or math.isinf(self._most) else f"; {self._fits}"

    @property
    def _fits(self) -> str:
        if self._least > self._most:
            return "no one block size fits all of them"
        if self._least == self._most:
            return f"blocks of {self._least} tokens fit all rows"
        return f"blocks of {self._least} to {self._most:g} tokens fit all rows"


def _refuse_repeated_names(reader: Reader, rows: CheckedRows, refused: _Refused) -> None:
    for place, row, earlier in rows.repeats():
        refused.add(place, reader.repeated_name(row, earlier))
        rows.drop(place)


def _refuse_contradicting_turns(reader: Reader, rows: CheckedRows, refused: _Refused) -> None:
    for session in rows.sessions():
        timeline = Timeline(reader.clock, reader.fault, checks_names=False)
        for place, row in session:
            try:
                _, turn, _ = timeline.place(row)
            except TraceError as fault:
                refused.add(place, fault)
                rows.drop(place)
            else:
                if turn:
                    rows.continues(place)


def _units(reader: Reader, rows: CheckedRows) -> list[Finding]:
    """Whether all times are in one unit, and where nothing arrives."""
    count = rows.count_sessions()
    if not count:
        return []
    (first, first_line), (last, last_line) = rows.first(), rows.last()
    span_ms = reader.clock.to_ms(last - first)
    try:
        check_span(str(reader.path), span_ms, first_line, last_line)
    except TraceError as fault:
        return [Finding("fault", "units", str(fault), 1, [first_line, last_line])]
    if count < _ENOUGH_ROWS or span_ms == 0:
        return []
    found = []
    rate = (count - 1) / span_ms * 1e3
    if reader.clock is Clock.MILLISECONDS and rate > _USUAL_RATE_RPS:
        found.append(Finding("warning", "units", f"in ms these are {rate:,.0f} requests/s; are the times seconds?", 1))
    text = f"times jump by a factor of more than {_JUMP:g} from one row to the next; are two units mixed?"
    found.append(_counted(Finding("warning", "units", text), rows.jumps(_ENOUGH_ROWS, _JUMP)))
    longest_ms = max(_HOLE_MS, _HOLE_GAPS * span_ms / (count - 1))
    return [*found, _holes(reader.clock, rows, first, longest_ms)]


def _holes(clock: Clock, rows: CheckedRows, first: float, longest_ms: float) -> Finding:
    hole = Finding("warning", "hole", "")
    widest: list[tuple[float, float, int]] = []
    before_ms = 0.0
    for arrivals in rows.arrivals():
        times_ms = clock.all_to_ms(np.array([at - first for at, _ in arrivals]))
        gaps = np.diff(times_ms, prepend=before_ms)
        before_ms = float(times_ms[-1])
        wide = np.flatnonzero(gaps > longest_ms).tolist()
        hole.count += len(wide)
        # The widest first, of equally wide ones the earliest.
        some = ((-float(gaps[row]), float(times_ms[row]), arrivals[row][1]) for row in wide)
        widest = heapq.nsmallest(_EXAMPLES, [*widest, *some])
    if widest:
        widest_s = -widest[0][0] / 1e3
        text = f"gaps of more than {longest_ms / 1e3:.0f} s without an arrival, the widest of {widest_s:.0f} s"
        hole.text = f"{text}; lines are those after them"
        hole.lines = [line for _, _, line in widest]
    return hole


def _outcomes(reader: Reader, launch: EngineLaunchConfig, scheduler_rules: str) -> list[Finding]:
    """What the engine says to each request."""
    reasons = rejection_reasons(launch.engine, scheduler_rules)
    counts = np.zeros(len(reasons), np.int64)
    names: list[list[str]] = [[] for _ in reasons]
    limit = math.inf if launch.engine.max_model_len is None else launch.engine.max_model_len
    num_cut = 0
    with full_disk_told(reader.path), closing(Spool(reader)) as spool:
        for portion in spool.portions():
            said = refusals(portion, launch, scheduler_rules)
            counts += np.bincount(said, minlength=len(reasons))
            for number in np.unique(said):
                shown = portion.request_ids[said == number][: _EXAMPLES - len(names[number])]
                names[number] += shown.tolist()
            prompts, outputs = portion.prompt_tokens, portion.output_tokens
            num_cut += int(((prompts < limit) & (prompts + outputs > limit)).sum())
    findings = []
    for reason, count, some in zip(reasons, counts.tolist(), names, strict=True):
        if reason is not None:
            text = f'requests would be rejected: "{reason}" ({", ".join(some)}{", …" if count > _EXAMPLES else ""})'
            findings.append(Finding("fault", "rejected", text, count))
    text = f"requests would be stopped by max_model_len = {limit} before their last token"
    return [*findings, Finding("note", "cut_output", text, num_cut)]
