"""GEMM latencies against the rules of op-level.md section 2.2, and against a plain search of all sites."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk._ext.sites import GemmSite, GemmTable

FLOPS, BYTES, BANDWIDTH = 4e9, 2.0, 1e9
# How much faster the roofline of a table is than `sol_ms`: utilisations up to this much are below it.
FASTER = 10.0


def sol_ms(m, n, k):
    return max(2 * m * n * k / FLOPS, BYTES * (m * n + m * k + n * k) / BANDWIDTH) * 1000


def table_of(curves, power_w=None):
    """Table of {(n, k): {m: latency in ms}}, sites in the order given."""
    entries = [(m, ms) for curve in curves.values() for m, ms in sorted(curve.items())]
    power = None if power_w is None else np.array([power_w[m] for m, _ in entries], float)
    return GemmTable(
        np.array([n for n, _ in curves]),
        np.array([k for _, k in curves]),
        np.cumsum([0, *map(len, curves.values())]),
        np.array([m for m, _ in entries]),
        np.array([ms for _, ms in entries]),
        power,
        FASTER * FLOPS,
        BYTES,
        FASTER * BANDWIDTH,
    )


def ask(curves, m, n, k, power_w=None):
    return GemmSite(table_of(curves, power_w), n, k).ask(m)


# --- the rules as section 2.2 states them ---


def on_curve(curve, m, n, k):
    if m in curve:
        return curve[m]
    below, above = [key for key in curve if key < m], [key for key in curve if key > m]
    if below and above:
        low, high = max(below), min(above)
        return curve[low] + (curve[high] - curve[low]) * (m - low) / (high - low)
    tail = sorted(curve, reverse=bool(below))[:3]
    return sol_ms(m, n, k) / statistics.median(sol_ms(key, n, k) / curve[key] for key in tail)


def raised(curves):
    return {site: {m: max(ms, sol_ms(m, *site) / FASTER) for m, ms in curve.items()} for site, curve in curves.items()}


def expected(curves, m, n, k):
    curves = raised(curves)
    if (n, k) in curves:
        return on_curve(curves[n, k], m, n, k)
    sites = [site for site, curve in curves.items() if min(curve) <= m <= max(curve)] or list(curves)
    offsets = {site: (math.log2(site[0]) - math.log2(n), math.log2(site[1]) - math.log2(k)) for site in sites}
    near = [site for site in sites if math.hypot(*offsets[site]) <= 2]
    if not near:
        if any(min(offset[axis] for offset in offsets.values()) > 0 for axis in (0, 1)):
            return None
        beyond = [max(offset[axis] for offset in offsets.values()) < 0 for axis in (0, 1)]
        if sum(beyond) != 1:
            return None
        near = [site for site in sites if abs(offsets[site][beyond.index(False)]) <= 2]
    near = sorted(near, key=lambda site: math.hypot(*offsets[site]))[:4]
    if not near:
        return None
    weights = [1 / (math.hypot(*offsets[site]) ** 2 + 1e-12) for site in near]
    utilisation = [sol_ms(m, *site) / on_curve(curves[site], m, *site) for site in near]
    return sol_ms(m, n, k) / (sum(w * u for w, u in zip(weights, utilisation, strict=True)) / sum(weights))


SIZE = st.sampled_from([3, 32, 48, 64, 100, 128, 256, 1000, 1024, 5000])


@st.composite
def cases(draw):
    rows = st.dictionaries(st.sampled_from([1, 2, 4, 7, 16, 64, 256]), st.floats(0.01, 10.0), min_size=1)
    if draw(st.booleans()):
        # Measured tables ask every site for the same m.
        rows = st.fixed_dictionaries(dict.fromkeys(draw(rows), st.floats(0.01, 10.0)))
    curves = draw(st.dictionaries(st.tuples(SIZE, SIZE), rows, min_size=1, max_size=12))
    query = draw(SIZE | st.integers(1, 9000)), draw(SIZE | st.integers(1, 9000))
    return curves, draw(st.lists(st.integers(0, 600), min_size=1, max_size=8)), *query


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_query_follows_the_rules(case):
    curves, many_m, n, k = case
    site = GemmSite(table_of(curves), n, k)
    for m in many_m:
        answer, wanted = site.ask(m), expected(curves, m, n, k)
        assert answer is None if wanted is None else answer[0] == pytest.approx(wanted, rel=1e-9)


# --- one rule each, by hand ---

CURVE = {(64, 32): {2: 1.0, 4: 3.0, 8: 4.0}}


@pytest.mark.parametrize(("m", "latency_ms"), [(4, 3.0), (3, 2.0), (6, 3.5)])
def test_a_measured_site_answers_by_itself(m, latency_ms):
    # A closer fit elsewhere plays no part.
    curves = CURVE | {(64, 33): {3: 9.0, 6: 9.0}}
    assert ask(curves, m, 64, 32) == (latency_ms, 0.0)


@pytest.mark.parametrize(("m", "tail"), [(1, (1.0, 2.0, 9.0)), (99, (1.0, 9.0, 2.0))])
def test_beyond_a_curve_the_median_utilisation_of_three_points_is_held(m, tail):
    # Utilisations of five points, by their position; the median of either end is 2.
    utilisation = dict(zip((2, 4, 8, 16, 32), (1.0, 2.0, 9.0, 2.0, 1.0), strict=True))
    curve = {(64, 32): {key: sol_ms(key, 64, 32) / value for key, value in utilisation.items()}}
    assert statistics.median(tail) == 2.0
    assert ask(curve, m, 64, 32)[0] == pytest.approx(sol_ms(m, 64, 32) / 2.0)


@pytest.mark.parametrize(("points", "held"), [({4: 2.0}, 2.0), ({4: 2.0, 8: 3.0}, 2.5)])
def test_shorter_curves_hold_what_they_have(points, held):
    curve = {(64, 32): {m: sol_ms(m, 64, 32) / utilisation for m, utilisation in points.items()}}
    assert ask(curve, 1, 64, 32)[0] == pytest.approx(sol_ms(1, 64, 32) / held)
    assert ask(curve, 100, 64, 32)[0] == pytest.approx(sol_ms(100, 64, 32) / held)


def flat(utilisation, *sites, rows=(1, 1000)):
    """Curves on which every point has one utilisation."""
    return {site: {m: sol_ms(m, *site) / utilisation for m in rows} for site in sites}


def test_absent_sites_share_the_utilisation_of_their_neighbours_by_distance():
    # In log2: one step from the first, two from the second: weights 1 and 1/4 of utilisations 1 and 2.
    curves = flat(1.0, (128, 64)) | flat(2.0, (16, 64))
    assert ask(curves, 1000, 64, 64)[0] == pytest.approx(sol_ms(1000, 64, 64) / ((1 + 2 / 4) / 1.25), rel=1e-9)


def test_only_four_neighbours_answer_the_first_seen_at_one_distance():
    curves = flat(1.0, (128, 64), (32, 64), (64, 128), (64, 32))
    assert ask(flat(9.0, (256, 64)) | curves, 1000, 64, 64)[0] == pytest.approx(sol_ms(1000, 64, 64))
    step = flat(5.0, (128, 64)) | flat(1.0, (32, 64), (64, 128)) | flat(3.0, (64, 32)) | flat(7.0, (256, 128))
    near = flat(9.0, (64, 65)) | step
    weights = {(64, 65): 1 / (math.log2(65) - 6) ** 2, (128, 64): 1, (32, 64): 1, (64, 128): 1}
    held = {(64, 65): 9.0, (128, 64): 5.0, (32, 64): 1.0, (64, 128): 1.0}
    mean = sum(weights[site] * held[site] for site in held) / sum(weights.values())
    assert ask(near, 1000, 64, 64)[0] == pytest.approx(sol_ms(1000, 64, 64) / mean, rel=1e-6)


def test_sites_that_cover_m_go_before_nearer_ones_that_do_not():
    curves = flat(1.0, (64, 64), rows=(1, 8)) | flat(2.0, (128, 64), rows=(1, 64))
    assert ask(curves, 64, 65, 64)[0] == pytest.approx(sol_ms(64, 65, 64) / 2.0)
    # Where none covers it all of them answer, each beyond its curve: the nearer one nearly alone.
    assert ask(curves, 65, 65, 64)[0] == pytest.approx(sol_ms(65, 65, 64), rel=0.01)


@pytest.mark.parametrize(
    ("n", "k", "answers"),
    [
        pytest.param(256, 64, True, id="at the gate"),
        pytest.param(257, 64, True, id="beyond the largest n only"),
        pytest.param(64, 100_000, True, id="beyond the largest k only"),
        pytest.param(15, 64, False, id="below the smallest n"),
        pytest.param(100_000, 15, False, id="beyond in n, below in k"),
        pytest.param(1000, 1000, False, id="beyond in both"),
    ],
)
def test_far_sites_answer_only_across_one_frontier(n, k, answers):
    assert (ask(flat(1.0, (64, 64)), 1, n, k) is not None) is answers


def test_across_a_frontier_only_sites_level_with_the_query_answer():
    curves = flat(1.0, (64, 64)) | flat(3.0, (64, 1024))
    assert ask(curves, 1, 10_000, 1024)[0] == pytest.approx(sol_ms(1, 10_000, 1024) / 3.0)
    assert ask(curves, 1, 10_000, 255)[0] == pytest.approx(sol_ms(1, 10_000, 255) / 1.0)


def test_a_gap_between_far_sites_has_no_answer():
    assert ask(flat(1.0, (64, 64), (64 * 64, 64)), 1, 512, 64) is None


def test_power_follows_the_same_weights():
    power = {1: 100.0, 1000: 300.0}
    assert ask(flat(1.0, (64, 64)), 1000, 64, 64, power)[1] == 300.0
    assert ask(flat(1.0, (64, 64), (64, 65)), 1, 64, 66, power)[1] == pytest.approx(100.0)
    assert ask(flat(1.0, (64, 64)), 500.5, 64, 64, power)[1] == 200.0
    assert ask(flat(1.0, (64, 64), (64, 65)), 500.5, 64, 66, power)[1] == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("power", "held"),
    [({16: 300.0}, 300.0), ({1: 100.0, 16: 300.0}, 200.0), ({1: 5.0, 2: 400.0, 4: 200.0, 8: 300.0}, 300.0)],
    ids=["one point", "two points", "median of the last three"],
)
def test_beyond_a_curve_the_power_of_its_end_is_held(power, held):
    curve = {(64, 64): {m: 1000.0 + m for m in power}}
    assert ask(curve, 5000, 64, 64, power)[1] == held


def test_a_measurement_faster_than_light_keeps_its_energy():
    # A quarter of the speed of light's time: a quarter of the power.
    least_ms = sol_ms(8, 64, 64) / FASTER
    assert ask({(64, 64): {8: least_ms / 4}}, 8, 64, 64, {8: 400.0}) == pytest.approx((least_ms, 100.0))


def test_a_table_without_rows_has_no_answer():
    assert ask({}, 1, 64, 64) is None


@pytest.mark.parametrize("site", [(64, 32), (65, 32)])
def test_a_number_of_rows_that_is_none_has_no_answer(site):
    assert ask(CURVE, math.nan, *site) is None


def test_a_row_faster_than_the_roofline_is_raised_to_it():
    # 2 x 1000 x 100 x 100 FLOP at 4e10/s: 0.5 ms; 2 B x (1000 + 1e6 + 1000) at 1e10 B/s: 0.2004 ms.
    assert ask({(100, 100): {1000: 0.1}}, 1000, 100, 100)[0] == pytest.approx(0.5)
    assert ask({(1, 1000): {1000: 0.1}}, 1000, 1, 1000)[0] == pytest.approx(0.2004)
    assert ask({(1, 1000): {1000: 7.0}}, 1000, 1, 1000)[0] == 7.0
