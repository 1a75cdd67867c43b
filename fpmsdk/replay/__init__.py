"""Replay of request traces through a simulated engine: traces in, latencies and passes out.

Names load on first use; a process that reads a trace does not load pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "RecordedPasses": "fpmsdk.replay.recording",
    "ReplayReport": "fpmsdk.replay.report",
    "SteppedRank": "fpmsdk.replay.stepped_rank",
    "SteppedReplay": "fpmsdk.replay.stepped",
    "StreamReport": "fpmsdk.replay.run_stream",
    "Trace": "fpmsdk.replay.trace",
    "TraceStream": "fpmsdk.replay.trace_stream",
    "fit_pass_timing": "fpmsdk.replay.fitted",
    "fit_table_timing": "fpmsdk.replay.fitted",
    "replay_stream": "fpmsdk.replay.run_stream",
    "replay_trace": "fpmsdk.replay.run",
}

__all__ = [
    "RecordedPasses",
    "ReplayReport",
    "SteppedRank",
    "SteppedReplay",
    "StreamReport",
    "Trace",
    "TraceStream",
    "fit_pass_timing",
    "fit_table_timing",
    "replay_stream",
    "replay_trace",
]

if TYPE_CHECKING:
    from fpmsdk.replay.fitted import fit_pass_timing, fit_table_timing
    from fpmsdk.replay.recording import RecordedPasses
    from fpmsdk.replay.report import ReplayReport
    from fpmsdk.replay.run import replay_trace
    from fpmsdk.replay.run_stream import StreamReport, replay_stream
    from fpmsdk.replay.stepped import SteppedReplay
    from fpmsdk.replay.stepped_rank import SteppedRank
    from fpmsdk.replay.trace import Trace
    from fpmsdk.replay.trace_stream import TraceStream


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fpmsdk.replay' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
