import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk import ForwardPassPerfModel
from fpmsdk._ext.passroofline import PassRoofline
from fpmsdk._ext.wholeforward import DirectEngine, SolAssistedEngine
from fpmsdk.errors import (
    ConfigError,
    FpmDataError,
    FpmNoCellError,
    FpmNotCollectedError,
    FpmUncoveredError,
    InfeasibleMemoryError,
    PerfDataNotAvailableError,
    UnsupportedQueryError,
)
from fpmsdk.perfmodel.wholeforward_tables import assisted_curves, strict_curves
from tests.perfdb.pairs import VERSION, decode, prefill, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfdb.test_forward_cells import points
from tests.perfmodel.deployments import DEPLOYMENT, checkpoint, direct_config, profile, rank

ELEMENTWISE = [{"kind": "memory", "name": "ew", "factors": (1e6, 4.8e12)}]


def explain(*lookup):
    return LookupError(lookup)


def direct(prefills=(), decodes=()):
    """A strict engine over {batch: {kv: {tokens: ms}}} rows in short form."""
    prefill_points = points(*prefills) if prefills else points((1, 1, 0, 1.0))
    decode_points = points(*((b, 0, kv, ms) for b, kv, ms in decodes)) if decodes else points((1, 0, 1, 1.0))
    return DirectEngine(*strict_curves(prefill_points, decode_points), explain)


def rows_of(batches):
    return [(b, kv, ms) for b, curve in batches.items() for kv, ms in curve.items()]


def assisted(prefills, decodes, records=tuple(ELEMENTWISE)):
    curves = assisted_curves(points(*prefills), points(*((b, 0, kv, ms) for b, kv, ms in decodes)))
    roofline = PassRoofline(records)
    return SolAssistedEngine(*curves[:4], roofline, roofline, explain)


# --- direct ---


def test_kv_curves_are_blended_between_their_neighbours():
    engine = direct([(1, 100, 0, 10), (1, 200, 0, 20), (1, 100, 2048, 999), (1, 100, 4096, 30), (1, 200, 4096, 40)])
    assert engine.prefill_query(1, 150, 2048)[1:3] == (25.0, "cross_kv_interpolation")
    assert engine.prefill_query(1, 100, 2048)[1:3] == (999.0, "exact_lookup")


PADDED = {8: {8: 1000, 192: 1000}, 9: {64: 9, 192: 29}, 16: {64: 16, 128: 26}, 17: {64: 2000, 192: 2000}}


def test_decode_rows_of_another_captured_graph_say_nothing():
    engine = direct(decodes=rows_of(PADDED))
    assert engine.decode_query(12, 96)[1] == 17.0
    assert engine.baseline_query(12, 96)[1] == 12.0


@pytest.mark.parametrize("kv", [32, 160])
def test_one_sided_support_is_no_support(kv):
    assert direct(decodes=rows_of(PADDED)).decode_query(12, kv)[0] == "no_support"


@pytest.mark.parametrize(
    ("batches", "rows"),
    [
        ((6, 14, 16, 18), (6, 14)),
        ((6, 14, 16, 18, 20), None),  # 6 is a doubling away, farther than the four above
        ((8, 14, 16, 18, 20), (8, 14)),  # 8 is nearer than 20
        ((3, 5, 7, 14, 16), (7, 14)),
        ((2, 14), None),  # 2 is farther than two doublings
        ((3, 14), (3, 14)),  # 3 is not
    ],
)
def test_of_the_rows_of_one_graph_the_four_nearest_within_two_doublings_count(batches, rows):
    engine = direct(decodes=rows_of({batch: {32: 1.0, 64: 2.0} for batch in batches}))
    status, _, _, support = engine.decode_query(12, 32)
    assert status == ("ok" if rows else "no_support")
    assert tuple(batch for (batch, *_), *_ in support) == (rows or ())


EVIDENCE_PREFILL = [(1, 1, 0, 2), (1, 4, 0, 10), (1, 12, 0, 18), (1, 4, 8, 30), (1, 12, 8, 46)]
EVIDENCE_DECODE = {1: {0: 3, 1: 4, 64: 67}, 2: {4: 10, 20: 26}, 4: {8: 20, 24: 52}, 6: {12: 30, 24: 10}}


