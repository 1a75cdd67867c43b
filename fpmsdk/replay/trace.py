"""A request trace in columns: when each request arrives, how long it is, which of its blocks others share.

Not the file forms, which are one module each in `fpmsdk.replay.formats`, and not prompt contents: a trace
knows the identity of prompt blocks (`hash_ids`), never token values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError

MAX_TOKENS = 2**31 - 1
MAX_PRIORITY = 2**31 - 1

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order in which a replay serves them.

    Sessions come in the order in which their first turns arrive (equal times keep the order of the source),
    and the turns of a session follow one another. A request of its own is a session of one turn.

    Attributes
    ----------
    request_ids: unique names, object[n] of str.
    arrival_ms: float64[n], milliseconds from the start of the trace; NaN for a later turn, which arrives
        `delay_ms` after the turn before it has completed.
    prompt_tokens: int64[n], at least 1.
    output_tokens: int64[n]; 0 asks for the prefill only.
    priority: int64[n]; a smaller value is served earlier where the scheduler knows priorities.
    session_ids: object[sessions] of str.
    session_index: int64[n], the row's session, ascending.
    turn_index: int64[n], from 0 within a session.
    delay_ms: float64[n], 0 for a first turn.
    dp_rank, prefill_dp_rank: int64[n], the attention-DP rank that must serve the request, -1 for any; the second
        on prefill workers.
    hash_offsets: int64[n + 1]; row i owns `hash_ids[hash_offsets[i]:hash_offsets[i + 1]]`. A row without
        blocks shares its prompt with no other; any other row has just enough to cover its prompt, or more: then they
        are the identities of what it generates too, which the prompt of a later turn repeats.
    hash_ids: int64, dense from 0 in order of first appearance in the source.
    block_tokens: prompt tokens that one hash id stands for.
    awaits_offsets: int64[n + 1]; row i owns `awaits[awaits_offsets[i]:awaits_offsets[i + 1]]`.
    awaits: int64, how many rows back those of the same session lie that a later turn waits for, `delay_ms` after the
        last of them has completed; a later turn without any waits for the row before it.

    Source: engine-and-replay.md section 5.2.

    >>> trace = Trace.from_arrays([0.0, 40.0], prompt_tokens=[512, 640], output_tokens=[8, 0])
    >>> len(trace), trace.arrival_ms.tolist(), trace.request_ids.tolist()
    (2, [0.0, 40.0], ['request_1', 'request_2'])
    """

    request_ids: NDArray[np.object_]
    arrival_ms: Float64
    prompt_tokens: Int64
    output_tokens: Int64
    priority: Int64
    session_ids: NDArray[np.object_]
    session_index: Int64
    turn_index: Int64
    delay_ms: Float64
    dp_rank: Int64
    prefill_dp_rank: Int64
    hash_offsets: Int64
    hash_ids: Int64
    block_tokens: int
    awaits_offsets: Int64
    awaits: Int64

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
        more_paths: Sequence[str | Path] | None = None,
        kv_block_tokens: int | None = None,
    ) -> Trace:
        """Read a trace file, gzip-compressed or not; an option that the form does not have is refused.

        Parameters
        ----------
        path: the file; of `weka` also a directory of plays.
        format: `mooncake`, `mooncake-delta`, `dynamo`, `aiperf` (JSON lines), `azure`, `burstgpt` (CSV), `guidellm`,
            `weka`, `recorded` (JSON) or `parquet`; None looks at the ending and the first record.
        block_tokens: prompt tokens per hash id of a Mooncake trace, 512 when omitted.
        time_unit: unit of `timestamp` and `delay` in a Mooncake trace, `ms` when omitted.
        benchmark: which benchmark of a GuideLLM report, from 0; needed when it holds several.
        nested_timestamps: whether the requests of a Weka subagent count from its start; `auto`, the default, takes
            `relative` when one of them would lie before it.
        more_paths: further files of a Dynamo trace.
        kv_block_tokens: size of the KV blocks for which a `mooncake-delta` trace is told, in tokens; 1, which serves
            every size and needs most memory, when omitted.

        Raises
        ------
        TraceError: the file is unreadable, empty or of unknown form, or a row breaks a rule; names file,
            line and field.

        Source: engine-and-replay.md section 5.2.

        >>> import json, pathlib, tempfile
        >>> row = {"timestamp": 7000, "input_length": 700, "output_length": 3, "hash_ids": [41, 8]}
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "trace.jsonl"
        >>> _ = file.write_text(json.dumps(row))
        >>> trace = Trace.read(file)
        >>> trace.arrival_ms.tolist(), trace.prompt_tokens.tolist(), trace.hash_ids.tolist()
        ([0.0], [700], [0, 1])
        """
        from fpmsdk.replay.formats import ReadOptions, read_trace

        more = None if more_paths is None else tuple(more_paths)
        options = ReadOptions(block_tokens, time_unit, benchmark, nested_timestamps, more, kv_block_tokens)
        return read_trace(path, format, options)

    @classmethod
    def from_arrays(
        cls,
        arrival_ms: ArrayLike,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        *,
        request_ids: Sequence[str] | None = None,
        priority: ArrayLike | None = None,
        session_ids: Sequence[str] | None = None,
        delay_ms: ArrayLike | None = None,
        dp_rank: ArrayLike | None = None,
        prefill_dp_rank: ArrayLike | None = None,
        hash_ids: Sequence[Sequence[int]] | None = None,
        block_tokens: int = 512,
        awaits: Sequence[Sequence[int]] | None = None,
    ) -> Trace:
        """Build a trace from columns of equal length; rows in any order are put into arrival order.

        Parameters
        ----------
        arrival_ms: milliseconds from the start, finite and at least 0; ignored for a later turn.
        prompt_tokens, output_tokens: lengths; a prompt has at least one token.
        request_ids: unique names; `request_<row from 1>` when omitted.
        priority: 32-bit integers, 0 when omitted.
        session_ids: the session of each row; equal names are turns in row order. Omitted: no sessions.
        delay_ms: wait of a later turn after the turn before it completed; 0 for a first turn.
        dp_rank: the attention-DP rank that must serve each request, -1 for any.
        prefill_dp_rank: the same on prefill workers; `dp_rank` when omitted.
        hash_ids: block identities of each prompt, unsigned 64-bit; none, or enough to cover the prompt.
        block_tokens: prompt tokens per hash id.
        awaits: of each row, how many turns of its session back those lie that it waits for; none for the turn before.

        Raises
        ------
        TraceError: no rows, columns of different length, or a value outside its range.

        >>> trace = Trace.from_arrays([5.0, 0.0], [4, 9], [1, 1], request_ids=["late", "early"])
        >>> trace.request_ids.tolist()
        ['early', 'late']
        """
        prompts = _integers("prompt_tokens", prompt_tokens, 1, MAX_TOKENS)
        n = len(prompts)
        if n == 0:
            raise TraceError("the trace has no requests; give at least one row")
        outputs = _integers("output_tokens", output_tokens, 0, MAX_TOKENS, n)
        check_block_tokens(block_tokens)
        if request_ids is None:
            ids = [f"request_{row}" for row in range(1, n + 1)]
        else:
            ids = _names("request_ids", request_ids, n)
            _check_unique(ids)
        priorities = (
            np.zeros(n, np.int64)
            if priority is None
            else _integers("priority", priority, -MAX_PRIORITY - 1, MAX_PRIORITY, n)
        )
        delays = np.zeros(n) if delay_ms is None else _milliseconds("delay_ms", delay_ms, n)
        ranks = np.full(n, -1) if dp_rank is None else _integers("dp_rank", dp_rank, -1, MAX_PRIORITY, n)
        prefill_ranks = (
            ranks if prefill_dp_rank is None else _integers("prefill_dp_rank", prefill_dp_rank, -1, MAX_PRIORITY, n)
        )
        if session_ids is None:
            names, session, turn = ids, np.arange(n), np.zeros(n, np.int64)
        else:
            names, session, turn = _sessions(_names("session_ids", session_ids, n))
        first = turn == 0
        if delays[first].any():
            row = int(np.flatnonzero(first & (delays != 0))[0])
            raise TraceError(
                f"delay_ms[{row}] is {delays[row]} on the first turn of its session; only a later turn waits, give 0",
                field="delay_ms",
            )
        arrivals = _milliseconds("arrival_ms", arrival_ms, n, first)
        offsets, blocks = _blocks(hash_ids, prompts, block_tokens)
        awaits_offsets, steps = _awaits(awaits, turn)

        return cls.ordered(
            request_ids=ids,
            session_ids=names,
            session_arrival_ms=arrivals[first],
            session=session,
            turn=turn,
            delay_ms=delays,
            prompt_tokens=prompts,
            output_tokens=outputs,
            priority=priorities,
            dp_rank=ranks,
            prefill_dp_rank=prefill_ranks,
            hash_offsets=offsets,
            hash_ids=blocks,
            block_tokens=block_tokens,
            awaits_offsets=awaits_offsets,
            awaits=steps,
        )

    @classmethod
    def ordered(
        cls,
        *,
        request_ids: list[str],
        session_ids: list[str],
        session_arrival_ms: Float64,
        session: Int64,
        turn: Int64,
        delay_ms: Float64,
        prompt_tokens: Int64,
        output_tokens: Int64,
        priority: Int64,
        dp_rank: Int64,
        prefill_dp_rank: Int64,
        hash_offsets: Int64,
        hash_ids: NDArray[np.uint64],
        block_tokens: int,
        awaits_offsets: Int64,
        awaits: Int64,
    ) -> Trace:
        """Put checked columns of a source into the order of a trace; for readers of files.

        Parameters
        ----------
        session_ids, session_arrival_ms: one entry per session, in order of appearance.
        session, turn: of each row; the turns of a session come in order.
        hash_offsets, hash_ids: raw block identities of each row, as many as its prompt has blocks or none.
        awaits_offsets, awaits: as in the class.

        >>> none, offsets = np.zeros(2, np.int64), np.zeros(3, np.int64)
        >>> trace = Trace.ordered(
        ...     request_ids=["late", "early"], session_ids=["late", "early"], session_arrival_ms=np.array([5.0, 0.0]),
        ...     session=np.array([0, 1]), turn=none, delay_ms=np.zeros(2), prompt_tokens=none + 8,
        ...     output_tokens=none + 1, priority=none, dp_rank=none - 1, prefill_dp_rank=none - 1, hash_offsets=offsets,
        ...     hash_ids=np.zeros(0, np.uint64), block_tokens=512, awaits_offsets=offsets, awaits=none[:0])
        >>> trace.request_ids.tolist()
        ['early', 'late']
        """
        if len(session_ids) == len(request_ids) and (session_arrival_ms[1:] >= session_arrival_ms[:-1]).all():
            # No sessions, and in order already.
            return cls(
                request_ids=np.array(request_ids, object),
                arrival_ms=session_arrival_ms,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                priority=priority,
                session_ids=np.array(session_ids, object),
                session_index=session,
                turn_index=turn,
                delay_ms=delay_ms,
                dp_rank=dp_rank,
                prefill_dp_rank=prefill_dp_rank,
                hash_offsets=hash_offsets,
                hash_ids=_dense(hash_ids),
                block_tokens=block_tokens,
                awaits_offsets=awaits_offsets,
                awaits=awaits,
            )
        by_arrival = np.argsort(session_arrival_ms, kind="stable")
        rank = np.empty(len(session_ids), np.int64)
        rank[by_arrival] = np.arange(len(session_ids))
        order = np.lexsort((turn, rank[session]))
        arrivals = np.where(turn == 0, session_arrival_ms[session], np.nan)
        return cls(
            request_ids=np.array(request_ids, object)[order],
            arrival_ms=arrivals[order],
            prompt_tokens=prompt_tokens[order],
            output_tokens=output_tokens[order],
            priority=priority[order],
            session_ids=np.array(session_ids, object)[by_arrival],
            session_index=rank[session][order],
            turn_index=turn[order],
            delay_ms=delay_ms[order],
            dp_rank=dp_rank[order],
            prefill_dp_rank=prefill_dp_rank[order],
            hash_offsets=_gathered_offsets(hash_offsets, order),
            hash_ids=_gathered(hash_offsets, _dense(hash_ids), order),
            block_tokens=block_tokens,
            awaits_offsets=_gathered_offsets(awaits_offsets, order),
            awaits=_gathered(awaits_offsets, awaits, order),
        )

    @classmethod
    def synthetic(
        cls,
        request_count: int,
        input_tokens: int,
        output_tokens: int,
        *,
        request_rate: float | None = None,
        arrival_interval_ms: float | None = None,
        arrival_seed: int | None = None,
        random_range_ratio: float = 1.0,
        random_seed: int | None = None,
        turns_per_session: int = 1,
        inter_turn_delay_ms: float = 0.0,
        cached_prefix_tokens: int = 0,
        shared_prefix_ratio: float = 0.0,
        num_prefix_groups: int = 0,
        block_tokens: int | None = None,
    ) -> Trace:
        """Make a workload; equal arguments give the same trace everywhere.

        Parameters
        ----------
        request_count: requests, or with several turns sessions.
        input_tokens, output_tokens: lengths of every request; turns do not accumulate context.
        request_rate, arrival_interval_ms, arrival_seed: arrivals of first turns, as in `with_arrivals`. Without rate
            and interval all arrive at 0, for a replay with `concurrency`.
        random_range_ratio: below 1, lengths are uniform between this share of the given ones and the given ones.
        random_seed: of lengths and prefix groups, 0 when omitted.
        turns_per_session, inter_turn_delay_ms: turns of each session, and the wait between them.
        cached_prefix_tokens: every prompt begins with the same so many tokens.
        shared_prefix_ratio, num_prefix_groups: each session draws a group; this share of a prompt's blocks, the
            leading ones, is that of the group.
        block_tokens: size of these blocks, 512 when omitted.

        Raises
        ------
        TraceError: a value is out of range, or has no effect.

        Source: engine-and-replay.md section 5.3.

        >>> trace = Trace.synthetic(3, 1024, 128, request_rate=20.0, arrival_seed=7)
        >>> trace.request_ids.tolist(), trace.arrival_ms.round(2).tolist()
        (['synthetic-0', 'synthetic-1', 'synthetic-2'], [0.0, 19.57, 27.74])
        """
        from fpmsdk.replay.synthetic import synthetic_trace

        return synthetic_trace(
            request_count,
            input_tokens,
            output_tokens,
            request_rate=request_rate,
            arrival_interval_ms=arrival_interval_ms,
            arrival_seed=arrival_seed,
            random_range_ratio=random_range_ratio,
            random_seed=random_seed,
            turns_per_session=turns_per_session,
            inter_turn_delay_ms=inter_turn_delay_ms,
            cached_prefix_tokens=cached_prefix_tokens,
            shared_prefix_ratio=shared_prefix_ratio,
            num_prefix_groups=num_prefix_groups,
            block_tokens=block_tokens,
        )

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.request_ids)

    def head(self, n: int) -> Trace:
        """The first n requests (all when there are fewer).

        >>> len(Trace.from_arrays([0.0, 1.0, 2.0], [4, 4, 4], [1, 1, 1]).head(2))
        2
        """
        if n < 1:
            raise TraceError(f"head({n}) selects no requests; ask for at least one")
        return self._take(np.arange(min(n, len(self))))

    def between(self, start_ms: float, end_ms: float) -> Trace:
        """The sessions whose first turn arrives in [start_ms, end_ms), on a clock that starts at start_ms.

        Raises
        ------
        TraceError: none arrives there.

        >>> Trace.from_arrays([0.0, 10.0, 20.0], [4, 5, 6], [1, 1, 1]).between(10, 20).arrival_ms.tolist()
        [0.0]
        """
        session_arrival = self.arrival_ms[self.turn_index == 0]
        inside = (session_arrival >= start_ms) & (session_arrival < end_ms)
        if not inside.any():
            raise TraceError(
                f"no request arrives between {start_ms} and {end_ms} ms; "
                f"arrivals run from {session_arrival[0]} to {session_arrival[-1]} ms"
            )
        return self._take(np.flatnonzero(inside[self.session_index]), origin_ms=start_ms)

    def with_arrivals(
        self,
        *,
        request_rate: float | None = None,
        arrival_interval_ms: float | None = None,
        arrival_seed: int | None = None,
    ) -> Trace:
        """The same requests in the same order with other arrivals, one per session.

        Parameters
        ----------
        request_rate: mean arrivals per second of a Poisson process.
        arrival_interval_ms: constant gap in ms.
        arrival_seed: of the Poisson process, 42 when omitted.

        Raises
        ------
        TraceError: neither or both of rate and interval, or a value out of range.

        >>> Trace.from_arrays([0.0, 7.0], [4, 4], [1, 1]).with_arrivals(arrival_interval_ms=2.5).arrival_ms.tolist()
        [0.0, 2.5]
        """
        from fpmsdk.replay.arrivals import arrival_times_ms

        if request_rate is None and arrival_interval_ms is None:
            raise TraceError("with_arrivals sets none; give request_rate or arrival_interval_ms", field="request_rate")
        times = arrival_times_ms(
            len(self.session_ids),
            request_rate=request_rate,
            arrival_interval_ms=arrival_interval_ms,
            arrival_seed=arrival_seed,
        )
        arrivals = np.where(self.turn_index == 0, times[self.session_index], np.nan)
        return replace(self, arrival_ms=arrivals)

    def write(self, path: str | Path, format: Literal["parquet", "mooncake"] | None = None) -> None:
        """Write the trace to a file, whole or not at all; `Trace.read` returns an equal one.

        Only the numbers of blocks may differ: they follow the order of the source.

        Parameters
        ----------
        path: the file; an existing one is replaced.
        format: `parquet`, which says everything, or `mooncake`, which has no place for attention-DP ranks nor for
            `block_tokens`: give it to whoever reads the file. None goes by the ending, .parquet or .jsonl.

        Raises
        ------
        TraceError: the form is unknown, or cannot say what the trace holds.
        OSError: the file cannot be written.

        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "trace.parquet"
        >>> Trace.from_arrays([3.0], [512], [8]).write(file)
        >>> Trace.read(file).arrival_ms.tolist()
        [3.0]
        """
        from fpmsdk.replay.convert import write_trace

        write_trace(self, path, format)

    def summary(self) -> dict[str, Any]:
        """What the trace asks for: counts, duration of the arrivals, rate and lengths.

        >>> Trace.from_arrays([0.0, 500.0], [4, 8], [1, 0]).summary()["mean_prompt_tokens"]
        6.0
        """
        arrivals = self.arrival_ms[self.turn_index == 0]
        span_ms = float(arrivals[-1] - arrivals[0])
        return {
            "num_requests": len(self),
            "num_sessions": len(self.session_ids),
            "arrival_span_ms": span_ms,
            "arrival_rate_rps": (len(arrivals) - 1) / span_ms * 1e3 if span_ms > 0 else None,
            "total_prompt_tokens": int(self.prompt_tokens.sum()),
            "mean_prompt_tokens": float(self.prompt_tokens.mean()),
            "max_prompt_tokens": int(self.prompt_tokens.max()),
            "total_output_tokens": int(self.output_tokens.sum()),
            "mean_output_tokens": float(self.output_tokens.mean()),
            "max_output_tokens": int(self.output_tokens.max()),
            "zero_output_requests": int((self.output_tokens == 0).sum()),
            "num_prompt_blocks": len(self.hash_ids),
            "num_distinct_prompt_blocks": len(np.unique(self.hash_ids)),
        }

    def _take(self, rows: Int64, origin_ms: float = 0.0) -> Trace:
        # Rows ascend and hold each session from its first turn on, so the order of the class is kept.
        sessions, session_index = np.unique(self.session_index[rows], return_inverse=True)
        return Trace(
            request_ids=self.request_ids[rows],
            arrival_ms=self.arrival_ms[rows] - origin_ms,
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            priority=self.priority[rows],
            session_ids=self.session_ids[sessions],
            session_index=session_index.astype(np.int64),
            turn_index=self.turn_index[rows],
            delay_ms=self.delay_ms[rows],
            dp_rank=self.dp_rank[rows],
            prefill_dp_rank=self.prefill_dp_rank[rows],
            hash_offsets=_gathered_offsets(self.hash_offsets, rows),
            hash_ids=_gathered(self.hash_offsets, self.hash_ids, rows),
            block_tokens=self.block_tokens,
            awaits_offsets=_gathered_offsets(self.awaits_offsets, rows),
            awaits=_gathered(self.awaits_offsets, self.awaits, rows),
        )


