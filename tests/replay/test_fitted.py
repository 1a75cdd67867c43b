"""A pass timing fitted to telemetry: what it learns, how it prices, what it refuses."""

import numpy as np
import pytest

from fpmsdk import FpmBatch, sample
from fpmsdk._ext.fitted import LinearPassTiming
from fpmsdk._ext.pricing import PassPricer, price_pass
from fpmsdk.errors import TimingError
from fpmsdk.perfdb.forward_cells import ForwardCell, Points
from fpmsdk.replay import fit_pass_timing, fit_table_timing


def iteration(wall_ms, prefill=(0, 0, 0), decode=(0, 0)):
    names = (
        "num_prefill_requests",
        "sum_prefill_tokens",
        "sum_prefill_kv_tokens",
        "num_decode_requests",
        "sum_decode_kv_tokens",
    )
    return {"wall_time": wall_ms / 1e3, "scheduled_requests": dict(zip(names, (*prefill, *decode), strict=True))}


# 4 ms, 0.1 a prefill token, 0.001 a pair, 0.5 a decode request, 0.01 a decode KV token, 3 for prefill at all. Pairs of
# (n, new, cached): cached * new / n + new^2 / 2n + new / 2.
EXACT = [
    iteration(4 + 0.5 + 0.1, decode=(1, 10)),
    iteration(4 + 1.0 + 1.0, decode=(2, 100)),
    iteration(4 + 2.0 + 0.7, decode=(4, 70)),
    iteration(4 + 1.0 + 0.055 + 3, prefill=(1, 10, 0)),
    iteration(4 + 2.0 + (100 + 100 + 10) * 0.001 + 3, prefill=(2, 20, 10)),
    iteration(4 + 4.0 + (1600 + 800 + 20) * 0.001 + 3 + 1.0 + 0.3, prefill=(1, 40, 40), decode=(2, 30)),
    iteration(4 + 1.0 + 0.055 + 3 + 0.5 + 0.2, prefill=(1, 10, 0), decode=(1, 20)),
]


def test_the_fit_finds_the_six_coefficients():
    timing = fit_pass_timing(FpmBatch.from_dicts(EXACT))
    assert timing.coefficients_ms == pytest.approx([4.0, 0.1, 0.001, 0.5, 0.01, 3.0])


def test_iterations_without_work_or_wall_time_are_left_out():
    idle = [iteration(50.0), iteration(0.0, decode=(1, 1)), iteration(float("nan"), decode=(1, 1))]
    timing = fit_pass_timing(FpmBatch.from_dicts(EXACT + idle))
    assert timing.coefficients_ms == pytest.approx([4.0, 0.1, 0.001, 0.5, 0.01, 3.0])


def test_relative_errors_count():
    # Between 1 and 4 ms of equal work, 1.18 makes the squares of the relative errors least: (1 + 1/4) / (1 + 1/16).
    timing = fit_pass_timing(FpmBatch.from_dicts([iteration(ms, decode=(1, 0)) for ms in (1.0, 4.0) * 3]))
    assert sum(np.multiply(timing.coefficients_ms, [1, 0, 0, 1, 0, 0])) == pytest.approx(1.25 / 1.0625)


def table(prefill, decode, genuine=True):
    def points(rows, which):
        columns = np.array(rows, np.float64).reshape(-1, 4).T
        return Points(*(column.astype(np.int64) for column in columns[:3]), columns[3], np.full(len(rows), which))

    return ForwardCell("org/m", {}, ("cell",), points(prefill, True), points(decode, genuine), 0, 0)


# The law of EXACT at points of a table: batch, prefill tokens, KV tokens, ms.
PREFILL_POINTS = [(1, 10, 0, 8.055), (2, 20, 10, 9.21), (1, 40, 40, 13.42)]
DECODE_POINTS = [(1, 0, 10, 4.6), (2, 0, 100, 6.0), (4, 0, 70, 6.7), (3, 0, 30, 5.8)]


def test_a_table_is_fitted_by_the_same_law():
    timing = fit_table_timing(table(PREFILL_POINTS, DECODE_POINTS))
    assert timing.coefficients_ms == pytest.approx([4.0, 0.1, 0.001, 0.5, 0.01, 3.0])


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (table(PREFILL_POINTS, []), "no usable decode points of org/m"),
        (table([], DECODE_POINTS), "no usable prefill points of org/m"),
        (table(PREFILL_POINTS, DECODE_POINTS, genuine=False), "no usable decode points of org/m"),
        (table(PREFILL_POINTS[:1], DECODE_POINTS[:4]), "5 points are usable"),
        (table(PREFILL_POINTS, [(n, 0, 8 * n, 4.0 + 20 * (n > 4)) for n in range(1, 9)]), "price with the fpm_inter"),
    ],
)
def test_a_table_that_the_law_does_not_describe_is_refused(cell, reason):
    with pytest.raises(TimingError, match=reason):
        fit_table_timing(cell)


def test_a_mixed_pass_is_one_forward():
    pricer = PassPricer(LinearPassTiming([4.0, 0.1, 0.001, 0.5, 0.01, 3.0]), True, 1.0, 1.0)
    work = {"num_prefill": 1, "sum_prefill_end_tokens": 80, "sum_prefill_past_tokens": 40}
    # Two decode requests that know 32 tokens have computed 30.
    assert price_pass(pricer, **work, num_decode=2, sum_decode_tokens=32) == (
        pytest.approx(4 + 4.0 + 2.42 + 3 + 1.0 + 0.3),
        0.0,
        True,
    )
    assert price_pass(pricer, num_decode=2, sum_decode_tokens=32) == (0.0, pytest.approx(4 + 1.0 + 0.3), False)
    assert price_pass(pricer) == (0.0, 0.0, False)


def test_a_price_is_never_negative():
    pricer = PassPricer(LinearPassTiming([-4.0, 0.0, 0.0, 0.0, 0.0, 0.0]), True, 1.0, 1.0)
    assert price_pass(pricer, num_decode=1, sum_decode_tokens=9) == (0.0, 0.0, False)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(TimingError, match="5 of 5 iterations are usable"):
        fit_pass_timing(FpmBatch.from_dicts(EXACT[:5]))
    with pytest.raises(TimingError, match="1 iterations have 2 ranks"):
        fit_pass_timing(FpmBatch.from_dicts([EXACT[:2]]))
    with pytest.raises(ValueError, match="6 finite coefficients"):
        LinearPassTiming([1.0, float("nan"), 0.0, 0.0, 0.0, 0.0])


def test_the_recorded_engine_is_fitted_to_plausible_figures():
    timing = fit_pass_timing(FpmBatch.from_frames(sample.train_frames()))
    constant, token, _, _, kv_token, has_prefill = timing.coefficients_ms
    assert 4.0 < constant < 5.0
    assert 0.05 < token < 0.1
    assert 0.0003 < kv_token < 0.0006
    assert 2.0 < has_prefill < 4.0