@pytest.mark.parametrize(
    ("query", "latency_ms", "weights"),
    [
        (("prefill_query", 1, 6, 0), 12.0, [0.75, 0.25]),
        (("prefill_query", 1, 6, 2), 17.5, [0.5625, 0.1875, 0.1875, 0.0625]),
        (("decode_query", 2, 12), 18.0, [0.5, 0.5]),
        (("decode_query", 3, 12), 23.0, [0.25, 0.25, 0.375, 0.125]),
    ],
)
def test_weights_are_products_of_the_linear_weights(query, latency_ms, weights):
    engine = direct(EVIDENCE_PREFILL, rows_of(EVIDENCE_DECODE))
    name, *at = query
    status, found, _, support = getattr(engine, name)(*at)
    assert (status, found, [weight for *_, weight in support]) == ("ok", latency_ms, weights)


@pytest.mark.parametrize(
    ("counts", "latency_ms"),
    [((1, 4, 0, 3, 12), 18.0), ((1, 4, 0, 6, 24), 10.0), ((1, 0, 5, 3, 12), 23.0), ((2, 0, 0, 0, 0), 0.0)],
)
def test_a_mixed_pass_adds_only_what_decode_costs_beyond_its_floor(counts, latency_ms):
    engine = direct(EVIDENCE_PREFILL, rows_of(EVIDENCE_DECODE))
    prefill_part, decode_part, baseline = engine.evidence_of(*counts)
    total = 0.0 if prefill_part is None else prefill_part[0]
    if decode_part is not None:
        total += decode_part[0] if baseline is None else max(decode_part[0] - baseline[0], 0.0)
    assert total == latency_ms


def test_prefill_without_points_on_both_kv_sides_goes_by_kv_first():
    engine = direct([(1, 100, 0, 10), (1, 100, 100, 20), (1, 200, 50, 30), (1, 200, 150, 50)])
    assert engine.prefill_query(1, 150, 75)[1:3] == (26.25, "kv_first_interpolation")
    assert engine.prefill_query(1, 150, 25)[0] == "no_support"


@pytest.mark.parametrize(("batch", "tokens", "kv"), [(2, 150, 0), (1.5, 150, 0), (1, 99, 0), (1, 201, 0), (1, 150, 1)])
def test_nothing_is_extrapolated(batch, tokens, kv):
    assert direct([(1, 100, 0, 10), (1, 200, 0, 20)]).prefill_query(batch, tokens, kv)[0] == "no_support"


def with_knees(prefills=(), decodes=(), **knees):
    prefill_points = points(*prefills) if prefills else points((1, 1, 0, 1.0))
    decode_points = points(*((b, 0, kv, ms) for b, kv, ms in decodes)) if decodes else points((1, 0, 1, 1.0))
    return DirectEngine(*strict_curves(prefill_points, decode_points, knees), explain)


class TestKnees:
    @pytest.mark.parametrize(
        ("tokens", "supported"), [(100, True), (120, False), (128, False), (200, True), (250, True), (300, True)]
    )
    def test_a_curve_is_not_read_across_a_captured_size(self, tokens, supported):
        rows = [(1, at, 0, at / 10) for at in (100, 200, 300)]
        engine = with_knees(rows, total_prefill_tokens=(128,))
        assert (engine.prefill_query(1, tokens, 0)[0] == "ok") == supported

    def test_a_pair_of_points_at_the_knee_serves_both_sides(self):
        rows = [(1, at, 0, float(at)) for at in (100, 128, 129, 200)]
        engine = with_knees(rows, total_prefill_tokens=(128,))
        assert [engine.prefill_query(1, at, 0)[0] for at in (110, 128, 129, 150)] == ["ok"] * 4

    def test_cached_lengths_are_not_blended_across_the_window_of_attention(self):
        rows = [(2, at, kv, 10.0) for at in (100, 200) for kv in (0, 100, 300)]
        engine = with_knees(rows, kv_tokens_per_request=(100,))
        assert engine.prefill_query(2, 150, 50)[0] == "ok"
        assert engine.prefill_query(2, 150, 150)[0] == "no_support"

    def test_decode_is_not_read_across_the_window_of_attention(self):
        engine = with_knees(decodes=[(2, kv, 3.0) for kv in (4, 100, 300)], kv_tokens_per_request=(100,))
        assert [engine.decode_query(2, kv)[0] for kv in (50, 150, 300)] == ["ok", "no_support", "ok"]

    def test_the_sidecar_declares_them(self, place):
        config = config_of(place)
        write_pair(
            place / "pair",
            [row | {"model_path": config["model"]} for row in ROWS],
            knees={"total_prefill_tokens": [128]},
        )
        with pytest.raises(FpmUncoveredError):
            ForwardPassPerfModel.best_available(config).predict_prefill_latency_total(1, 150, 0)


