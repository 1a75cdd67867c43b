"""Recorded telemetry files and the grouping of attention-DP ranks."""

import gzip
import json

import pytest

from fpmsdk.errors import FrameDecodeError, MetricsError
from fpmsdk.metrics import (
    ForwardPassMetrics,
    FpmStream,
    ScheduledRequestMetrics,
    encode_frame,
    group_ranks,
    read_frames,
    write_frames,
)


@pytest.mark.parametrize("name", ["frames.bin", "frames.bin.gz"])
def test_frame_files_round_trip(tmp_path, name):
    frames = [b"one", b"", b"three"]
    assert write_frames(tmp_path / name, frames) == 3
    assert read_frames(tmp_path / name) == frames


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (2, "frame 0 at byte 0: expected 4 bytes of length, found 2"),
        (6, "frame 0 at byte 4: expected 3 bytes, found 2"),
    ],
)
def test_a_truncated_file_names_frame_and_byte(tmp_path, cut, message):
    path = tmp_path / "frames.bin"
    write_frames(path, [b"one"])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FrameDecodeError, match=f"frames.bin: truncated in {message}; the 0 frames before it"):
        read_frames(path)


def test_a_truncated_gzip_file_is_named(tmp_path):
    path = tmp_path / "frames.bin.gz"
    write_frames(path, [b"x" * 1000])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FrameDecodeError, match="not a complete gzip file"):
        read_frames(path)


def test_a_file_of_another_kind_is_recognised_by_its_lengths(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"this is no frame file")
    with pytest.raises(FrameDecodeError, match="claims 1936287860 bytes"):
        read_frames(path)


def test_the_recorder_file_yields_time_and_metrics(tmp_path):
    path = tmp_path / "recorded.jsonl"
    path.write_text(json.dumps({"received_at_ns": 5, "metrics": {"wall_time": 0.1}}) + "\n\n")
    assert list(FpmStream(path)) == [(5, {"wall_time": 0.1})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", 'line 2: expected an object with the object "metrics"'),
        ('{"metrics": 1, "received_at_ns": 1}', 'expected an object with the object "metrics"'),
        ('{"metrics": {}, "received_at_ns": true}', "received_at_ns: expected an integer, found True"),
    ],
)
def test_a_bad_recorder_line_is_named(tmp_path, line, message):
    path = tmp_path / "recorded.jsonl.gz"
    path.write_bytes(gzip.compress(f'{{"received_at_ns": 5, "metrics": {{}}}}\n{line}\n'.encode()))
    with pytest.raises(FrameDecodeError, match=message):
        list(FpmStream(path))


def frame(counter, rank, worker="w", wall_time=0.01):
    work = ScheduledRequestMetrics(num_decode_requests=1) if wall_time else ScheduledRequestMetrics()
    return encode_frame(
        ForwardPassMetrics(
            worker_id=worker, dp_rank=rank, counter_id=counter, wall_time=wall_time, scheduled_requests=work
        )
    )


def test_ranks_are_grouped_by_worker_and_counter():
    frames = [
        frame(1, 1),
        frame(1, 0, "v"),
        frame(1, 0),
        frame(9, 0, wall_time=0.0),
        frame(1, 1, "v"),
        frame(2, 0),
    ]
    grouped = group_ranks(frames, attention_dp=2)
    assert [[(m.worker_id, m.counter_id, m.dp_rank) for m in iteration] for iteration in grouped] == [
        [("w", 1, 0), ("w", 1, 1)],
        [("v", 1, 0), ("v", 1, 1)],
    ]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([frame(1, 2)], r"frame 0 \(worker 'w', counter 1\): dp_rank 2 is outside 0..1"),
        ([frame(1, 0), frame(1, 0)], "frame 1 .*: dp_rank 0 reports this iteration twice"),
        ([frame(1, 0), frame(2, 0), frame(2, 1)], r"worker 'w', counter 1: ranks \[1\] are missing"),
    ],
)
def test_ranks_of_different_iterations_are_not_put_together(frames, message):
    with pytest.raises(MetricsError, match=message):
        group_ranks(frames, attention_dp=2)
