"""Requests on their way into a replay, some whole sessions at a time, as columns.

A portion is what a trace is, but for the time it takes to serve it. Not where portions come from; see
`fpmsdk.replay.trace_stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from fpmsdk.replay.trace import Trace

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


class Portion(Struct, frozen=True, eq=False):
    """Sessions in the order of their arrival, the turns of each together.

    Attributes
    ----------
    request_ids: object[n] of str.
    session_ids: object[n] of str; None for a request that is a session of its own.
    arrival_ms: float64[n]; NaN for a later turn.
    turn_index, prompt_tokens, output_tokens, priority, dp_rank, prefill_dp_rank: int64[n], delay_ms: float64[n], as in
        `Trace`.
    hash_offsets: int64[n + 1], hash_ids: int64; row i owns `hash_ids[hash_offsets[i]:hash_offsets[i + 1]]`. Equal
        numbers are equal blocks in all portions of a stream.
    """

    request_ids: NDArray[np.object_]
    session_ids: NDArray[np.object_]
    arrival_ms: Float64
    turn_index: Int64
    prompt_tokens: Int64
    output_tokens: Int64
    priority: Int64
    dp_rank: Int64
    prefill_dp_rank: Int64
    delay_ms: Float64
    hash_offsets: Int64
    hash_ids: Int64

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.request_ids)

    def columns(self, arrival_ms: Float64, delay_ms: Float64) -> dict[str, Any]:
        """The columns that `Replay` takes, with times as they come to it."""
        first_turns = np.flatnonzero(self.turn_index == 0)
        following = np.arange(1, len(self) + 1)
        following[np.append(self.turn_index[1:] == 0, True)] = -1
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "priority": self.priority,
            "dp_rank": self.dp_rank,
            "prefill_dp_rank": self.prefill_dp_rank,
            "delay_ms": delay_ms,
            "next_turn": following,
            "first_turns": first_turns,
            "arrival_ms": arrival_ms[first_turns],
            "hash_offsets": self.hash_offsets,
            "hash_ids": self.hash_ids,
        }


def portion_of(trace: Trace, start: int, end: int) -> Portion:
    """Some rows of a trace, whole sessions."""
    some = slice(start, end)
    turn_index = trace.turn_index[some]
    names = trace.session_ids[trace.session_index[some]]
    is_alone = (turn_index == 0) & np.append(turn_index[1:] == 0, True)
    names[is_alone] = None
    first = trace.hash_offsets[start]
    return Portion(
        request_ids=trace.request_ids[some],
        session_ids=names,
        arrival_ms=trace.arrival_ms[some],
        turn_index=turn_index,
        prompt_tokens=trace.prompt_tokens[some],
        output_tokens=trace.output_tokens[some],
        priority=trace.priority[some],
        dp_rank=trace.dp_rank[some],
        prefill_dp_rank=trace.prefill_dp_rank[some],
        delay_ms=trace.delay_ms[some],
        hash_offsets=trace.hash_offsets[start : end + 1] - first,
        hash_ids=trace.hash_ids[first : trace.hash_offsets[end]],
    )


def lone_request(
    request_id: str,
    prompt_tokens: int,
    output_tokens: int,
    priority: int,
    dp_rank: int,
    prefill_dp_rank: int | None,
    hash_ids: Sequence[int],
    block_tokens: int,
) -> Portion:
    """A portion of one request; raises TraceError for what no trace may hold."""
    trace = Trace.from_arrays(
        [0.0],
        [prompt_tokens],
        [output_tokens],
        request_ids=[request_id],
        priority=[priority],
        dp_rank=[dp_rank],
        prefill_dp_rank=None if prefill_dp_rank is None else [prefill_dp_rank],
        hash_ids=[list(hash_ids)] if len(hash_ids) else None,
        block_tokens=block_tokens,
    )
    portion = portion_of(trace, 0, 1)
    # As they were given: a trace numbers them anew.
    given = np.array([int(value) for value in hash_ids[: len(portion.hash_ids)]], np.uint64)
    return structs.replace(portion, hash_ids=given.view(np.int64))
