"""Ctrl-C during a replay: what was simulated so far is reported as partial."""

import json
import signal

import numpy as np
import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import ReplayInterrupted

LAUNCH = {"engine": {"block_size": 4, "num_gpu_blocks": 64, "enable_prefix_caching": False}}


class InterruptedAfter:
    """Constant latencies; presses Ctrl-C while a pass is priced."""

    def __init__(self, passes):
        self.left = passes

    def predict_prefill_ms(self, batch, mean_isl, mean_prefix):
        return 10.0

    def predict_decode_ms(self, batch, active_kv_tokens, mean_context, total_kv_tokens):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return 1.0


def test_the_report_holds_what_happened_until_then():
    trace = Trace.from_arrays([0.0, 100.0, 200.0], [8, 8, 8], [4, 40, 4])
    with pytest.raises(ReplayInterrupted, match=r"interrupted at 1\d\d.0 ms of simulated time") as stop:
        # Three decode passes of the first request, three equal ones of the second, which are remembered, and 17 more
        # of it, in passes that touch no request.
        replay_trace(trace, launch=LAUNCH, timing=InterruptedAfter(20))
    report = stop.value.report
    assert report.partial
    rows = report.requests.to_pylist()
    assert [row["status"] for row in rows] == ["completed", "unfinished"]  # the third has not arrived
    assert rows[0]["last_token_ms"] == 13.0
    assert rows[1]["first_token_ms"] == 110.0
    # Its first token, and those of the 19 passes that ended.
    assert rows[1]["output_tokens"] == 20
    assert rows[1]["last_token_ms"] == 129.0
    assert report.summary["completed_requests"] == 1
    assert json.loads(report.to_json())["partial"] is True
    assert report.table().title.startswith("PARTIAL, interrupted: 1 of 2")


def test_without_a_completed_request_there_is_no_report():
    trace = Trace.from_arrays([0.0], [8], [40])
    with pytest.raises(ReplayInterrupted, match="before any request completed") as stop:
        replay_trace(trace, launch=LAUNCH, timing=InterruptedAfter(5))
    assert stop.value.report is None


def test_a_loop_over_replays_ends_too():
    trace = Trace.from_arrays([0.0, 100.0], [8, 8], [4, 40])
    with pytest.raises(KeyboardInterrupt):
        replay_trace(trace, launch=LAUNCH, timing=InterruptedAfter(5))


def test_compiled_timing_is_interrupted_as_well():
    count = 300_000
    trace = Trace.from_arrays(np.arange(count, dtype=float), np.full(count, 8), np.full(count, 3))
    launch = {"engine": {**LAUNCH["engine"], "timing_model": {"type": "fixed", "prefill_ms": 0.5, "decode_ms": 0.1}}}

    def press(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    try:
        # The trace is served within a second or so; the alarm comes when it has begun.
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(100):
                replay_trace(trace, launch=launch, record_passes=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_finished_replay_is_not_partial():
    timing = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
    report = replay_trace(Trace.from_arrays([0.0], [8], [4]), launch=LAUNCH, timing=timing)
    assert not report.partial
    assert json.loads(report.to_json())["partial"] is False
