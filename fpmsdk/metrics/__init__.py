"""Telemetry input: forward-pass metrics as messages, recorded streams and columnar batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "ForwardPassMetrics": "fpmsdk.metrics.wire",
    "FpmBatch": "fpmsdk.metrics.batch",
    "FpmStream": "fpmsdk.metrics.streams",
    "QueuedRequestMetrics": "fpmsdk.metrics.wire",
    "ScheduledRequestMetrics": "fpmsdk.metrics.wire",
    "decode_frame": "fpmsdk.metrics.wire",
    "encode_frame": "fpmsdk.metrics.wire",
    "group_ranks": "fpmsdk.metrics.streams",
    "read_frames": "fpmsdk.metrics.streams",
    "write_frames": "fpmsdk.metrics.streams",
}

__all__ = [
    "ForwardPassMetrics",
    "FpmBatch",
    "FpmStream",
    "QueuedRequestMetrics",
    "ScheduledRequestMetrics",
    "decode_frame",
    "encode_frame",
    "group_ranks",
    "read_frames",
    "write_frames",
]

if TYPE_CHECKING:
    from fpmsdk.metrics.batch import FpmBatch
    from fpmsdk.metrics.streams import FpmStream, group_ranks, read_frames, write_frames
    from fpmsdk.metrics.wire import (
        ForwardPassMetrics,
        QueuedRequestMetrics,
        ScheduledRequestMetrics,
        decode_frame,
        encode_frame,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fpmsdk.metrics' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
