"""The requests of a configuration, and the load with which they arrive.

Source: predict-recommend.md section 3.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.speculation import RandomWords
from fpmsdk.prediction.compile.sessions import session_trace
from fpmsdk.prediction.config import (
    ConcurrencyLoad,
    ConstantRateLoad,
    KvCapacityLoad,
    PoissonLoad,
    PredictConfig,
    SessionSource,
    TimestampsLoad,
    TraceSource,
)
from fpmsdk.replay.arrivals import arrival_times_ms
from fpmsdk.replay.trace import Trace


def workload_of(config: PredictConfig, kv_concurrency: int | None = None) -> tuple[Trace, dict[str, Any]]:
    """The requests, and the options of the replay that say how they arrive.

    Parameters
    ----------
    kv_concurrency: requests in flight that a share of the cache comes to, for such a load.

    Raises
    ------
    TraceError: the trace cannot be read.
    """
    source, stop = config.traffic.source, config.traffic.stop
    options: dict[str, Any] = {}
    if stop is not None and stop.max_virtual_time_seconds is not None:
        options["max_sim_time_ms"] = stop.max_virtual_time_seconds * 1e3
    if isinstance(source, TraceSource):
        return _recorded(source, config), options | _trace_load(config)
    load, arrivals_ms = config.traffic.load, _arrivals_ms(config, _count(config, kv_concurrency))
    if isinstance(load, ConcurrencyLoad | KvCapacityLoad):
        options["concurrency"] = load.concurrency if isinstance(load, ConcurrencyLoad) else kv_concurrency
    if isinstance(source, SessionSource):
        block_tokens = next(iter(config.roles.values())).kv_cache.block_size
        return session_trace(source, arrivals_ms, block_tokens), options
    prefix = {"cached_prefix_tokens": source.cached_prefix_tokens} if source.cached_prefix_tokens else {}
    trace = Trace.synthetic(len(arrivals_ms), source.input_tokens, source.output_tokens, **prefix)
    return dataclasses.replace(trace, arrival_ms=arrivals_ms), options


def _recorded(source: TraceSource, config: PredictConfig) -> Trace:
    if source.format == "weka":
        return Trace.read(source.paths[0], "weka", nested_timestamps=source.nested_timestamp_basis)
    if source.format == "mooncake-delta":
        cache = config.roles["aggregated"].kv_cache.block_size
        return Trace.read(source.paths[0], source.format, block_tokens=source.block_size, kv_block_tokens=cache)
    if source.format == "dynamo":
        return Trace.read(
            source.paths[0], source.format, block_tokens=source.block_size, more_paths=source.paths[1:] or None
        )
    return Trace.read(source.paths[0], source.format, block_tokens=source.block_size)


def _trace_load(config: PredictConfig) -> dict[str, Any]:
    load = config.traffic.load
    if isinstance(load, TimestampsLoad):
        # Plays have no common clock: a lane takes the next one when its last has settled.
        return {"arrival_speedup_ratio": load.speedup, "concurrency": load.agentic_lanes}
    assert isinstance(load, ConcurrencyLoad)
    return {"concurrency": load.concurrency}


def _arrivals_ms(config: PredictConfig, count: int) -> NDArray[np.float64]:
    """When requests or sessions arrive; all at 0 where a closed loop admits them."""
    load = config.traffic.load
    if isinstance(load, PoissonLoad):
        return poisson_times_ms(count, load.per_second, load.seed)
    if isinstance(load, ConstantRateLoad):
        return arrival_times_ms(count, arrival_interval_ms=1e3 / load.per_second)
    return np.zeros(count)


def poisson_times_ms(count: int, per_second: float, seed: int) -> NDArray[np.float64]:
    """A Poisson process as the engine's own generator draws it, float64[count] in ms, the first at 0.

    Not the stream of `arrival_times_ms`, which is that of trace replays. Source: engine-and-replay.md section 5.3.

    >>> poisson_times_ms(3, 30.0, 7).round(4).tolist()
    [0.0, 1.0262, 13.2545]
    """
    words, mean_gap_ms = RandomWords(seed), 1e3 / per_second
    gaps_ms = (-mean_gap_ms * math.log(1.0 - (words.next() >> 11) * 2.0**-53) for _ in range(count - 1))
    return np.fromiter(accumulate(gaps_ms, initial=0.0), np.float64, count)


def _count(config: PredictConfig, kv_concurrency: int | None) -> int:
    """Requests or sessions that a synthetic source makes."""
    stop, load = config.traffic.stop, config.traffic.load
    assert stop is not None
    ((name, value),) = stop.counts().items()
    if not name.endswith("_per_load_unit"):
        return int(value)
    if isinstance(load, PoissonLoad | ConstantRateLoad):
        unit: float = load.per_second
    else:
        assert isinstance(load, ConcurrencyLoad | KvCapacityLoad)
        unit = load.concurrency if isinstance(load, ConcurrencyLoad) else kv_concurrency or 0
    return max(1, round(value * unit))
