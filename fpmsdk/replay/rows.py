"""One request as a reader of trace files sees it, and the clock that its times are on.

Every form of file becomes a stream of rows, one at a time. Not their order or their columns: see
`fpmsdk.replay.timeline` and `fpmsdk.replay.builder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Clock(Enum):
    """The unit of a source's times. Differences become ms; absolute times of a source mean nothing.

    >>> Clock.NANOSECONDS.to_ms(1_500_000), Clock.SECONDS.to_ms(0.268141)
    (1.5, 268.141)
    """

    MILLISECONDS = "ms"
    SECONDS = "s"
    NANOSECONDS = "ns"  # integers: an epoch in ns does not fit a float

    def to_ms(self, difference: float) -> float:
        """Return a difference of two times in ms."""
        if self is Clock.MILLISECONDS:
            return difference
        if self is Clock.NANOSECONDS:
            return difference / 1e6
        # By way of whole nanoseconds, so that decimal seconds become the same decimal milliseconds.
        return float(np.rint(difference * 1e9)) / 1e6

    def all_to_ms(self, differences: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return many differences in ms, each as `to_ms` gives it."""
        if self is Clock.MILLISECONDS:
            return differences.astype(np.float64)
        if self is Clock.NANOSECONDS:
            return differences / 1e6
        in_ms: NDArray[np.float64] = np.rint(differences * 1e9) / 1e6
        return in_ms


@dataclass(slots=True)
class Row:
    """One request of a source, with times on the clock of the source.

    Attributes
    ----------
    line: line of the source from 1, or the ordinal of the request where the form has no lines.
    prompt_tokens, output_tokens: lengths; a prompt has at least one token.
    at: when it arrived; None counts as 0.
    end: when it was answered, where the source knows; the next turn of the session waits from then.
    delay: wait of a later turn in units of the clock; None is inferred from the times.
    request_id: None is `request_<line>`.
    session_id: None is a session of its own, with the name of the request.
    priority, dp_rank, prefill_dp_rank: as in `Trace`.
    hash_ids: identities of prompt blocks.
    describes_output: the blocks past the prompt identify what is generated.
    awaits: of a later turn, how many rows of its session back those lie that it waits for; none is the row before it.
    """

    line: int
    prompt_tokens: int
    output_tokens: int
    at: float | None = None
    end: float | None = None
    delay: float | None = None
    request_id: str | None = None
    session_id: str | None = None
    priority: int = 0
    dp_rank: int = -1
    prefill_dp_rank: int = -1
    hash_ids: Sequence[int] = ()
    awaits: Sequence[int] = ()
    describes_output: bool = False

    @property
    def name(self) -> str:
        """The name of the request, given or made from its line."""
        return self.request_id or f"request_{self.line}"


@dataclass(slots=True)
class LeftOut:
    """A record of the source that stands for no request to serve, and why."""

    line: int
    reason: str


class PlacedRow(NamedTuple):
    """One request on the clock of the trace, as files written by us hold it.

    `session_id` is None where the session has the name of the request; `arrival_ms` is None for a later turn.
    """

    request_id: str
    session_id: str | None
    arrival_ms: float | None
    delay_ms: float
    prompt_tokens: int
    output_tokens: int
    priority: int
    dp_rank: int
    prefill_dp_rank: int
    hash_ids: Sequence[int]
    awaits: Sequence[int]
