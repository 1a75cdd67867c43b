"""Recorded telemetry files and the grouping of attention-DP ranks."""

import gzip
import json
import zlib

import pytest

from fpmsdk.errors import FrameDecodeError, MetricsError
from fpmsdk.metrics import (
    ForwardPassMetrics,
    FpmStream,
    ScheduledRequestMetrics,
    decode_frame,
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


def damaged(data, how):
    if how == "cut":
        return data[:-9]
    if how == "foreign":
        return b"no gzip at all"
    flipped = bytearray(data)
    flipped[-5 if how == "length" else len(data) // 2] ^= 0xFF
    return bytes(flipped)


@pytest.mark.parametrize("how", ["cut", "flipped", "length", "foreign"])
@pytest.mark.parametrize("name", ["stream.bin.gz", "stream.jsonl.gz"])
def test_damaged_gzip_data_are_a_decode_error_that_names_the_file(tmp_path, name, how):
    path = tmp_path / name
    line = json.dumps({"received_at_ns": 1, "metrics": {}}).encode()
    # Stored, not compressed: a flipped byte lands in the content and shows in the checksum only.
    stored = zlib.compressobj(0, wbits=31)
    content = line + b" " * 9000 + b"\n" if name.endswith("jsonl.gz") else b"\x04\0\0\0abcd" * 900
    path.write_bytes(damaged(stored.compress(content) + stored.flush(), how))
    with pytest.raises(FrameDecodeError, match=name):
        read_frames(path) if ".bin" in name else list(FpmStream(path))


def test_flipped_bytes_anywhere_in_a_compressed_stream_are_a_decode_error(tmp_path):
    path = tmp_path / "stream.bin.gz"
    write_frames(path, [encode_frame(ForwardPassMetrics(counter_id=number)) for number in range(50)])
    whole = path.read_bytes()
    for at in range(10, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(FrameDecodeError, match="not a complete gzip file"):
            read_frames(path)


def test_recorded_messages_as_frames(tmp_path):
    path = tmp_path / "stream.jsonl"
    path.write_text(json.dumps({"received_at_ns": 1, "metrics": {"counter_id": 2**64 - 1}}))
    (frame,) = FpmStream(path).frames()
    assert decode_frame(frame).counter_id == 2**64 - 1


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ('{"counter_id": 18446744073709551616}', "not a forward-pass metrics message"),
        ('{"counter_id": -9223372036854775809}', "not a forward-pass metrics message"),
        ('{"worker_id": "\\ud800"}', "not a forward-pass metrics message"),
        ('{"counter_id": %s}' % ("9" * 5000), "not JSON"),
        ('{"x": %s}' % ("[" * 100_000 + "]" * 100_000), "nested too deeply"),
    ],
    ids=["large", "small", "surrogate", "digits", "deep"],
)
def test_what_the_wire_cannot_carry_is_refused_by_line(tmp_path, metrics, said):
    path = tmp_path / "stream.jsonl"
    path.write_text(f'\n{{"received_at_ns": 1, "metrics": {metrics}}}')
    with pytest.raises(FrameDecodeError, match=f"stream.jsonl: line 2: {said}"):
        list(FpmStream(path).frames())


@pytest.mark.parametrize("name", ["frames.bin", "frames.bin.gz"])
def test_a_frame_file_is_written_whole_or_not_at_all(tmp_path, name):
    def frames():
        yield b"one"
        raise KeyError

    path = tmp_path / name
    write_frames(path, [b"before"])
    with pytest.raises(KeyError):
        write_frames(path, frames())
    assert read_frames(path) == [b"before"]
    assert list(tmp_path.iterdir()) == [path]
