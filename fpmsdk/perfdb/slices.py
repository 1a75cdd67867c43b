"""A loaded table: flat immutable arrays, and one view of them per key.

Rows from several files are merged here, the first row of a coordinate winning. No Python object per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.perfdb.parquet import Integers, Text
from fpmsdk.perfdb.sources import Source

Key = tuple[Any, ...]


class Slice(NamedTuple):
    """The rows of one key, sorted by their axes; read-only.

    `axes` holds one int[n] a grid axis, outer to inner; `latency_ms` and `power_w` are float64[n], power NaN where not
    measured; `order`, int32[n], is the rank of each row in the order in which the files gave them.
    Source: op-level.md section 1.5.

    >>> import numpy as np
    >>> part = Slice((np.array([1, 8]),), np.array([0.5, 0.7]), np.array([np.nan, 400.0]), np.array([1, 0], np.int32))
    >>> part.latency_ms[part.axes[0] == 8].item()
    0.7
    """

    axes: tuple[Integers, ...]
    latency_ms: NDArray[np.float64]
    power_w: NDArray[np.float64]
    order: NDArray[np.int32]


class TableArrays(NamedTuple):
    """All rows of a table, grouped by key and sorted by axes inside a group.

    `offsets` bounds the groups (one more than groups); `power_w` is None when no file measures it;
    `primary_rows` counts per group the rows that come from the requested version's own file.
    """

    offsets: NDArray[np.int64]
    axes: tuple[Integers, ...]
    latency_ms: NDArray[np.float64]
    power_w: NDArray[np.float64] | None
    order: NDArray[np.int32]
    primary_rows: NDArray[np.int64]


class Slices(Mapping[Key, Slice]):
    """Slices by key, in the order in which the files first name them."""

    def __init__(self, keys: Sequence[Key], arrays: TableArrays) -> None:
        self._index = {key: number for number, key in enumerate(keys)}
        self._arrays = arrays
        if arrays.power_w is None:
            longest = int(np.diff(arrays.offsets).max(initial=0))
            self._no_power = np.full(longest, np.nan)
            self._no_power.flags.writeable = False

    def __getitem__(self, key: Key) -> Slice:
        number = self._index[key]
        arrays = self._arrays
        rows = slice(int(arrays.offsets[number]), int(arrays.offsets[number + 1]))
        power = self._no_power[: rows.stop - rows.start] if arrays.power_w is None else arrays.power_w[rows]
        return Slice(tuple(axis[rows] for axis in arrays.axes), arrays.latency_ms[rows], power, arrays.order[rows])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index


class Table(NamedTuple):
    """One loaded table: views by key, the files that its rows come from, and the arrays behind the views.

    Source: op-level.md sections 1.3 and 1.5.

    >>> import tempfile
    >>> from fpmsdk.perfdb import open_database
    >>> from fpmsdk.sample.tiny import write_systems
    >>> gemm = open_database(write_systems(tempfile.mkdtemp()), "tiny_gpu", "vllm", "0.24.0").table("gemm_perf")
    >>> gemm.rows, [source.channel for source in gemm.sources]
    (16, ['primary'])
    """

    slices: Slices
    sources: tuple[Source, ...]
    arrays: TableArrays

    @classmethod
    def of(cls, keys: Sequence[Key], arrays: TableArrays, sources: tuple[Source, ...]) -> Table:
        """Return the table of these arrays, which from now on cannot be written.

        Parameters: `keys`, one per group of rows, in the order in which the files first name them; `arrays`, the rows;
        `sources`, the files they come from.

        >>> import numpy as np
        >>> offsets, axis, latency_ms = np.array([0, 2]), np.array([1, 8]), np.array([0.5, 0.7])
        >>> arrays = TableArrays(offsets, (axis,), latency_ms, None, np.arange(2, dtype=np.int32), np.array([2]))
        >>> Table.of([("bfloat16",)], arrays, ()).slices["bfloat16",].latency_ms.tolist()
        [0.5, 0.7]
        """
        power = () if arrays.power_w is None else (arrays.power_w,)
        for array in (arrays.offsets, *arrays.axes, arrays.latency_ms, *power, arrays.order, arrays.primary_rows):
            array.flags.writeable = False
        return cls(Slices(keys, arrays), sources, arrays)

    @property
    def rows(self) -> int:
        """Number of distinct coordinates."""
        return len(self.arrays.latency_ms)


class Block(NamedTuple):
    """The admitted rows of one file, by the columns of the table."""

    key: tuple[Integers | Text, ...]
    axes: tuple[Integers, ...]
    latency_ms: NDArray[np.float64]
    power_w: NDArray[np.float64] | None
    is_primary: bool


def first_seen(*columns: Integers) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Number the distinct rows of some columns in the order in which they first occur.

    Returns: the number of each row, and the first row of each number.

    >>> first_seen(np.array([7, 5, 7]), np.array([1, 1, 1]))
    (array([0, 1, 0], dtype=int32), array([0, 1]))
    """
    return _first_seen(_combined((codes, len(values)) for codes, values in map(_ranks, columns)))


