"""Gauges and traffic of a replay sampled at even intervals, as an engine's metrics endpoint would show them.

Source: engine-and-replay.md section 5.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fpmsdk.files import whole_file
from fpmsdk.replay.stream import write_table

if TYPE_CHECKING:
    import pyarrow

Columns = Mapping[str, NDArray[Any]]

_COUNTERS = ("cache_hit_tokens", "cache_total_tokens", "preemptions")


def telemetry_series(
    samples: Columns,
    requests: Columns,
    sample_interval_ms: float,
    dp_sizes: Mapping[str, int],
    kv_cache_capacity_bytes: int | None,
) -> pyarrow.Table:
    """Return one row per sample.

    Parameters
    ----------
    samples: what the replay recorded, an entry per sample and rank.
    requests: the request columns of the report, with latencies.
    sample_interval_ms: at whose multiples the samples lie.
    dp_sizes: attention-DP ranks per worker of each `pool`.
    kv_cache_capacity_bytes: of a rank whose cache is a budget of bytes; None for one of blocks.

    Returns
    -------
    `sample_ordinal`; `kind`: baseline (at 0, gauges only), periodic, final (the rest of the last interval);
    `interval_start_ms`, `sampled_at_ms`; `traffic`: requests that arrived, and length and latency of those that
    completed, since the sample before; `prefill_scheduler_metrics`, `decode_scheduler_metrics`: gauges of each
    rank after its last command or end of pass (aggregated workers count as decode);
    `prefill_interval_metrics`, `decode_interval_metrics`: counts since the sample before.
    """
    import pyarrow as pa

    first = np.flatnonzero(np.diff(samples["sample"], prepend=-1))
    at_ms = samples["sampled_at_ms"][first]
    start_ms = np.concatenate([at_ms[:1], at_ms[:-1]])
    kind = np.full(len(at_ms), "periodic", object)
    kind[:1] = "baseline"
    if at_ms[-1] != (len(at_ms) - 1) * sample_interval_ms:
        kind[-1] = "final"
    columns: dict[str, Any] = {
        "sample_ordinal": np.arange(len(at_ms)),
        "kind": pa.array(kind, pa.string()),
        "interval_start_ms": start_ms,
        "sampled_at_ms": at_ms,
        "traffic": _traffic(samples, requests, start_ms, at_ms),
    }
    pools = {"prefill": samples["pool"] == "prefill", "decode": samples["pool"] != "prefill"}
    for side, chosen in pools.items():
        of_side = {name: column[chosen] for name, column in samples.items()}
        dp_size = dp_sizes.get(side, dp_sizes.get("agg", 1))
        columns[f"{side}_scheduler_metrics"] = _gauges(of_side, len(at_ms), dp_size, kv_cache_capacity_bytes)
    for side, chosen in pools.items():
        of_side = {name: column[chosen] for name, column in samples.items()}
        columns[f"{side}_interval_metrics"] = _struct(
            {name: _per_interval(of_side, name, len(at_ms)) for name in _COUNTERS}
        )
    return pa.table(columns)


def write_series(path: str | Path, series: pyarrow.Table) -> None:
    """Write a series, whole or not at all: `.parquet`, `.arrow`, or `.jsonl` with one JSON object per sample."""
    if Path(path).suffix != ".jsonl":
        write_table(path, series)
        return
    with whole_file(path) as file:
        for row in series.to_pylist():
            file.write(msgspec.json.encode(row) + b"\n")


def _per_interval(samples: Columns, name: str, count: int) -> NDArray[np.int64]:
    totals = np.bincount(samples["sample"], samples[name], count).astype(np.int64)
    return np.diff(totals, prepend=0)


def _gauges(samples: Columns, count: int, dp_size: int, capacity_bytes: int | None) -> pyarrow.ListArray:
    import pyarrow as pa

    active, inactive = samples["active_blocks"], samples["published_free_blocks"]
    total = active + samples["free_blocks"]
    fields: dict[str, Any] = {
        "worker_id": samples["worker"] // dp_size,
        "dp_rank": samples["worker"] % dp_size,
        "active_blocks": active,
        "inactive_blocks": inactive,
    }
    if capacity_bytes is None:
        usage, physical = active / np.maximum(total, 1), (active + inactive) / np.maximum(total, 1)
        fields["total_blocks"] = total
    else:
        usage = physical = samples["kv_cache_used_bytes"] / capacity_bytes
        fields["total_blocks"] = np.zeros_like(total)
        fields["kv_cache_used_bytes"] = samples["kv_cache_used_bytes"]
        fields["kv_cache_capacity_bytes"] = np.full(len(total), capacity_bytes)
    fields |= {
        "active_cache_usage": usage,
        "physical_cache_usage": physical,
        "running_requests": samples["running_requests"],
        "waiting_requests": samples["waiting_requests"],
    }
    offsets = np.searchsorted(samples["sample"], np.arange(count + 1))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _struct(fields))


def _traffic(
    samples: Columns, requests: Columns, start_ms: NDArray[np.float64], at_ms: NDArray[np.float64]
) -> pyarrow.StructArray:
    import pyarrow as pa

    count = len(at_ms)
    done = requests["status"] == "completed"
    completed_in = _interval_of(requests["end_ms"][done], at_ms)
    completed = np.bincount(completed_in, minlength=count)

    def mean(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        values = requests[name][done].astype(np.float64)
        has_one = ~np.isnan(values)
        values, where = values[has_one], completed_in[has_one]
        counts = np.bincount(where, minlength=count)
        return np.bincount(where, values, count) / np.maximum(counts, 1), counts

    (ttft_ms, ttft_count), (itl_ms, itl_count) = mean("ttft_ms"), mean("itl_ms")
    steps, tokens = (_per_interval(samples, name, count) for name in ("decode_steps", "decode_tokens"))
    accepted = pa.array(tokens / np.maximum(steps, 1), mask=steps == 0)
    return _struct(
        {
            "duration_s": (at_ms - start_ms) / 1e3,
            "arriving_requests": np.bincount(_interval_of(requests["arrival_ms"], at_ms), minlength=count),
            "completed_requests": completed,
            "avg_isl": mean("prompt_tokens")[0],
            "avg_osl": mean("output_tokens")[0],
            "avg_ttft_ms": ttft_ms,
            "avg_itl_ms": itl_ms,
            "ttft_count": ttft_count,
            "itl_count": itl_count,
            "avg_accept_length": accepted,
            "accept_length_forward_count": steps,
        }
    )


def _interval_of(times_ms: NDArray[np.float64], at_ms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Sample whose interval holds each time; the baseline has none, so the first interval starts with its moment."""
    found: NDArray[np.int64] = np.minimum(np.searchsorted(at_ms[1:], times_ms) + 1, len(at_ms) - 1)
    return found


def _struct(fields: Mapping[str, Any]) -> pyarrow.StructArray:
    import pyarrow as pa

    return pa.StructArray.from_arrays([pa.array(values) for values in fields.values()], list(fields))
