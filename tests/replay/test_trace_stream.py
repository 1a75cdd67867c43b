"""A stream holds the requests of the trace that is read whole, in its order, and refuses what that refuses."""

import json
import random
import sqlite3

import numpy as np
import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay import scratch, spool, trace_stream
from fpmsdk.replay.trace import Trace
from fpmsdk.replay.trace_stream import TraceStream

COLUMNS = ("arrival_ms", "turn_index", "prompt_tokens", "output_tokens", "priority", "dp_rank", "delay_ms")


def mooncake(rows):
    return "\n".join(json.dumps(row) for row in rows)


def row(at, **more):
    return {"timestamp": at, "input_length": 9, "output_length": 3, "hash_ids": [4]} | more


def chats(seed):
    rng = random.Random(seed)
    rows = []
    for number in range(400):
        rows.append(row(rng.randrange(0, 5000) + number * 10, hash_ids=[rng.randrange(9)], priority=rng.randrange(3)))
        rows[-1]["input_length"] = rng.randrange(1, 500)
        if rng.random() < 0.7:
            rows[-1]["session_id"] = f"chat {rng.randrange(60)}"
            rows[-1]["timestamp"] = number * 10
        if rng.random() < 0.5:
            rows[-1]["request_id"] = f"no {number}"
    return mooncake(rows)


FILES = {
    "one.jsonl": mooncake([row(5)]),
    "unsorted.jsonl": mooncake([row(500), row(7), row(7, request_id="second at 7"), row(0.5)]),
    "interleaved.jsonl": mooncake(
        [row(50, session_id="b"), row(0, session_id="a"), row(60, session_id="a"), row(55, session_id="b"), row(50)]
    ),
    "delays.jsonl": mooncake([row(9, session_id="a"), row(1), {**row(0, session_id="a"), "delay": 7.5}]),
    "chats.jsonl": chats(1),
    "more chats.jsonl": chats(2),
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:46.5,9,1\n",
    "burst.csv": "Timestamp,Request tokens,Response tokens\n5,472,18\n45,1087,230\n6,0,0\n",
}


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    monkeypatch.setattr(spool, "_ROWS_PER_PORTION", 7)
    monkeypatch.setattr(trace_stream, "_ROWS_PER_PORTION", 7)


@pytest.fixture(params=FILES)
def path(request, tmp_path):
    file = tmp_path / request.param
    file.write_text(FILES[request.param])
    return file


def assert_streams(stream, trace):
    for _ in range(2):  # it may be gone through again
        portions = list(stream.portions())
        assert max(map(len, portions)) <= max(14, int(np.bincount(trace.session_index).max()) + 7)
        joined = {name: np.concatenate([getattr(portion, name) for portion in portions]) for name in COLUMNS}
        for name in COLUMNS:
            np.testing.assert_array_equal(joined[name], getattr(trace, name), name)
        assert np.concatenate([portion.request_ids for portion in portions]).tolist() == trace.request_ids.tolist()
        found = np.concatenate([portion.session_ids for portion in portions])
        names = trace.session_ids[trace.session_index]
        assert all(name in (None, expected) for name, expected in zip(found, names, strict=True))
        assert [name for name, turn in zip(found, trace.turn_index, strict=True) if turn] == [
            name for name, turn in zip(names, trace.turn_index, strict=True) if turn
        ]
        counts = np.concatenate([np.diff(portion.hash_offsets) for portion in portions])
        assert counts.tolist() == np.diff(trace.hash_offsets).tolist()
        ids = np.concatenate([portion.hash_ids for portion in portions])
        # Two blocks are equal here when they are there.
        pairs = set(zip(ids.tolist(), trace.hash_ids.tolist(), strict=True))
        assert len(pairs) == len(set(ids.tolist())) == len(set(trace.hash_ids.tolist()))
    assert stream.num_requests == len(trace)
    assert stream.block_tokens == trace.block_tokens
    assert stream.has_blocks == (len(trace.hash_ids) > 0)
    assert stream.has_delays == bool(trace.delay_ms.any())


def test_a_file_is_streamed_as_it_is_read_whole(path):
    with TraceStream.read(path) as stream:
        assert_streams(stream, Trace.read(path))


def test_our_own_form_is_streamed_as_it_is_read_whole(path, tmp_path):
    Trace.read(path).write(tmp_path / "own.parquet")
    with TraceStream.read(tmp_path / "own.parquet") as stream:
        assert_streams(stream, Trace.read(tmp_path / "own.parquet"))


def test_a_trace_in_memory_is_streamed_as_it_is(path):
    trace = Trace.read(path)
    assert_streams(TraceStream.of(trace), trace)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(0, request_id="a"), row(1), row(2, request_id="a"), row(3, request_id="a")],
        [row(0), row(1, request_id="request_1")],
        [row(0, request_id="request_2"), row(1)],
        [row(0), row(4e12)],
        [row(5, session_id="a"), row(1, session_id="a")],
        [row(5) | {"delay": 3.0}],
        [row(5, session_id="a") | {"delay": 3.0}],
        [row(5, session_id="a"), row(None, session_id="a"), row(6, session_id="a") | {"delay": -1}],
        [row(5), row(6, output_length=-1)],
        [row(5), row(6, input_length=9999)],
    ],
)
def test_a_stream_refuses_what_reading_refuses(rows, tmp_path):
    (tmp_path / "t.jsonl").write_text(mooncake(rows))
    with pytest.raises(TraceError) as whole:
        Trace.read(tmp_path / "t.jsonl", "mooncake")
    with pytest.raises(TraceError) as streamed:
        TraceStream.read(tmp_path / "t.jsonl", "mooncake")
    assert (str(streamed.value), streamed.value.line) == (str(whole.value), whole.value.line)


def test_sessions_that_branch_are_for_a_trace(tmp_path):
    trace = Trace.from_arrays([0.0] * 3, [8] * 3, [1] * 3, session_ids=["a"] * 3, awaits=[[], [1], [2]])
    trace.write(tmp_path / "t.parquet")
    with pytest.raises(
        TraceError, match=r"t.parquet: the trace has sessions that branch; read it whole, with Trace.read"
    ):
        TraceStream.read(tmp_path / "t.parquet")


def test_a_full_disk_is_said_so(tmp_path, monkeypatch):
    class Full(sqlite3.Connection):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.execute("pragma max_page_count = 3")

    monkeypatch.setattr(scratch.sqlite3, "connect", Full)
    (tmp_path / "t.jsonl").write_text(chats(3))
    with pytest.raises(TraceError, match=r"t.jsonl: its rows cannot be kept on disk meanwhile: .*full; make room"):
        TraceStream.read(tmp_path / "t.jsonl")
