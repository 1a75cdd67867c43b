"""Numbers that are too many for the memory, handed back in ascending order: sorted runs in a temporary file, merged.

Not what is computed from them; see `fpmsdk.replay.fold`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_VALUES_PER_RUN = 1 << 17
_VALUES_IN_MERGE = 1 << 17
_LEAST_READ = 256

Block = NDArray[np.void]


class Spill:
    """A multiset of numbers; memory does not grow with it, but for the few bytes of a run.

    Parameters
    ----------
    values_per_run: so many are sorted in memory; up to these no file is made.
    value_type: of the values, float64 or an integer type.

    Example
    -------
    >>> spill = Spill(values_per_run=2)
    >>> spill.add(np.array([3.0, 1.0, 2.0, 1.0]))
    >>> [pair for block in spill.blocks() for pair in block.tolist()]
    [(1.0, 2), (2.0, 1), (3.0, 1)]
    >>> spill.close()
    """

    def __init__(self, values_per_run: int = _VALUES_PER_RUN, value_type: type[np.generic] = np.float64) -> None:
        self.dtype = np.dtype([("value", value_type), ("count", np.int64)])
        self._values_per_run = values_per_run
        self._file: IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []  # first and end row in the file
        self._fresh: list[Block] = []
        self._num_fresh = 0
        self.total = 0

    def add(self, values: NDArray[Any], counts: NDArray[np.int64] | None = None) -> None:
        """Add values, each as often as its count says, once without."""
        rows = np.empty(len(values), self.dtype)
        rows["value"], rows["count"] = values, 1 if counts is None else counts
        self.total += int(rows["count"].sum())
        for start in range(0, len(rows), self._values_per_run):
            some = rows[start : start + self._values_per_run]
            self._fresh.append(some)
            self._num_fresh += len(some)
            if self._num_fresh >= self._values_per_run:
                self._write_run()

    def blocks(self) -> Iterator[Block]:
        """The distinct values in ascending order with their counts, a block at a time; as often as one likes."""
        if self._fresh:
            if not self._runs:
                yield _merged(np.concatenate(self._fresh))
                return
            self._write_run()
        if not self._runs or self._file is None:
            return
        width = max(_LEAST_READ, _VALUES_IN_MERGE // len(self._runs))
        pending = [_Run(self._file, self.dtype, first, end, width) for first, end in self._runs]
        while pending:
            # What is at most as large as the end of some run's block has come up in all of them.
            limit = min(run.rows["value"][-1] for run in pending)
            yield _merged(np.concatenate([run.take(limit) for run in pending]))
            pending = [run for run in pending if len(run.rows)]

    def close(self) -> None:
        """Give the disk back."""
        if self._file is not None:
            self._file.close()

    def _write_run(self) -> None:
        run = _merged(np.concatenate(self._fresh))
        self._fresh.clear()
        self._num_fresh = 0
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="fpmsdk-")  # noqa: SIM115 - until close
        first = self._runs[-1][1] if self._runs else 0
        self._file.seek(first * self.dtype.itemsize)
        self._file.write(run.tobytes())
        self._runs.append((first, first + len(run)))


def _merged(rows: Block) -> Block:
    """Sorted, equal values as one."""
    rows = rows[np.argsort(rows["value"], kind="stable")]
    if not len(rows):
        return rows
    first = np.flatnonzero(np.append(True, rows["value"][1:] != rows["value"][:-1]))
    joined = rows[first]
    joined["count"] = np.add.reduceat(rows["count"], first)
    return joined


class _Run:
    """What a merge has read of one sorted run."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[np.void], first: int, end: int, width: int) -> None:
        self._dtype = dtype
        self._file, self._next, self._end, self._width = file, first, end, width
        self.rows = self._read()

    def take(self, limit: Any) -> Block:
        """The rows up to a value, which is none beyond the block at hand."""
        length = int(np.searchsorted(self.rows["value"], limit, "right"))
        taken, self.rows = self.rows[:length], self.rows[length:]
        if not len(self.rows):
            self.rows = self._read()
        return taken

    def _read(self) -> Block:
        length = min(self._width, self._end - self._next)
        self._file.seek(self._next * self._dtype.itemsize)
        self._next += length
        return np.frombuffer(self._file.read(length * self._dtype.itemsize), self._dtype)
