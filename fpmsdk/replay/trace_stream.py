"""Traces that are too long for the memory: requests from a file or made on the way, some at a time.

Not the replay, which is `fpmsdk.replay.run_stream`. Source: engine-and-replay.md sections 5.2 and 5.3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from fpmsdk.errors import TraceError
from fpmsdk.replay.arrivals import arrival_portions_ms
from fpmsdk.replay.formats import ReadOptions, open_trace
from fpmsdk.replay.portions import Portion, portion_of
from fpmsdk.replay.spool import Spool
from fpmsdk.replay.synthetic import Recipe, synthetic_portions
from fpmsdk.replay.trace import Trace

_ROWS_PER_PORTION = 1024


class TraceStream:
    """The requests of a trace in the order in which a replay serves them; `replay_stream` replays it.

    Memory does not grow with the number of requests, only with the turns of one session. May be gone through again.

    Attributes
    ----------
    num_requests: how many.
    block_tokens: prompt tokens that one hash id stands for.
    has_blocks: whether a request has hash ids.
    has_delays: whether a turn waits after the one before it.

    Example
    -------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "t.csv"
    >>> _ = file.write_text("Timestamp,Request tokens,Response tokens\\n7,472,18\\n5,1087,230\\n")
    >>> with TraceStream.read(file) as stream:
    ...     stream.num_requests, [time for portion in stream.portions() for time in portion.arrival_ms.tolist()]
    (2, [0.0, 2000.0])
    """

    def __init__(
        self,
        portions: Callable[[], Iterator[Portion]],
        *,
        num_requests: int,
        block_tokens: int,
        has_blocks: bool,
        has_delays: bool,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.portions = portions
        self.num_requests = num_requests
        self.block_tokens = block_tokens
        self.has_blocks = has_blocks
        self.has_delays = has_delays
        self._close = weakref.finalize(self, close)

    @classmethod
    def read(
        cls,
        path: str | Path,
        format: str | None = None,
        *,
        block_tokens: int | None = None,
        time_unit: Literal["ms", "s"] | None = None,
        benchmark: int | None = None,
        nested_timestamps: Literal["auto", "absolute", "relative"] | None = None,
        advance: Callable[[int], None] = lambda rows: None,
    ) -> TraceStream:
        """Read a file once, check it whole, and keep it on disk in the order of a replay.

        Parameters
        ----------
        path, format, block_tokens, time_unit, benchmark, nested_timestamps: as `Trace.read` takes them.
        advance: called with the number of rows read since its last call.

        Raises
        ------
        TraceError: as of `Trace.read`; also for sessions that branch, which only a `Trace` holds.

        >>> import json, tempfile
        >>> file = Path(tempfile.mkdtemp()) / "t.jsonl"
        >>> row = {"timestamp": 7000, "input_length": 700, "output_length": 3, "hash_ids": [41, 8]}
        >>> _ = file.write_text(json.dumps(row))
        >>> with TraceStream.read(file) as stream:
        ...     stream.block_tokens, stream.has_blocks
        (512, True)
        """
        spool = Spool(
            open_trace(path, format, ReadOptions(block_tokens, time_unit, benchmark, nested_timestamps)), advance
        )
        if spool.has_branches:
            spool.close()
            raise TraceError(
                f"{path}: the trace has sessions that branch; read it whole, with Trace.read",
                path=str(path),
                field="awaits",
            )
        return cls(
            spool.portions,
            num_requests=spool.num_requests,
            block_tokens=spool.block_tokens,
            has_blocks=spool.has_blocks,
            has_delays=spool.has_delays,
            close=spool.close,
        )

    @classmethod
    def synthetic(cls, request_count: int, input_tokens: int, output_tokens: int, **options: Any) -> TraceStream:
        """Make the workload of `Trace.synthetic` on the way, with its arguments and errors.

        >>> stream = TraceStream.synthetic(2_000_000, 1024, 128, request_rate=20.0)
        >>> next(stream.portions()).request_ids[:2].tolist()
        ['synthetic-0', 'synthetic-1']
        """
        recipe = Recipe.of(request_count, input_tokens, output_tokens, **options)
        return cls(
            lambda: synthetic_portions(recipe, _ROWS_PER_PORTION),
            num_requests=recipe.num_requests,
            block_tokens=recipe.block_tokens,
            has_blocks=recipe.has_blocks,
            has_delays=recipe.inter_turn_delay_ms > 0 and recipe.turns > 1,
        )

    @classmethod
    def of(cls, trace: Trace) -> TraceStream:
        """The requests of a trace in memory.

        Raises
        ------
        TraceError: the trace has sessions that branch.

        >>> TraceStream.of(Trace.from_arrays([0.0], [4], [1])).num_requests
        1
        """
        if len(trace.awaits):
            raise TraceError("the trace has sessions that branch; replay it with replay_trace", field="awaits")

        def portions() -> Iterator[Portion]:
            start = 0
            while start < len(trace):
                end = min(start + _ROWS_PER_PORTION, len(trace))
                while end < len(trace) and trace.turn_index[end] > 0:
                    end += 1
                yield portion_of(trace, start, end)
                start = end

        return cls(
            portions,
            num_requests=len(trace),
            block_tokens=trace.block_tokens,
            has_blocks=len(trace.hash_ids) > 0,
            has_delays=bool(trace.delay_ms.any()),
        )

    def with_arrivals(
        self,
        *,
        request_rate: float | None = None,
        arrival_interval_ms: float | None = None,
        arrival_seed: int | None = None,
    ) -> TraceStream:
        """The same requests in the same order with other arrivals, as `Trace.with_arrivals`; closes with this stream.

        >>> stream = TraceStream.of(Trace.from_arrays([0.0, 7.0], [4, 4], [1, 1]))
        >>> next(stream.with_arrivals(arrival_interval_ms=2.5).portions()).arrival_ms.tolist()
        [0.0, 2.5]
        """
        if request_rate is None and arrival_interval_ms is None:
            raise TraceError("with_arrivals sets none; give request_rate or arrival_interval_ms", field="request_rate")

        def times() -> Iterator[NDArray[np.float64]]:
            return arrival_portions_ms(
                self.num_requests,
                request_rate=request_rate,
                arrival_interval_ms=arrival_interval_ms,
                arrival_seed=arrival_seed,
            )

        next(times())  # its checks

        def portions() -> Iterator[Portion]:
            following = times()
            for portion in self.portions():
                is_first = portion.turn_index == 0
                arrival_ms = np.full(len(portion), np.nan)
                arrival_ms[is_first] = [next(following)[0] for _ in range(int(is_first.sum()))]
                yield structs.replace(portion, arrival_ms=arrival_ms)

        return TraceStream(
            portions,
            num_requests=self.num_requests,
            block_tokens=self.block_tokens,
            has_blocks=self.has_blocks,
            has_delays=self.has_delays,
        )

    def close(self) -> None:
        """Give the disk back; done at the latest when the stream is no longer used.

        >>> TraceStream.synthetic(3, 8, 2).close()
        """
        self._close()

    def __enter__(self) -> TraceStream:
        """Use the stream, and close it after."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the stream."""
        self.close()