@given(
    st.lists(st.floats(0.1, 1e3), min_size=4, max_size=4),
    st.integers(100, 200),
    st.integers(0, 64),
)
def test_an_interpolated_latency_lies_between_its_support(latencies, tokens, kv):
    a, b, c, d = latencies
    status, found, _, support = direct(
        [(1, 100, 0, a), (1, 200, 0, b), (1, 100, 64, c), (1, 200, 64, d)]
    ).prefill_query(1, tokens, kv)
    assert status == "ok"
    used = [latency_ms for _, latency_ms, _ in support]
    assert min(used) * (1 - 1e-12) <= found <= max(used) * (1 + 1e-12)
    assert math.isclose(sum(weight for *_, weight in support), 1.0)
    assert math.isclose(sum(latency_ms * weight for _, latency_ms, weight in support), found, rel_tol=1e-9)


# --- carried by the roofline ---

BRACKET = {
    496: {1024: 9.5, 2048: 10.5, 4096: 11.5},
    497: {1024: 10.0, 2048: 11.0, 4096: 12.0},
    512: {1024: 10.5, 2048: 11.5, 4096: 12.5},
    513: {1024: 31, 2048: 34, 4096: 37},
    1024: {8192: 62, 16384: 65},
}


@pytest.mark.parametrize(
    ("batch", "kv", "expected"),
    [(500, 2048, 11.1), (600, 2048, 34.0), (600, 8192, 62.0), (600, 6000, None), (512, 2048, 11.5)],
)
def test_a_batch_off_the_lattice_lies_between_the_rows_of_its_graph(batch, kv, expected):
    engine = assisted([(1, 1, 0, 1.0)], rows_of(BRACKET))
    status, found, *_ = engine.decode_query(batch, kv)
    if expected is None:
        assert status == "no_bracket"
    else:
        assert found == pytest.approx(expected)


FLOORS = {
    **{1: {2: 2, 96: 3}, 2: {4: 2.5, 96: 3.5}, 8: {16: 4, 96: 5}, 9: {18: 5, 64: 6}},
    **{16: {32: 9, 96: 10}, 17: {34: 10, 96: 11}},
}


@pytest.mark.parametrize(
    ("batch", "kv", "expected"), [(15, 20, 5.0), (15, 80, 9.0), (15, 40, 5 + 4 * 6 / 7), (16, 40, 9.0)]
)
def test_the_baseline_is_the_floor_of_the_rows_that_hold_the_query(batch, kv, expected):
    assert assisted([(1, 1, 0, 1.0)], rows_of(FLOORS)).baseline_query(batch, kv)[1] == expected


CURVE = ((1024, 10), (2048, 20), (4096, 40))
GRID = [(b, t, 0, ms * (1 + 0.02 * i)) for i, b in enumerate((1, 2, 4)) for t, ms in CURVE]


def test_a_batch_beyond_flat_ones_is_taken_for_the_largest():
    engine = assisted(GRID, [(1, 1, 1.0)])
    assert engine.prefill_query(16, 4096, 0)[1] == pytest.approx(41.6)
    assert engine.prefill_query(16, 16384, 0)[0] == "outside_tokens"


def test_a_batch_beyond_others_is_outside_the_domain():
    steep = [(b, t, kv, ms * (1.2 if b == 4 else 1)) for b, t, kv, ms in GRID]
    steep += [(8, t, 0, 2 * ms) for t, ms in CURVE]
    assert assisted(steep, [(1, 1, 1.0)]).prefill_query(16, 4096, 0)[0] == "outside_batch"


