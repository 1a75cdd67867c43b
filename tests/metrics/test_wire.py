"""The message on the wire (clients.md section 4 and vector V2)."""

import msgspec
import pytest

from fpmsdk import sample
from fpmsdk.errors import FrameDecodeError
from fpmsdk.metrics import (
    ForwardPassMetrics,
    QueuedRequestMetrics,
    ScheduledRequestMetrics,
    decode_frame,
    encode_frame,
)

FILLED = ForwardPassMetrics(
    worker_id="42",
    dp_rank=1,
    counter_id=7,
    wall_time=0.0125,
    scheduled_requests=ScheduledRequestMetrics(2, 4096, 12.5, 128, 64, 131072, 1234.5),
    queued_requests=QueuedRequestMetrics(3, 9000, 0.5, 1, 77, 0.25),
)


def test_an_empty_message_has_every_field_in_order():
    frame = encode_frame(ForwardPassMetrics())
    assert len(frame) == 407
    start = "87a776657273696f6e01a9776f726b65725f6964a0a764705f72616e6b00aa636f756e7465725f696400a977616c6c5f74696d65"
    assert frame.hex().startswith(start + "cb0000000000000000b2" + b"scheduled_requests".hex() + "87")


def test_integers_take_their_shortest_form():
    frame = encode_frame(FILLED)
    assert len(frame) == 418
    for part in ("cb3f8999999999999a", "cd1000", "cc80", "ce00020000"):
        assert part in frame.hex()


def test_real_frames_survive_a_round_trip():
    frames = sample.eval_frames()[:200]
    assert [encode_frame(decode_frame(frame)) for frame in frames] == frames


def test_decoding_is_lenient_about_what_is_missing_or_unknown():
    assert decode_frame(msgspec.msgpack.encode({"version": 1, "extra": 5})) == ForwardPassMetrics()
    assert decode_frame(msgspec.msgpack.encode({"wall_time": 1})).wall_time == 1.0


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\xff",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"scheduled_requests": {"num_decode_requests": 3.0}}),
        msgspec.msgpack.encode({"worker_id": 3}),
        encode_frame(FILLED)[:-1],
        encode_frame(FILLED) + b"\x00",
    ],
    ids=["empty", "garbage", "list", "float for integer", "number for text", "truncated", "trailing byte"],
)
def test_bytes_that_are_no_message_are_refused(frame):
    with pytest.raises(FrameDecodeError, match=f"{len(frame)} bytes are not a forward-pass metrics frame"):
        decode_frame(frame)


def test_a_frame_nested_too_deeply_is_a_decode_error():
    with pytest.raises(FrameDecodeError, match="invalid FPM payload"):
        decode_frame(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00")
