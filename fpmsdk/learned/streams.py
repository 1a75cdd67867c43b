"""Recorded telemetry as training iterations: frame files, recorder files and Parquet tables, and how ranks are grouped.

Source: regression-and-learned.md section 3.3.
"""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from fpmsdk.errors import ConfigError, FrameDecodeError, MetricsError
from fpmsdk.metrics import FpmBatch, FpmStream, read_frames

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
    ConfigError: another ending, an unknown grouping, or one that a table cannot have.
    MetricsError, FrameDecodeError: the file is damaged, or a message cannot be grouped; names file and message.
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
    name = Path(path).name
    ending = Path(name.removesuffix(".gz")).suffix
    if ending == ".parquet" and not name.endswith(".gz"):
        if grouping != "none":
            raise ConfigError(
                f"grouping: {path}: a table groups its rows by the column iteration; use grouping none", "grouping"
            )
        return _read_table(path)
    if ending == ".bin":
        frames = read_frames(path)
    elif ending == ".jsonl":
        frames = list(FpmStream(path).frames())
    else:
        raise ConfigError(
            f"{path}: expected a frame file (.bin), a recorder file (.jsonl), either possibly with .gz, or a table "
            "(.parquet)"
        )
    try:
        return FpmBatch.from_frames(frames if grouping == "none" else _by_counter(frames))
    except MetricsError as fault:
        raise type(fault)(f"{path}: {fault}") from None


def _read_table(path: str | PathLike[str]) -> FpmBatch:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return FpmBatch.from_arrow(pq.read_table(path))
    except pa.ArrowException as fault:
        raise FrameDecodeError(f"{path}: not a Parquet table: {fault}") from None
    except MetricsError as fault:
        raise type(fault)(f"{path}: {fault}") from None


def _by_counter(frames: list[bytes]) -> Iterator[bytes]:
    seen: dict[Any, int] = {}
    for position, frame in enumerate(frames):
        try:
            message: Any = msgspec.msgpack.decode(frame)
        except msgspec.DecodeError as fault:
            raise FrameDecodeError(f"frame {position}: {fault}") from None
        worker, counter = (message.get(name) if isinstance(message, dict) else None for name in _KEY)
        for field, value, kind in zip(_KEY, (worker, counter), (str, int), strict=True):
            if type(value) is not kind or value == "":
                raise MetricsError(
                    f"frame {position}: {field}: grouping by counter needs one in every message, found {value!r}"
                )
        rank = message.get("dp_rank", 0)
        if (worker, counter) in seen:
            other = seen[worker, counter]
            raise MetricsError(
                f"frame {position}: worker_id {worker!r} and counter_id {counter} come twice, "
                + (f"from dp_rank {rank}" if rank == other else f"from dp_rank {other} and {rank}, which count apart")
                + "; train with grouping none"
            )
        seen[worker, counter] = rank
        yield frame


_KEY = ("worker_id", "counter_id")
