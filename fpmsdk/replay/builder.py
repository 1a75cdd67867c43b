"""Rows of a source, one at a time, into the columns of a `Trace`: a few bytes per request, nothing else is kept."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import TraceError
from fpmsdk.replay.rows import Clock, Row
from fpmsdk.replay.trace import Trace

# No trace of requests is that long, but times in two units look as if.
MAX_SPAN_MS = 10 * 365.25 * 86_400e3


class TraceBuilder:
    """Growing columns.

    Parameters
    ----------
    clock: that of the rows.
    keeps_clock: times count from the 0 of the source, else from its earliest arrival.
    block_tokens: prompt tokens per hash id.
    """

    def __init__(self, clock: Clock, keeps_clock: bool, block_tokens: int) -> None:
        self._clock = clock
        self._keeps_clock = keeps_clock
        self._block_tokens = block_tokens
        self._request_ids: list[str] = []
        self._session_ids: list[str] = []
        # Of first turns only, as the sessions.
        self._at: array[Any] = array("q" if clock is Clock.NANOSECONDS else "d")
        self._lines = array("q")
        self._session, self._turn = array("q"), array("q")
        self._prompts, self._outputs, self._priorities = array("q"), array("q"), array("q")
        self._ranks, self._prefill_ranks = array("q"), array("q")
        self._delays = array("d")
        self._num_blocks = array("q")
        self._blocks = array("Q")
        self._num_awaits, self._awaits = array("q"), array("q")

    def add(self, row: Row, session: int, turn: int, delay_ms: float) -> None:
        """Append a placed row; the turns of a session come in order."""
        name = row.name
        self._request_ids.append(name)
        self._lines.append(row.line)
        if turn == 0:
            self._session_ids.append(name if row.session_id is None else row.session_id)
            self._at.append(row.at or 0)
        self._session.append(session)
        self._turn.append(turn)
        self._delays.append(delay_ms)
        self._prompts.append(row.prompt_tokens)
        self._outputs.append(row.output_tokens)
        self._priorities.append(row.priority)
        self._ranks.append(row.dp_rank)
        self._prefill_ranks.append(row.prefill_dp_rank)
        used = len(row.hash_ids)
        if not row.describes_output:
            # Blocks past the end of the prompt identify nothing.
            used = min(used, -(-row.prompt_tokens // self._block_tokens))
        self._num_blocks.append(used)
        self._blocks.extend(row.hash_ids[:used])
        self._num_awaits.append(len(row.awaits))
        self._awaits.extend(row.awaits)

    def __len__(self) -> int:
        """Return the number of rows so far."""
        return len(self._request_ids)

    def trace(self, path: str) -> Trace:
        """Return the trace of all rows.

        Raises
        ------
        TraceError: the arrivals span so much time that they cannot be in one unit.
        """
        self._check_names(path)
        at = np.frombuffer(self._at, np.int64 if self._clock is Clock.NANOSECONDS else np.float64)
        session, turn = np.frombuffer(self._session, np.int64), np.frombuffer(self._turn, np.int64)
        first, last = int(at.argmin()), int(at.argmax())
        line = np.frombuffer(self._lines, np.int64)[turn == 0]
        # As Python numbers, whose differences do not wrap around.
        check_span(path, self._clock.to_ms(at[last].item() - at[first].item()), line[first].item(), line[last].item())
        arrivals_ms = self._clock.all_to_ms(at - (0 if self._keeps_clock else at[first]))
        return Trace.ordered(
            request_ids=self._request_ids,
            session_ids=self._session_ids,
            session_arrival_ms=arrivals_ms,
            session=session,
            turn=turn,
            delay_ms=np.frombuffer(self._delays, np.float64),
            prompt_tokens=np.frombuffer(self._prompts, np.int64),
            output_tokens=np.frombuffer(self._outputs, np.int64),
            priority=np.frombuffer(self._priorities, np.int64),
            dp_rank=np.frombuffer(self._ranks, np.int64),
            prefill_dp_rank=np.frombuffer(self._prefill_ranks, np.int64),
            hash_offsets=_offsets(self._num_blocks),
            hash_ids=np.frombuffer(self._blocks, np.uint64),
            awaits_offsets=_offsets(self._num_awaits),
            awaits=np.frombuffer(self._awaits, np.int64),
            block_tokens=self._block_tokens,
        )

    def _check_names(self, path: str) -> None:
        # A given name may be the one that a row without name gets.
        if len(set(self._request_ids)) < len(self._request_ids):
            seen: dict[str, int] = {}
            for name, line in zip(self._request_ids, self._lines, strict=True):
                if seen.setdefault(name, line) != line:
                    text = f'repeats request_id "{name}" of line {seen[name]}; request ids are unique'
                    raise TraceError(f"{path}: trace line {line} {text}", path=path, line=line, field="request_id")


def _offsets(counts: array[int]) -> NDArray[np.int64]:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.frombuffer(counts, np.int64), out=offsets[1:])
    return offsets


def check_span(path: str, span_ms: float, first_line: int, last_line: int) -> None:
    """Raise TraceError when arrivals are so far apart that they are in two units."""
    if span_ms > MAX_SPAN_MS:
        raise TraceError(
            f"{path}: arrivals span {span_ms / 86_400e3 / 365.25:.3g} years, from line {first_line} to line "
            f"{last_line}; two units or two clocks are mixed, write all times in one",
            path=path,
            line=last_line,
        )
