"""Measured points as curves in flat arrays, and what follows from them before any query.

Curves share a site: batch and KV tokens in prefill, batch alone in decode. Source: fpm-interpolation.md section 2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.perfdb.forward_cells import Points

_FLAT_MEDIAN = 0.05
_FLAT_RECORDS = 3


class Curves(NamedTuple):
    """Curves in ascending order of their sites; entries `first[i]:first[i + 1]` of `x` and `latency_ms` are curve i.

    `second` is the other coordinate of a site, zero where the batch alone is one. Sites of `batches[j]` are
    `batch_first[j]:batch_first[j + 1]`. float64 but for the int64 offsets.
    """

    batch: NDArray[np.float64]
    second: NDArray[np.float64]
    first: NDArray[np.int64]
    x: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    batches: NDArray[np.float64]
    batch_first: NDArray[np.int64]


def prefill_curves(points: Points) -> Curves:
    """Latency over prefill tokens at each (batch, KV tokens)."""
    return _curves(points.batch, points.kv, points.tokens, points.latency_ms)


def prefill_curves_over_kv(points: Points) -> Curves:
    """Latency over KV tokens at each (batch, prefill tokens)."""
    return _curves(points.batch, points.tokens, points.kv, points.latency_ms)


def decode_curves(points: Points) -> Curves:
    """Latency over KV tokens at each batch."""
    return _curves(points.batch, np.zeros_like(points.batch), points.kv, points.latency_ms)


def _curves(
    batch: NDArray[np.int64], second: NDArray[np.int64], x: NDArray[np.int64], latency_ms: NDArray[np.float64]
) -> Curves:
    order = np.lexsort((x, second, batch))
    batch, second, x = batch[order], second[order], x[order]
    begins = np.flatnonzero(np.r_[True, (batch[1:] != batch[:-1]) | (second[1:] != second[:-1])][: len(order)])
    site_batch = batch[begins].astype(np.float64)
    batches, batch_first = np.unique(site_batch, return_index=True)
    arrays = (
        site_batch,
        second[begins].astype(np.float64),
        np.append(begins, len(order)).astype(np.int64),
        x.astype(np.float64),
        latency_ms[order],
        batches,
        np.append(batch_first, len(begins)).astype(np.int64),
    )
    for array in arrays:
        array.setflags(write=False)
    return Curves(*arrays)


def capture_batches(curves: Curves) -> NDArray[np.float64]:
    """Batches after which the engine's graph changes: those whose successor was collected too.

    >>> capture_batches(_curves(np.array([1, 2, 4]), np.zeros(3, int), np.ones(3, int), np.ones(3)))
    array([1.])
    """
    return curves.batches[:-1][np.diff(curves.batches) == 1] if len(curves.batches) else curves.batches


def flat_batch_limit(curves: Curves) -> float | None:
    """Largest collected prefill batch when latency hardly depends on the batch, else None.

    Source: fpm-interpolation.md section 2.1.
    """
    deviations: list[float] = []
    for low in range(len(curves.batches) - 1):
        known = {kv: _entries(curves, site) for site, kv in _sites(curves, low)}
        for site, kv in _sites(curves, low + 1):
            if kv in known:
                deviations += _deviations(*known[kv], *_entries(curves, site))
    if len(curves.batches) < 2 or len(deviations) < _FLAT_RECORDS:
        return None
    deviations.sort()
    middle = len(deviations) // 2
    median = deviations[middle] if len(deviations) % 2 else (deviations[middle - 1] + deviations[middle]) / 2.0
    return float(curves.batches[-1]) if median <= _FLAT_MEDIAN else None


def _sites(curves: Curves, batch: int) -> list[tuple[int, float]]:
    sites = range(curves.batch_first[batch], curves.batch_first[batch + 1])
    return [(site, float(curves.second[site])) for site in sites]


def _entries(curves: Curves, site: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    entries = slice(curves.first[site], curves.first[site + 1])
    return curves.x[entries], curves.latency_ms[entries]


def _deviations(
    x: NDArray[np.float64], low_ms: NDArray[np.float64], asked: NDArray[np.float64], high_ms: NDArray[np.float64]
) -> list[float]:
    # Relative differences of the curve of the larger batch from that of the smaller one, inside the latter.
    found = []
    for at, latency in zip(asked, high_ms, strict=True):
        if not x[0] <= at <= x[-1]:
            continue
        right = int(np.searchsorted(x, at))
        base = low_ms[right]
        if x[right] != at:
            weight = (at - x[right - 1]) / (x[right] - x[right - 1])
            base = low_ms[right - 1] + (low_ms[right] - low_ms[right - 1]) * weight
        if base > 0.0:
            found.append(abs(float(latency) / float(base) - 1.0))
    return found
