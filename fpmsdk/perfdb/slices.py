"""A loaded table: flat immutable arrays, and one view of them per key.

Rows from several files are merged here, the first row of a coordinate winning. No Python object per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.perfdb.parquet import Text
from fpmsdk.perfdb.sources import Source

Key = tuple[Any, ...]


class Slice(NamedTuple):
    """The rows of one key, sorted by their axes; read-only.

    `axes` holds one int64 array a grid axis, outer to inner; `power_w` is NaN where not measured; `order` is
    the rank of each row in the order in which the files gave them.
    """

    axes: tuple[NDArray[np.int64], ...]
    latency_ms: NDArray[np.float64]
    power_w: NDArray[np.float64]
    order: NDArray[np.int32]


class TableArrays(NamedTuple):
    """All rows of a table, grouped by key and sorted by axes inside a group.

    `offsets` bounds the groups (one more than groups); `power_w` is None when no file measures it;
    `primary_rows` counts per group the rows that come from the requested version's own file.
    """

    offsets: NDArray[np.int64]
    axes: tuple[NDArray[np.int64], ...]
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
    """One loaded table."""

    slices: Slices
    sources: tuple[Source, ...]
    arrays: TableArrays

    @classmethod
    def of(cls, keys: Sequence[Key], arrays: TableArrays, sources: tuple[Source, ...]) -> Table:
        """Return the table of these arrays, which from now on cannot be written."""
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

    key: tuple[NDArray[np.int64] | Text, ...]
    axes: tuple[NDArray[np.int64], ...]
    latency_ms: NDArray[np.float64]
    power_w: NDArray[np.float64] | None
    is_primary: bool


def first_seen(*columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the distinct rows of some columns in the order in which they first occur.

    Returns: the number of each row, and the first row of each number.

    >>> first_seen(np.array([7, 5, 7]), np.array([1, 1, 1]))
    (array([0, 1, 0]), array([0, 1]))
    """
    return _first_seen(_combined([(codes, len(values)) for codes, values in map(_ranks, columns)]))


def merge(blocks: Sequence[Block]) -> tuple[list[Key], TableArrays]:
    """Merge the rows of several files; the first row of a coordinate wins.

    Parameters: `blocks`, at least one row together, most trusted file first.
    Returns: the keys in first-seen order and the arrays of the table.
    """
    count = sum(len(block.latency_ms) for block in blocks)
    key_columns = [_codes([block.key[at] for block in blocks]) for at in range(len(blocks[0].key))]
    axes = [np.concatenate([block.axes[at] for block in blocks]) for at in range(len(blocks[0].axes))]
    group, first = _first_seen(_combined([(codes, len(values)) for codes, values in key_columns]))
    keys = list(zip(*([values[code] for code in codes[first]] for codes, values in key_columns), strict=True))

    coordinate = _combined([(group, len(first)), *((codes, len(values)) for codes, values in map(_ranks, axes))])
    by_coordinate, row = _sorted_rows(coordinate)
    kept = np.empty(count, np.bool_)
    kept[0] = True
    np.not_equal(by_coordinate[1:], by_coordinate[:-1], out=kept[1:])
    row = row[kept]
    group = group[row]
    offsets = np.searchsorted(group, np.arange(len(first) + 1))
    primary = int(sum(len(block.latency_ms) for block in blocks if block.is_primary))
    return keys, TableArrays(
        offsets=offsets.astype(np.int64),
        axes=tuple(axis[row] for axis in axes),
        latency_ms=np.concatenate([block.latency_ms for block in blocks])[row],
        power_w=_power(blocks, row),
        order=_rank_in_group(group, row, offsets, count),
        primary_rows=np.bincount(group[row < primary], minlength=len(first)).astype(np.int64),
    )


def _power(blocks: Sequence[Block], row: NDArray[np.int64]) -> NDArray[np.float64] | None:
    if all(block.power_w is None for block in blocks):
        return None
    parts = [np.full(len(b.latency_ms), np.nan) if b.power_w is None else b.power_w for b in blocks]
    return np.concatenate(parts)[row]


def _rank_in_group(
    group: NDArray[np.int64], row: NDArray[np.int64], offsets: NDArray[np.int64], count: int
) -> NDArray[np.int32]:
    """Rank of every kept row among the kept rows of its group, by row number."""
    bits = count.bit_length()
    by_row = np.sort((group << bits) | row) & ((1 << bits) - 1)
    rank = np.empty(count, np.int32)
    rank[by_row] = np.arange(len(row)) - offsets[group]
    return rank[row]


def _codes(parts: Sequence[NDArray[np.int64] | Text]) -> tuple[NDArray[np.int64], list[Any]]:
    """Dense codes of one key column over all files, with the values they stand for."""
    texts = [part for part in parts if isinstance(part, Text)]
    if not texts:
        codes, values = _ranks(np.concatenate([part for part in parts if not isinstance(part, Text)]))
        return codes, values.tolist()
    shared: dict[str, int] = {}
    for part in texts:
        for value in part.values:
            shared.setdefault(value, len(shared))
    renamed = [np.array([shared[value] for value in part.values] or [0], np.int64)[part.codes] for part in texts]
    return np.concatenate(renamed), list(shared)


def _ranks(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order-preserving dense codes of integers, and the sorted distinct integers."""
    low, high = int(values.min()), int(values.max())
    if high - low >= 4 * len(values) + 1024:
        # Not `np.unique`: it loads masked arrays, a tenth of a start.
        distinct = np.sort(values)
        distinct = distinct[np.append(True, distinct[1:] != distinct[:-1])]
        return np.searchsorted(distinct, values), distinct
    # Small ranges, the usual case, need no sort.
    present = np.zeros(high - low + 1, np.bool_)
    present[values - low] = True
    return (np.cumsum(present) - 1)[values - low], np.flatnonzero(present) + low


def _combined(columns: Sequence[tuple[NDArray[np.int64], int]]) -> NDArray[np.int64]:
    """One integer a row that orders rows as the columns do, outer to inner."""
    combined, size = columns[0]
    for codes, count in columns[1:]:
        if size * count >= 2**62:
            combined, distinct = _ranks(combined)
            size = len(distinct)
        combined = combined * count + codes
        size *= count
    return combined


def _first_seen(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Renumber codes in the order of their first row; also return that row for each."""
    ranks, distinct = _ranks(codes)
    first = np.empty(len(distinct), np.int64)
    # Assigned backwards, the first row of a code is written last.
    first[ranks[::-1]] = np.arange(len(codes))[::-1]
    order = np.argsort(first)
    number = np.empty(len(distinct), np.int64)
    number[order] = np.arange(len(distinct))
    return number[ranks], first[order]


def _sorted_rows(coordinate: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Coordinates in order, and the row of each; rows of equal coordinates keep their order."""
    bits = len(coordinate).bit_length()
    if int(coordinate.max()) >= 1 << (63 - bits):
        coordinate = _ranks(coordinate)[0]
    # Sorting one integer that holds both is several times faster than a stable argsort.
    packed = np.sort((coordinate << bits) | np.arange(len(coordinate)))
    return packed >> bits, packed & ((1 << bits) - 1)
