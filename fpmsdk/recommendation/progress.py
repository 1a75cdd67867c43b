"""How a sweep goes, for whoever watches: a line on a terminal, plain lines elsewhere, or events for a program.

Source: predict-recommend.md sections 10.4 and 14.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from msgspec import Struct, field

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.candidate import Outcome

if TYPE_CHECKING:
    from rich.text import Text

STYLES = ("auto", "live", "plain", "json", "none")
_PLAIN_SECONDS, _LIVE_SECONDS = 5.0, 0.1

Seen = Callable[[Outcome, float | None], None]


class State(Struct):
    """Where a sweep stands.

    total: candidates there will be; None where that is not known.
    known: of those done, how many an earlier run had evaluated.

    >>> state = State(total=20)
    >>> state.done, state.seconds_left(elapsed_seconds=10.0)
    (0, None)
    """

    total: int | None
    known: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    best: float | None = None

    @property
    def done(self) -> int:
        """Candidates with an outcome."""
        return self.statuses.total()

    def rate(self, elapsed_seconds: float) -> float | None:
        """Candidates evaluated a second; None before the first one."""
        fresh = self.done - self.known
        return fresh / elapsed_seconds if fresh > 0 and elapsed_seconds > 0 else None

    def seconds_left(self, elapsed_seconds: float) -> float | None:
        """About how long the rest takes in s; None where that is not known."""
        rate = self.rate(elapsed_seconds)
        return None if rate is None or self.total is None else max(0, self.total - self.done) / rate

    def line(self, elapsed_seconds: float) -> str:
        """All of it in words."""
        parts = [f"{self.done}" + ("" if self.total is None else f"/{self.total}") + " candidates"]
        parts += [f"{count} {status.replace('_', ' ')}" for status, count in sorted(self.statuses.items())]
        if self.best is not None:
            parts.append(f"best {self.best:,.6g}")
        if (rate := self.rate(elapsed_seconds)) is not None:
            parts.append(f"{rate:,.3g}/s")
        if (left := self.seconds_left(elapsed_seconds)) is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.4), duration(75), duration(7322)
    ('0.4 s', '1 min 15 s', '2 h 02 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """Shows a state as it changes.

    Parameters
    ----------
    style: one of `STYLES`; `auto` is `live` where the stream is a terminal, else `plain`.
    stream: where it is shown; None for standard error.

    Raises
    ------
    OnboardError: no such style.

    >>> import io
    >>> stream = io.StringIO()
    >>> with Progress("plain", stream).shown(State(total=0)) as seen:
    ...     pass
    >>> stream.getvalue()
    '0/0 candidates\\n'
    """

    def __init__(self, style: str = "none", stream: TextIO | None = None) -> None:
        if style not in STYLES:
            raise OnboardError(f"--progress: found {style!r}, accepted are {', '.join(STYLES)}", "--progress")
        self._stream = sys.stderr if stream is None else stream
        self._style = style if style != "auto" else "live" if self._stream.isatty() else "plain"

    @contextmanager
    def shown(self, state: State) -> Iterator[Seen]:
        """Show a state while the block runs; yields what is to be called with every outcome and its score."""
        begun = shown = time.monotonic()

        def count(outcome: Outcome, score: float | None) -> None:
            state.statuses[outcome.status] += 1
            if score is not None:
                state.best = score if state.best is None else max(state.best, score)

        if self._style == "live":
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            render = _Line(state, begun)
            with Live(render, console=console, refresh_per_second=1 / _LIVE_SECONDS, transient=True):
                yield count
            return

        def seen(outcome: Outcome, score: float | None) -> None:
            nonlocal shown
            count(outcome, score)
            if self._style == "json":
                self._event("candidate", state, begun, status=outcome.status, score=score)
            elif self._style == "plain" and time.monotonic() - shown > _PLAIN_SECONDS:
                shown = time.monotonic()
                self._say(state.line(shown - begun))

        if self._style == "json":
            self._event("begin", state, begun)
        try:
            yield seen
        finally:
            if self._style == "plain":
                self._say(state.line(time.monotonic() - begun))
            elif self._style == "json":
                self._event("end", state, begun)

    def _say(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _event(self, kind: str, state: State, begun: float, **more: Any) -> None:
        elapsed = time.monotonic() - begun
        event = {
            "event": kind,
            "elapsed_seconds": round(elapsed, 3),
            "done": state.done,
            "total": state.total,
            "known": state.known,
            "statuses": dict(state.statuses),
            "best": state.best,
            "seconds_left": state.seconds_left(elapsed),
            **more,
        }
        self._say(json.dumps(event, sort_keys=True))


class _Line:
    """What a terminal shows: drawn anew at every refresh, so that the time left runs while nothing ends."""

    def __init__(self, state: State, begun: float) -> None:
        self._state, self._begun = state, begun

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(self._state.line(time.monotonic() - self._begun), no_wrap=True, overflow="ellipsis")
