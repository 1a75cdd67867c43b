"""Which rows a regression store keeps, and in which order it reads them (regression-and-learned.md 0.3)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk import ForwardPassPerfModel
from tests.perfmodel.reference import ReferenceSampler


def decode_model(axes=("attention", "moe"), bins=(4, 4), max_observations=64):
    return ForwardPassPerfModel.best_available(
        {
            "model": "m",
            "system": "s",
            "backend": "vllm",
            "worker_type": "decode",
            "estimation_mode": "fpm_regression",
            "estimator_config": {
                "fpm_regression": {
                    "sampling": {
                        "axes": list(axes),
                        "bins_per_axis": list(bins),
                        "max_observations": max_observations,
                    },
                    "min_observations": 1,
                }
            },
        }
    )


def observe(model, requests, kv_tokens, wall_time_ms):
    scheduled = {"num_decode_requests": requests, "sum_decode_kv_tokens": kv_tokens}
    model.tune_with_fpms([[{"wall_time": wall_time_ms / 1000, "scheduled_requests": scheduled}]])


def retained(model):
    """Targets in ms in the order in which a fit reads them."""
    state = model._estimator.pure_decode.arrays
    return state["target_ms"][state["order"][: state["extent"][0]]]


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 4000)), max_size=60),
    bins=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    max_observations=st.integers(1, 20),
)
def test_rows_are_kept_and_ordered_as_the_specification_says(rows, bins, max_observations):
    model = decode_model(bins=bins, max_observations=max_observations)
    reference = ReferenceSampler(bins, max_observations)
    for number, (requests, kv_tokens) in enumerate(rows, start=1):
        observe(model, requests, kv_tokens, number)
        reference.insert((math.log1p(kv_tokens), math.log1p(requests)), number)
    assert retained(model).round(6).tolist() == [float(payload) for _, payload in reference.rows()]


@pytest.mark.parametrize("order", [(1, 3, 9), (9, 3, 1), (3, 9, 1), (1, 9, 3)])
def test_the_largest_key_loses_a_tie(order):
    model = decode_model(axes=("n",), bins=(3,), max_observations=2)
    for requests in order:
        observe(model, requests, 0, requests)
    assert sorted(retained(model).round(6)) == [1.0, 3.0]


def test_bounds_that_widen_move_rows_to_other_buckets():
    model = decode_model(bins=(2, 2))
    keys = []
    for requests, kv_tokens in ((1, 0), (2, 1), (16, 15)):
        observe(model, requests, kv_tokens, 1.0)
        state = model._estimator.pure_decode.arrays
        keys.append(state["bucket_key"][: state["extent"][1]].tolist())
    assert keys == [[0], [0, 3], [0, 3]]
    assert state["bucket_start"][:3].tolist() == [0, 2, 3]


def test_more_bins_than_memory_cost_nothing():
    model = decode_model(bins=(2**31, 2**32 - 1))
    for requests in range(1, 200):
        observe(model, requests, requests * 100, 1.0)
    assert model.diagnostics()["retained_observations"] == 64


def test_a_large_store_takes_memory_only_for_its_rows():
    model = decode_model(max_observations=2**62)
    for requests in range(1, 200):
        observe(model, requests, requests * 100, 1.0)
    assert model.diagnostics()["retained_observations"] == 199
    assert sum(array.nbytes for array in model._estimator.pure_decode.arrays.values()) < 64 * 1024
