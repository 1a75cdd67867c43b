"""The grid resolver against the rules of op-level.md section 2.1, and against a plain search of all measurements."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk._ext.grid import GridTable


def table_of(measured, sqrt_axis=-1, power_w=None):
    """Table of {coordinates: latency in ms}."""
    rows = sorted(measured)
    axes = tuple(np.array(column, np.int64) for column in zip(*rows, strict=True))
    power = None if power_w is None else np.array([power_w[row] for row in rows], float)
    return GridTable(axes, np.array([measured[row] for row in rows], float), power, sqrt_axis)


def proportional(*coordinates):
    return math.prod(coordinates)


def irregular(*coordinates):
    return 0.3 * math.prod(coordinates) + sum(0.05 * (axis + 1) * c for axis, c in enumerate(coordinates))


# --- the rules as section 2.1 states them ---


class OutOfRangeError(Exception):
    pass


def descend(measured, query, axis, sol, sqrt_axis):
    """Latency from the measurements of one branch; None is a miss."""
    if axis == len(query):
        return next(iter(measured.values()))
    branches = {}
    for coordinates, latency in measured.items():
        branches.setdefault(coordinates[axis], {})[coordinates] = latency
    if query[axis] in branches:
        return descend(branches[query[axis]], query, axis + 1, sol, sqrt_axis)
    below = [key for key in branches if key < query[axis]]
    above = [key for key in branches if key > query[axis]]
    if not below or not above:
        raise OutOfRangeError
    ends, children = (max(below), min(above)), []
    for key in ends:
        try:
            children.append(descend(branches[key], query, axis + 1, sol, sqrt_axis))
        except OutOfRangeError:
            children.append(OutOfRangeError)
    found = [child not in (None, OutOfRangeError) for child in children]
    if all(found):
        share = (query[axis] - ends[0]) / (ends[1] - ends[0])
        if axis == sqrt_axis:
            roots = [math.sqrt(child) for child in children]
            return (roots[0] + (roots[1] - roots[0]) * share) ** 2
        return children[0] + (children[1] - children[0]) * share
    if any(found):
        survivor = found.index(True)
        moved = list(query)
        moved[axis] = ends[survivor]
        return children[survivor] * sol(*query) / sol(*moved)
    if OutOfRangeError in children:
        raise OutOfRangeError
    return None


def held(measured, query, sol):
    here = sol(*query)
    if not (here > 0 and math.isfinite(here)):
        return None
    if len(query) == 1:
        anchor = min(measured) if query < min(measured) else max(measured)
        return here / (sol(*anchor) / measured[anchor])
    logs = [math.log2(max(c, 1e-12)) for c in query]
    near = sorted(
        (math.dist(logs, [math.log2(max(c, 1e-12)) for c in leaf]), leaf) for leaf in measured if sol(*leaf) > 0
    )
    if not near:
        return None
    radius = near[4][0] if len(near) > 4 else math.inf
    weights = [
        1 / (d * d + 1e-12) if radius == math.inf else (max(radius - d, 0) / (radius * d + 1e-12)) ** 2
        for d, _ in near[:4]
    ]
    if not any(weights):
        weights = [1.0] * len(weights)
    utilisation = sum(w * sol(*leaf) / measured[leaf] for w, (_, leaf) in zip(weights, near[:4], strict=True))
    return here / (utilisation / sum(weights))


def expected(measured, query, sol, sqrt_axis):
    try:
        return descend(measured, query, 0, sol, sqrt_axis)
    except OutOfRangeError:
        return held(measured, query, sol)


@st.composite
def cases(draw):
    """A ragged grid with a query inside, between or beyond its measurements."""
    num_axes = draw(st.integers(1, 3))
    coordinate = st.sampled_from([1, 2, 3, 5, 8, 13, 40, 100, 1000])
    rows = draw(st.lists(st.tuples(*[coordinate] * num_axes), min_size=1, max_size=40, unique=True))
    measured = {row: draw(st.floats(0.01, 100.0)) for row in rows}
    query = tuple(draw(coordinate | st.integers(0, 3000)) for _ in range(num_axes))
    return measured, query, draw(st.integers(-1, num_axes - 1))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_query_follows_the_rules(case):
    measured, query, sqrt_axis = case
    answer = table_of(measured, sqrt_axis).query(query, irregular)
    wanted = expected(measured, query, irregular, sqrt_axis)
    assert answer is None if wanted is None else answer[0] == pytest.approx(wanted, rel=1e-9)


def test_many_measurements_at_much_the_same_distance():
    measured = {(batch, length): 1.0 + (batch * length) % 7 for batch in (1, 2) for length in range(1000, 1300)}
    for query in ((40, 1150), (3, 1299), (1, 1300), (1, 1), (5000, 10**6)):
        wanted = expected(measured, query, irregular, -1)
        assert table_of(measured).query(query, irregular)[0] == pytest.approx(wanted, rel=1e-9), query


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 13))
def test_measurements_without_a_roofline_are_no_neighbours(case, dark):
    measured, query, _ = case
    query = (5000, *query[1:])

    def sol(*coordinates):
        return 0.0 if coordinates[-1] == dark else irregular(*coordinates)

    if len(query) == 1:
        query = (*query, 7)
        measured = {(*row, column): ms for row, ms in measured.items() for column in (1, dark)}
    answer = table_of(measured).query(query, sol)
    wanted = held(measured, query, sol)
    assert answer is None if wanted is None else answer[0] == pytest.approx(wanted, rel=1e-9)


# --- one rule each, by hand ---

SQUARE = {(1, 10): 2.0, (1, 20): 4.0, (3, 10): 6.0, (3, 20): 12.0}


@pytest.mark.parametrize(
    ("query", "latency_ms"),
    [
        pytest.param((3, 10), 6.0, id="exact"),
        pytest.param((1, 15), 3.0, id="between on the inner axis"),
        pytest.param((2, 10), 4.0, id="between on the outer axis"),
        pytest.param((2, 15), 6.0, id="between on both"),
    ],
)
def test_inside_the_measurements(query, latency_ms):
    # The speed of light plays no part here.
    assert table_of(SQUARE).query(query, lambda *_: math.nan) == (latency_ms, 0.0)


def test_the_root_of_latency_is_interpolated_along_the_square_axis():
    # From 4 to 16 in the middle: (2 + 4) / 2 = 3, squared.
    measured = {(1, 10): 4.0, (1, 20): 16.0, (3, 10): 4.0, (3, 20): 16.0}
    assert table_of(measured, sqrt_axis=1).query((1, 15), proportional) == (9.0, 0.0)
    assert table_of(measured, sqrt_axis=1).query((2, 15), proportional) == (9.0, 0.0)
    assert table_of(measured, sqrt_axis=0).query((1, 15), proportional) == (10.0, 0.0)


def test_power_is_linear_even_along_the_square_axis():
    measured, power = {(10,): 4.0, (20,): 16.0}, {(10,): 100.0, (20,): 300.0}
    assert table_of(measured, sqrt_axis=0, power_w=power).query((15,), proportional) == (9.0, 200.0)


def test_where_one_side_has_no_measurement_the_other_is_scaled_by_the_roofline():
    # (3, 15) does not exist: batch 3 was measured up to 12. 5.0 at (1, 15) times 2 / 1.
    ragged = {(1, 10): 4.0, (1, 20): 6.0, (3, 10): 1.0, (3, 12): 1.0}
    assert table_of(ragged).query((2, 15), proportional)[0] == 10.0
    # The other way around: 9.0 at (3, 15) times 2 / 3.
    ragged = {(1, 10): 1.0, (1, 12): 1.0, (3, 10): 8.0, (3, 20): 10.0}
    assert table_of(ragged).query((2, 15), proportional)[0] == 6.0


@pytest.mark.parametrize("sol", [lambda *_: 0.0, lambda *_: math.inf, lambda *_: math.nan, lambda *_: -1.0])
def test_without_a_usable_roofline_the_other_side_is_taken_as_it_is(sol):
    ragged = {(1, 10): 4.0, (1, 20): 6.0, (3, 10): 1.0, (3, 12): 1.0}
    assert table_of(ragged).query((2, 15), sol)[0] == 5.0


@pytest.mark.parametrize(
    ("query", "latency_ms"),
    [
        # Utilisation of the end point on the query's side: 2 / 4 below, 8 / 8 above.
        ((1,), 1.0 / (2.0 / 4.0)),
        ((0.5,), 0.5 / (2.0 / 4.0)),
        ((16,), 16.0),
    ],
)
def test_beyond_a_curve_the_utilisation_of_its_end_is_held(query, latency_ms):
    power = {(2,): 50.0, (8,): 70.0}
    answer = table_of({(2,): 4.0, (8,): 8.0}, power_w=power).query(query, proportional)
    assert answer == (latency_ms, 70.0 if query[0] > 8 else 50.0)


def test_beyond_a_grid_the_nearest_utilisation_is_held():
    # One measurement, utilisation 8 / 4: whatever is asked has it.
    assert table_of({(2, 4): 4.0}).query((4, 8), proportional)[0] == pytest.approx(16.0)
    assert table_of({(2, 4): 4.0}).query((2, 5), proportional)[0] == pytest.approx(5.0)


def test_neighbours_are_weighted_by_distance_and_by_the_radius_of_the_fifth():
    # In log2 from (2, 1): utilisations 1, 2, 4, 8, 16 at distances 1, 2, 3, 4, 5. Weights (5 - d) / (5 d) squared:
    # 0.64, 0.09, 16/900, 0.0025.
    measured = {(4 * 2**i, 1): 4 * 2**i / 2**i for i in range(5)}
    weights = [0.64, 0.09, 4 / 225, 0.0025]
    utilisation = sum(weight * 2**i for i, weight in enumerate(weights)) / sum(weights)
    assert table_of(measured).query((2, 1), proportional)[0] == pytest.approx(2.0 / utilisation, rel=1e-9)


def test_neighbours_at_one_distance_count_alike():
    # Five measurements at distance 5 from (1, 1, 1): the radius is their own, all weights vanish, and the first four
    # rows, of utilisations 1 to 4, count alike.
    leaves = [(8, 1, 16), (8, 16, 1), (16, 1, 8), (16, 8, 1), (32, 1, 1)]
    measured = {leaf: proportional(*leaf) / (i + 1) for i, leaf in enumerate(leaves)}
    assert table_of(measured).query((1, 1, 1), proportional)[0] == pytest.approx(1.0 / 2.5)


@pytest.mark.parametrize("query", [(math.nan, 15), (2, math.nan), (math.inf, 15), (2, math.inf), (1e308, 1e308)])
def test_queries_that_are_no_numbers_or_overflow_have_no_answer(query):
    assert table_of(SQUARE).query(query, proportional) is None


@pytest.mark.parametrize("query", [(math.nan,), (math.inf,)])
def test_neither_on_a_curve(query):
    assert table_of({(2,): 4.0, (8,): 8.0}).query(query, proportional) is None


@pytest.mark.parametrize(
    ("query", "sol"),
    [
        pytest.param((5, 0), proportional, id="no work"),
        pytest.param((5, 5), lambda *_: -1.0, id="negative"),
        pytest.param((5, 5), lambda *_: math.inf, id="infinite"),
    ],
)
def test_beyond_the_range_nothing_answers_without_a_roofline(query, sol):
    assert table_of(SQUARE).query(query, sol) is None


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_what_a_roofline_raises_comes_out(raised):
    def roofline(*_):
        raise raised("of the roofline")

    with pytest.raises(raised, match="of the roofline"):
        table_of(SQUARE).query((5, 5), roofline)


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_a_table_without_rows_has_no_answer(num_axes):
    empty = GridTable((np.array([], np.int64),) * num_axes, np.array([]), None, -1)
    assert empty.query((1,) * num_axes, proportional) is None


def test_one_value_on_an_axis_is_exact_or_held():
    plane = {(8, isl): 0.5 * isl for isl in (1, 2, 4)}
    assert table_of(plane).query((8, 3), proportional)[0] == 1.5
    assert table_of(plane).query((16, 4), proportional)[0] == pytest.approx(2 * 2.0)


@pytest.mark.parametrize("num_axes", [0, 4])
def test_a_grid_has_one_to_three_axes(num_axes):
    with pytest.raises(ValueError, match=f"one to 3 axes, found {num_axes}"):
        GridTable((np.array([1]),) * num_axes, np.array([1.0]), None, -1)


def test_a_query_has_a_coordinate_for_every_axis():
    with pytest.raises(ValueError, match="2 coordinates are needed, found 1"):
        table_of(SQUARE).query((1,), proportional)


def test_a_failing_roofline_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        table_of(SQUARE).query((9, 9), lambda *_: 1 / 0)
