"""The request record of a measured serving run: planned arrivals, lengths, and when each token came out.

One JSON object: `engine` (its settings), `requests` (id, arrival and added in seconds, prompt, output,
token_times in seconds). As a trace only the planned arrivals and the lengths count; `read_run` gives the
measured times as well, for comparison with a replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.fields import refused_field
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import no_requests, read_bytes
from fpmsdk.replay.latency import RequestLatencies
from fpmsdk.replay.rows import Clock, LeftOut, Row
from fpmsdk.replay.trace import MAX_TOKENS, Trace

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Request(msgspec.Struct):
    id: str
    arrival: _Seconds
    prompt: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    output: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    token_times: list[_Seconds] = []


class _Run(msgspec.Struct):
    requests: list[_Request]
    engine: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRun:
    """A measured run.

    Attributes
    ----------
    engine: scheduler settings under their vLLM names.
    trace: planned arrivals and lengths; times count from the start of the run.
    token_ms: float64, when each output token came out, request after request in trace order.
    token_offsets: int64[n + 1]; request i owns `token_ms[token_offsets[i]:token_offsets[i + 1]]`.
    """

    engine: dict[str, Any]
    trace: Trace
    token_ms: NDArray[np.float64]
    token_offsets: NDArray[np.int64]

    def latencies(self) -> RequestLatencies:
        """Measured latencies of each request, from its planned arrival; NaN for one without tokens."""
        counts = np.diff(self.token_offsets)
        times = np.append(self.token_ms, np.nan)

        def token(number: NDArray[np.int64]) -> NDArray[np.float64]:
            chosen: NDArray[np.float64] = times[np.where(number < counts, self.token_offsets[:-1] + number, -1)]
            return chosen

        first, second, last = token(0 * counts), token(0 * counts + 1), token(np.maximum(counts - 1, 0))
        return RequestLatencies.of(self.trace.arrival_ms, first, second, last, counts)

    def gaps_ms(self) -> NDArray[np.float64]:
        """Measured gaps between the tokens of the same request."""
        owner = np.repeat(np.arange(len(self.trace)), np.diff(self.token_offsets))
        same_request = np.diff(owner) == 0
        gaps: NDArray[np.float64] = np.diff(self.token_ms)[same_request]
        return gaps


class RecordedReader(Reader):
    """Planned arrivals and lengths of a measured run; times count from its start."""

    form = "recorded"
    keeps_clock = True
    has_lines = False

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.clock = Clock.SECONDS

    def records(self) -> Iterator[tuple[int, _Request]]:
        """The requests in order of arrival."""
        return enumerate(_run_of(self.path).requests, 1)

    def parse(self, line: int, record: _Request) -> Iterator[Row | LeftOut]:
        """One request."""
        _check_token_times(self.path, record)
        yield Row(line, record.prompt, record.output, at=record.arrival, request_id=record.id)


def _run_of(path: str | Path) -> _Run:
    content = read_bytes(path)
    try:
        run = msgspec.json.decode(content, type=_Run)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        field = refused_field(fault)
        raise TraceError(
            f"{path}: not the request record of a measured run: {fault}", path=str(path), field=field
        ) from fault
    run.requests.sort(key=lambda request: request.arrival)
    return run


def read_run(path: str | Path, block_tokens: int = 512) -> RecordedRun:
    """Read arrivals, lengths, engine settings and measured token times.

    Raises
    ------
    TraceError: names the file and the field.
    """
    run = _run_of(path)
    requests = run.requests
    if not requests:
        raise no_requests(path)
    for request in requests:
        _check_token_times(path, request)
    try:
        trace = Trace.from_arrays(
            _milliseconds([request.arrival for request in requests]),
            [request.prompt for request in requests],
            [request.output for request in requests],
            request_ids=[request.id for request in requests],
            block_tokens=block_tokens,
        )
    except TraceError as fault:
        raise TraceError(f"{path}: {fault}", path=str(path), field=fault.field) from fault
    offsets = np.zeros(len(requests) + 1, np.int64)
    np.cumsum([len(request.token_times) for request in requests], out=offsets[1:])
    tokens = _milliseconds([at for request in requests for at in request.token_times])
    return RecordedRun(run.engine, trace, tokens, offsets)


def _milliseconds(seconds: list[float]) -> NDArray[np.float64]:
    return Clock.SECONDS.all_to_ms(np.array(seconds, np.float64))


def _check_token_times(path: str | Path, request: _Request) -> None:
    times = request.token_times
    if times and len(times) != request.output:
        fault = f"{len(times)} token_times for output {request.output}; give one per output token, or none"
    elif any(later < earlier for earlier, later in pairwise(times)):
        fault = "token_times that go back in time; give them in order"
    else:
        return
    raise TraceError(f'{path}: request "{request.id}" has {fault}', path=str(path), field="token_times")
