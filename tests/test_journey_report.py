"""The figures of a real journey, from raw results of launches. Source: collector.md section 7.4."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks/journey_real"))

import launches
import replay


def result_file(path, seconds):
    """A result of an engine with two points of decode."""
    groups = [
        {
            "point": {
                "point_type": "decode",
                "batch_size": batch,
                "total_prefill_tokens": 0,
                "total_kv_read_tokens": 16 * batch,
            },
            "wall_time": wall,
        }
        for batch, wall in zip((1, 2), seconds, strict=True)
    ]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"iteration_groups": groups}))


@pytest.fixture
def journey(tmp_path):
    raw = "cells/fpm-1/raw/node0000/benchmark.json"
    result_file(tmp_path / "collection/artifacts" / raw, (0.010, 0.030))
    result_file(tmp_path / "collection/artifacts/smoke" / raw, (9.0, 9.0))
    result_file(tmp_path / "collection/budget/round-000" / raw, (9.0, 9.0))
    for number, seconds in enumerate([(0.010, 0.020), (0.012, 0.020), (0.014, 0.020)]):
        result_file(tmp_path / f"quality/samples/{number}" / raw, seconds)
    return tmp_path


def test_only_formal_launches_are_the_source_and_only_repetitions_scatter(journey):
    assert launches.formal_times(journey) == {("decode", 1, 0, 16): 0.010, ("decode", 2, 0, 32): 0.030}
    assert launches.repeated_times(journey)[("decode", 1, 0, 16)] == [0.010, 0.012, 0.014]


def test_the_figures_of_a_limit_are_told_by_name():
    good = {"error_percent": 3.0}
    comparison = {metric: {"p50": good, "mean": good, "p90": good} for metric in replay.METRICS}
    assert replay.missed(comparison, replay.TUNED, "tuned") == []
    comparison["itl_ms"] = {"p50": good, "mean": {"error_percent": -8.1}, "p90": good}
    assert replay.missed(comparison, replay.TUNED, "tuned") == ["tuned: itl_ms mean is -8.1 % off, 8 allowed"]


def test_the_price_of_a_point_is_the_median_of_all_its_launches(journey):
    import numpy as np

    from fpmsdk.perfdb.forward_cells import ForwardCell, Points

    none = Points(*(np.empty(0, np.int64) for _ in range(3)), np.empty(0), np.empty(0, bool))
    decode = Points(np.array([1, 2]), np.array([0, 0]), np.array([16, 32]), np.array([10.0, 30.0]), np.full(2, True))
    cell = ForwardCell("model", {}, (), none, decode, 0, 0)
    assert launches.medians(cell, journey).decode.latency_ms.tolist() == pytest.approx([11.0, 20.0])
