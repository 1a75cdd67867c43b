"""Which turn of which session a row is, how long it waits, and that no name comes twice.

Works on a stream of rows and keeps one entry per name that the source gives; a source without names needs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fpmsdk.errors import TraceError
from fpmsdk.replay.rows import Clock, Row

Fault = Callable[[Row, str, str], TraceError]


@dataclass(slots=True)
class _Session:
    index: int
    turns: int = 0
    at: float | None = None  # the latest one known
    end: float | None = None  # of the turn before


class Timeline:
    """Places rows of one source one after the other.

    Parameters
    ----------
    clock: that of the rows.
    fault: makes the error of a row from a text and the name of a field.
    counted: what the numbers of rows count, in errors.
    checks_names: whether a request id that comes twice is a fault.
    """

    def __init__(self, clock: Clock, fault: Fault, counted: str = "line", *, checks_names: bool = True) -> None:
        self._checks_names = checks_names
        self._clock = clock
        self._fault = fault
        self._counted = counted
        self._sessions: dict[str, _Session] = {}
        self._lines: dict[str, int] = {}
        self.num_sessions = 0

    def place(self, row: Row) -> tuple[int, int, float]:
        """Return the session (counted in order of appearance), the turn and the delay in ms of a row.

        Raises
        ------
        TraceError: a name comes twice, or a delay contradicts the session.
        """
        if self._checks_names:
            self._check_name(row)
        if row.session_id is None:
            if row.delay:
                raise self._first_turn_waits(row)
            if row.awaits:
                raise self._fault(row, "awaits another row, but is a session of its own; leave awaits out", "awaits")
            self.num_sessions += 1
            return self.num_sessions - 1, 0, 0.0
        session = self._sessions.get(row.session_id)
        if session is None:
            if row.delay:
                raise self._first_turn_waits(row)
            session = self._sessions[row.session_id] = _Session(self.num_sessions)
            self.num_sessions += 1
            delay_ms = 0.0
        else:
            delay_ms = self._delay_ms(row, session)
        turn, session.turns = session.turns, session.turns + 1
        if row.awaits and not 1 <= min(row.awaits) <= max(row.awaits) <= turn:
            text = f"awaits rows {list(row.awaits)} back; give 1 to {turn}, the rows of its session before it"
            raise self._fault(row, text, "awaits")
        if row.at is not None:
            session.at = row.at
        session.end = row.end
        return session.index, turn, delay_ms

    def _check_name(self, row: Row) -> None:
        if not row.request_id:
            earlier = self._lines.get(f"request_{row.line}") if self._lines else None
        else:
            earlier = self._lines.setdefault(row.request_id, row.line)
            if earlier == row.line:
                return
        if earlier is not None:
            text = f'repeats request_id "{row.name}" of {self._counted} {earlier}; request ids are unique'
            raise self._fault(row, text, "request_id")

    def _first_turn_waits(self, row: Row) -> TraceError:
        session = row.name if row.session_id is None else row.session_id
        return self._fault(row, f"sets delay on the first turn of session {session}; only a later turn waits", "delay")

    def _delay_ms(self, row: Row, session: _Session) -> float:
        if row.delay is not None:
            delay = row.delay
        elif row.at is None:
            delay = 0.0
        elif session.end is not None:
            # A turn that was asked before the one before it was answered follows at once.
            delay = max(0, row.at - session.end)
        elif session.at is None:
            raise self._fault(
                row,
                f"for session {row.session_id} cannot infer delay without a previous timestamp; "
                "give delay, or a timestamp on every turn",
                "delay",
            )
        else:
            delay = row.at - session.at
        if delay < 0:
            text = f"has invalid delay {delay:g} {self._clock.value}; give at least 0 between two turns"
            raise self._fault(row, text, "delay")
        delay_ms = self._clock.to_ms(delay)
        if not math.isfinite(delay_ms):
            raise self._fault(
                row, f"has invalid delay {delay:g} {self._clock.value}; give finite milliseconds", "delay"
            )
        return delay_ms
