"""A replay compared with the measured run: which figures, and what cannot be compared."""

import dataclasses
import json

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.compare import compare_with_measured
from fpmsdk.replay.formats.recorded import read_run
from fpmsdk.replay.run import replay_trace

LAUNCH = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}}}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "requests.json"
    requests = [
        {"id": "a", "arrival": 0.0, "prompt": 8, "output": 3, "token_times": [0.020, 0.021, 0.024]},
        {"id": "b", "arrival": 0.1, "prompt": 8, "output": 2, "token_times": [0.110, 0.112]},
    ]
    path.write_text(json.dumps({"requests": requests}))
    return read_run(path)


def test_latencies_are_compared_at_p50_and_p90_and_request_by_request(run):
    result = compare_with_measured(replay_trace(run.trace, launch=LAUNCH), run)
    # Measured 20 and 10 ms, replayed 10 and 10; of two values the median is the larger.
    assert result["ttft_ms"]["p50"] == {"measured": 20.0, "replayed": 10.0, "error_percent": -50.0}
    assert result["ttft_ms"]["request_error_percent"] == {"p50": 50.0, "p90": 50.0}
    # Mean gaps of a request: measured 2 and 2, replayed 1 and 1.
    assert result["itl_ms"]["p90"]["measured"] == pytest.approx(2.0)
    assert result["itl_ms"]["p90"]["error_percent"] == pytest.approx(-50.0)
    assert result["e2e_ms"]["p90"]["measured"] == pytest.approx(24.0)
    assert result["e2e_ms"]["p90"]["replayed"] == 12.0


def test_throughput_is_compared_per_user_and_over_all(run):
    result = compare_with_measured(replay_trace(run.trace, launch=LAUNCH), run)
    # Gaps of 1, 3 and 2 ms are 1000, 333 and 500 tokens/s.
    assert result["output_token_throughput_per_user"]["p50"]["measured"] == pytest.approx(500.0)
    assert result["output_token_throughput_per_user"]["p90"]["measured"] == pytest.approx(1000.0)
    assert result["duration_ms"]["total"]["measured"] == pytest.approx(112.0)
    assert result["duration_ms"]["total"]["replayed"] == 111.0
    assert result["output_throughput_tok_s"]["total"]["measured"] == pytest.approx(5 / 0.112)
    assert result["output_throughput_tok_s"]["total"]["replayed"] == pytest.approx(5 / 0.111)


def test_runs_of_different_requests_are_not_compared(run):
    with pytest.raises(TraceError, match="different requests"):
        compare_with_measured(replay_trace(run.trace.head(1), launch=LAUNCH), run)


def test_a_run_that_was_not_measured_is_not_compared(run):
    planned = dataclasses.replace(run, token_ms=run.token_ms[:0], token_offsets=0 * run.token_offsets)
    with pytest.raises(TraceError, match="no token_times"):
        compare_with_measured(replay_trace(run.trace, launch=LAUNCH), planned)