def check_block_tokens(block_tokens: Any, path: str | None = None) -> None:
    """Raise TraceError unless a block can have so many tokens."""
    is_integer = isinstance(block_tokens, int) and not isinstance(block_tokens, bool)
    if not is_integer or not 1 <= block_tokens <= MAX_TOKENS:
        raise TraceError(
            f"block_tokens is {shown(block_tokens)}; give the prompt tokens per hash id, 1 to {MAX_TOKENS}",
            path=path,
            field="block_tokens",
        )


def _column(name: str, values: ArrayLike, n: int | None) -> NDArray[Any]:
    try:
        column = np.asarray(values)
    except (ValueError, TypeError) as fault:
        raise TraceError(f"{name} is not a column of numbers: {fault}", field=name) from fault
    if column.ndim != 1 or (n is not None and len(column) != n):
        expected = "one dimension" if n is None else f"shape ({n},) as prompt_tokens has"
        raise TraceError(f"{name} has shape {column.shape}; give {expected}", field=name)
    return column


def _integers(name: str, values: ArrayLike, low: int, high: int, n: int | None = None) -> Int64:
    column = _column(name, values, n)
    if column.size and column.dtype.kind not in "iu":
        raise TraceError(f"{name} has dtype {column.dtype}; give integers", field=name)
    outside = np.flatnonzero((column < low) | (column > high))
    if outside.size:
        row = int(outside[0])
        raise TraceError(f"{name}[{row}] is {column[row]}; give {low} to {high}", field=name)
    return column.astype(np.int64)


