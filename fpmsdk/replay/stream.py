"""The telemetry that a replayed engine would have published: one forward-pass message per rank and pass.

Source: engine-and-replay.md sections 2.7, 4.4 and 5.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import ConfigError
from fpmsdk.files import whole_file
from fpmsdk.metrics import ForwardPassMetrics, QueuedRequestMetrics, ScheduledRequestMetrics, encode_frame

if TYPE_CHECKING:
    import pyarrow

# What a pass was priced for; beside the columns of the message.
PRICED_COLUMNS = (
    "priced_num_prefill",
    "priced_sum_prefill_end_tokens",
    "priced_sum_prefill_past_tokens",
    "priced_num_decode",
    "priced_sum_decode_tokens",
)
_SCHEDULED = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "var_prefill_length",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
    "var_decode_kv_tokens",
)
_QUEUED = {
    "queued_num_prefill_requests": "num_queued_prefill",
    "queued_sum_prefill_tokens": "sum_queued_prefill_tokens",
    "queued_var_prefill_length": "var_queued_prefill_length",
    "queued_num_decode_requests": "num_queued_decode",
    "queued_sum_decode_kv_tokens": "sum_queued_decode_kv_tokens",
    "queued_var_decode_kv_tokens": "var_queued_decode_kv_tokens",
}


def fpm_stream(passes: Mapping[str, NDArray[Any]], dp_sizes: Mapping[str, int]) -> pyarrow.Table:
    """Return the stream of a replay as a table that `FpmBatch.from_arrow` reads.

    Parameters
    ----------
    passes: the pass columns of a report, one entry per pass of a rank, in order of their end.
    dp_sizes: attention-DP ranks per worker of each `pool`.

    Returns
    -------
    A row per rank and pass in the order of publication; a rank that had no work while its worker passed has an
    empty row with the duration of the group. `iteration` groups the rows of a worker's pass.
    """
    import pyarrow as pa

    rows, iteration, dp_rank = _with_idle_ranks(passes, dp_sizes)
    is_idle = rows < 0
    # What an idle rank shares with its group, it takes from one that worked.
    begin = np.flatnonzero(np.diff(iteration, prepend=-1))
    group = np.where(is_idle, np.maximum.reduceat(rows, begin)[iteration], rows) if len(rows) else rows

    def of_rank(name: str) -> NDArray[Any]:
        column = passes[name][group]
        return np.where(is_idle, np.zeros((), column.dtype), column)

    sizes = np.array([dp_sizes[pool] for pool in passes["pool"][group]], np.int64)
    columns: dict[str, Any] = {
        "iteration": iteration,
        "wall_time_s": (passes["end_ms"] - passes["start_ms"])[group] / 1e3,
        "dp_rank": dp_rank,
        "counter_id": passes["iteration"][group],
        "pool": pa.array(passes["pool"][group], pa.string()),
        "worker_id": passes["worker"][group] // np.maximum(sizes, 1),
        "start_ms": passes["start_ms"][group],
        "end_ms": passes["end_ms"][group],
        **{name: of_rank(name) for name in _SCHEDULED},
        **{name: of_rank(source) for name, source in _QUEUED.items()},
        **{name: of_rank(name) for name in ("prefill_ms", "decode_ms", "composed", *PRICED_COLUMNS)},
    }
    return pa.table(columns)


def _with_idle_ranks(
    passes: Mapping[str, NDArray[Any]], dp_sizes: Mapping[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows of every rank: position in `passes` (-1 for a rank without work), iteration, attention-DP rank."""
    count = len(passes["worker"])
    size = np.array([dp_sizes[pool] for pool in passes["pool"]], np.int64)
    if (size == 1).all():
        return np.arange(count), np.arange(count), np.zeros(count, np.int64)
    worker, rank = passes["worker"] // size, passes["worker"] % size
    is_prefill = passes["pool"] == "prefill"
    is_new = np.ones(count, bool)
    is_new[1:] = (np.diff(worker) != 0) | (np.diff(passes["iteration"]) != 0) | (is_prefill[1:] != is_prefill[:-1])
    number = np.cumsum(is_new) - 1
    begin = np.concatenate([[0], np.cumsum(size[is_new])])
    rows = np.full(begin[-1], -1, np.int64)
    rows[begin[number] + rank] = np.arange(count)
    iteration = np.repeat(np.arange(len(begin) - 1), size[is_new])
    return rows, iteration, np.arange(begin[-1]) - begin[iteration]


def stream_frames(stream: pyarrow.Table) -> Iterator[bytes]:
    """Encode a stream as the messages of the wire, in order.

    `worker_id` is the number of the worker, behind the name of its pool when there are several.
    """
    names = ["wall_time_s", "dp_rank", "counter_id", "pool", "worker_id", *_SCHEDULED, *_QUEUED]
    for batch in stream.select(names).to_batches(max_chunksize=65_536):
        columns = [batch.column(name).to_pylist() for name in names]
        for wall_time_s, dp_rank, counter_id, pool, worker, *work in zip(*columns, strict=True):
            queued = work[len(_SCHEDULED) :]
            yield encode_frame(
                ForwardPassMetrics(
                    worker_id=str(worker) if pool == "agg" else f"{pool}-{worker}",
                    dp_rank=dp_rank,
                    counter_id=counter_id,
                    wall_time=wall_time_s,
                    scheduled_requests=ScheduledRequestMetrics(*work[: len(_SCHEDULED)]),
                    queued_requests=QueuedRequestMetrics(*queued),
                )
            )


def write_table(path: str | Path, table: pyarrow.Table) -> None:
    """Write an Arrow table, whole or not at all: `.parquet` or `.arrow` (IPC file).

    Raises
    ------
    ConfigError: another ending.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    ending = Path(path).suffix
    if ending not in (".parquet", ".arrow"):
        raise ConfigError(f"{path}: cannot tell the form from the ending {ending!r}; give .parquet or .arrow")
    with whole_file(path) as file:
        if ending == ".parquet":
            pq.write_table(table, file)
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


def read_table(path: str | Path) -> pyarrow.Table:
    """Read what `write_table` wrote.

    Raises
    ------
    ConfigError: another ending, or the file is of another form.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    ending = Path(path).suffix
    if ending not in (".parquet", ".arrow"):
        raise ConfigError(f"{path}: cannot tell the form from the ending {ending!r}; give .parquet or .arrow")
    try:
        if ending == ".parquet":
            return pq.read_table(path)
        with pa.OSFile(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid as fault:
        raise ConfigError(f"{path}: not a {ending[1:]} file: {fault}") from fault
