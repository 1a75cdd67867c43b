"""Whose turn it is: the trials of a search, shared among its branches, batch by batch.

Source: predict-recommend.md section 8.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.search.suggesting import Suggester


class Suggestion(Struct, frozen=True):
    """A candidate to be evaluated: its number in the order of suggestion, its branch and the candidate."""

    index: int
    branch: int
    sample: Sample


class Rounds:
    """Asks the branches in turn, a batch of each, until the trials are used up or every branch is exhausted.

    Parameters
    ----------
    suggesters: one a branch.
    max_trials: candidates of all branches; the branches get equal parts, the first ones what remains, and others what
        an exhausted one leaves. None for all there are.
    batch: candidates that are suggested at once, before what became of them is known.
    """

    def __init__(self, suggesters: Sequence[Suggester], *, max_trials: int | None, batch: int) -> None:
        self.suggesters = suggesters
        self._batch = batch
        self._turn = list(range(len(suggesters)))
        self._suggested = 0
        self._left: list[int] | None = None
        if max_trials is not None:
            part, remainder = divmod(max_trials, len(suggesters))
            self._left = [part + (branch < remainder) for branch in self._turn]

    @property
    def waits(self) -> bool:
        """Whether the next batch depends on results that have not been told."""
        branch = self._next_branch()
        return branch is not None and self.suggesters[branch].waits

    @property
    def repetitions(self) -> int:
        """How often a candidate came up again, in all branches."""
        return sum(suggester.repetitions for suggester in self.suggesters)

    def next(self) -> list[Suggestion]:
        """The batch of the branch whose turn it is; empty when the search is over."""
        while (branch := self._next_branch()) is not None:
            count = self._batch if self._left is None else min(self._batch, self._left[branch])
            samples = self.suggesters[branch].suggest(count)
            if not samples:
                self._retire(branch)
                continue
            if self._left is not None:
                self._left[branch] -= len(samples)
            self._turn.remove(branch)
            self._turn.append(branch)
            found = [Suggestion(self._suggested + place, branch, sample) for place, sample in enumerate(samples)]
            self._suggested += len(found)
            return found
        return []

    def _next_branch(self) -> int | None:
        # One that has used its part stays in the turn: an exhausted one may leave it more.
        return next((branch for branch in self._turn if self._left is None or self._left[branch] > 0), None)

    def _retire(self, branch: int) -> None:
        self._turn.remove(branch)
        if self._left is not None and self._turn:
            rest, self._left[branch] = self._left[branch], 0
            part, remainder = divmod(rest, len(self._turn))
            for place, other in enumerate(sorted(self._turn)):
                self._left[other] += part + (place < remainder)
