"""Every candidate of a finite branch, in an order that depends on nothing but the space.

Source: predict-recommend.md section 8 (grid).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.search.points import Points


class Grid:
    """The product of arms and knobs: the arms in their order, the last knob varies fastest.

    Raises
    ------
    OnboardError: a knob is continuous.
    """

    waits = False
    repetitions = 0

    def __init__(self, points: Points) -> None:
        if points.per_arm is None:
            continuous = [path for path, domain in points.knobs if domain.count is None]
            raise OnboardError(
                f"optimizer.algorithm: grid needs knobs that can be counted; {', '.join(continuous)} has a float range "
                "without step: give a step or choices, or use algorithm random",
                "optimizer.algorithm",
            )
        arms, per_arm = range(len(points.branch.arms)), range(points.per_arm)
        self._rest = (points.at(arm, index) for arm in arms for index in per_arm)

    def suggest(self, count: int) -> list[Sample]:
        """The next candidates."""
        return list(itertools.islice(self._rest, count))

    def tell(self, sample: Sample, values: Sequence[float] | None) -> None:
        """Nothing depends on what became of a candidate."""
