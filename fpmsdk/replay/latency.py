"""Latency figures of served requests: TTFT, TTST, ITL, end-to-end, their distributions, and goodput.

Works on columns of times in ms; knows neither the replay that produced them nor the report that prints them.
Source: engine-and-replay.md section 5.6.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fpmsdk.config.schema import shown
from fpmsdk.errors import ConfigError

Float64 = NDArray[np.float64]

PERCENTILES = {"median": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}

# A DDSketch keeps values to 0.1 %: bucket i holds (gamma^(i-1), gamma^i] and answers with its middle.
_SKETCH_GAMMA = (1 + 0.001) / (1 - 0.001)
_SKETCH_LOG_GAMMA = math.log(_SKETCH_GAMMA)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Moments and rank percentiles of a sample; all zero for an empty one."""

    mean: float = 0.0
    min: float = 0.0
    max: float = 0.0
    median: float = 0.0
    p75: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    std: float = 0.0

    @classmethod
    def of_sample(cls, values: ArrayLike) -> Distribution:
        """Exact figures; NaN marks an absent value.

        >>> Distribution.of_sample([4.0, 1.0, float("nan"), 2.0]).median
        2.0
        """
        sample = np.asarray(values, np.float64)
        sample = np.sort(sample[np.isfinite(sample)])
        if sample.size == 0:
            return cls()
        return cls(
            mean=float(sample.mean()),
            min=float(sample[0]),
            max=float(sample[-1]),
            std=float(sample.std()),
            **{name: float(sample[rank_of(sample.size, p)]) for name, p in PERCENTILES.items()},
        )

    @classmethod
    def of_stream(cls, values: ArrayLike, counts: ArrayLike, exact: bool = False) -> Distribution:
        """Figures of a stream in which values[i] occurred counts[i] times.

        Moments are exact; percentiles too when `exact`, else those of a DDSketch with relative accuracy 0.001 (a
        stream of one value answers with it). Non-finite values are left out.

        >>> Distribution.of_stream([1.0, 11.0], [3, 1]).median
        0.9989999999999999
        """
        stream, weights = merged_stream(values, counts)
        if stream.size == 0:
            return cls()
        total = int(weights.sum())
        mean = float((stream * weights).sum() / total)
        # Buckets ascend with their values, so the rank is found among the values themselves.
        ends = np.cumsum(weights)
        at = {name: float(stream[np.searchsorted(ends, rank_of(total, p), "right")]) for name, p in PERCENTILES.items()}
        return cls(
            mean=mean,
            min=float(stream[0]),
            max=float(stream[-1]),
            std=math.sqrt(float(((stream - mean) ** 2 * weights).sum() / total)),
            **(at if exact or total == 1 else {name: sketched(value) for name, value in at.items()}),
        )

    def named(self, name: str) -> dict[str, float]:
        """The figures as summary keys, `mean_<name>` and so on.

        >>> Distribution(mean=2.0).named("ttft_ms")["mean_ttft_ms"]
        2.0
        """
        return {f"{figure}_{name}": value for figure, value in asdict(self).items()}


def merged_stream(values: ArrayLike, counts: ArrayLike) -> tuple[Float64, NDArray[np.int64]]:
    """The distinct finite values of a stream in ascending order, and how often each occurred.

    >>> [column.tolist() for column in merged_stream([2.0, 1.0, 2.0], [1, 5, 2])]
    [[1.0, 2.0], [5, 3]]
    """
    stream, weights = np.asarray(values, np.float64), np.asarray(counts, np.int64)
    kept = np.isfinite(stream) & (weights > 0)
    stream, inverse = np.unique(stream[kept], return_inverse=True)
    return stream, np.bincount(inverse, weights[kept], len(stream)).astype(np.int64)


def rank_of(n: int, percent: int) -> int:
    """The place, from 0, of a percentile in a sorted sample of n values."""
    # round((n - 1) * percent / 100) with halves away from zero, in integers.
    return ((n - 1) * percent + 50) // 100


def sketched(value: float) -> float:
    """What a DDSketch answers for a value."""
    if value <= 0:
        return 0.0
    bucket = math.ceil(math.log(value) / _SKETCH_LOG_GAMMA)
    return 2 * math.pow(_SKETCH_GAMMA, bucket) / (_SKETCH_GAMMA + 1)


