"""Our own Parquet form: it says everything, an equal trace comes back, and damage is refused."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace


def renumbered(hash_ids):
    numbers = {}
    return [numbers.setdefault(raw, len(numbers)) for raw in hash_ids.tolist()]


def assert_equal(found, expected):
    assert renumbered(found.hash_ids) == renumbered(expected.hash_ids)  # numbers follow the order of the source
    for field in dataclasses.fields(Trace):
        if field.name == "hash_ids":
            continue
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, np.ndarray) and one.dtype == np.float64:
            np.testing.assert_array_equal(one, other, field.name)
        else:
            assert np.array_equal(one, other), field.name


def everything():
    return Trace.from_arrays(
        [5.0, np.nan, 3.25, 7.125, 0.1 + 0.2],
        [9, 16, 4, 5, 3],
        [1, 0, 7, 2, 3],
        request_ids=["a", "b", "c", "d", "e"],
        priority=[0, -3, 2**31 - 1, 0, 1],
        session_ids=["s", "s", "c", "t", "e"],
        delay_ms=[0, 1 / 3, 0, 0, 0],
        dp_rank=[-1, 0, 3, -1, -1],
        prefill_dp_rank=[2, -1, -1, -1, 0],
        hash_ids=[[7, 8, 9], [7, 8, 9, 1], [], [2**64 - 1, 7], [4]],
        block_tokens=4,
        awaits=[[], [1], [], [], []],
    )


def test_what_is_written_is_read_again(tmp_path):
    everything().write(tmp_path / "trace.parquet")
    assert_equal(Trace.read(tmp_path / "trace.parquet"), everything())


def test_a_trace_that_starts_late_keeps_its_clock(tmp_path):
    late = everything().between(1.0, 6.0)
    late.write(tmp_path / "trace.parquet")
    assert_equal(Trace.read(tmp_path / "trace.parquet"), late)


def test_more_rows_than_one_group_holds(tmp_path, monkeypatch):
    monkeypatch.setattr("fpmsdk.replay.formats.parquet._ROWS_PER_GROUP", 100)
    n = 1050
    many = Trace.from_arrays(np.arange(n) * 0.5, np.full(n, 3), np.full(n, 1))
    many.write(tmp_path / "trace.parquet")
    assert_equal(Trace.read(tmp_path / "trace.parquet"), many)


def test_the_file_describes_itself_to_others(tmp_path):
    everything().write(tmp_path / "trace.parquet")
    schema = pq.read_schema(tmp_path / "trace.parquet")
    assert schema.metadata[b"fpmsdk.trace"] == b'{"version":1,"block_tokens":4}'
    assert pq.read_table(tmp_path / "trace.parquet")["request_id"].to_pylist() == ["e", "c", "a", "b", "d"]


@pytest.fixture
def edited(tmp_path):
    def write(change=lambda table: table, metadata=None):
        everything().write(tmp_path / "trace.parquet")
        table = change(pq.read_table(tmp_path / "trace.parquet"))
        table = table.replace_schema_metadata(table.schema.metadata if metadata is None else metadata)
        pq.write_table(table, tmp_path / "trace.parquet")
        return tmp_path / "trace.parquet"

    return write


def with_value(name, row, value):
    def change(table):
        values = table[name].to_pylist()
        values[row] = value
        index = table.schema.get_field_index(name)
        return table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    return change


@pytest.mark.parametrize(
    ("name", "row", "value", "said"),
    [
        ("prompt_tokens", 1, 0, "prompt_tokens is 0; give 1 to"),
        ("output_tokens", 1, -1, "output_tokens is -1"),
        ("priority", 1, 2**31, "priority is 2147483648"),
        ("dp_rank", 1, -2, "dp_rank is -2"),
        ("delay_ms", 3, float("nan"), "delay_ms is nan"),
        ("delay_ms", 1, 2.0, "sets delay on the first turn of session c"),
        ("arrival_ms", 1, -1.0, "arrival_ms is -1.0"),
        ("request_id", 1, "", "request_id is empty"),
        ("awaits", 3, [2], "awaits rows [2] back; give 1 to 1"),
        ("awaits", 1, [1], "awaits another row, but is a session of its own"),
        ("request_id", 1, "e", 'repeats request_id "e" of line 1'),
        ("prompt_tokens", 2, 99, "has a prompt of 99 tokens, but 3 hash_ids of 4 tokens cover 12"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_by_number(edited, name, row, value, said):
    path = edited(with_value(name, row, value))
    with pytest.raises(TraceError) as refused:
        Trace.read(path)
    assert said in str(refused.value)
    assert refused.value.line == row + 1


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "does not say that it is a trace"),
        ({"fpmsdk.trace": "{"}, "says of itself what cannot be read"),
        ({"fpmsdk.trace": '{"version":2,"block_tokens":4}'}, "is a trace of version 2; this release reads version 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(edited, metadata, said):
    with pytest.raises(TraceError, match=said):
        Trace.read(edited(metadata=metadata))


def nullable(table):
    index = table.schema.get_field_index("priority")
    return table.set_column(index, pa.field("priority", pa.int64()), table["priority"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.drop_columns(["priority"]), "no such column for priority"),
        (nullable, "may have nulls in priority"),
    ],
)
def test_a_file_with_other_columns_is_refused(edited, change, said):
    with pytest.raises(TraceError, match=said):
        Trace.read(edited(change))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_bytes_that_are_no_parquet_are_refused(tmp_path, content):
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.parquet: not a readable Parquet file"):
        Trace.read(tmp_path / "t.parquet")


def test_damage_within_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    everything().write(path)
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)
    with pytest.raises(TraceError, match="not a readable Parquet file"):
        Trace.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.parquet: cannot read the trace: No such file"):
        Trace.read(tmp_path / "none.parquet")
