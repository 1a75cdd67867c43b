"""GuideLLM reports (`benchmarks.json`): the completed requests of one benchmark, with epoch times in seconds.

As a trace they are what was asked, when it was sent. Errored and incomplete requests are left out. A report is one
JSON document; it is gone through once, with its requests on disk.
Source: vllm-project/guidellm, `GenerativeBenchmarksReport`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import ijson
import msgspec

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.fields import refused_field
from fpmsdk.replay.formats.json_parts import NOT_JSON, json_parts
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import opened
from fpmsdk.replay.rows import Clock, LeftOut, Row
from fpmsdk.replay.trace import MAX_TOKENS


class _Timings(msgspec.Struct):
    request_start: float | None = None
    resolve_start: float | None = None
    request_end: float | None = None
    resolve_end: float | None = None


class _Info(msgspec.Struct):
    conversation_id: str | None = None
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _Request(msgspec.Struct):
    request_id: str | None = None
    info: _Info = msgspec.field(default_factory=_Info)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    # Reports before 0.4 have the times here.
    start_time: float | None = None
    end_time: float | None = None

    def start(self) -> float | None:
        return _first(self.info.timings.request_start, self.info.timings.resolve_start, self.start_time)

    def end(self) -> float | None:
        return _first(self.info.timings.request_end, self.info.timings.resolve_end, self.end_time)


_DECODER = msgspec.msgpack.Decoder(_Request)


def _first(*times: float | None) -> float | None:
    return next((time for time in times if time is not None), None)


_WANTED = "benchmarks.item.requests."
_OTHERS = ("errored", "incomplete")


class _Walk:
    """Takes the parts of a report in order, and makes requests of those of one benchmark.

    Parameters
    ----------
    benchmark: which, from 0.
    refused: makes the error of a text and the name of a field.
    """

    def __init__(self, benchmark: int, refused: Callable[[str, str], TraceError]) -> None:
        self._benchmark = benchmark
        self._refused = refused
        self._builder: ijson.ObjectBuilder | None = None
        self._has_requests = True  # the benchmark at hand, as far as it goes
        self.has_benchmarks = False
        self.count = 0
        self.found: Counter[str] = Counter()
        self.completed: int | None = None  # as the report says

    def take(self, prefix: str, event: str, value: Any) -> _Request | None:
        """One part; returns the request that it completes."""
        if self._builder is not None:
            return self._continue(prefix, event, value)
        if prefix == "benchmarks" and event != "end_array":
            self._expect("start_array", event, prefix)
            self.has_benchmarks = True
        elif prefix == "benchmarks.item" and event != "map_key":
            self._take_benchmark(event)
        elif prefix == "benchmarks.item.requests" and event == "start_map":
            self._has_requests = True
        elif self.count == self._benchmark + 1:
            if prefix == "benchmarks.item.metrics.request_totals.successful" and isinstance(value, int):
                self.completed = value
            elif prefix.startswith(_WANTED):
                self._take_request(prefix[len(_WANTED) :], event, value)
        return None

    def _take_benchmark(self, event: str) -> None:
        if event != "end_map":
            self._expect("start_map", event, f"benchmarks[{self.count}]")
            self.count += 1
            self._has_requests = False
        elif not self._has_requests:
            raise self._refused(f"benchmarks[{self.count - 1}] has no requests", f"benchmarks[{self.count - 1}]")

    def _take_request(self, place: str, event: str, value: Any) -> None:
        status, _, rest = place.partition(".")
        if status not in ("successful", *_OTHERS) or event in ("end_map", "end_array", "map_key"):
            return
        if rest == "":
            self._expect("start_array", event, f"benchmarks[{self._benchmark}].requests.{status}")
        elif rest == "item":
            self.found[status] += 1
            if status == "successful":
                self._expect("start_map", event, self._place)
                self._builder = ijson.ObjectBuilder()
                self._builder.event(event, value)

    def _continue(self, prefix: str, event: str, value: Any) -> _Request | None:
        assert self._builder is not None
        self._builder.event(event, value)
        if prefix != _WANTED + "successful.item" or event != "end_map":
            return None
        document, self._builder = self._builder.value, None
        try:
            return msgspec.convert(document, _Request)
        except msgspec.ValidationError as fault:
            field = refused_field(fault)
            raise self._refused(
                f"{fault} of {self._place}", f"{self._place}.{field}" if field else self._place
            ) from fault

    @property
    def _place(self) -> str:
        return f"benchmarks[{self._benchmark}].requests.successful[{self.found['successful'] - 1}]"

    def _expect(self, expected: str, event: str, place: str) -> None:
        if event != expected:
            kind = {"start_array": "a list", "start_map": "an object"}[expected]
            raise self._refused(f"{place} is not {kind}", place)


class GuidellmReader(Reader):
    """Requests in order of their start; the turns of a conversation follow one another."""

    form = "guidellm"
    options = frozenset({"benchmark"})
    has_lines = False

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.clock = Clock.SECONDS
        self._benchmark = options.benchmark

    def records(self) -> Iterator[tuple[int, _Request | str]]:
        """The requests of the benchmark, then a word for each that did not complete."""
        with closing(sqlite3.connect("")) as kept:  # on disk, gone with the connection
            kept.execute("create table requests (id integer primary key, start, request)")
            others = self._read(kept)
            line = 0
            for (request,) in kept.execute("select request from requests order by start, id"):
                line += 1
                yield line, _DECODER.decode(request)
        for status in _OTHERS:
            for _ in range(others[status]):
                line += 1
                yield line, status

    def parse(self, line: int, record: _Request | str) -> Iterator[Row | LeftOut]:
        """One request, or one that did not complete."""
        if isinstance(record, str):
            yield LeftOut(line, record)
            return
        row = Row(
            line,
            record.prompt_tokens or 0,
            -1 if record.output_tokens is None else record.output_tokens,
            at=record.start(),
            end=record.end(),
            request_id=record.request_id,
            session_id=record.info.conversation_id,
        )
        for name, low in (("prompt_tokens", 1), ("output_tokens", 0)):
            if not low <= getattr(row, name) <= MAX_TOKENS:
                text = f"has {name} {shown(getattr(record, name))}; give an integer from {low} to {MAX_TOKENS}"
                raise self.fault(row, text, name)
        if row.at is None:
            raise self.fault(row, "has no start time; write the report with request timings", "info.timings")
        yield row

    def _read(self, kept: sqlite3.Connection) -> Counter[str]:
        """Keep the completed requests of the benchmark; return how many others there are of each kind."""
        walk = _Walk(self._benchmark or 0, self._refused)
        with self._opened_events() as events:
            for prefix, event, value in events:
                request = walk.take(prefix, event, value)
                if request is not None:
                    kept.execute(
                        "insert into requests values (null, ?, ?)",
                        (request.start() or 0.0, msgspec.msgpack.encode(request)),
                    )
        if not walk.has_benchmarks:
            raise self._refused("it has no benchmarks", "benchmarks")
        self._check_choice(walk.count, walk.found["successful"], walk.completed)
        return walk.found

    @contextmanager
    def _opened_events(self) -> Iterator[Iterator[tuple[str, str, Any]]]:
        try:
            with opened(self.path) as content:
                yield json_parts(content)
        except NOT_JSON as fault:
            raise self._refused(str(fault)) from fault

    def _refused(self, text: str, field: str = "") -> TraceError:
        return TraceError(f"{self.path}: not a GuideLLM report: {text}", path=str(self.path), field=field)

    def _check_choice(self, count: int, found: int, completed: int | None) -> None:
        chosen = self._benchmark
        if chosen is None and count == 1:
            chosen = 0
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < count:
            given = "" if chosen is None else f", benchmark is {shown(chosen)}"
            raise TraceError(
                f"{self.path}: the report holds {count} benchmarks{given}; name one with benchmark=0 to {count - 1}",
                path=str(self.path),
                field="benchmark",
            )
        if completed is not None and found < completed:
            raise TraceError(
                f"{self.path}: the report holds a sample, {found} of {completed} completed requests; write it with "
                "all of them",
                path=str(self.path),
                field=f"benchmarks[{chosen}].requests.successful",
            )
