import math

import pytest

from fpmsdk.perfdb.forward_cells import ForwardCell
from fpmsdk.perfmodel.leave_one_out import HeldOut, LeaveOneOut, leave_one_out
from tests.perfdb.test_forward_cells import points


def cell(prefill, decode):
    return ForwardCell("m", {}, (), points(*prefill), points(*((b, 0, kv, ms) for b, kv, ms in decode)), 0, 0)


LINE = [(1, tokens, 0, tokens / 10) for tokens in (100, 200, 400)]


def test_a_point_inside_its_curve_is_predicted_from_its_neighbours():
    report = leave_one_out(cell([*LINE[:1], (1, 200, 0, 40.0), *LINE[2:]], [(1, 2, 1.0)]))
    (held,) = [point for point in report.points if point.predicted_ms is not None]
    assert (held.coordinates, held.measured_ms, held.resolution) == ((1, 200, 0), 40.0, "within_curve_interpolation")
    assert held.predicted_ms == pytest.approx(20.0)
    assert held.error == pytest.approx(-0.5)


def test_points_at_the_ends_are_reported_without_a_prediction():
    report = leave_one_out(cell(LINE, [(1, 2, 1.0), (1, 64, 2.0), (1, 128, 3.0)]))
    assert report.summary()["prefill"] == {
        "points": 3,
        "predicted": 1,
        "median_error": pytest.approx(0.0, abs=1e-12),
        "p90_error": pytest.approx(0.0, abs=1e-12),
        "max_error": pytest.approx(0.0, abs=1e-12),
    }
    assert report.summary()["decode"]["predicted"] == 1


def test_a_table_that_cannot_predict_itself_expects_nothing():
    report = leave_one_out(cell([(1, 1, 0, 1.0)], [(1, 2, 1.0)]))
    assert report.summary()["decode"] == {
        "points": 1,
        "predicted": 0,
        **dict.fromkeys(("median_error", "p90_error", "max_error")),
    }
    assert report.expected_error("decode", (1, None, 2)) is None


def test_the_expected_error_is_the_root_mean_square_of_the_nearest_points():
    near = [HeldOut("decode", (1, None, 100 + i), 10.0, 11.0 if i % 2 else 13.0, "exact_lookup") for i in range(12)]
    far = [HeldOut("decode", (64, None, 100_000), 10.0, 90.0, "exact_lookup")]
    other = [HeldOut("prefill", (1, 1, 100), 10.0, 90.0, "exact_lookup")]
    report = LeaveOneOut([*near, *far, *other])
    assert report.expected_error("decode", (1, None, 105)) == pytest.approx(math.sqrt((0.01 + 0.09) / 2))
