"""Small native collections, made by hand."""

import numpy as np

from fpmsdk.collect.artifact import NativeCollection, RankTiming


def point(kind, number, batch, tokens, kv, **changes):
    return {
        "point_type": kind,
        "benchmark_id": number,
        "batch_size": batch,
        "total_prefill_tokens": tokens,
        "total_kv_read_tokens": kv,
        "expected_cudagraph_mode": "NONE",
        "expected_capture_size": None,
        "padding_tokens": None,
        "sample_reasons": [],
        "partition": None,
        "rows": None,
    } | changes


def prefill_point(number, batch, tokens, kv, **changes):
    return point("prefill", number, batch, tokens, kv, **changes)


def decode_point(number, batch, kv, **changes):
    return point("decode", number, batch, 0, kv, **changes)


def sweep(points, walls=None, regime="real_kv", **changes):
    """A collection of these points; `walls` are seconds by point and rank."""
    walls = np.array([[0.01 * point["benchmark_id"]] for point in points] if walls is None else walls)
    coordinates = [[p[name] for p in points] for name in ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")]
    fields = {
        "phase": points[0]["point_type"],
        "points": tuple(points),
        "regimes": (regime,) * len(points),
        "coordinates": np.array(coordinates),
        "rank_wall_s": walls,
        "timings": tuple(RankTiming(rank, 2.0, 1.0) for rank in range(walls.shape[1])),
        "backend_version": "0.28.0",
        "attempt_id": "attempt",
        "run_id": "run",
        "grid_digest": "grid",
        "kvwarm": None,
        "input_provenance": None,
        "engines": (None,) * walls.shape[1],
        "files": (),
    }
    return NativeCollection(**fields | changes)


def captured_decodes():
    """Batches 1 to 32 at 16 and 1024 tokens of context each; graphs are captured up to 16 requests."""
    points = []
    for batch in (1, 2, 4, 8, 16, 32):
        for context in (16, 1024):
            captured = {"expected_cudagraph_mode": "FULL", "expected_capture_size": batch, "padding_tokens": 0}
            points.append(decode_point(len(points) + 1, batch, batch * context, **captured if batch <= 16 else {}))
    return sweep(points)
