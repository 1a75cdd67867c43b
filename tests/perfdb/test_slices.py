"""Merging rows: first row wins, order of keys and rows, sorting, power; checked against a plain dictionary."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.perfdb.parquet import Text
from fpmsdk.perfdb.slices import Block, Table, merge

VALUES = st.sampled_from([0, 1, 2, 3, 5, -1, 4096, 2**40])
ROWS = st.lists(st.tuples(st.sampled_from("abc"), VALUES, VALUES, VALUES), min_size=1, max_size=40)


def block(given_rows, start=0, *, is_primary=False, power=None):
    """Rows of (text key, integer key, axis, axis); the latency numbers them from `start`."""
    names = sorted({row[0] for row in given_rows}, reverse=True)
    codes = np.array([names.index(row[0]) for row in given_rows], np.int32)
    key, outer, inner = (np.array([row[at] for row in given_rows], np.int64) for at in (1, 2, 3))
    latency = np.arange(start, start + len(given_rows), dtype=np.float64)
    return Block((Text(codes, tuple(names)), key), (outer, inner), latency, power, is_primary)


def table(*blocks):
    return Table.of(*merge(blocks), ())


@given(st.lists(ROWS, min_size=1, max_size=3))
def test_every_coordinate_keeps_its_first_row(files):
    expected: dict = {}
    for number, row in enumerate(row for file in files for row in file):
        expected.setdefault(row[:2], {}).setdefault(row[2:], number)
    starts = np.cumsum([0, *(len(file) for file in files)])
    merged = table(*(block(file, start) for file, start in zip(files, starts, strict=False)))

    assert list(merged.slices) == list(expected)
    for key, points in expected.items():
        part = merged.slices[key]
        in_order = sorted(points)
        assert list(zip(*(axis.tolist() for axis in part.axes), strict=True)) == in_order
        assert part.latency_ms.tolist() == [points[coordinate] for coordinate in in_order]
        first_seen = sorted(points, key=points.get)
        assert part.order.tolist() == [first_seen.index(coordinate) for coordinate in in_order]
    assert merged.rows == sum(map(len, expected.values()))


def test_keys_and_coordinates_too_many_for_one_integer_are_still_told_apart():
    wide = np.arange(4000, dtype=np.int64) * 2**33
    key = tuple(np.roll(wide, at) for at in range(6))
    merged = table(Block(key, key, np.arange(4000, dtype=np.float64), None, False))
    assert len(merged.slices) == merged.rows == 4000
    chosen = tuple(int(column[17]) for column in key)
    assert merged.slices[chosen].latency_ms.tolist() == [17.0]


def test_primary_rows_are_counted_per_key():
    own = block([("a", 1, 0, 0), ("a", 1, 0, 1), ("a", 1, 0, 0), ("b", 1, 0, 0)], is_primary=True)
    donor = block([("a", 1, 0, 0), ("a", 1, 5, 5), ("c", 1, 0, 0)], 10)
    merged = table(own, donor)
    assert list(merged.slices) == [("a", 1), ("b", 1), ("c", 1)]
    assert merged.arrays.primary_rows.tolist() == [2, 1, 0]


def test_power_is_kept_where_measured():
    measured = block([("a", 1, 0, 0)], power=np.array([250.0]))
    merged = table(measured, block([("a", 1, 0, 1)], 10))
    power = merged.slices["a", 1].power_w
    assert power[0] == 250.0
    assert math.isnan(power[1])


def test_power_that_nobody_measured_is_nan_everywhere():
    merged = table(block([("a", 1, 0, 0), ("a", 1, 0, 1), ("b", 1, 0, 0)]))
    assert [np.isnan(part.power_w).tolist() for part in merged.slices.values()] == [[True, True], [True]]


def test_arrays_are_read_only_contiguous_and_of_the_declared_types():
    part = table(block([("a", 1, 0, 0), ("b", 1, 0, 0), ("a", 1, 0, 1)])).slices["a", 1]
    arrays = {"int64": part.axes, "float64": (part.latency_ms, part.power_w), "int32": (part.order,)}
    for dtype, members in arrays.items():
        for array in members:
            assert (array.dtype, array.flags.c_contiguous, array.flags.writeable) == (np.dtype(dtype), True, False)


def test_a_key_that_does_not_exist_is_a_key_error():
    slices = table(block([("a", 1, 0, 0)])).slices
    assert ("b", 1) not in slices
    with pytest.raises(KeyError):
        slices["b", 1]
