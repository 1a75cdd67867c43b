"""Which points are measured next."""

import numpy as np
import pytest

from fpmsdk.onboard.budget.choose import UNKNOWN, choose, expected_errors
from fpmsdk.onboard.budget.holdout import split
from fpmsdk.perfmodel.leave_one_out import HeldOut


def asked(tokens, error):
    """A measured point of prefill that the others predict with an error; None where they do not answer."""
    return HeldOut("prefill", (1, tokens, 0), 10.0, None if error is None else 10.0 * (1 + error), None)


def curve(*kv):
    return np.array([[1, 0, each] for each in kv], np.int64)


@pytest.mark.parametrize("measured", [[], [asked(16, None), asked(512, None)]])
def test_where_nothing_is_known_everything_may_be_wrong(measured):
    assert expected_errors(np.array([[1, 64, 0]]), measured).tolist() == [UNKNOWN]


def test_half_the_distance_is_a_quarter_of_the_error():
    measured = [asked(15, None), asked(255, 0.32), asked(4095, None)]  # four doublings apart
    near, far = expected_errors(np.array([[1, 511, 0], [1, 1023, 0]]), measured)
    assert near == pytest.approx(0.32 / 16) and far == pytest.approx(0.32 / 4)


def test_no_more_than_everything_is_expected_to_be_wrong():
    measured = [asked(15, 0.9), asked(31, 0.9)]
    assert expected_errors(np.array([[1, 4095, 0]]), measured).tolist() == [UNKNOWN]


def test_what_the_traffic_needs_comes_first():
    grid = curve(16, 32, 64)
    assert choose(grid, np.full(3, 0.1), np.array([0.1, 0.1, 0.8]), curve(8, 128), 1) == [2]


def test_a_chosen_point_speaks_for_its_neighbours():
    grid = curve(16, 17, 1024)
    # The two neighbours count most alone; together they are no better than one.
    assert choose(grid, np.array([0.5, 0.49, 0.2]), np.ones(3), curve(8, 2048), 2) == [0, 2]


def test_no_point_is_chosen_twice_and_no_more_than_there_are():
    assert sorted(choose(curve(16, 32), np.ones(2), np.ones(2), curve(8), 5)) == [0, 1]


def test_the_envelope_is_never_kept_apart_and_the_parts_are_the_grid():
    grid = np.array([[batch, 0, batch * kv] for batch in (1, 2, 4) for kv in (2, 4, 8, 16, 32)], np.int64)
    parts = split("decode", grid, most=16, seed=42)
    assert {tuple(row) for row in parts.envelope.tolist()} >= {(1, 0, 2), (1, 0, 32), (4, 0, 8), (4, 0, 128)}
    together = np.concatenate([parts.envelope, parts.holdout, parts.candidates])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, grid.tolist()))
    assert len(parts.holdout) == 3  # a fifth