NINE = [(1, 1024, 0, 10), (1, 2048, 0, 20), (1, 4096, 0, 40), (1, 2048, 2048, 24), (2, 2048, 0, 21)]
NINE_DECODE = [(8, 8, 6), (8, 4096, 7), (8, 65536, 9), (16, 65536, 12)]


def test_prefill_and_decode_of_one_rank_share_a_pass():
    (prefill_ms, *_), (decode_ms, *_), (floor_ms, *_) = assisted(NINE, NINE_DECODE).evidence_of(2, 2048, 0, 8, 32768)
    assert (prefill_ms, decode_ms, floor_ms) == (21.0, 7 + 2 * 28672 / 61440, 6.0)


def test_without_a_formula_for_an_operator_nothing_is_carried_over():
    engine = assisted(GRID, [(1, 1, 1.0)], [*ELEMENTWISE, {"kind": "none", "name": "odd"}])
    assert engine.prefill_query(1, 1500, 0)[0] == "ok"
    assert engine.prefill_query(3, 1500, 0)[0] == "no_usable_site"
    assert assisted(GRID, [(1, 1, 1.0)]).prefill_query(3, 1500, 0)[0:3:2] == ("ok", "sol_transfer")


# --- models ---

ROWS = [
    *(prefill(1, tokens, 0, tokens / 10) for tokens in (100, 200)),
    *(decode(1, kv, 3.0 + kv / 100) for kv in (0, 2, 100)),
    decode(2, 4, 3.5),
]


@pytest.fixture
def place(tmp_path):
    Systems(tmp_path / "systems").hardware()
    checkpoint(tmp_path / "model")
    return tmp_path


def config_of(place, rows=ROWS, **changes):
    model = place / "model"
    path = write_pair(place / "pair", [row | {"model_path": str(model)} for row in rows])
    return direct_config(model, place / "systems", path, **changes)


def model_of(place, rows=ROWS, **changes):
    return ForwardPassPerfModel.best_available(config_of(place, rows, **changes))


def test_static_queries_are_lookups_by_totals(place):
    model = model_of(place)
    assert model.predict_prefill_latency_total(1, 150, 0) == 15.0
    assert model.predict_prefill_latency(1, 150) == 15.0
    assert model.predict_decode_latency_total(1, 51) == pytest.approx(3.51)
    assert model.fpm_decode_kv_ceiling() == 100
    assert model.static_phase_latency(batch_size=1, input_tokens=150, output_tokens=8, prefill=True) == 15.0


def test_a_static_decode_is_priced_every_32_tokens(place):
    latency = model_of(place).static_phase_latency(batch_size=1, input_tokens=50, output_tokens=40, prefill=False)
    assert latency == pytest.approx((3 + 0.51) * 32 + (3 + 0.83) * 7)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.predict_prefill_latency_total(5, 4, 0),
        lambda model: model.predict_prefill_latency_total(0, 1, 0),
        lambda model: model.predict_prefill_latency_total(1, 150, -1),
        lambda model: model.predict_prefill_latency(1, 5, 5),
        lambda model: model.predict_decode_latency_total(1, 2.5),
        lambda model: model.predict_decode_latency_total(1, -2),
        lambda model: model.predict_decode_latency_total(1, 2**32),
        lambda model: model.predict_decode_latency_total(True, 2),
        *(
            lambda model, steps=steps: model.static_phase_latency(
                batch_size=1, input_tokens=10, output_tokens=steps, prefill=False
            )
            for steps in (1.5, -1, True, "2", None, math.nan)
        ),
    ],
)
def test_fractional_negative_and_contradictory_coordinates_are_errors(place, ask):
    with pytest.raises(ConfigError):
        ask(model_of(place))


def test_a_telemetry_rank_may_compute_fewer_tokens_than_it_has_requests(place):
    model = model_of(place, [*ROWS, prefill(5, 1, 0, 2.0)])
    assert model.estimate_forward_pass_time_ms(rank(5, 1)) == 2.0


def test_operator_diagnostics_are_not_for_measured_passes(place):
    with pytest.raises(UnsupportedQueryError, match="op_level"):
        model_of(place).static_phase_diagnostics(batch_size=1, context_length=8, prefill=True)