def merge(blocks: Sequence[Block]) -> tuple[list[Key], TableArrays]:
    """Merge the rows of several files; the first row of a coordinate wins.

    Large tables are the peak of a start's memory, so columns are joined one at a time and sorted in place.

    Parameters: `blocks`, at least one row together, most trusted file first.
    Returns: the keys in first-seen order and the arrays of the table.
    """

    def joined(axis: int) -> Integers:
        return np.concatenate([block.axes[axis] for block in blocks])

    num_axes = len(blocks[0].axes)
    group, keys = _groups([[block.key[at] for block in blocks] for at in range(len(blocks[0].key))])
    ranked = ((codes, len(values)) for codes, values in map(_ranks, map(joined, range(num_axes))))
    row = _distinct_rows(_combined(itertools.chain([(group, len(keys))], ranked)))
    group = group[row]
    offsets = np.searchsorted(group, np.arange(len(keys) + 1))
    order = _rank_in_group(group, row, offsets, sum(len(block.latency_ms) for block in blocks))
    primary = sum(len(block.latency_ms) for block in blocks if block.is_primary)
    return keys, TableArrays(
        offsets=offsets.astype(np.int64),
        axes=tuple(joined(axis)[row] for axis in range(num_axes)),
        latency_ms=np.concatenate([block.latency_ms for block in blocks])[row],
        power_w=_power(blocks, row),
        order=order,
        primary_rows=np.bincount(group[row < primary], minlength=len(keys)).astype(np.int64),
    )


def _power(blocks: Sequence[Block], row: NDArray[np.int64]) -> NDArray[np.float64] | None:
    if all(block.power_w is None for block in blocks):
        return None
    parts = [np.full(len(b.latency_ms), np.nan) if b.power_w is None else b.power_w for b in blocks]
    return np.concatenate(parts)[row]


def _rank_in_group(
    group: NDArray[np.int32], row: NDArray[np.int64], offsets: NDArray[np.int64], count: int
) -> NDArray[np.int32]:
    """Rank of every kept row among the kept rows of its group, by row number."""
    bits = count.bit_length()
    by_row = group.astype(np.int64)
    by_row <<= bits
    by_row |= row
    by_row.sort()
    by_row &= (1 << bits) - 1
    position = np.arange(len(row), dtype=np.int32)
    position -= offsets.astype(np.int32)[group]
    rank = np.empty(count, np.int32)
    rank[by_row] = position
    return rank[row]


def _groups(columns: Sequence[Sequence[Integers | Text]]) -> tuple[NDArray[np.int32], list[Key]]:
    """Number of the key of each row, and the keys in first-seen order."""
    coded = [_codes(parts) for parts in columns]
    group, first = _first_seen(_combined((codes, len(values)) for codes, values in coded))
    return group, list(zip(*([values[code] for code in codes[first]] for codes, values in coded), strict=True))


def _codes(parts: Sequence[Integers | Text]) -> tuple[NDArray[np.int32], list[Any]]:
    """Dense codes of one key column over all files, with the values they stand for."""
    texts = [part for part in parts if isinstance(part, Text)]
    if not texts:
        codes, values = _ranks(np.concatenate([part for part in parts if not isinstance(part, Text)]))
        return codes, values.tolist()
    shared: dict[str, int] = {}
    for part in texts:
        for value in part.values:
            shared.setdefault(value, len(shared))
    renamed = [np.array([shared[value] for value in part.values] or [0], np.int32)[part.codes] for part in texts]
    return np.concatenate(renamed), list(shared)


def _ranks(values: Integers) -> tuple[NDArray[np.int32], Integers]:
    """Order-preserving dense codes of integers, and the sorted distinct integers."""
    low, high = int(values.min()), int(values.max())
    if high - low >= 4 * len(values) + 1024:
        # Not `np.unique`: it loads masked arrays, a tenth of a start.
        distinct = np.sort(values)
        distinct = distinct[np.append(True, distinct[1:] != distinct[:-1])]
        return np.searchsorted(distinct, values).astype(np.int32), distinct
    # Small ranges, the usual case, need no sort.
    present = np.zeros(high - low + 1, np.bool_)
    present[values - low] = True
    return (np.cumsum(present, dtype=np.int32) - 1)[values - low], np.flatnonzero(present) + low


def _combined(columns: Iterable[tuple[NDArray[np.int32], int]]) -> NDArray[np.int64]:
    """One integer a row that orders rows as the columns do, outer to inner."""
    combined, size = np.zeros(1, np.int64), 1
    for codes, count in columns:
        if size * count >= 2**62:
            ranks, distinct = _ranks(combined)
            combined, size = ranks.astype(np.int64), len(distinct)
        if size == 1:
            combined = codes.astype(np.int64)
        else:
            combined *= count
            combined += codes
        size *= count
    return combined


def _first_seen(codes: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Renumber codes in the order of their first row; also return that row for each."""
    ranks, distinct = _ranks(codes)
    first = np.empty(len(distinct), np.int64)
    # Assigned backwards, the first row of a code is written last.
    first[ranks[::-1]] = np.arange(len(codes))[::-1]
    order = np.argsort(first)
    number = np.empty(len(distinct), np.int32)
    number[order] = np.arange(len(distinct))
    return number[ranks], first[order]


def _distinct_rows(coordinate: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first row of each distinct coordinate, in the order of the coordinates, which are overwritten."""
    bits = len(coordinate).bit_length()
    if int(coordinate.max()) >= 1 << (63 - bits):
        coordinate = _ranks(coordinate)[0].astype(np.int64)
    # Sorting one integer that holds both is several times faster than a stable argsort.
    coordinate <<= bits
    coordinate |= np.arange(len(coordinate))
    coordinate.sort()
    row = coordinate & ((1 << bits) - 1)
    coordinate >>= bits
    first: NDArray[np.int64] = row[np.append(True, coordinate[1:] != coordinate[:-1])]
    return first
