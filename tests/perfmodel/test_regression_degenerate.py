"""Regressions over data that say little: one row, axes that repeat each other or never vary, constant targets."""

import math

import pytest

from tests.perfmodel.test_regression_vectors import build, decode, lists

SIX = ["n", "E", "P", "maxP", "nE", "logN"]
FITS = {
    "plane": {},
    "signed": {"linear": {"non_negative": False}},
    "six axes": {"linear": {"feature_axes": SIX}},
    "six signed axes": {"linear": {"feature_axes": SIX, "non_negative": False}},
    "spline": {"kind": "spline"},
}


def row(requests, past, wall_ms=0.0):
    return decode(requests, requests * past, wall_ms, **lists([(1, past)] * requests))


@pytest.mark.parametrize("fit", FITS)
def test_one_row_shows_no_axis_that_varies(fit):
    model = build(fit=FITS[fit], min_observations=1)
    model.tune_with_fpms(row(3, 100, 7.0))
    assert model.estimate_forward_pass_time_ms(row(3, 100)) is None
    assert model.diagnostics()["retained_observations"] == 1


@pytest.mark.parametrize("fit", FITS)
def test_rows_that_are_all_the_same_are_no_fit(fit):
    model = build(fit=FITS[fit])
    for i in range(100):
        model.tune_with_fpms(row(3, 100, 7.0 + i % 3))
    assert model.estimate_forward_pass_time_ms(row(3, 100)) is None


@pytest.mark.parametrize("fit", FITS)
def test_a_constant_target_is_explained_by_no_axis(fit):
    model = build(fit=FITS[fit])
    for i in range(100):
        model.tune_with_fpms(row(1 + i % 7, 100 + 13 * i % 900, 7.0))
    answer = model.estimate_forward_pass_time_ms(row(3, 300))
    assert answer is None or answer == pytest.approx(7.0, rel=1e-6)


@pytest.mark.parametrize("fit", ["six axes", "six signed axes"])
def test_axes_that_repeat_each_other_still_predict(fit):
    # Every decode request extends by one token: E equals n, and nE its square.
    model = build(fit=FITS[fit], sampling={"max_observations": 200})
    for i in range(200):
        requests, past = 1 + i % 9, 100 + 37 * i % 800
        model.tune_with_fpms(row(requests, past, 3.0 + 2.0 * requests + 0.001 * requests * past))
    assert model.estimate_forward_pass_time_ms(row(5, 400)) == pytest.approx(15.0, rel=1e-6)


@pytest.mark.parametrize("fit", FITS)
def test_extreme_wall_times_leave_an_answer_that_is_finite_or_none(fit):
    model = build(fit=FITS[fit])
    for i in range(300):
        wall_ms = 1e305 if i == 120 else 1e-300 if i == 121 else 5.0 + i % 7
        model.tune_with_fpms(row(1 + i % 7, 100 + 13 * i % 900, wall_ms))
        answer = model.estimate_forward_pass_time_ms(row(3, 300))
        assert answer is None or math.isfinite(answer)