def test_the_slowest_rank_ends_the_iteration_and_idle_ranks_are_told(place):
    detailed = model_of(place).estimate_forward_pass_detailed([rank(1, 100), rank(1, 200), rank()])
    assert (detailed["latency_ms"], detailed["max_rank"]) == (20.0, 1)
    assert [record["latency_ms"] for record in detailed["ranks"]] == [10.0, 20.0, 0.0]
    assert detailed["ranks"][2]["queries"] == []


def test_an_iteration_without_work_has_no_evidence(place):
    detailed = model_of(place).estimate_forward_pass_detailed([rank()])
    assert detailed == {
        "latency_ms": 0.0,
        "native_latency_ms": 0.0,
        "correction_factor": 1.0,
        "max_rank": None,
        "ranks": [],
    }


def test_a_miss_names_the_point_to_measure(place):
    with pytest.raises(
        FpmUncoveredError, match=r"FPM direct prefill query .*measure .*total_prefill_tokens=500"
    ) as caught:
        model_of(place).estimate_forward_pass_time_ms(rank(1, 500, 0, 1, 50))
    assert caught.value.points == (("prefill", (1, 500, 0)),)


def test_a_refused_rank_names_the_points_of_all_its_lookups_and_those_suffice(place):
    asked = rank(1, 500, 0, 3, 5000)
    with pytest.raises(FpmUncoveredError) as caught:
        model_of(place).estimate_forward_pass_time_ms(asked)
    assert caught.value.points == (("prefill", (1, 500, 0)), ("decode", (3, None, 5000)))
    measured = [
        prefill(*at, 50.0) if phase == "prefill" else decode(at[0], at[2], 9.0) for phase, at in caught.value.points
    ]
    assert model_of(place, [*ROWS, *measured]).estimate_forward_pass_time_ms(asked) == 50.0


def test_the_points_of_all_ranks_are_named_once(place):
    # Rank 1 answers; a point that two ranks lack is one to measure.
    asked = [rank(1, 500), rank(1, 150), rank(0, 0, 0, 3, 5000), rank(1, 500, 0, 3, 6000)]
    for ask in ("estimate_forward_pass_time_ms", "estimate_forward_pass_detailed", "explain"):
        with pytest.raises(FpmUncoveredError) as caught:
            getattr(model_of(place), ask)(asked)
        assert caught.value.points == (
            ("prefill", (1, 500, 0)),
            ("decode", (3, None, 5000)),
            ("decode", (3, None, 6000)),
        )
        assert "total_kv_read_tokens=6000" in str(caught.value)
    measured = [prefill(1, 500, 0, 50.0), decode(3, 5000, 60.0), decode(3, 6000, 70.0)]
    assert model_of(place, [*ROWS, *measured]).estimate_forward_pass_time_ms(asked) == 50.0 + 70.0 - 60.0


class TestExplain:
    WIDE = (
        *(prefill(1, tokens, 0, tokens / 10) for tokens in (100, 200, 400, 800)),
        *(decode(1, kv, ms) for kv, ms in ((2, 3.0), (64, 4.0), (128, 5.0), (256, 7.0))),
    )

    def test_anchors_weights_and_distances_are_told(self, place):
        explained = model_of(place, self.WIDE).explain(rank(1, 150))
        (lookup,) = explained["ranks"][0]["lookups"]
        assert [anchor["latency_ms"] for anchor in lookup["anchors"]] == [10.0, 20.0]
        assert [anchor["weight"] for anchor in lookup["anchors"]] == [0.5, 0.5]
        assert lookup["distance"] == pytest.approx(math.log2(201 / 151))
        assert (explained["latency_ms"], explained["in_domain"], explained["correction_factor"]) == (15.0, True, 1.0)

    def test_the_expected_error_is_that_of_the_own_points(self, place):
        model = model_of(place, self.WIDE)
        assert model.explain(rank(1, 150))["expected_error"] == pytest.approx(0.0, abs=1e-12)
        decode_error = model.explain(rank(0, 0, 0, 1, 100))["expected_error"]
        assert decode_error > 0.0
        mixed = model.explain(rank(1, 200, 0, 1, 100))
        decode_ms = 4.0 + 36 / 64
        assert mixed["expected_error"] == pytest.approx(decode_error * decode_ms / mixed["latency_ms"])

    def test_the_correction_is_part_of_the_explanation(self, place):
        model = model_of(place, self.WIDE)
        model.tune_with_fpms([[rank(1, 150) | {"wall_time": 0.018}]] * 5)
        explained = model.explain(rank(1, 150))
        assert explained["correction_factor"] == pytest.approx(1.2)
        assert explained["latency_ms"] == model.estimate_forward_pass_time_ms(rank(1, 150))

    def test_an_iteration_without_work_expects_no_error(self, place):
        assert model_of(place).explain(rank())["expected_error"] is None

    def test_other_kinds_of_model_refuse(self):
        config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"}
        model = ForwardPassPerfModel.best_available(config | {"estimation_mode": "fpm_regression"})
        with pytest.raises(UnsupportedQueryError, match="explain"):
            model.explain(rank())


