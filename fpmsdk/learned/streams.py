"""Recorded telemetry as training iterations, and whether worker and counter identify each of them.

Source: regression-and-learned.md section 3.3.
"""

from collections.abc import Iterable
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import msgspec

from fpmsdk.errors import ConfigError, FrameDecodeError, MetricsError
from fpmsdk.metrics import FpmBatch, FpmStream
from fpmsdk.metrics.portions import read_portions
from fpmsdk.metrics.streams import iterate_frames

GROUPINGS = ("none", "counter")


def read_stream(path: str | PathLike[str], grouping: str = "none") -> FpmBatch:
    """Read the iterations of a recorded stream in time order.

    Parameters
    ----------
    path: a frame file (`.bin`), a recorder file (`.jsonl`), either possibly with `.gz`, or a table (`.parquet`) in the
        form of `FpmBatch.to_arrow`.
    grouping: ``none``, a message is an iteration; ``counter``, so are all messages of one worker and counter, and each
        of them has to be alone, as counters of several ranks count different things. A table groups its own rows.

    Raises
    ------
    ConfigError: an unknown grouping, or one that a table cannot have.
    MetricsError: another ending, the file is damaged or empty, or a message cannot be grouped; names file and message.
    OSError: it cannot be read.

    Example
    -------
    >>> import tempfile
    >>> from fpmsdk.metrics import ForwardPassMetrics, encode_frame, write_frames
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write_frames(f"{folder}/run.bin.gz", [encode_frame(ForwardPassMetrics(wall_time=0.01))])
    ...     len(read_stream(f"{folder}/run.bin.gz"))
    1
    """
    if grouping not in GROUPINGS:
        raise ConfigError(f"grouping: expected one of {', '.join(GROUPINGS)}, found {grouping!r}", "grouping")
    if grouping == "counter":
        _check_counters(fspath(path))
    return FpmBatch.concatenate(list(read_portions(path)))


def _check_counters(place: str) -> None:
    ending = Path(place.removesuffix(".gz")).suffix
    if ending == ".parquet":
        raise ConfigError(
            f"grouping: {place}: a table groups its rows by the column iteration; use grouping none", "grouping"
        )
    frames: Iterable[bytes] = FpmStream(place).frames() if ending == ".jsonl" else iterate_frames(place)
    ranks: dict[Any, int] = {}
    for position, frame in enumerate(frames):
        try:
            message: Any = msgspec.msgpack.decode(frame)
        except msgspec.DecodeError as fault:
            raise FrameDecodeError(f"{place}: frame {position}: {fault}") from None
        if reason := _counter_fault(message if isinstance(message, dict) else {}, ranks):
            raise MetricsError(f"{place}: frame {position}: {reason}; train with grouping none")


def _counter_fault(message: dict[str, Any], ranks: dict[Any, int]) -> str | None:
    # What keeps a message from being the only one of its worker and counter; `ranks` holds those before it.
    for field, kind in (("worker_id", str), ("counter_id", int)):
        value = message.get(field)
        if type(value) is not kind or value == "":
            return f"{field}: grouping by counter needs one in every message, found {value!r}"
    worker, counter, rank = message["worker_id"], message["counter_id"], message.get("dp_rank", 0)
    other = ranks.get((worker, counter))
    if other is None:
        ranks[worker, counter] = rank
        return None
    whose = f"from dp_rank {rank}" if rank == other else f"from dp_rank {other} and {rank}, which count apart"
    return f"worker_id {worker!r} and counter_id {counter} come twice, {whose}"
