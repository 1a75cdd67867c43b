"""Step functions over time: sums over ranks, and figures of even intervals when there are too many steps to draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """A value over time: `value[i]` from `at_ms[i]` until `at_ms[i + 1]`, the last one for ever."""

    at_ms: Float64
    value: Float64

    @classmethod
    def of_changes(cls, at_ms: Float64, change: Float64) -> Steps:
        """The running sum of changes; those of one moment are one step.

        >>> Steps.of_changes(np.array([5.0, 0.0, 5.0]), np.array([2.0, 1.0, -1.0])).value.tolist()
        [1.0, 2.0]
        """
        moments, inverse = np.unique(at_ms, return_inverse=True)
        return cls(moments, np.cumsum(np.bincount(inverse, change, len(moments))))

    def binned(self, edges_ms: Float64) -> tuple[Float64, Float64]:
        """Mean over time and largest value between neighbouring edges; zero before the first step.

        >>> Steps(np.array([0.0, 1.0]), np.array([4.0, 0.0])).binned(np.array([0.0, 2.0, 3.0]))
        (array([2., 0.]), array([4., 0.]))
        """
        at_ms = np.append(self.at_ms, max(edges_ms[-1], self.at_ms[-1]))
        area = np.append(0.0, np.cumsum(self.value * np.diff(at_ms)))
        mean = np.diff(np.interp(edges_ms, at_ms, area)) / np.diff(edges_ms)
        before = np.searchsorted(self.at_ms, edges_ms[:-1], "right") - 1
        largest = np.where(before >= 0, self.value[np.maximum(before, 0)], 0.0)
        inside = np.searchsorted(edges_ms, self.at_ms, "right") - 1
        counts = (inside >= 0) & (inside < len(largest))
        np.maximum.at(largest, inside[counts], self.value[counts])
        return mean, largest