class TestCoverage:
    def model(self, place, rows=ROWS):
        return model_of(place, rows, interpolation={"collect_coverage": True})

    def test_every_lookup_of_a_pass_counts_once(self, place):
        model = self.model(place)
        model.estimate_forward_pass_time_ms(rank(1, 150, 0, 1, 50))
        model.tune_with_fpms([[rank(1, 150, 0, 1, 50) | {"wall_time": 0.02}]])
        model.predict_prefill_latency_total(1, 100, 0)
        coverage = model.fpm_query_coverage()
        assert coverage["queries"] == {"measured": 3, "interpolated": 4, "unsupported": 0}
        assert coverage["mixed_decode_baseline"] == {"measured": 2, "interpolated": 0, "unsupported": 0}

    def test_a_refusal_counts_once_and_ends_the_pass(self, place):
        model = self.model(place)
        for _ in range(2):
            with pytest.raises(PerfDataNotAvailableError):
                model.estimate_forward_pass_detailed([rank(1, 500, 0, 1, 50), rank(1, 150)])
        coverage = model.fpm_query_coverage()
        assert coverage["queries"] == {"measured": 0, "interpolated": 0, "unsupported": 2}
        (gap,) = coverage["gaps"]
        assert gap["occurrences"] == 2
        assert gap["coordinates"] == {"batch_size": 1.0, "total_prefill_tokens": 500.0, "total_kv_read_tokens": 0.0}

    def test_gaps_beyond_the_limit_are_only_counted(self, place):
        model = self.model(place)
        for tokens in range(1000, 1130):
            with pytest.raises(PerfDataNotAvailableError):
                model.estimate_forward_pass_time_ms(rank(1, tokens))
        coverage = model.fpm_query_coverage()
        assert (len(coverage["gaps"]), coverage["omitted_gap_queries"]) == (128, 2)

    def test_it_is_absent_unless_collected(self, place):
        assert model_of(place).fpm_query_coverage() is None

    def test_it_changes_no_answer(self, place):
        asked = rank(1, 150, 0, 1, 50)
        assert self.model(place).estimate_forward_pass_time_ms(asked) == model_of(place).estimate_forward_pass_time_ms(
            asked
        )


