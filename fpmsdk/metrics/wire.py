"""The forward-pass metrics message, as Dynamo puts it on the wire: MessagePack, maps with string keys.

Field names, order and defaults are those of version 1 of the message; rules between fields are checked where the
message is used. Source: clients.md section 4.
"""

import msgspec

from fpmsdk.errors import FrameDecodeError


class ScheduledRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """Work executed in one iteration on one rank; lengths and KV sums in tokens.

    `extend_lengths` and `past_kv_lengths` list new and cached tokens per scheduled request; Dynamo does not send
    them, estimators with per-request feature axes need them.

    Source: clients.md section 4.

    Example
    -------
    >>> ScheduledRequestMetrics(num_decode_requests=2, sum_decode_kv_tokens=900).sum_prefill_tokens
    0
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0
    extend_lengths: tuple[int, ...] | None = None
    past_kv_lengths: tuple[int, ...] | None = None


class QueuedRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """Requests that wait and were not executed, lengths in tokens; decode requests here were preempted.

    Source: clients.md section 4.

    Example
    -------
    >>> QueuedRequestMetrics(num_prefill_requests=1, sum_prefill_tokens=300).num_decode_requests
    0
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPassMetrics(msgspec.Struct, frozen=True, gc=False):
    """One engine iteration on one attention-DP rank; `wall_time` in seconds.

    Source: clients.md section 4.

    Example
    -------
    >>> frame = encode_frame(ForwardPassMetrics(worker_id="42", wall_time=0.0125))
    >>> decode_frame(frame).wall_time
    0.0125
    """

    version: int = 1
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequestMetrics = ScheduledRequestMetrics()
    queued_requests: QueuedRequestMetrics = QueuedRequestMetrics()


_decoder = msgspec.msgpack.Decoder(ForwardPassMetrics)
_encoder = msgspec.msgpack.Encoder()


def decode_frame(frame: bytes) -> ForwardPassMetrics:
    """Decode one message.

    Missing fields take their defaults and unknown ones are ignored, as every consumer of the message does.

    Parameters
    ----------
    frame: the encoded message.

    Raises
    ------
    FrameDecodeError: not MessagePack, truncated, not a map, nested too deeply, or a field of the wrong type.

    Source: clients.md section 4.

    Example
    -------
    >>> decode_frame(b"\\x81\\xa9wall_time\\xcb?\\x89\\x99\\x99\\x99\\x99\\x99\\x9a").wall_time
    0.0125
    """
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameDecodeError(
            f"invalid FPM payload: {len(frame)} bytes are not a forward-pass metrics frame: {error}"
        ) from None


def encode_frame(metrics: ForwardPassMetrics) -> bytes:
    """Encode one message, all fields in declared order; per-request lists only when given.

    Parameters
    ----------
    metrics: one iteration on one rank.

    Source: clients.md section 4.

    Example
    -------
    >>> len(encode_frame(ForwardPassMetrics(worker_id="42")))
    409
    """
    message = msgspec.to_builtins(metrics)
    scheduled = message["scheduled_requests"]
    for name in ("extend_lengths", "past_kv_lengths"):
        if scheduled[name] is None:
            del scheduled[name]
    return _encoder.encode(message)
