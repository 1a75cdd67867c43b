"""Prediction error by kind of iteration, and the order of predict-then-tune."""

import math

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch
from fpmsdk.perfmodel.accuracy import error_by_kind, measured_ms, predict_then_tune

PREFILL = {"num_prefill_requests": 1, "sum_prefill_tokens": 64}
DECODE = {"num_decode_requests": 2, "sum_decode_kv_tokens": 900}


def rank(wall_time, *work):
    return {"wall_time": wall_time, "scheduled_requests": {k: v for part in work for k, v in part.items()}}


@pytest.mark.parametrize(
    ("iteration", "expected"),
    [
        (rank(0.005, DECODE), 5.0),
        ([rank(0.005, DECODE), rank(0.007)], 7.0),  # the slowest rank, idle or not
        (rank(0.005), math.nan),
        (rank(0.0, DECODE), math.nan),
        (rank(-0.004, DECODE), math.nan),
        ([rank(0.0, DECODE), rank(0.003, PREFILL)], 3.0),
    ],
)
def test_the_measured_latency_is_that_of_the_slowest_rank(iteration, expected):
    np.testing.assert_allclose(measured_ms(FpmBatch.from_dicts([iteration])), [expected])


def test_an_empty_batch_has_no_latencies():
    assert len(measured_ms(FpmBatch.from_dicts([]))) == 0


def test_errors_are_counted_by_kind_and_idle_or_unpredicted_iterations_left_out():
    batch = FpmBatch.from_dicts(
        [
            rank(0.010, PREFILL),
            rank(0.010, DECODE),
            rank(0.010, DECODE),
            rank(0.010, PREFILL, DECODE),
            [rank(0.010, PREFILL), rank(0.010, DECODE)],
            rank(0.010),
            rank(0.0, DECODE),
        ]
    )
    error = error_by_kind(np.array([11.0, 9.0, np.nan, 12.0, 10.0, 99.0, 99.0]), batch)
    figures = {kind: tuple(row.values()) for kind, row in error.items()}
    assert figures == {
        "prefill": (1, 0, pytest.approx(10.0), pytest.approx(10.0)),
        "decode": (1, 1, pytest.approx(10.0), pytest.approx(-10.0)),
        "mixed": (2, 0, pytest.approx(10.0), pytest.approx(10.0)),
        "all": (4, 1, pytest.approx(10.0), pytest.approx(5.0)),
    }


def test_a_kind_that_never_occurred_has_no_error():
    row = error_by_kind(np.array([5.0]), FpmBatch.from_dicts([rank(0.005, DECODE)]))["prefill"]
    assert row == {"iterations": 0, "not_ready": 0, "mape_percent": None, "bias_percent": None}


def test_each_iteration_is_predicted_before_it_is_learned():
    config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"} | {
        "estimation_mode": "fpm_regression",
        "estimator_config": {"fpm_regression": {"min_observations": 3}},
    }
    iterations = [rank(0.001 * n, {"num_decode_requests": n, "sum_decode_kv_tokens": 100 * n}) for n in range(1, 601)]
    steps = []
    model = ForwardPassPerfModel.best_available(config)
    predicted = predict_then_tune(model, iterations, advance=steps.append)
    assert np.isnan(predicted[:3]).all()
    twin = ForwardPassPerfModel.best_available(config)
    for position, iteration in enumerate(iterations[:10]):
        if position >= 3:
            assert predicted[position] == twin.estimate_forward_pass_time_ms(iteration)
        twin.tune_with_fpms(iteration)
    assert sum(steps) == 512
