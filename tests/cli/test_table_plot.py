"""What a picture of a table shows, before any library draws it."""

import numpy as np
import pytest

from fpmsdk.cli.table_plot import Curve, picture
from fpmsdk.errors import FpmNotCollectedError
from fpmsdk.perfdb.forward_cells import ForwardCell, Points
from tests.perfdb.test_forward_cells import points

CELL = ForwardCell(
    "org/m",
    {},
    (),
    points((1, 200, 0, 3.0), (1, 100, 0, 2.0), (1, 100, 64, 2.5), (2, 100, 0, 4.0)),
    points((1, 0, 8, 5.0), (2, 0, 8, 6.0), (2, 0, 16, 7.0)),
    0,
    0,
)


def test_prefill_curves_run_over_tokens_for_each_batch_and_cached_length():
    assert picture(CELL, "prefill", "curves").curves == [
        Curve("batch 1, 0 cached", [100, 200], [2.0, 3.0]),
        Curve("batch 1, 64 cached", [100], [2.5]),
        Curve("batch 2, 0 cached", [100], [4.0]),
    ]


def test_decode_curves_run_over_kv_tokens_for_each_batch():
    assert picture(CELL, "decode", "curves").curves == [
        Curve("batch 1", [8], [5.0]),
        Curve("batch 2", [8, 16], [6.0, 7.0]),
    ]


def test_one_batch_can_be_drawn_alone():
    assert [curve.name for curve in picture(CELL, "decode", "curves", batch=2).curves] == ["batch 2"]


def test_a_heat_map_leaves_out_what_was_not_measured():
    drawn = picture(CELL, "prefill", "heatmap")
    assert (drawn.x, drawn.y) == ([100, 200], [0, 64])
    np.testing.assert_array_equal(drawn.grid_ms, [[2.0, 3.0], [2.5, np.nan]])
    drawn = picture(CELL, "decode", "heatmap")
    assert (drawn.x, drawn.y) == ([8, 16], [1, 2])
    np.testing.assert_array_equal(drawn.grid_ms, [[5.0, np.nan], [6.0, 7.0]])


def test_a_phase_without_points_and_a_batch_that_was_not_measured_are_errors():
    with pytest.raises(FpmNotCollectedError, match="no decode points of batch 4; it has 1, 2"):
        picture(CELL, "decode", "curves", batch=4)
    nothing = Points(*(np.empty(0, dtype) for dtype in (int, int, int, float, bool)))
    with pytest.raises(FpmNotCollectedError, match="no prefill points to draw"):
        picture(CELL._replace(prefill=nothing), "prefill", "curves")
