"""Latency distributions and goodput (engine-and-replay.md section 5.6)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.errors import ConfigError
from fpmsdk.replay.latency import Distribution, RequestLatencies, Sla

NAN = math.nan


@pytest.mark.parametrize(
    ("n", "percentiles"),
    [
        (1, (0, 0, 0, 0, 0)),
        (2, (1, 1, 1, 1, 1)),  # 0.5 rounds away from zero
        (3, (1, 2, 2, 2, 2)),
        (11, (5, 8, 9, 10, 10)),  # 7.5 and 9.5 round up
        (101, (50, 75, 90, 95, 99)),
    ],
)
def test_a_percentile_is_the_value_at_the_rounded_rank(n, percentiles):
    got = Distribution.of_sample(np.arange(n)[::-1])
    assert (got.median, got.p75, got.p90, got.p95, got.p99) == percentiles


def test_moments_of_a_sample_use_the_population_deviation():
    got = Distribution.of_sample([2.0, 4.0, NAN, 4.0, 6.0])
    assert (got.mean, got.min, got.max) == (4.0, 2.0, 6.0)
    assert got.std == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("empty", [[], [NAN]])
def test_an_empty_sample_is_all_zero(empty):
    assert Distribution.of_sample(empty) == Distribution()
    assert Distribution.of_stream(empty, [1] * len(empty)) == Distribution()


# Recorded from the reference simulator: (gaps, counts) -> figures of its token stream.
@pytest.mark.parametrize(
    ("gaps", "counts", "figures"),
    [
        ([1.0], [2], {"median": 0.9989999999999999, "p99": 0.9989999999999999, "mean": 1.0, "std": 0.0}),
        ([1.0], [1], {"median": 1.0, "p99": 1.0}),
        ([1.0, 11.0], [3, 1], {"median": 0.999, "p75": 0.999, "p90": 10.99016, "mean": 3.5, "std": 4.330127}),
        ([11.0, 1.0], [1, 1], {"median": 10.99016, "min": 1.0, "max": 11.0, "mean": 6.0, "std": 5.0}),
        ([1.0, 14.0], [13, 1], {"p95": 0.999, "p99": 13.999203, "mean": 1.928571, "std": 3.348012}),
        ([1.0, 10001.0], [20, 1], {"p95": 0.999, "p99": 10006.624177, "std": 2129.58855}),
        ([5.8462], [9], {"median": 5.841572874092177}),
        ([1000.0], [3], {"median": 999.2468071445758, "max": 1000.0}),
    ],
)
def test_stream_percentiles_are_those_of_the_sketch_and_moments_exact(gaps, counts, figures):
    got = Distribution.of_stream(gaps, counts)
    assert {name: getattr(got, name) for name in figures} == pytest.approx(figures, rel=1e-6)


def test_zero_gaps_and_absent_gaps():
    got = Distribution.of_stream([0.0, 4.0, math.inf, NAN], [3, 1, 5, 5])
    assert (got.median, got.min, got.mean) == (0.0, 0.0, 1.0)


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.integers(1, 9)), min_size=1, max_size=50))
def test_a_stream_agrees_with_its_sample_to_the_sketch_accuracy(gaps):
    values, counts = map(list, zip(*gaps, strict=True))
    stream = Distribution.of_stream(values, counts)
    sample = Distribution.of_sample(np.repeat(values, counts))
    for name in ("mean", "min", "max"):
        assert getattr(stream, name) == pytest.approx(getattr(sample, name), rel=1e-9)
    assert stream.std == pytest.approx(sample.std, rel=1e-6, abs=1e-6 * sample.mean)
    for name in ("median", "p75", "p90", "p95", "p99"):
        assert getattr(stream, name) == pytest.approx(getattr(sample, name), rel=1.0001e-3)


def test_an_exact_stream_has_the_percentiles_of_its_sample():
    values, counts = [5.8462, 3.0, 7.25], [50, 3, 47]
    exact = Distribution.of_stream(values, counts, exact=True)
    assert (exact.median, exact.p75, exact.p99) == (5.8462, 7.25, 7.25)


def column(*values):
    return np.array(values, np.float64)


def latencies(arrival, first, second, last, tokens):
    return RequestLatencies.of(
        column(*arrival), column(*first), column(*second), column(*last), np.array(tokens, np.int64)
    )


def test_latencies_are_differences_of_token_times():
    got = latencies([10, 10, 10], [15, 15, NAN], [17, NAN, NAN], [25, 15, NAN], [6, 1, 0])
    np.testing.assert_array_equal(got.ttft_ms, [5, 5, NAN])
    np.testing.assert_array_equal(got.ttst_ms, [2, NAN, NAN])
    np.testing.assert_array_equal(got.itl_ms, [2, NAN, NAN])
    np.testing.assert_array_equal(got.e2e_ms, [15, 5, NAN])


def test_latencies_are_never_negative():
    got = latencies([10], [9], [8], [7], [3])
    assert [got.ttft_ms[0], got.ttst_ms[0], got.itl_ms[0], got.e2e_ms[0]] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        ({"ttft_ms": 5}, [True, True, False]),
        ({"ttft_ms": 4.9}, [False, False, False]),
        ({"itl_ms": 2}, [True, True, False]),
        ({"itl_ms": 1.9}, [False, True, False]),
        ({"ttft_ms": 5, "itl_ms": 1.9}, [False, True, False]),
        ({"e2e_ms": 10}, [False, True, True]),
        ({"e2e_ms": 4}, [False, False, False]),
    ],
)
def test_goodput_holds_every_bound(bounds, good):
    # Six tokens; one token, which has no ITL to bound; none, which only an e2e bound can judge, by its end.
    arrival, end = column(10, 10, 10), column(25, 15, 18)
    got = latencies(arrival, [15, 15, NAN], [17, NAN, NAN], [25, 15, NAN], [6, 1, 0])
    assert Sla(**bounds).met_by(got, arrival, end).tolist() == good


@pytest.mark.parametrize(
    ("bounds", "path"),
    [
        ({}, "sla"),
        ({"ttft_ms": 0}, "sla.ttft_ms"),
        ({"ttft_ms": -3.0}, "sla.ttft_ms"),
        ({"itl_ms": math.inf}, "sla.itl_ms"),
        ({"itl_ms": NAN}, "sla.itl_ms"),
        ({"itl_ms": True}, "sla.itl_ms"),
        ({"e2e_ms": "9"}, "sla.e2e_ms"),
        ({"e2e_ms": 9, "ttft_ms": 3}, "sla.e2e_ms"),
        ({"tpot_ms": 9}, "sla.tpot_ms"),
    ],
)
def test_a_malformed_sla_is_refused_by_path(bounds, path):
    with pytest.raises(ConfigError) as refused:
        Sla.from_dict(bounds)
    assert refused.value.path == path
