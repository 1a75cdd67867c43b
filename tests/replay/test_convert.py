"""Conversion between forms: an equal trace comes back, memory does not grow, and nothing is half-written."""

import dataclasses
import json
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.errors import TraceError
from fpmsdk.replay.convert import convert_trace
from fpmsdk.replay.formats.reader import ReadOptions
from fpmsdk.replay.trace import Trace
from tests.replay.formats.test_parquet import assert_equal, everything

MOONCAKE = [
    {"timestamp": 1000.5, "input_length": 9, "output_length": 3, "hash_ids": [4, 7, 9], "session_id": "s"},
    {"timestamp": 7, "input_length": 4, "output_length": 0, "hash_ids": [7], "priority": 5},
    {"timestamp": 1500.75, "input_length": 12, "output_length": 1, "hash_ids": [4, 7, 9], "session_id": "s"},
]


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("target", ["t.parquet", "u.jsonl"])
def test_a_converted_trace_is_equal_to_the_one_it_was_made_from(tmp_path, target):
    source = write_lines(tmp_path / "t.jsonl", MOONCAKE)
    done = convert_trace(source, tmp_path / target, options=ReadOptions(block_tokens=4))
    assert (done.source_format, done.num_requests, done.block_tokens, done.left_out) == ("mooncake", 3, 4, {})
    expected = Trace.read(source, block_tokens=4)
    assert_equal(Trace.read(tmp_path / target, block_tokens=4 if target == "u.jsonl" else None), expected)


BLOCK_IDS = st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1))


@st.composite
def traces(draw):
    n = draw(st.integers(1, 12))
    sessions = draw(st.lists(st.sampled_from("abcd"), min_size=n, max_size=n))
    is_first = [name not in sessions[:row] for row, name in enumerate(sessions)]
    prompts = draw(st.lists(st.integers(1, 20), min_size=n, max_size=n))
    times = st.floats(0, 1e9, allow_subnormal=False)
    return Trace.from_arrays(
        draw(st.lists(times, min_size=n, max_size=n)),
        prompts,
        draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        request_ids=[f"{name}{row}" for row, name in enumerate(sessions)],
        session_ids=sessions,
        priority=draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)),
        delay_ms=[0.0 if first else draw(times) for first in is_first],
        hash_ids=[draw(st.lists(BLOCK_IDS, min_size=-(-p // 4), max_size=-(-p // 4))) for p in prompts],
        block_tokens=4,
    )


@given(traces())
def test_any_trace_comes_back_equal_from_a_file_and_from_a_converted_file(trace):
    with tempfile.TemporaryDirectory() as folder:
        kept, moved = Path(folder, "t.parquet"), Path(folder, "t.jsonl")
        trace.write(kept)
        assert_equal(Trace.read(kept), trace)
        convert_trace(kept, moved)
        # The clock of a Mooncake trace starts with its first arrival.
        start_ms = trace.arrival_ms[0]
        from_start = dataclasses.replace(trace, arrival_ms=trace.arrival_ms - start_ms)
        assert_equal(Trace.read(moved, block_tokens=4), from_start)


def test_what_was_left_out_is_counted(tmp_path):
    (tmp_path / "t.csv").write_text("Timestamp,Request tokens,Response tokens\n1,5,5\n2,0,0\n3,4,0\n")
    done = convert_trace(tmp_path / "t.csv", tmp_path / "t.parquet")
    assert done.left_out == {"failed: no response tokens": 2}
    assert done.num_requests == 1


def test_a_row_without_blocks_shares_none_in_mooncake_form(tmp_path):
    Trace.from_arrays([0.0, 1.0], [9, 4], [1, 1], block_tokens=4).write(tmp_path / "t.jsonl")
    assert Trace.read(tmp_path / "t.jsonl", block_tokens=4).hash_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (everything(), "attention-DP rank, which a Mooncake trace cannot say"),
        (
            Trace.from_arrays([0.0] * 3, [4] * 3, [1] * 3, session_ids=["s"] * 3, awaits=[[], [1], [2]]),
            "waits for other turns than the one before it",
        ),
        (Trace.from_arrays([0.0], [4], [1], dp_rank=[0]), "attention-DP rank"),
    ],
)
def test_what_mooncake_cannot_say_is_refused_and_nothing_is_written(tmp_path, trace, said):
    with pytest.raises(TraceError, match=said):
        trace.write(tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_hash_ids_that_could_meet_made_up_ones_are_refused(tmp_path):
    source = write_lines(tmp_path / "t.jsonl", [MOONCAKE[1] | {"hash_ids": [2**63]}])
    with pytest.raises(TraceError, match="write Parquet"):
        convert_trace(source, tmp_path / "u.jsonl", options=ReadOptions(block_tokens=4))


def test_a_broken_source_leaves_the_target_as_it_was(tmp_path):
    source = write_lines(tmp_path / "t.jsonl", [*MOONCAKE, {"timestamp": 1}])
    (tmp_path / "t.parquet").write_text("before")
    with pytest.raises(TraceError, match="trace line 4 is missing hash_ids"):
        convert_trace(source, tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").read_text() == "before"


@pytest.mark.parametrize(
    ("target", "format", "said"),
    [("t.csv", None, "the ending does not tell the form to write"), ("t.csv", "azure", "cannot write traces of form")],
)
def test_a_form_that_is_not_written_is_refused(tmp_path, target, format, said):
    with pytest.raises(TraceError, match=said):
        everything().write(tmp_path / target, format)


def test_memory_of_a_conversion_does_not_grow_with_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr("fpmsdk.replay.formats.parquet._ROWS_PER_GROUP", 500)

    def peak_bytes(num_rows):
        source = tmp_path / f"{num_rows}.csv"
        with open(source, "w") as file:
            file.write("Timestamp,Request tokens,Response tokens\n")
            file.writelines(f"{row},{100 + row % 50},{row % 9 + 1}\n" for row in range(num_rows))
        convert_trace(source, tmp_path / "warm.parquet")
        tracemalloc.start()
        convert_trace(source, tmp_path / "t.parquet")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    assert peak_bytes(4000) < 1.1 * peak_bytes(1500)


def test_reading_keeps_columns_only(tmp_path):
    source = tmp_path / "t.csv"
    n = 3_000
    with open(source, "w") as file:
        file.write("Timestamp,Request tokens,Response tokens\n")
        file.writelines(f"{row},100,1\n" for row in range(n))
    Trace.read(source)
    tracemalloc.start()
    trace = Trace.read(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(trace.arrival_ms, np.arange(n) * 1000.0)
    assert peak < 700 * n  # names, columns and their sorted copies; the text alone would not tell