@dataclass(frozen=True, slots=True, eq=False)
class RequestLatencies:
    """Latencies of each request in ms, float64[n]; NaN where the request has none.

    Attributes
    ----------
    ttft_ms: first token after arrival.
    ttst_ms: second token after the first.
    itl_ms: mean gap between tokens (TPOT); needs two tokens.
    e2e_ms: last token after arrival.
    """

    ttft_ms: Float64
    ttst_ms: Float64
    itl_ms: Float64
    e2e_ms: Float64

    @classmethod
    def of(
        cls,
        arrival_ms: Float64,
        first_token_ms: Float64,
        second_token_ms: Float64,
        last_token_ms: Float64,
        output_tokens: NDArray[np.int64],
    ) -> RequestLatencies:
        """Latencies from absolute times (NaN when absent) and the number of tokens that came out.

        >>> times = [np.array([t]) for t in (5.0, 15.0, 17.0, 25.0)]
        >>> RequestLatencies.of(*times, np.array([6])).itl_ms.tolist()
        [2.0]
        """
        gaps = np.where(output_tokens > 1, output_tokens - 1.0, np.nan)
        return cls(
            ttft_ms=np.maximum(first_token_ms - arrival_ms, 0.0),
            ttst_ms=np.maximum(second_token_ms - first_token_ms, 0.0),
            itl_ms=np.maximum((last_token_ms - first_token_ms) / gaps, 0.0),
            e2e_ms=np.maximum(last_token_ms - arrival_ms, 0.0),
        )


@dataclass(frozen=True, slots=True)
class Sla:
    """Latency bounds in ms that make a completed request a good one; None leaves a bound out.

    Raises
    ------
    ConfigError: no bound, one that is not finite and positive, or e2e_ms together with another.

    >>> Sla(ttft_ms=200, itl_ms=20).itl_ms
    20
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        """Check the bounds."""
        bounds = {name: value for name, value in asdict(self).items() if value is not None}
        if not bounds:
            raise ConfigError("sla sets no bound; give ttft_ms, itl_ms or e2e_ms, or no sla", "sla")
        for name, value in bounds.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value <= sys.float_info.max:
                raise ConfigError(f"sla.{name} is {shown(value)}; give finite milliseconds above 0", f"sla.{name}")
        if self.e2e_ms is not None and len(bounds) > 1:
            raise ConfigError("sla.e2e_ms excludes ttft_ms and itl_ms; give one or the other", "sla.e2e_ms")

    @classmethod
    def from_dict(cls, bounds: Mapping[str, float | None]) -> Sla:
        """Bounds by name.

        >>> Sla.from_dict({"e2e_ms": 900})
        Sla(ttft_ms=None, itl_ms=None, e2e_ms=900)
        """
        if not isinstance(bounds, Mapping):
            raise ConfigError(f"sla is {shown(bounds)}; give bounds by name, as {{'ttft_ms': 200}}", "sla")
        unknown = sorted(map(str, set(bounds) - {"ttft_ms", "itl_ms", "e2e_ms"}))
        if unknown:
            raise ConfigError(
                f"sla.{unknown[0]} is unknown; bounds are ttft_ms, itl_ms and e2e_ms", f"sla.{unknown[0]}"
            )
        return cls(**bounds)

    def met_by(self, latencies: RequestLatencies, arrival_ms: Float64, end_ms: Float64) -> NDArray[np.bool_]:
        """Which completed requests hold every bound, bool[n].

        A request without tokens can hold an e2e bound only, by its end; one with a single token has no ITL to
        bound.
        """
        good = np.ones(len(arrival_ms), np.bool_)
        if self.ttft_ms is not None:
            good &= latencies.ttft_ms <= self.ttft_ms
        if self.itl_ms is not None:
            one_token = ~np.isnan(latencies.ttft_ms) & np.isnan(latencies.itl_ms)
            good &= one_token | (latencies.itl_ms <= self.itl_ms)
        if self.e2e_ms is not None:
            e2e_ms = np.where(np.isnan(latencies.e2e_ms), end_ms - arrival_ms, latencies.e2e_ms)
            good &= e2e_ms <= self.e2e_ms
        return good
