"""What op-level estimates tell of themselves: anchors, distances, domain, expected error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk import ForwardPassPerfModel
from fpmsdk._ext.grid import GridTable
from fpmsdk._ext.sites import GemmSite, GemmTable
from fpmsdk.errors import PerfDataNotAvailableError
from tests.perfdb.fixtures import own_cache  # noqa: F401
from tests.perfmodel import tiny
from tests.perfmodel.deployments import rank


@pytest.fixture
def config(tmp_path):
    systems = tiny.write_root(tmp_path / "systems")
    return {
        "model": str(tiny.write_model(tmp_path / "tiny")),
        "system": "x100",
        "backend": "vllm",
        "backend_version": tiny.VERSION,
        "worker_type": "aggregated",
        "estimation_mode": "op_level",
        "systems_paths": [str(systems.path)],
    }


@pytest.fixture
def model(config):
    return ForwardPassPerfModel.best_available(config)


def lookups(explained, rank=0):
    return {lookup["operator"]: lookup for lookup in explained["ranks"][rank]["lookups"]}


PREFILL, DECODE, MIXED = rank(2, 100, 37), rank(0, 0, 0, 4, 1000), rank(1, 100, 7, 4, 1000)


@pytest.mark.parametrize("metrics", [PREFILL, DECODE, MIXED, rank(3, 3000, 100)])
def test_the_operators_add_up_to_the_estimate(model, metrics):
    explained = model.explain(metrics)
    assert explained["latency_ms"] == model.estimate_forward_pass_time_ms(metrics)
    counted = [entry["latency_ms"] for entry in explained["ranks"][0]["lookups"] if not entry["overlapped"]]
    assert sum(counted) == pytest.approx(explained["native_latency_ms"], rel=1e-12)


def test_experts_and_collectives_add_up_too(config, tmp_path):
    moe = tiny.write_model(tmp_path / "tiny_moe", **tiny.MOE_CONFIG)
    model = ForwardPassPerfModel.best_available(
        config | {"model": str(moe), "tp": 2, "moe_tp_size": 1, "moe_ep_size": 2}
    )
    explained = model.explain(MIXED)
    counted = [entry["latency_ms"] for entry in explained["ranks"][0]["lookups"] if not entry["overlapped"]]
    assert sum(counted) == pytest.approx(explained["native_latency_ms"], rel=1e-12)
    assert {"tokens"} in [set(entry["coordinates"]) for entry in explained["ranks"][0]["lookups"]]
    assert {"elements"} in [set(entry["coordinates"]) for entry in explained["ranks"][0]["lookups"]]


def test_an_operator_names_the_measurements_around_its_query(model):
    gemm = lookups(model.explain(PREFILL))["context_qkv_gemm"]
    assert gemm["coordinates"] == {"m": 100.0, "n": 512.0, "k": 256.0}
    assert [anchor["coordinates"]["m"] for anchor in gemm["anchors"]] == [64.0, 256.0]
    assert [anchor["weight"] for anchor in gemm["anchors"]] == [156 / 192, 36 / 192]
    assert gemm["anchors"][0]["latency_ms"] == 0.004 + 1.3e-8 * 64 * (512 + 256)
    assert gemm["distance"] == pytest.approx(np.log2(100 / 64))
    assert (gemm["resolution"], gemm["in_domain"]) == ("grid_interpolation", True)


def test_decode_attention_averages_the_anchors_of_its_positions(model):
    attention = lookups(model.explain(DECODE))["generation_attention"]
    assert attention["coordinates"] == {"num_heads": 4.0, "batch_size": 4, "position": 250.0}
    assert {anchor["coordinates"]["batch_size"] for anchor in attention["anchors"]} == {4.0}
    assert sum(anchor["weight"] for anchor in attention["anchors"]) == pytest.approx(1.0)


def test_a_measured_point_is_its_own_anchor(model):
    gemm = lookups(model.explain(DECODE))["generation_qkv_gemm"]
    assert (gemm["resolution"], gemm["distance"], len(gemm["anchors"])) == ("exact_lookup", 0.0, 1)


def test_a_query_beyond_the_measurements_is_outside_the_domain(model):
    explained = model.explain(rank(3, 3000, 100))
    assert not explained["in_domain"]
    gemm = lookups(explained)["context_qkv_gemm"]
    assert (gemm["resolution"], gemm["in_domain"]) == ("sol_transfer", False)
    assert gemm["distance"] == pytest.approx(np.log2(3000 / 1024))
    assert model.explain(PREFILL)["in_domain"]


def test_the_expected_error_grows_with_the_distance_from_the_measurements(model):
    near, far = (lookups(model.explain(rank(1, tokens)))["context_qkv_gemm"] for tokens in (2048, 8192))
    assert (near["distance"], far["distance"]) == (1.0, 3.0)
    assert far["expected_error"] == pytest.approx(3.0 * near["expected_error"])


def test_a_formula_has_neither_anchors_nor_an_error_of_its_own(model):
    norm = lookups(model.explain(PREFILL))["context_add_norm_1"]
    assert (norm["resolution"], norm["anchors"], norm["expected_error"], norm["in_domain"]) == (
        "formula",
        [],
        None,
        True,
    )


def test_the_expected_error_is_that_of_left_out_measurements(model):
    # GEMM rows lie on lines of m, attention rows on a power of the length: only the latter err.
    found = lookups(model.explain(PREFILL))
    assert found["context_qkv_gemm"]["expected_error"] == pytest.approx(0.0, abs=1e-12)
    assert found["context_attention"]["expected_error"] > 0.01
    explained = model.explain(PREFILL)
    attention_share = found["context_attention"]["latency_ms"] / explained["native_latency_ms"]
    measured_share = explained["ranks"][0]["measured_share"]
    assert explained["expected_error"] == pytest.approx(
        found["context_attention"]["expected_error"] * attention_share / measured_share, rel=1e-6
    )


def test_the_correction_is_part_of_the_explanation(model):
    native_ms = model.estimate_forward_pass_time_ms(PREFILL)
    model.tune_with_fpms([[PREFILL | {"wall_time": 1.25e-3 * native_ms}]] * 5)
    explained = model.explain(PREFILL)
    assert explained["correction_factor"] == pytest.approx(1.25)
    assert explained["latency_ms"] == model.estimate_forward_pass_time_ms(PREFILL)


def test_the_slowest_rank_gives_the_expected_error(model):
    explained = model.explain([rank(1, 1), rank(), PREFILL])
    assert explained["max_rank"] == 2
    assert explained["expected_error"] == explained["ranks"][2]["expected_error"]
    assert explained["ranks"][1] == {
        "rank": 1, "latency_ms": 0, "in_domain": True, "expected_error": None, "measured_share": 0.0, "lookups": []
    }  # fmt: skip


def test_the_speed_of_light_rests_on_no_measurement(config):
    explained = ForwardPassPerfModel.best_available(config | {"database_mode": "SOL"}).explain(MIXED)
    assert {entry["resolution"] for entry in explained["ranks"][0]["lookups"]} == {"speed_of_light"}
    assert explained["expected_error"] is None


def test_a_query_without_an_answer_is_the_error_of_an_estimate(config, tmp_path):
    (tmp_path / "systems/data/x100/attention/vllm" / tiny.VERSION / "generation_attention_perf.parquet").unlink()
    model = ForwardPassPerfModel.best_available(config | {"worker_type": "prefill"})
    with pytest.raises(PerfDataNotAvailableError):
        model.explain(DECODE)


# --- tables ---

AXES = (np.array([1, 1, 1, 1, 4, 4, 4, 9]), np.array([1, 8, 8, 64, 1, 8, 64, 8]), np.array([2, 2, 6, 2, 2, 2, 2, 2]))
GRID = GridTable(AXES, np.array([1.0, 2.0, 2.5, 9.0, 2.0, 4.0, 20.0, 9.0]), None, -1)


def flops(*coordinates):
    return 0.1 * coordinates[0] * coordinates[1] * coordinates[2]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 64), st.sampled_from([1, 2, 6, 9]))
def test_the_weights_of_a_grid_reproduce_its_answer(one, two, three):
    at = (one, two, three)
    resolution, weights = GRID.support(at, flops)
    answer = GRID.query(at, flops)[0]
    axes, latency_ms = GRID.columns()
    assert sum(weights.values()) == pytest.approx(1.0)
    if resolution in ("exact_lookup", "grid_interpolation"):
        assert sum(latency_ms[row] * weight for row, weight in weights.items()) == pytest.approx(answer)
    elif resolution == "sol_transfer":
        utilisation = sum(
            weight * flops(*(axis[row] for axis in axes)) / latency_ms[row] for row, weight in weights.items()
        )
        assert flops(*at) / utilisation == pytest.approx(answer)


def test_a_ragged_grid_says_that_one_side_was_carried_over():
    assert GRID.support((1, 8, 4), flops)[0] == "grid_interpolation"
    assert GRID.support((1, 20, 4), flops)[0] == "ragged_transfer"


def test_a_table_gives_back_its_rows():
    axes, latency_ms = GRID.columns()
    assert [axis.tolist() for axis in axes] == [axis.tolist() for axis in AXES]
    assert latency_ms.tolist() == [1.0, 2.0, 2.5, 9.0, 2.0, 4.0, 20.0, 9.0]


@pytest.mark.parametrize(("axis", "kept"), [(2, [0, 2, 3, 4, 5, 6, 7]), (1, [0, 3, 4, 5, 6, 7]), (0, [4, 5, 6, 7])])
def test_a_row_is_left_out_alone_or_with_all_that_share_its_place(axis, kept):
    axes, _ = GRID.without(1, axis).columns()
    assert [axis.tolist() for axis in axes] == [axis[kept].tolist() for axis in AXES]


CURVES = GemmTable(
    np.array([64, 64, 128]), np.array([32, 64, 32]), np.array([0, 3, 5, 6]), np.array([1, 4, 16, 1, 16, 8]),
    np.array([1.0, 2.0, 6.0, 3.0, 9.0, 7.0]), None, 1e30, 1.0, 1e30,
)  # fmt: skip


@pytest.mark.parametrize(("m", "resolution", "weights"), [
    (4, "exact_lookup", {1: 1.0}),
    (10, "grid_interpolation", {1: 0.5, 2: 0.5}),
    (32, "sol_transfer", {2: 1.0}),
])  # fmt: skip
def test_a_product_names_the_points_of_its_curve(m, resolution, weights):
    assert GemmSite(CURVES, 64, 32).support(m) == (resolution, weights)


def test_a_product_without_a_curve_names_those_of_its_neighbours():
    resolution, weights = GemmSite(CURVES, 96, 32).support(10)
    assert resolution == "sol_transfer"
    assert {CURVES.point(entry)[0][1:] for entry in weights} == {(64.0, 32.0), (64.0, 64.0)}
    assert sum(weights.values()) == pytest.approx(1.0)


def test_curves_without_an_entry_or_without_a_site():
    assert GemmSite(CURVES.without(1, False), 64, 32).support(4) == ("grid_interpolation", {0: 0.8, 1: 0.2})
    assert GemmSite(CURVES.without(1, True), 64, 64).support(1) == ("exact_lookup", {0: 1.0})
    assert CURVES.point(4) == ((16.0, 64.0, 64.0), 9.0)
