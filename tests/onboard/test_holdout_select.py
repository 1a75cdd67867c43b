"""Which points a holdout keeps and which it withholds.

Source: onboarding.md section 8.3 and Vectors.
"""

import itertools

import numpy as np
import pytest

from fpmsdk.onboard.holdout_select import boundary_axes, envelope_anchors, select_points, tie_hash

PREFILL = np.array(list(itertools.product((1, 2, 4), (16, 32, 64, 128, 256), (0, 64, 256, 1024, 2048))))
DECODE = np.array([(batch, 0, kv) for batch in (1, 2, 4) for kv in (4, 16, 64, 256, 2048)])


def chosen(phase, points, seed, limit=16):
    return select_points(phase, points, envelope_anchors(phase, points), limit=limit, seed=seed)


def test_the_tie_hash_is_that_of_the_recorded_vector():
    assert tie_hash(42, "prefill", (1, 16, 0)) == "5f422c8c10e0a44c953b4b9715abc719a230277435d609ab9b3f6a63ade2fadb"


def test_the_envelope_of_the_recorded_grid_has_12_and_6_anchors():
    assert len(envelope_anchors("prefill", PREFILL)) == 12
    assert len(envelope_anchors("decode", DECODE)) == 6


def test_a_curve_between_the_outer_ones_that_reaches_further_keeps_its_ends():
    ragged = np.array([[1, 16, 0], [1, 64, 0], [1, 8, 32], [1, 128, 32], [1, 16, 64], [1, 64, 64]])
    assert envelope_anchors("prefill", ragged) == set(map(tuple, ragged.tolist()))


def test_seed_42_selects_the_recorded_points_in_order():
    assert chosen("prefill", PREFILL, 42) == [
        (2, 64, 256),
        (4, 128, 0),
        (1, 128, 0),
        (4, 256, 1024),
        (4, 16, 1024),
        (1, 256, 1024),
        (1, 16, 1024),
        (2, 32, 0),
        (4, 64, 64),
        (2, 256, 64),
        (2, 16, 64),
        (1, 64, 2048),
        (4, 32, 0),
        (4, 64, 2048),
        (1, 64, 64),
    ]
    assert chosen("decode", DECODE, 42) == [(4, 0, 16), (1, 0, 256), (4, 0, 256)]


def test_seed_43_selects_the_recorded_points():
    assert chosen("prefill", PREFILL, 43)[:3] == [(1, 256, 256), (4, 32, 0), (2, 16, 1024)]
    assert chosen("decode", DECODE, 43) == [(2, 0, 256), (4, 0, 16), (1, 0, 16)]


@pytest.mark.parametrize(
    ("points", "limit", "count"),
    [
        (DECODE, 2, 2),  # the limit
        (DECODE, 16, 3),  # a fifth
        (DECODE[:3], 16, 1),  # at least one
        (DECODE[[0, 4]], 16, 0),  # all are anchors
        (DECODE[:1], 16, 0),  # one point says nothing of interpolation
    ],
)
def test_a_fifth_is_withheld_between_one_and_the_limit(points, limit, count):
    assert len(chosen("decode", points, 42, limit)) == count


def test_the_order_of_the_rows_does_not_matter():
    assert chosen("prefill", PREFILL[::-1], 42) == chosen("prefill", PREFILL, 42)


def test_boundary_axes_are_measured_extremes_of_axes_that_vary():
    assert boundary_axes((1, 0, 2048), DECODE) == ["min_batch_size", "max_total_kv_read_tokens"]
    assert boundary_axes((2, 0, 64), DECODE) == []
