"""When the requests of an open loop arrive: at a constant interval, or as a seeded Poisson process.

Not timestamps, which traces hold, and not the closed loop, which is the replay's. Source: engine-and-replay.md 5.3.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError

DEFAULT_SEED = 42


def arrival_times_ms(
    count: int,
    *,
    request_rate: float | None = None,
    arrival_interval_ms: float | None = None,
    arrival_seed: int | None = None,
) -> NDArray[np.float64]:
    """Arrivals in ms, float64[count], the first at 0; without rate and interval all are at 0.

    Parameters
    ----------
    count: how many.
    request_rate: mean arrivals per second of a Poisson process.
    arrival_interval_ms: constant gap.
    arrival_seed: of the Poisson process, 42 when omitted; equal seeds give equal arrivals everywhere.

    Raises
    ------
    TraceError: a value is out of range, both are given, or a seed without a Poisson process.

    >>> arrival_times_ms(4, arrival_interval_ms=100.0).tolist()
    [0.0, 100.0, 200.0, 300.0]
    >>> arrival_times_ms(3, request_rate=10.0).round(3).tolist()
    [0.0, 102.006, 104.539]
    """
    (times,) = arrival_portions_ms(
        count,
        count,
        request_rate=request_rate,
        arrival_interval_ms=arrival_interval_ms,
        arrival_seed=arrival_seed,
    )
    return times


def arrival_portions_ms(
    count: int,
    portion: int = 1,
    *,
    request_rate: float | None = None,
    arrival_interval_ms: float | None = None,
    arrival_seed: int | None = None,
) -> Iterator[NDArray[np.float64]]:
    """The same arrivals, at most `portion` at a time; raises TraceError before the first."""
    if request_rate is not None and arrival_interval_ms is not None:
        raise TraceError("request_rate and arrival_interval_ms both set the arrivals; give one", field="request_rate")
    if request_rate is None:
        if arrival_seed is not None:
            raise TraceError("arrival_seed has no effect without request_rate; leave it out", field="arrival_seed")
        interval = 0.0 if arrival_interval_ms is None else checked_number("arrival_interval_ms", arrival_interval_ms)
        last_ms = -interval
        for first in range(0, count, portion):
            # Added up as the public engine does: an arrival may coincide with the end of a pass.
            gaps = np.full(min(portion, count - first), interval)
            gaps[0] += last_ms
            times = np.cumsum(gaps)
            last_ms = float(times[-1])
            yield times
        return
    rate = checked_number("request_rate", request_rate)
    if rate == 0 or not math.isfinite(1000 / rate):
        raise TraceError(f"request_rate is {rate!r}; give requests per second above 0", field="request_rate")
    seed = DEFAULT_SEED if arrival_seed is None else checked_integer("arrival_seed", arrival_seed, 0)
    # The generator of the standard library: its stream is part of its contract.
    generator = random.Random(seed)
    at_ms = 0.0
    for first in range(0, count, portion):
        times = np.empty(min(portion, count - first))
        for index in range(len(times)):
            if first + index > 0:
                at_ms += generator.expovariate(rate) * 1000.0
            times[index] = at_ms
        yield times


def checked_number(name: str, value: Any) -> float:
    """Return a finite number of at least 0, or raise TraceError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise TraceError(f"{name} is {shown(value)}; give a finite number of at least 0", field=name)
    return float(value)


def checked_integer(name: str, value: Any, low: int, high: int = 2**64 - 1) -> int:
    """Return an integer within bounds, or raise TraceError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise TraceError(f"{name} is {shown(value)}; give an integer from {low} to {high}", field=name)
    return value


def checked_ratio(name: str, value: Any) -> float:
    """Return a number from 0 to 1, or raise TraceError."""
    if checked_number(name, value) > 1:
        raise TraceError(f"{name} is {shown(value)}; give a number from 0 to 1", field=name)
    return float(value)
