"""GuideLLM reports (`benchmarks.json`): the completed requests of one benchmark, with epoch times in seconds.

As a trace they are what was asked, when it was sent. Errored and incomplete requests are left out. A report is one
JSON document and is decoded as a whole. Source: vllm-project/guidellm, `GenerativeBenchmarksReport`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.fields import refused_field
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import read_bytes
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


def _first(*times: float | None) -> float | None:
    return next((time for time in times if time is not None), None)


class _ByStatus(msgspec.Struct):
    successful: list[_Request] = []
    errored: list[msgspec.Raw] = []
    incomplete: list[msgspec.Raw] = []


class _Totals(msgspec.Struct):
    successful: int | None = None


class _Metrics(msgspec.Struct):
    request_totals: _Totals = msgspec.field(default_factory=_Totals)


class _Benchmark(msgspec.Struct):
    requests: _ByStatus
    metrics: _Metrics = msgspec.field(default_factory=_Metrics)


class _Report(msgspec.Struct):
    benchmarks: list[_Benchmark]


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
        requests = self._chosen().requests
        starts = [request.start() or 0.0 for request in requests.successful]
        in_order = sorted(range(len(starts)), key=starts.__getitem__)
        yield from ((row, requests.successful[index]) for row, index in enumerate(in_order, 1))
        others = ["errored"] * len(requests.errored) + ["incomplete"] * len(requests.incomplete)
        yield from enumerate(others, len(in_order) + 1)

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

    def _chosen(self) -> _Benchmark:
        try:
            benchmarks = msgspec.json.decode(read_bytes(self.path), type=_Report).benchmarks
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise TraceError(
                f"{self.path}: not a GuideLLM report: {fault}", path=str(self.path), field=refused_field(fault)
            ) from fault
        chosen = self._benchmark
        if chosen is None and len(benchmarks) == 1:
            chosen = 0
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < len(benchmarks):
            given = "" if chosen is None else f", benchmark is {shown(chosen)}"
            raise TraceError(
                f"{self.path}: the report holds {len(benchmarks)} benchmarks{given}; name one with benchmark=0 to "
                f"{len(benchmarks) - 1}",
                path=str(self.path),
                field="benchmark",
            )
        found, completed = (
            len(benchmarks[chosen].requests.successful),
            benchmarks[chosen].metrics.request_totals.successful,
        )
        if completed is not None and found < completed:
            raise TraceError(
                f"{self.path}: the report holds a sample, {found} of {completed} completed requests; write it with "
                "all of them",
                path=str(self.path),
                field=f"benchmarks[{chosen}].requests.successful",
            )
        return benchmarks[chosen]
