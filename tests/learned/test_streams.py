"""Recorded streams as iterations: every form, and what counters may say."""

import gzip
import json

import msgspec
import pyarrow.parquet as pq
import pytest

from fpmsdk import FpmBatch, errors
from fpmsdk.learned.streams import read_stream
from fpmsdk.metrics import write_frames


def message(worker="w", counter=1, rank=0, **fields):
    return {"worker_id": worker, "counter_id": counter, "dp_rank": rank, "wall_time": 0.01} | fields


def frames_file(folder, *messages, name="run.bin.gz"):
    path = folder / name
    write_frames(path, [msgspec.msgpack.encode(one) for one in messages])
    return path


def lines_file(folder, *messages, name="run.jsonl"):
    content = "".join(json.dumps({"received_at_ns": 1, "metrics": one}) + "\n" for one in messages).encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def table_file(folder, *iterations):
    path = folder / "run.parquet"
    pq.write_table(FpmBatch.from_dicts(iterations).to_arrow(), path)
    return path


@pytest.mark.parametrize(
    "write",
    [
        frames_file,
        lambda folder, *messages: frames_file(folder, *messages, name="run.bin"),
        lines_file,
        lambda folder, *messages: lines_file(folder, *messages, name="run.jsonl.gz"),
        table_file,
    ],
    ids=["bin.gz", "bin", "jsonl", "jsonl.gz", "parquet"],
)
def test_every_form_reads_as_the_same_iterations(write, tmp_path):
    messages = [message(counter=n, wall_time=n / 100) for n in (1, 2, 3)]
    batch = read_stream(write(tmp_path, *messages))
    assert batch.wall_time_s.tolist() == [0.01, 0.02, 0.03]
    assert batch.counter_id.tolist() == [1, 2, 3]


def test_a_table_keeps_the_ranks_of_an_iteration_together(tmp_path):
    path = table_file(tmp_path, [message(rank=0), message(rank=1)], message(counter=2))
    assert read_stream(path).iteration_offsets.tolist() == [0, 2, 3]


def test_grouped_by_counter_messages_stay_in_their_order(tmp_path):
    path = frames_file(tmp_path, message("a", 2), message("b", 2), message("a", 1), message("a", 0))
    assert read_stream(path, "counter").counter_id.tolist() == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (message(worker=""), "frame 1: worker_id: .* found ''"),
        ({"wall_time": 0.01, "counter_id": 2}, "frame 1: worker_id: .* found None"),
        ({"wall_time": 0.01, "worker_id": "w"}, "frame 1: counter_id: .* found None"),
        (message(counter="2"), "frame 1: counter_id: .* found '2'"),
        (message(), "frame 1: worker_id 'w' and counter_id 1 come twice, from dp_rank 0;"),
        (
            message(rank=1),
            "frame 1: worker_id 'w' and counter_id 1 come twice, from dp_rank 0 and 1, which count apart",
        ),
    ],
)
def test_what_cannot_be_grouped_by_counter_is_refused(second, found, tmp_path):
    path = frames_file(tmp_path, message(), second)
    with pytest.raises(errors.MetricsError, match=f"run.bin.gz: {found}"):
        read_stream(path, "counter")


@pytest.mark.parametrize(
    ("name", "grouping", "message"),
    [
        ("run.bin", "zzz", "grouping: expected one of none, counter, found 'zzz'"),
        ("run.parquet", "counter", "a table groups its rows"),
    ],
)
def test_groupings_that_cannot_be_are_named(name, grouping, message):
    with pytest.raises(errors.ConfigError, match=message):
        read_stream(name, grouping)


def test_damaged_files_are_named(tmp_path):
    for name in ("run.parquet", "run.bin", "run.bin.gz"):
        (tmp_path / name).write_bytes(b"zzzzzzzz")
        with pytest.raises(errors.MetricsError, match=name):
            read_stream(tmp_path / name)
    with pytest.raises(errors.MetricsError, match=r"bad.bin: frame 0|bad.bin: .*iteration 0"):
        write_frames(tmp_path / "bad.bin", [b"\xc1"])
        read_stream(tmp_path / "bad.bin", "counter")
    with pytest.raises(errors.MetricsError, match="run.csv"):
        read_stream("run.csv")
    with pytest.raises(OSError, match="none.bin"):
        read_stream(tmp_path / "none.bin")