def _milliseconds(name: str, values: ArrayLike, n: int, counted: NDArray[np.bool_] | None = None) -> Float64:
    """A column of times; where `counted` is false the value is ignored and 0 returned."""
    column = _column(name, values, n)
    if column.dtype.kind not in "iuf":
        raise TraceError(f"{name} has dtype {column.dtype}; give milliseconds as numbers", field=name)
    if counted is not None:
        column = np.where(counted, column, 0)
    bad = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
    if bad.size:
        row = int(bad[0])
        raise TraceError(f"{name}[{row}] is {column[row]}; give finite milliseconds of at least 0", field=name)
    return column.astype(np.float64)


def _names(column: str, values: Iterable[str], n: int) -> list[str]:
    names = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if names is None or len(names) != n:
        found = shown(values) if names is None else f"{len(names)} entries"
        raise TraceError(f"{column} has {found}; give {n}, one per row", field=column)
    for row, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise TraceError(f"{column}[{row}] is {shown(name)}; give a non-empty string", field=column)
    return names


def _check_unique(ids: list[str]) -> None:
    seen: dict[str, int] = {}
    for row, name in enumerate(ids):
        if seen.setdefault(name, row) != row:
            raise TraceError(
                f'duplicate request id "{name}" in rows {seen[name]} and {row}; request ids are unique',
                field="request_ids",
            )


