"""The candidates of a branch as points: an arm (a backend with its parallel sizes) and one value of every knob.

Source: predict-recommend.md sections 6.4 and 8.2.
"""

from __future__ import annotations

import random
from typing import Any

from fpmsdk.recommendation.branches import Branch
from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.domains import Domain


class Points:
    """The points of one branch.

    branch: what is searched.
    knobs: dotted path and domain of each knob, in order.
    per_arm: points of each arm; None where a knob is continuous.
    """

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.knobs: tuple[tuple[str, Domain], ...] = branch.domains
        size = branch.size
        self.per_arm = None if size is None else size // len(branch.arms)

    def at(self, arm: int, index: int) -> Sample:
        """The point of an arm with a number below `per_arm`; the last knob varies fastest."""
        values = []
        for path, domain in reversed(self.knobs):
            count = domain.count
            assert count is not None
            index, position = divmod(index, count)
            values.append((path, domain.at(position)))
        return self.of(arm, values)

    def draw(self, arm: int, rng: random.Random) -> Sample:
        """A point of an arm, each knob drawn as its scale says."""
        return self.of(arm, [(path, domain.draw(rng)) for path, domain in self.knobs])

    def first(self) -> Sample:
        """Some point, the same one every time."""
        return self.draw(0, random.Random(0)) if self.per_arm is None else self.at(0, 0)

    def of(self, arm: int, values: list[tuple[str, Any]]) -> Sample:
        """The point of an arm with these values."""
        return Sample(self.branch.mode, self.branch.arms[arm].backend, arm, tuple(sorted(values)))