class TestConstruction:
    def test_the_external_pair_is_pinned_absolutely(self, place, monkeypatch):
        config = config_of(place)
        monkeypatch.chdir(place)
        config["estimator_config"]["fpm_interpolation"]["fpm_parquet_path"] = "pair/fpm_forward_perf.parquet"
        pinned = ForwardPassPerfModel.best_available(config).diagnostics()["provenance"]["config"]
        interpolation = pinned["estimator_config"]["fpm_interpolation"]
        assert interpolation["fpm_parquet_path"] == str(place / "pair" / "fpm_forward_perf.parquet")
        assert pinned["transfer_policy"] == ["xshape", "xquant", "xprofile", "xop"]
        assert ForwardPassPerfModel.best_available(pinned).diagnostics()["provenance"]["config"] == pinned

    def test_the_pair_of_a_systems_root_lies_at_backend_and_version(self, place):
        config = config_of(place)
        del config["estimator_config"]["fpm_interpolation"]["fpm_parquet_path"]
        with pytest.raises(FpmNotCollectedError, match=rf"data/x100/vllm/{VERSION}/fpm_forward_perf\.parquet"):
            ForwardPassPerfModel.best_available(config)
        rows = [row | {"model_path": str(place / "model")} for row in ROWS]
        write_pair(place / "systems" / "data" / "x100" / "vllm" / VERSION, rows)
        assert ForwardPassPerfModel.best_available(config).predict_prefill_latency_total(1, 100, 0) == 10.0

    @pytest.mark.parametrize(
        ("worker_type", "rows", "phase"),
        [
            ("aggregated", ROWS[:2], "decode"),
            ("aggregated", ROWS[2:], "prefill"),
            ("prefill", ROWS[2:], "prefill"),
            ("decode", ROWS[:2], "decode"),
            ("decode", [*ROWS[:2], decode(1, 2, 3.0, kv_seed_regime="fake_fallback")], "decode"),
        ],
    )
    def test_a_role_needs_genuine_points_of_its_phases(self, place, worker_type, rows, phase):
        rows = [{"kv_seed_regime": "real_kv"} | row for row in rows]
        with pytest.raises(FpmNotCollectedError, match=f"direct FPM {phase} interpolation has no genuine measurements"):
            model_of(place, rows, worker_type=worker_type)

    @pytest.mark.parametrize(("worker_type", "rows"), [("prefill", ROWS[:2]), ("decode", ROWS[2:])])
    def test_a_role_needs_no_points_of_the_other_phase(self, place, worker_type, rows):
        model = model_of(place, rows, worker_type=worker_type)
        other = rank(1, 100) if worker_type == "decode" else rank(0, 0, 0, 1, 2)
        with pytest.raises(FpmUncoveredError):
            model.estimate_forward_pass_time_ms(other)

    def test_another_precision_has_no_cell(self, place):
        config = config_of(place)
        config["fpm_profile"] = profile(place / "model", DEPLOYMENT | {"gemm_quant_mode": "fp8"})
        with pytest.raises(FpmNoCellError, match="No FPM cell matches"):
            ForwardPassPerfModel.best_available(config)

    def test_a_deployment_that_does_not_fit_yields_no_latency(self, place):
        Systems(place / "systems").hardware(gpu={"mem_capacity": 1000})
        config = config_of(place) | {"fallback_policy": "regression"}
        memory = {"activations_bytes": 20, "runtime_overhead_bytes": 30, "comm_overhead_bytes": 50}
        resources = DEPLOYMENT["resources"] | memory | {"weights_bytes": 900}
        config["fpm_profile"] = profile(place / "model", DEPLOYMENT | {"resources": resources})
        with pytest.raises(
            InfeasibleMemoryError, match=r"need 1001 bytes.*1000 are available.*that fits is 2"
        ) as caught:
            ForwardPassPerfModel.best_available(config)
        assert (caught.value.needed_bytes, caught.value.available_bytes, caught.value.smallest_tp) == (1001, 1000, 2)
        resources["weights_bytes"] -= 1
        config["fpm_profile"] = profile(place / "model", DEPLOYMENT | {"resources": resources})
        assert ForwardPassPerfModel.best_available(config).predict_prefill_latency_total(1, 100, 0) == 10.0

    def test_a_broken_pair_fails_at_construction(self, place):
        config = config_of(place)
        (place / "pair" / "fpm_forward_perf.metadata.json").unlink()
        with pytest.raises(FpmDataError, match="sidecar"):
            ForwardPassPerfModel.best_available(config)

    def test_a_missing_table_lets_the_next_candidate_try(self, place):
        config = config_of(place) | {"fallback_policy": "regression"}
        (place / "pair" / "fpm_forward_perf.parquet").unlink()
        model = ForwardPassPerfModel.best_available(config)
        assert model.diagnostics()["provenance"]["selected_estimation_mode"] == "fpm_regression"
        assert model.diagnostics()["last_warning"].startswith("FpmInterpolation: perf database error: File does not")

    def test_the_version_must_be_queryable(self, place):
        (place / "systems" / "query_versions.yaml").write_text("defaults: {vllm: {current: '1.0'}}")
        (place / "systems" / "data" / "x100" / "vllm" / "1.0").mkdir(parents=True)
        with pytest.raises(ValueError, match="not queryable"):
            model_of(place)


def test_finding_17_prefill_latency_takes_the_batch_as_bs_with_a_measured_profile(place):
    assert model_of(place).predict_prefill_latency(bs=1, isl=150, prefix=0) == 15.0
