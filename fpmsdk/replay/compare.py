"""A replay beside the measured run of the same requests: what users of the engine saw, what was predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.recorded import RecordedRun
from fpmsdk.replay.latency import Distribution, RequestLatencies
from fpmsdk.replay.report import ReplayReport

Float64 = NDArray[np.float64]


def compare_with_measured(report: ReplayReport, run: RecordedRun) -> dict[str, dict[str, Any]]:
    """Compare latencies and throughput of a replay with those that were measured.

    Parameters
    ----------
    report: of a replay of `run.trace` in which every request completed.
    run: with the measured token times.

    Returns
    -------
    For `ttft_ms`, `itl_ms` (mean gap of a request) and `e2e_ms`: `p50`, `mean` and `p90` over the requests, and
    `request_error_percent`, p50 and p90 of the absolute error of each request. For
    `output_token_throughput_per_user` (tokens/s, over token gaps): `p50` and `p90`. For
    `output_throughput_tok_s` and `duration_ms`: `total`. Each figure has `measured`, `replayed` and
    `error_percent`.

    Raises
    ------
    TraceError: the report is of other requests, or the run has no measured times.
    """
    if report.request_columns["request_id"].tolist() != run.trace.request_ids.tolist():
        raise TraceError("the replay and the measured run have different requests; compare runs of one trace")
    if len(run.token_ms) == 0:
        raise TraceError("the run has no token_times; only a measured run can be compared with", field="token_times")
    summary = report.summary
    measured = run.latencies()
    gaps_ms = run.gaps_ms()
    users = Distribution.of_sample(1e3 / gaps_ms[gaps_ms > 0])
    duration_ms = float(run.token_ms.max())
    return {
        **compare_latencies(measured, report.latencies),
        "output_token_throughput_per_user": {
            "p50": _pair(users.median, summary["median_output_token_throughput_per_user"]),
            "p90": _pair(users.p90, summary["p90_output_token_throughput_per_user"]),
        },
        "output_throughput_tok_s": {
            "total": _pair(len(run.token_ms) / duration_ms * 1e3, summary["output_throughput_tok_s"])
        },
        "duration_ms": {"total": _pair(duration_ms, summary["duration_ms"])},
    }


def compare_latencies(measured: RequestLatencies, replayed: RequestLatencies) -> dict[str, dict[str, Any]]:
    """The latencies of `compare_with_measured`, of the same requests in the same order."""
    return {
        "ttft_ms": _latency(measured.ttft_ms, replayed.ttft_ms),
        "itl_ms": _latency(measured.itl_ms, replayed.itl_ms),
        "e2e_ms": _latency(measured.e2e_ms, replayed.e2e_ms),
    }


def _latency(measured: Float64, replayed: Float64) -> dict[str, Any]:
    ours, theirs = Distribution.of_sample(replayed), Distribution.of_sample(measured)
    errors = Distribution.of_sample(np.abs(replayed - measured) / measured * 100)
    return {
        "p50": _pair(theirs.median, ours.median),
        "mean": _pair(theirs.mean, ours.mean),
        "p90": _pair(theirs.p90, ours.p90),
        "request_error_percent": {"p50": errors.median, "p90": errors.p90},
    }


def _pair(measured: float, replayed: float) -> dict[str, float]:
    return {
        "measured": measured,
        "replayed": replayed,
        "error_percent": (replayed - measured) / measured * 100,
    }
