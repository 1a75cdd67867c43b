"""What every algorithm of a search is to the rest: it suggests candidates, and is told what became of them.

Source: predict-recommend.md section 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fpmsdk.recommendation.candidate import Sample


class Suggester(Protocol):
    """Suggests candidates of one branch, never one of them twice."""

    @property
    def waits(self) -> bool:
        """Whether the next suggestion depends on the results of those before."""
        ...

    @property
    def repetitions(self) -> int:
        """How often a candidate came up again, which costs no trial."""
        ...

    def suggest(self, count: int) -> list[Sample]:
        """The next candidates; fewer than asked for when there are no more."""
        ...

    def tell(self, sample: Sample, values: Sequence[float] | None) -> None:
        """What became of a suggested candidate, in the order of suggestion.

        Parameters
        ----------
        values: its objectives, more is better; None where it cannot be ranked.
        """
        ...
