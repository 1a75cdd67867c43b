"""Recorded telemetry portion by portion, so that a stream of any length fits: frame files, recorder files, Parquet.

Source: clients.md section 4; `FpmBatch.to_arrow` for the columns of a Parquet file.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmsdk.errors import MetricsError
from fpmsdk.metrics.batch import FpmBatch
from fpmsdk.metrics.streams import FpmStream, group_ranks, iterate_frames

if TYPE_CHECKING:
    import pyarrow

PORTION_ITERATIONS = 1 << 15


def read_portions(
    path: str | PathLike[str], *, attention_dp: int = 1, size: int = PORTION_ITERATIONS
) -> Iterator[FpmBatch]:
    """The iterations of a recorded stream, in order.

    Parameters
    ----------
    path: a frame file (.bin), a recorder file (.jsonl), either possibly with .gz, or a Parquet file (.parquet) with the
        columns of `FpmBatch.to_arrow`, whose column `iteration` says which rows are the ranks of one iteration.
    attention_dp: ranks that report each iteration; frames of several ranks are grouped in memory as a whole.
    size: iterations of a portion; one of a Parquet file may be larger or smaller.

    Yields
    ------
    Batches, none of them empty.

    Raises
    ------
    MetricsError: not a stream, without any iteration, or something in it is no iteration; names file and place.
    OSError: the file cannot be read.

    Example
    -------
    >>> import tempfile
    >>> from fpmsdk.metrics import write_frames
    >>> from fpmsdk import sample
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write_frames(f"{folder}/run.bin.gz", sample.burst_frames())
    ...     [len(portion) for portion in read_portions(f"{folder}/run.bin.gz", size=1000)]
    [1000, 654]
    """
    place = fspath(path)
    ending = Path(place.removesuffix(".gz")).suffix
    if ending == ".bin":
        portions = _of_frames(place, iterate_frames(path), attention_dp, size)
    elif ending == ".jsonl":
        portions = _of_frames(place, FpmStream(path).frames(), attention_dp, size)
    elif Path(place).suffix == ".parquet":
        portions = _of_parquet(place, attention_dp, size)
    else:
        raise MetricsError(
            f"{place}: telemetry is a frame file (.bin) or a recorder file (.jsonl), either possibly with .gz, or a "
            "Parquet file (.parquet)"
        )
    found = False
    for portion in portions:
        found = True
        yield portion
    if not found:
        raise MetricsError(f"{place}: holds no iteration; give a recording of an engine at work")


@contextmanager
def _blaming(place: str, first: int) -> Iterator[None]:
    try:
        yield
    except MetricsError as fault:
        counted = f"counted from {first:,}: " if first else ""
        raise type(fault)(f"{place}: {counted}{fault}") from None


def _of_frames(place: str, frames: Iterable[bytes], attention_dp: int, size: int) -> Iterator[FpmBatch]:
    iterations: Iterator[Any] = iter(frames)
    if attention_dp > 1:
        with _blaming(place, 0):
            iterations = iter(group_ranks(iterations, attention_dp))
    first = 0
    while portion := list(islice(iterations, size)):
        with _blaming(place, first):
            yield FpmBatch.from_frames(portion)
        first += len(portion)


def _of_parquet(place: str, attention_dp: int, size: int) -> Iterator[FpmBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(place) as file:
            first = 0
            for table in _whole_iterations(file, size * attention_dp):
                with _blaming(place, first):
                    yield FpmBatch.from_arrow(table)
                first += table.num_rows
    except pa.ArrowException as fault:
        raise MetricsError(f"{place}: not a readable Parquet file: {fault}") from None


def _whole_iterations(file: Any, rows: int) -> "Iterator[pyarrow.Table]":
    # Tables that end where an iteration does: its last one is held back until the next shows that it is complete.
    import numpy as np
    import pyarrow as pa

    held: pyarrow.Table | None = None
    for batch in file.iter_batches(rows):
        table = pa.Table.from_batches([batch])
        if "iteration" not in table.column_names or table["iteration"].null_count:
            yield table
            continue
        table = table if held is None else pa.concat_tables([held, table])
        numbers = table["iteration"].to_numpy()
        last = int(np.argmax(numbers == numbers[-1]))
        held = table.slice(last)
        if last:
            yield table.slice(0, last)
    if held is not None:
        yield held
