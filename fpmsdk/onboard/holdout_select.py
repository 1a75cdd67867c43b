"""Which measured points of a phase are withheld: the envelope stays, the rest is sampled far and wide.

A point is (batch size, prefill tokens, KV tokens); arrays of points are int64[n, 3].
Source: onboarding.md section 8.3, steps 3 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fpmsdk.documents.canonical import pretty_bytes
from fpmsdk.files import sha256

Point = tuple[int, int, int]
Points = NDArray[np.int64]

AXES = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")
TARGET_FRACTION = 0.20
_ROWS_PER_SELECTED = 5  # the target fraction, as the whole number it divides by


def tie_hash(seed: int, phase: str, point: Point) -> str:
    """The hexadecimal digest that decides between points equally far away.

    >>> tie_hash(42, "prefill", (1, 16, 0))[:12]
    '5f422c8c10e0'
    """
    return sha256(pretty_bytes([seed, [phase, *point]]))


def envelope_anchors(phase: str, points: Points) -> set[Point]:
    """The points of a phase that are never withheld: at each batch size, the ends of what was measured.

    Parameters
    ----------
    phase: `prefill` or `decode`.
    points: int64[n, 3], in any order.

    Returns
    -------
    For decode the points of least and most KV; for prefill the ends of the curves of least and most KV, and of all
    points in their order, because a curve between may reach further.

    >>> sorted(envelope_anchors("decode", np.array([[1, 0, 4], [1, 0, 16], [1, 0, 64]])))
    [(1, 0, 4), (1, 0, 64)]
    """
    anchors: set[Point] = set()
    for batch in np.unique(points[:, 0]):
        group = points[points[:, 0] == batch]
        anchors |= _ends(group)
        if phase == "prefill":
            for kv in (group[:, 2].min(), group[:, 2].max()):
                anchors |= _ends(group[group[:, 2] == kv])
    return anchors


def _ends(points: Points) -> set[Point]:
    ordered = sorted(map(_point, points))
    return {ordered[0], ordered[-1]}


def _point(row: Points) -> Point:
    batch, tokens, kv = row.tolist()
    return batch, tokens, kv


def select_points(phase: str, points: Points, anchors: set[Point], *, limit: int, seed: int) -> list[Point]:
    """The points to withhold, in the order in which they were chosen.

    About a fifth of the points, at least one, at most `limit`: the first by hash, each further one as far as possible
    from those chosen, on axes of log2(1 + value) scaled to what is left to choose from.

    Parameters
    ----------
    phase: `prefill` or `decode`; it goes into the hashes.
    points: int64[n, 3], every measured point of the phase.
    anchors: points that must stay.
    limit: the most to choose, at least 1.
    seed: other seeds choose other points.

    Returns
    -------
    Chosen points; none when fewer than two were measured, or all must stay.

    >>> curve = np.array([[1, 0, 4], [1, 0, 16], [1, 0, 64]])
    >>> select_points("decode", curve, envelope_anchors("decode", curve), limit=16, seed=42)
    [(1, 0, 16)]
    """
    candidates = sorted(point for point in map(_point, points) if point not in anchors)
    if len(points) < 2 or not candidates:
        return []
    count = min(limit, max(1, len(points) // _ROWS_PER_SELECTED), len(candidates))
    positions = _positions(candidates)
    hashes = [tie_hash(seed, phase, point) for point in candidates]
    chosen = [min(range(len(candidates)), key=hashes.__getitem__)]
    distance = np.full(len(candidates), np.inf)
    while len(chosen) < count:
        offset = positions - positions[chosen[-1]]
        distance = np.minimum(distance, offset[:, 0] ** 2 + offset[:, 1] ** 2 + offset[:, 2] ** 2)
        distance[chosen] = -1.0
        farthest = np.flatnonzero(distance == distance.max()).tolist()
        chosen.append(max(farthest, key=hashes.__getitem__))
    return [candidates[index] for index in chosen]


def _positions(points: Sequence[Point]) -> NDArray[np.float64]:
    # The logarithms of the standard library are the same on every machine; those of numpy depend on its kernels.
    logs: NDArray[np.float64] = np.array([[math.log2(1 + value) for value in point] for point in points])
    low, extent = logs.min(axis=0), np.ptp(logs, axis=0)
    scaled: NDArray[np.float64] = (logs - low) / np.where(extent > 0, extent, 1.0)
    return scaled


def boundary_axes(point: Point, points: Points) -> list[str]:
    """The axes at whose measured minimum or maximum a point lies, as `min_<axis>` and `max_<axis>`.

    >>> boundary_axes((1, 0, 4), np.array([[1, 0, 4], [1, 0, 16]]))
    ['min_total_kv_read_tokens']
    """
    found = []
    for axis, value in enumerate(point):
        low, high = points[:, axis].min(), points[:, axis].max()
        if low != high:
            found += [f"min_{AXES[axis]}"] if value == low else []
            found += [f"max_{AXES[axis]}"] if value == high else []
    return found
