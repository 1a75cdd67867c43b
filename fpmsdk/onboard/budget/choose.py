"""Which points to measure next: where the table is expected to be wrong most, weighted by the traffic.

A measured point that the others predict badly says that the table is steep there. How badly an unmeasured point will be
predicted follows from its measured neighbours: their errors when they are left out, scaled by the square of how much
nearer or further the candidate's next measured point is, as the error of a straight line grows with the square of its
length. Distances are doublings. Source: beyond the specification; errors of points left out: fpm-interpolation.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fpmsdk.onboard.budget.grid import Grid
from fpmsdk.perfmodel.leave_one_out import HeldOut

Float64 = NDArray[np.float64]

_NEIGHBOURS = 4
# What is expected where nothing is known, and at most.
UNKNOWN = 1.0


def distances(points: Grid, others: Grid) -> Float64:
    """Doublings between every point and every other, float64[points, others]; zero tokens count as one.

    >>> distances(np.array([[1, 127, 0]]), np.array([[2, 127, 0], [1, 255, 0]])).tolist()
    [[1.0, 1.0]]
    """
    offset = np.array([0, 1, 1])
    one, other = np.log2(points + offset), np.log2(others + offset)
    found: Float64 = np.sqrt(((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=2))
    return found


def expected_errors(candidates: Grid, left_out: Sequence[HeldOut]) -> Float64:
    """Relative error with which the table is expected to answer each candidate, between 0 and 1.

    Parameters
    ----------
    candidates: int64[n, 3] of one phase.
    left_out: every measured point of the phase, asked of the others.

    >>> def point(tokens, error):
    ...     predicted = None if error is None else 10.0 * (1 + error)
    ...     return HeldOut("prefill", (1, tokens, 0), 10.0, predicted, None)
    >>> measured = [point(15, None), point(63, 0.1), point(255, None)]
    >>> expected_errors(np.array([[1, 127, 0]]), measured).round(3).tolist()
    [0.025]
    """
    if not left_out:
        return np.full(len(candidates), UNKNOWN)
    measured = np.array([[each or 0 for each in point.coordinates] for point in left_out], np.int64)
    known = np.array([point.error is not None for point in left_out])
    errors = np.array([abs(point.error or 0.0) for point in left_out])
    if not known.any():
        return np.full(len(candidates), UNKNOWN)
    apart = distances(measured, measured)
    np.fill_diagonal(apart, np.inf)
    spacing = apart.min(axis=1)
    away = distances(candidates, measured)
    nearest = away.min(axis=1)
    # Ends of what was measured cannot be asked of the others; their neighbours speak for them.
    from_known = np.argsort(away[:, known], axis=1, kind="stable")[:, :_NEIGHBOURS]
    scaled = errors[known][from_known] * (nearest[:, None] / spacing[known][from_known]) ** 2
    result: Float64 = np.clip(np.sqrt((scaled**2).mean(axis=1)), 0.0, UNKNOWN)
    return result


def choose(candidates: Grid, expected: Float64, weights: Float64, measured: Grid, count: int) -> list[int]:
    """The candidates to measure, best first; each takes away what its neighbours are expected to be wrong.

    Parameters
    ----------
    candidates: int64[n, 3] of one phase, none of them measured.
    expected: as `expected_errors`, by candidate.
    weights: by candidate, what an error there counts.
    measured: int64[m, 3].
    count: the most to choose.

    >>> grid = np.array([[1, 0, kv] for kv in (16, 32, 64, 128)])
    >>> measured = np.array([[1, 0, 8], [1, 0, 256]])
    >>> choose(grid, np.array([0.1, 0.4, 0.3, 0.1]), np.ones(4), measured, 2)
    [1, 0]
    """
    start = distances(candidates, measured).min(axis=1) if len(measured) else np.full(len(candidates), np.inf)
    near, chosen = start.copy(), list[int]()
    gain = weights * expected
    while len(chosen) < min(count, len(candidates)):
        left = gain * np.where(np.isfinite(start), (near / np.maximum(start, 1e-9)) ** 2, 1.0)
        left[chosen] = -1.0
        best = int(left.argmax())
        chosen.append(best)
        near = np.minimum(near, distances(candidates, candidates[best : best + 1])[:, 0])
    return chosen
