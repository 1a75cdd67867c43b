"""A request trace in columns: when each request arrives, how long it is, which of its blocks others share.

Not the file forms, which are one module each in `fpmsdk.replay.formats`, and not prompt contents: a trace
knows the identity of prompt blocks (`hash_ids`), never token values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

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
        blocks shares its prompt with no other; any other row has just enough to cover its prompt.
    hash_ids: int64, dense from 0 in order of first appearance in the source.
    block_tokens: prompt tokens that one hash id stands for.

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

    @classmethod
    def read(cls, path: str | Path, format: str | None = None, *, block_tokens: int = 512) -> Trace:
        """Read a trace file, gzip-compressed or not.

        Parameters
        ----------
        path: the file.
        format: `mooncake` (JSON lines), `azure` (CSV) or `recorded` (the request record of a measured
            run); None decides by the ending .jsonl, .csv or .json, before an optional .gz.
        block_tokens: prompt tokens per hash id of a Mooncake trace.

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
        from fpmsdk.replay.formats import reader_for

        _check_block_tokens(block_tokens, str(path))
        return reader_for(path, format)(path, block_tokens)

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
        _check_block_tokens(block_tokens)
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
            names, session, turn = np.array(ids, object), np.arange(n), np.zeros(n, np.int64)
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

        session_arrival = arrivals[first]
        by_arrival = np.argsort(session_arrival, kind="stable")
        rank = np.empty(len(names), np.int64)
        rank[by_arrival] = np.arange(len(names))
        order = np.lexsort((turn, rank[session]))
        arrivals[~first] = np.nan
        return cls(
            request_ids=np.array(ids, object)[order],
            arrival_ms=arrivals[order],
            prompt_tokens=prompts[order],
            output_tokens=outputs[order],
            priority=priorities[order],
            session_ids=names[by_arrival],
            session_index=rank[session][order],
            turn_index=turn[order],
            delay_ms=delays[order],
            dp_rank=ranks[order],
            prefill_dp_rank=prefill_ranks[order],
            hash_offsets=_gathered_offsets(offsets, order),
            hash_ids=_gathered(offsets, blocks, order),
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
        )


def _check_block_tokens(block_tokens: Any, path: str | None = None) -> None:
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


def _sessions(names: list[str]) -> tuple[NDArray[np.object_], Int64, Int64]:
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
    return np.array(list(index), object), session, turn


def _blocks(hash_ids: Sequence[Sequence[int]] | None, prompts: Int64, block_tokens: int) -> tuple[Int64, Int64]:
    n = len(prompts)
    offsets = np.zeros(n + 1, np.int64)
    if hash_ids is None:
        return offsets, np.empty(0, np.int64)
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
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    dense = np.empty(len(first), np.int64)
    dense[np.argsort(first)] = np.arange(len(first))
    return offsets, dense[inverse]


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
