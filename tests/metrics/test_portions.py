"""Recorded streams portion by portion: the same iterations as at once, in every form; bad files are named."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fpmsdk import FpmBatch, sample
from fpmsdk.errors import FrameDecodeError, MetricsError
from fpmsdk.metrics import decode_frame, write_frames
from fpmsdk.metrics.portions import read_portions


def ranks(*counts):
    """Iterations with so many ranks each."""
    return [
        [
            {
                "dp_rank": rank,
                "counter_id": number + 1,
                "wall_time": 0.001 * (number + 1),
                "scheduled_requests": {"num_decode_requests": rank + 1, "sum_decode_kv_tokens": 10 * number},
            }
            for rank in range(count)
        ]
        for number, count in enumerate(counts)
    ]


def joined(portions):
    return pa.concat_tables([portion.to_arrow().drop_columns("iteration") for portion in portions])


@pytest.mark.parametrize("name", ["run.bin", "run.bin.gz"])
def test_frame_files(tmp_path, name):
    frames = sample.burst_frames()[:700]
    write_frames(tmp_path / name, frames)
    portions = list(read_portions(tmp_path / name, size=256))
    assert [len(portion) for portion in portions] == [256, 256, 188]
    assert joined(portions).equals(joined([FpmBatch.from_frames(frames)]))


def test_recorder_files(tmp_path):
    frames = sample.burst_frames()[:50]
    lines = [
        json.dumps({"received_at_ns": 1, "metrics": {"wall_time": decode_frame(frame).wall_time}}) for frame in frames
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    (portion,) = read_portions(tmp_path / "run.jsonl")
    assert portion.wall_time_s.tolist() == [decode_frame(frame).wall_time for frame in frames]


def test_frames_of_several_ranks_are_grouped(tmp_path):
    import msgspec

    write_frames(tmp_path / "run.bin", [msgspec.msgpack.encode(rank) for pair in ranks(2, 2, 2) for rank in pair])
    portions = list(read_portions(tmp_path / "run.bin", attention_dp=2, size=2))
    assert [portion.num_ranks for portion in portions] == [4, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_no_iteration_of_a_parquet_file_is_cut(tmp_path, size):
    batch = FpmBatch.from_dicts(ranks(1, 3, 2, 4, 1, 1, 3))
    pq.write_table(batch.to_arrow(), tmp_path / "run.parquet")
    portions = list(read_portions(tmp_path / "run.parquet", size=size))
    assert [int(n) for portion in portions for n in np.diff(portion.iteration_offsets)] == [1, 3, 2, 4, 1, 1, 3]
    assert joined(portions).equals(joined([batch]))


def test_without_the_column_iteration_each_row_is_one(tmp_path):
    pq.write_table(pa.table({"wall_time_s": [0.1, 0.2, 0.3]}), tmp_path / "run.parquet")
    assert [len(portion) for portion in read_portions(tmp_path / "run.parquet", size=2)] == [2, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.txt", b"", "run.txt: telemetry is a frame file"),
        ("run.parquet.gz", b"", "telemetry is a frame file"),
        ("run.bin", b"", "run.bin: holds no iteration"),
        ("run.bin", b"\5\0\0\0abc", "truncated in frame 0 at byte 4"),
        ("run.bin", b"\3\0\0\0abc", "run.bin: .*frame"),
        ("run.parquet", b"no parquet", "run.parquet: not a readable Parquet file"),
    ],
)
def test_what_is_no_stream_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MetricsError, match=message):
        list(read_portions(tmp_path / name))


def test_a_bad_frame_behind_good_ones_is_counted_from_its_portion(tmp_path):
    frames = sample.burst_frames()[:5]
    write_frames(tmp_path / "run.bin", [*frames, b"\xc1"])
    portions = read_portions(tmp_path / "run.bin", size=4)
    assert len(next(portions)) == 4
    with pytest.raises(FrameDecodeError, match="run.bin: counted from 4: .*1"):
        next(portions)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"iteration": [0, 1, 0]}, "column iteration"),
        ({"iteration": [0, None, 1]}, "column iteration: expected no nulls"),
        ({"iteration": [0.5, 1.0, 2.0]}, "column iteration: expected integers"),
        ({"num_decode_requests": [1, -1, 1]}, "column num_decode_requests, row 1"),
    ],
)
def test_a_bad_column_is_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "run.parquet")
    with pytest.raises(MetricsError, match=f"run.parquet: .*{message}"):
        list(read_portions(tmp_path / "run.parquet"))


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    for name in ("none.bin", "none.parquet"):
        with pytest.raises(FileNotFoundError):
            list(read_portions(tmp_path / name))