def _sessions(names: list[str]) -> tuple[list[str], Int64, Int64]:
    n = len(names)
    index: dict[str, int] = {}
    turns: list[int] = []
    session = np.empty(n, np.int64)
    turn = np.empty(n, np.int64)
    for row, name in enumerate(names):
        known = index.setdefault(name, len(index))
        if known == len(turns):
            turns.append(0)
        session[row], turn[row] = known, turns[known]
        turns[known] += 1
    return list(index), session, turn


def _blocks(
    hash_ids: Sequence[Sequence[int]] | None, prompts: Int64, block_tokens: int
) -> tuple[Int64, NDArray[np.uint64]]:
    n = len(prompts)
    offsets = np.zeros(n + 1, np.int64)
    if hash_ids is None:
        return offsets, np.empty(0, np.uint64)
    try:
        rows = [list(ids) for ids in hash_ids]
    except TypeError as fault:
        raise TraceError(f"hash_ids is not a list of lists: {fault}", field="hash_ids") from fault
    if len(rows) != n:
        raise TraceError(f"hash_ids has {len(rows)} rows; give {n}, one per request", field="hash_ids")
    # As numpy reads them, floats and texts of digits would be integers too.
    for kind in set(map(type, chain.from_iterable(rows))):
        if not issubclass(kind, int | np.integer) or kind is bool:
            raise TraceError(f"hash_ids holds a {kind.__name__}; give unsigned 64-bit integers", field="hash_ids")
    counts = np.fromiter(map(len, rows), np.int64, n)
    short = np.flatnonzero((counts > 0) & (prompts > counts * block_tokens))
    if short.size:
        row = int(short[0])
        raise TraceError(
            f"prompt_tokens[{row}] is {prompts[row]} but its {counts[row]} hash_ids of {block_tokens} tokens "
            f"cover {counts[row] * block_tokens}; give a hash id for every block or none at all",
            field="hash_ids",
        )
    # Blocks past the end of the prompt identify nothing.
    used = np.minimum(counts, -(-prompts // block_tokens))
    np.cumsum(used, out=offsets[1:])
    blocks = chain.from_iterable(ids[:k] for ids, k in zip(rows, used.tolist(), strict=True))
    try:
        values = np.fromiter(map(int, blocks), np.uint64, int(offsets[-1]))
    except OverflowError as fault:
        raise TraceError(
            f"hash_ids holds something else than unsigned 64-bit integers: {fault}", field="hash_ids"
        ) from fault
    return offsets, values


def _awaits(awaits: Sequence[Sequence[int]] | None, turn: Int64) -> tuple[Int64, Int64]:
    offsets = np.zeros(len(turn) + 1, np.int64)
    if awaits is None:
        return offsets, np.empty(0, np.int64)
    if len(awaits) != len(turn):
        raise TraceError(f"awaits has {len(awaits)} rows; give {len(turn)}, one per request", field="awaits")
    for row, (steps, last) in enumerate(zip(awaits, turn.tolist(), strict=True)):
        if any(isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= last for step in steps):
            raise TraceError(
                f"awaits[{row}] is {shown(list(steps))}; give 1 to {last}, the turns of its session before it",
                field="awaits",
            )
    np.cumsum([len(steps) for steps in awaits], out=offsets[1:])
    return offsets, np.fromiter(chain.from_iterable(awaits), np.int64, int(offsets[-1]))


def _dense(values: NDArray[np.uint64]) -> Int64:
    """Number identities from 0 in order of first appearance."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse]


def _gathered_offsets(offsets: Int64, rows: Int64) -> Int64:
    gathered = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.diff(offsets)[rows], out=gathered[1:])
    return gathered


def _gathered(offsets: Int64, values: Int64, rows: Int64) -> Int64:
    counts = np.diff(offsets)[rows]
    ends = np.cumsum(counts)
    # Position within the row plus the row's start in the source.
    source = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(offsets[rows], counts)
    gathered: Int64 = values[source]
    return gathered
