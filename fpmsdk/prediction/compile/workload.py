"""The requests of a configuration, and the load with which they arrive.

Source: predict-recommend.md section 3.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.prediction.compile.sessions import session_trace
from fpmsdk.prediction.config import (
    ConcurrencyLoad,
    ConstantRateLoad,
    KvCapacityLoad,
    PoissonLoad,
    PredictConfig,
    SessionSource,
    SyntheticSource,
    TimestampsLoad,
    TraceSource,
)
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
        return _recorded(source), options | _trace_load(config)
    arrivals, load = _arrivals(config, kv_concurrency)
    return _synthetic(config, source, arrivals, kv_concurrency), options | load


def _recorded(source: TraceSource) -> Trace:
    if source.format == "weka":
        return Trace.read(source.paths[0], "weka", nested_timestamps=source.nested_timestamp_basis)
    return Trace.read(source.paths[0], source.format, block_tokens=source.block_size)


def _trace_load(config: PredictConfig) -> dict[str, Any]:
    load = config.traffic.load
    if isinstance(load, TimestampsLoad):
        # Plays have no common clock: a lane takes the next one when its last has settled.
        return {"arrival_speedup_ratio": load.speedup, "concurrency": load.agentic_lanes}
    assert isinstance(load, ConcurrencyLoad)
    return {"concurrency": load.concurrency}


def _arrivals(config: PredictConfig, kv_concurrency: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the generator, and options of the replay."""
    load = config.traffic.load
    if isinstance(load, PoissonLoad):
        return {"request_rate": load.per_second, "arrival_seed": load.seed}, {}
    if isinstance(load, ConstantRateLoad):
        return {"arrival_interval_ms": 1e3 / load.per_second}, {}
    assert isinstance(load, ConcurrencyLoad | KvCapacityLoad)
    concurrency = load.concurrency if isinstance(load, ConcurrencyLoad) else kv_concurrency
    return {}, {"concurrency": concurrency}


def _synthetic(
    config: PredictConfig, source: SyntheticSource | SessionSource, arrivals: dict[str, Any], kv_concurrency: int | None
) -> Trace:
    count = _count(config, kv_concurrency)
    if isinstance(source, SyntheticSource):
        prefix = {"cached_prefix_tokens": source.cached_prefix_tokens} if source.cached_prefix_tokens else {}
        return Trace.synthetic(count, source.input_tokens, source.output_tokens, **prefix, **arrivals)
    block_tokens = next(iter(config.roles.values())).kv_cache.block_size
    return session_trace(source, count, block_tokens, arrivals)


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
