"""The summary of a replay from portions of its requests: equal to the bit to that of all of them at once.

Keeps sums; latencies and token gaps go to disk, so that percentiles are exact and memory does not grow with the run.
Figures are defined in `fpmsdk.replay.latency` and `totals`. Source: engine-and-replay.md section 5.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.replay.latency import PERCENTILES, Distribution, RequestLatencies, Sla, rank_of, sketched
from fpmsdk.replay.sorting import Spill
from fpmsdk.replay.totals import Columns, Totals, first_rejected

Float64 = NDArray[np.float64]

# Up to so many values numpy adds at once; more it halves, as `_pairwise` does.
_VALUES_AT_ONCE = 1 << 15


class Fold:
    """Takes requests that are over and gaps between tokens; tells the figures of all of them.

    Parameters
    ----------
    sla: bounds for goodput.
    exact_itl: percentiles of token gaps exactly, not those of a sketch.
    """

    def __init__(self, sla: Sla | None, exact_itl: bool) -> None:
        self._sla = sla
        self._exact_itl = exact_itl
        self.totals = Totals()
        self._first_rejected: tuple[str, str] | None = None
        self._spills = {name: Spill() for name in ("ttft_ms", "ttst_ms", "itl_ms", "e2e_ms", "gaps", "rates")}

    def add(self, columns: Columns) -> None:
        """Add request columns, as a report has them."""
        latencies = latencies_of(columns)
        self.totals.add(columns, latencies, self._sla)
        self._first_rejected = self._first_rejected or first_rejected(columns)
        done = columns["status"] == "completed"
        for name in ("ttft_ms", "ttst_ms", "itl_ms", "e2e_ms"):
            values = getattr(latencies, name)[done]
            self._spills[name].add(values[np.isfinite(values)])

    def add_gaps(self, gap_ms: Float64, count: NDArray[np.int64]) -> None:
        """Add gaps between tokens, each with the number of tokens that waited so long."""
        kept = np.isfinite(gap_ms) & (count > 0)
        self._spills["gaps"].add(gap_ms[kept], count[kept])
        positive = kept & (gap_ms > 0)
        rates = 1e3 / gap_ms[positive]
        finite = np.isfinite(rates)
        self._spills["rates"].add(rates[finite], count[positive][finite])

    def distributions(self) -> dict[str, Any]:
        """The distributions of a summary."""
        spills = self._spills
        stream = {name: _of_stream(spills[name], self._exact_itl) for name in ("gaps", "rates")}
        return {
            "num_ttft_samples": spills["ttft_ms"].total,
            "num_tpot_samples": spills["itl_ms"].total,
            "num_e2e_latency_samples": spills["e2e_ms"].total,
            **of_sample(spills["ttft_ms"]).named("ttft_ms"),
            **of_sample(spills["ttst_ms"]).named("ttst_ms"),
            **of_sample(spills["itl_ms"]).named("tpot_ms"),
            **stream["gaps"].named("itl_ms"),
            **of_sample(spills["e2e_ms"]).named("e2e_latency_ms"),
            **stream["rates"].named("output_token_throughput_per_user"),
        }

    def why_empty(self) -> str:
        """In words, what became of requests of which none completed."""
        return self.totals.why_empty(self._first_rejected)

    def __enter__(self) -> Fold:
        """Use the fold, and give the disk back after it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        with ExitStack() as stack:
            for spill in self._spills.values():
                stack.callback(spill.close)


def latencies_of(columns: Columns) -> RequestLatencies:
    """The latencies of request columns."""
    return RequestLatencies.of(
        columns["arrival_ms"],
        columns["first_token_ms"],
        columns["second_token_ms"],
        columns["last_token_ms"],
        columns["output_tokens"],
    )


def of_sample(spill: Spill) -> Distribution:
    """The distribution of a sample, as `Distribution.of_sample` gives it."""
    n = spill.total
    if n == 0:
        return Distribution()
    mean = _sum(_repeated(spill), n, lambda values: values) / n
    square = _sum(_repeated(spill), n, lambda values: (values - mean) * (values - mean))
    return _figures(spill, mean, np.sqrt(square / n), sketches=False)


def _of_stream(spill: Spill, exact: bool) -> Distribution:
    """As `Distribution.of_stream`."""
    distinct = sum(len(block) for block in spill.blocks())
    if distinct == 0:
        return Distribution()
    total = spill.total

    def weighted(block_of: Callable[[Float64], Float64]) -> Float64:
        portions = (block_of(block["value"]) * block["count"] for block in spill.blocks())
        return _sum(portions, distinct, lambda values: values)

    mean = float(weighted(lambda values: values) / total)
    variance = float(weighted(lambda values: (values - mean) ** 2) / total)
    return _figures(spill, mean, np.sqrt(variance), sketches=not exact and total > 1)


def _figures(spill: Spill, mean: Any, std: Any, *, sketches: bool) -> Distribution:
    ranks = {name: rank_of(spill.total, percent) for name, percent in PERCENTILES.items()}
    at: dict[str, float] = {}
    least = greatest = 0.0
    passed = 0
    for block in spill.blocks():
        if passed == 0:
            least = float(block["value"][0])
        greatest = float(block["value"][-1])
        ends = passed + np.cumsum(block["count"])
        for name, rank in ranks.items():
            if passed <= rank < ends[-1]:
                at[name] = float(block["value"][np.searchsorted(ends, rank, "right")])
        passed = int(ends[-1])
    if sketches:
        at = {name: sketched(value) for name, value in at.items()}
    return Distribution(mean=float(mean), min=least, max=greatest, std=float(std), **at)


def _repeated(spill: Spill) -> Iterator[Float64]:
    """The values in ascending order, each as often as it occurs."""
    for block in spill.blocks():
        ends = np.cumsum(block["count"])
        for first in range(0, int(ends[-1]), _VALUES_AT_ONCE):
            ranks = np.arange(first, min(first + _VALUES_AT_ONCE, int(ends[-1])))
            yield block["value"][np.searchsorted(ends, ranks, "right")]


def _sum(portions: Iterator[Float64], n: int, of: Callable[[Float64], Float64]) -> Float64:
    """The sum of `of` n values that come in portions, with numpy's additions in numpy's order."""
    reader = _Reader(portions)

    def pairwise(length: int) -> Float64:
        if length <= _VALUES_AT_ONCE:
            total: Float64 = np.add.reduce(of(reader.read(length)))
            return total
        half = length // 2 - length // 2 % 8
        return pairwise(half) + pairwise(length - half)

    return pairwise(n)


class _Reader:
    """Portions of values, read in lengths of one's own."""

    def __init__(self, portions: Iterator[Float64]) -> None:
        self._portions = portions
        self._rest = np.empty(0)

    def read(self, length: int) -> Float64:
        parts, missing = [], length
        while True:
            parts.append(self._rest[:missing])
            missing -= len(parts[-1])
            self._rest = self._rest[len(parts[-1]) :]
            if missing == 0:
                return np.concatenate(parts)
            self._rest = next(self._portions)
