"""Candidates drawn by chance, none twice, and from every arm in turn.

Source: predict-recommend.md section 8.2.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.search.points import Points

# Draws that follow the scale of the knobs before any unseen point does, and draws before a continuous arm is given up.
_SCALED_DRAWS, _CONTINUOUS_DRAWS = 32, 64
# Draws before the rest of a finite arm is gone through in order.
_UNIFORM_DRAWS = 16


class StratifiedRandom:
    """Draws from the arms in turn, without replacement; a finite branch is covered exactly once.

    Parameters
    ----------
    points: the branch.
    seed: of this branch.
    cheapest_first: whether the turn goes from few GPUs to many, instead of by chance.
    """

    waits = False
    repetitions = 0

    def __init__(self, points: Points, seed: int, *, cheapest_first: bool = False) -> None:
        self._points = points
        self._rng = random.Random(seed)
        arms = list(range(len(points.branch.arms)))
        self._rng.shuffle(arms)
        if cheapest_first:
            arms.sort(key=lambda arm: points.branch.arms[arm].gpus)
        self._turn = deque(arms)
        self._seen: dict[int, set[tuple[tuple[str, object], ...]]] = {arm: set() for arm in arms}
        self._scaled = any(domain.logarithmic for _, domain in points.knobs)

    def suggest(self, count: int) -> list[Sample]:
        """The next candidates."""
        found: list[Sample] = []
        while len(found) < count and self._turn:
            arm = self._turn.popleft()
            sample = self._unseen(arm)
            if sample is None:
                continue
            self.exclude(sample)
            self._turn.append(arm)
            found.append(sample)
        return found

    def exclude(self, sample: Sample) -> None:
        """Never suggest a candidate."""
        self._seen[sample.arm].add(sample.knobs)

    def tell(self, sample: Sample, values: Sequence[float] | None) -> None:
        """Nothing depends on what became of a candidate."""

    def _unseen(self, arm: int) -> Sample | None:
        seen, total = self._seen[arm], self._points.per_arm
        if total is not None and len(seen) >= total:
            return None
        if total is None or self._scaled:
            for _ in range(_CONTINUOUS_DRAWS if total is None else _SCALED_DRAWS):
                sample = self._points.draw(arm, self._rng)
                if sample.knobs not in seen:
                    return sample
        if total is None:
            return None
        for _ in range(_UNIFORM_DRAWS):
            sample = self._points.at(arm, self._rng.randrange(total))
            if sample.knobs not in seen:
                return sample
        # Few are left: the first one from a place that is drawn.
        start = self._rng.randrange(total)
        for step in range(total):
            sample = self._points.at(arm, (start + step) % total)
            if sample.knobs not in seen:
                return sample
        return None
