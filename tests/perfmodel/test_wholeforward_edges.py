"""Latency along ragged grids and declared knees: no jump where a curve ends, no blend across a knee."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk import ForwardPassPerfModel
from fpmsdk._ext.passroofline import PassRoofline
from fpmsdk._ext.wholeforward import DirectEngine, SolAssistedEngine
from fpmsdk.errors import FpmUncoveredError
from fpmsdk.perfmodel.wholeforward_tables import assisted_curves, strict_curves
from tests.perfdb.pairs import decode, prefill, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfdb.test_forward_cells import points
from tests.perfmodel.deployments import checkpoint, direct_config

# Latency bound by memory: weights, and a little for every token.
ROOFLINE = [
    {"kind": "gemm", "name": "g", "factors": (64, 64, 1e12, 2, 1e9)},
    {"kind": "memory", "name": "e", "factors": (1e3, 1e9)},
]
TOKENS, KV = (64, 128, 256, 512, 1024), (0, 256, 1024, 4096)
DECODE_KV = (64, 128, 256, 512, 1024, 2048)


def ragged(draw, sites, xs):
    """Curves over some of the points `xs`, each beginning and ending where it likes."""
    rows = []
    for site in sites:
        first = draw(st.integers(0, len(xs) - 2))
        last = draw(st.integers(first + 1, len(xs) - 1))
        level = draw(st.floats(0.8, 1.3))
        rows += [(site, x, level * (2.0 + x / 100)) for x in xs[first : last + 1]]
    return rows


@st.composite
def prefill_rows(draw):
    return [(1, x, kv, ms * (1 + kv / 1e4)) for kv, x, ms in ragged(draw, KV, TOKENS)]


@st.composite
def decode_rows(draw):
    # Batches 8 and 9 are neighbours: a captured graph ends at 8.
    return [(batch, 0, kv, ms + batch / 50) for batch, kv, ms in ragged(draw, (4, 8, 9, 12, 16), DECODE_KV)]


def unexplained(*lookup):
    return AssertionError(lookup)


def direct(prefills, decodes, knees=None, *, continuous=True):
    return DirectEngine(*strict_curves(prefills, decodes, knees), unexplained, continuous=continuous)


def assisted(prefills, decodes, knees=None, *, continuous=True):
    roofline = PassRoofline(ROOFLINE)
    curves = assisted_curves(prefills, decodes, knees)
    return SolAssistedEngine(*curves[:4], roofline, roofline, unexplained, continuous=continuous)


SOME_PREFILL, SOME_DECODE = points((1, 1, 0, 1.0)), points((1, 0, 1, 1.0))


def largest_step(ask, xs):
    """Largest relative change between neighbouring queries that both have an answer."""
    answers = [ask(x) for x in xs]
    pairs = [(a[1], b[1]) for a, b in pairwise(answers) if a[0] == b[0] == "ok"]
    return max((abs(b - a) / min(a, b) for a, b in pairs), default=0.0)


# From one token to the next: no curve rises by more than (1.3 - 0.8) of its level over 64 tokens, a hundredth a token.
SMALL = 0.03


@settings(max_examples=60, deadline=None)
@given(prefill_rows(), st.sampled_from([0, 100, 256, 700, 1024, 3000]))
@pytest.mark.parametrize("make", [direct, assisted])
def test_prefill_does_not_jump_where_a_curve_ends(make, rows, kv):
    engine = make(points(*rows), SOME_DECODE)
    assert largest_step(lambda tokens: engine.prefill_query(1, tokens, kv), range(64, 1025)) < SMALL


@settings(max_examples=60, deadline=None)
@given(decode_rows(), st.sampled_from([4, 6, 8, 9, 10, 14, 16]))
@pytest.mark.parametrize("make", [direct, assisted])
def test_decode_does_not_jump_where_a_row_ends(make, rows, batch):
    engine = make(SOME_PREFILL, points(*rows))
    assert largest_step(lambda kv: engine.decode_query(batch, kv), range(64, 2049)) < SMALL


RAGGED = [
    *((1, x, 0, 2.0 + x / 100) for x in TOKENS),
    *((1, x, 256, 4.0 + x / 100) for x in TOKENS[:3]),
    *((1, x, 1024, 9.0 + x / 50) for x in TOKENS),
]


@pytest.mark.parametrize("make", [direct, assisted])
def test_other_models_step_over_a_curve_that_ends(make):
    engine = make(points(*RAGGED), SOME_DECODE, continuous=False)
    assert largest_step(lambda tokens: engine.prefill_query(1, tokens, 300), range(64, 1025)) > SMALL


def test_a_direct_query_beyond_its_neighbour_is_refused_and_one_point_answers_it(tmp_path):
    Systems(tmp_path / "systems").hardware()
    model = checkpoint(tmp_path / "model")
    rows = [*(prefill(*row) for row in RAGGED), decode(1, 2, 3.0)]

    def build(rows):
        path = write_pair(tmp_path / "pair", [row | {"model_path": str(model)} for row in rows])
        options = {"ragged_edges": "continuous"}
        return ForwardPassPerfModel.best_available(
            direct_config(model, tmp_path / "systems", path, interpolation=options)
        )

    assert build(rows).predict_prefill_latency_total(1, 256, 200) > 0
    with pytest.raises(FpmUncoveredError) as caught:
        build(rows).predict_prefill_latency_total(1, 300, 200)
    assert caught.value.points == (("prefill", (1, 300, 200)),)
    assert build([*rows, prefill(1, 300, 200, 7.5)]).predict_prefill_latency_total(1, 300, 200) == 7.5


def test_a_curve_that_ends_is_held_at_the_utilisation_of_its_end_point():
    engine = assisted(points(*RAGGED), SOME_DECODE)
    status, latency_ms, resolution, support = engine.prefill_query(1, 512, 256)
    # Both parts of the roofline: weights with activations, and 1 us a token.
    sol = {tokens: (2 * (64 * 64 + 128 * tokens) + 1e3 * tokens) / 1e9 * 1e3 for tokens in (256, 512)}
    assert (status, resolution) == ("ok", "sol_transfer")
    assert latency_ms == pytest.approx((4.0 + 2.56) * sol[512] / sol[256])
    assert support == [((1.0, 256.0, 256.0), 4.0 + 256 / 100, 1.0)]  # the point that stands for it


def test_an_answer_that_is_held_names_the_points_whose_utilisation_it_holds():
    # Nobody covers 2048 tokens: the last points of the nearest curves do, the median of three of each.
    engine = assisted(points(*RAGGED, (2, 64, 0, 9.0), (2, 4096, 0, 90.0)), SOME_DECODE, continuous=False)
    rows = [row for row in RAGGED if row[0] == 1]
    _, _, resolution, support = engine.prefill_query(1, 2048, 0)
    assert resolution == "sol_transfer"
    assert sum(weight for _, _, weight in support) == pytest.approx(1.0)
    measured = {(float(b), float(t), float(k)): ms for b, t, k, ms in [*rows, (2, 64, 0, 9.0), (2, 4096, 0, 90.0)]}
    assert all(measured[at] == ms for at, ms, _ in support)


# --- knees ---


@settings(max_examples=40, deadline=None)
@given(st.integers(129, 255), st.sampled_from([0, 10, 256, 300, 700, 1024]), st.booleans())
def test_no_prefill_answer_rests_on_both_sides_of_a_captured_size(tokens, kv, continuous):
    rows = [(1, x, at, 5.0 + x / 100 + (40.0 if x > 192 else 0.0)) for at in (0, 256, 1024) for x in TOKENS]
    engine = assisted(points(*rows), SOME_DECODE, {"total_prefill_tokens": (192,)}, continuous=continuous)
    status, latency_ms, _, support = engine.prefill_query(1, tokens, kv)
    assert status == "ok"
    assert len({at[1] > 192 for at, *_ in support}) <= 1
    assert (latency_ms > 20.0) == (tokens > 192)


def test_a_knee_lies_at_the_largest_point_before_it():
    rows = [(1, x, 0, 5.0 if x <= 128 else 50.0) for x in (64, 128, 129, 256)]
    engine = assisted(points(*rows), SOME_DECODE, {"total_prefill_tokens": (128,)})
    found = [engine.prefill_query(1, tokens, 0)[1] for tokens in (100, 128, 129, 200)]
    assert found == [5.0, 5.0, 50.0, 50.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(64, 2048), st.sampled_from([4, 6, 8, 12]))
@pytest.mark.parametrize("make", [direct, assisted])
@pytest.mark.parametrize("continuous", [True, False])
def test_no_decode_answer_rests_on_both_sides_of_the_window(make, continuous, kv, batch):
    window = 64
    rows = [(b, 0, x, 3.0 if x / b <= window else 30.0) for b in (4, 8, 16) for x in DECODE_KV]
    engine = make(SOME_PREFILL, points(*rows), {"kv_tokens_per_request": (window,)}, continuous=continuous)
    status, latency_ms, _, support = engine.decode_query(batch, kv)
    if status != "ok":
        return
    sides = {at[2] / at[0] > window for at, *_ in support}
    assert sides <= {kv / batch > window}
    assert (latency_ms > 15.0) == (kv / batch > window)


def test_every_decode_query_between_the_rows_keeps_to_its_side():
    # 128 tokens are 16 a request in batch 8 and 32 in batch 4: before a window of 20, and beyond it.
    rows = [(b, 0, x, 3.0 + x / b / 100) for b in (4, 8) for x in DECODE_KV]
    decodes = points(*rows)
    assert direct(SOME_PREFILL, decodes).decode_query(6, 128)[0] == "ok"
    knees = {"kv_tokens_per_request": (20,)}
    assert direct(SOME_PREFILL, decodes, knees).decode_query(6, 128)[0] == "no_support"
    assert direct(SOME_PREFILL, decodes, knees, continuous=False).decode_query(6, 128)[0] == "no_support"


def test_cached_lengths_beyond_the_window_do_not_answer_for_those_before_it():
    rows = [(b, x, kv, 5.0 if kv / b <= 300 else 50.0) for b in (1, 4) for kv in (0, 256, 1024) for x in TOKENS]
    engine = assisted(points(*rows), SOME_DECODE, {"kv_tokens_per_request": (300,)})
    found = [engine.prefill_query(2, 256, kv) for kv in (200, 590, 700)]
    assert [status for status, *_ in found] == ["ok"] * 3
    assert found[0][1] < 10.0 and found[1][1] < 10.0 and found[2][1] > 25.0
