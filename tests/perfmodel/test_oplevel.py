"""Op-level models over a tiny systems root: selection, estimates, corrections, static queries, and what goes wrong.

Figures marked as recorded are those of the public software on the very same root and model.
Source: fpm-model.md sections 2, 4 to 6 with vectors V1 and V4; op-level.md section 5.
"""

import shutil
import sys
import threading

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, errors
from fpmsdk._ext.pricing import FpmTiming, PassPricer, price_pass
from fpmsdk.perfdb import database
from tests.perfdb.fixtures import own_cache  # noqa: F401
from tests.perfdb.synthetic import Systems
from tests.perfmodel import tiny


@pytest.fixture
def systems(tmp_path):
    return tiny.write_root(tmp_path / "systems")


@pytest.fixture
def config(tmp_path, systems):
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
def build(config):
    def build_model(**changes):
        return ForwardPassPerfModel.best_available(config | changes)

    return build_model


@pytest.fixture
def moe_config(tmp_path, config):
    model = tiny.write_model(tmp_path / "tiny_moe", **tiny.MOE_CONFIG)
    return config | {"model": str(model), "tp": 2, "moe_tp_size": 1, "moe_ep_size": 2}


def iteration(num_prefill=0, prefill_tokens=0, prefill_kv=0, num_decode=0, decode_kv=0, wall_time=0.0):
    scheduled = {
        "num_prefill_requests": num_prefill,
        "sum_prefill_tokens": prefill_tokens,
        "sum_prefill_kv_tokens": prefill_kv,
        "num_decode_requests": num_decode,
        "sum_decode_kv_tokens": decode_kv,
    }
    return {"wall_time": wall_time, "scheduled_requests": scheduled}


def prefill(tokens, wall_time=0.0):
    return iteration(1, tokens, wall_time=wall_time)


def decode(requests, kv_tokens, wall_time=0.0):
    return iteration(0, 0, 0, requests, kv_tokens, wall_time)


LOADS = (
    (1, 64, 0, 0, 0),
    (2, 100, 37, 0, 0),
    (3, 3000, 100, 0, 0),
    (0, 0, 0, 4, 1000),
    (0, 0, 0, 3, 0),
    (0, 0, 0, 9, 90000),
    (1, 100, 7, 4, 1000),
    (2, 9000, 0, 64, 2000),
)
RECORDED = {
    "tp 1": (
        0.06204505824464821,
        0.06423919889340293,
        0.5344269155866698,
        0.04898235733333334,
        0.04356256452550475,
        0.26215549225921864,
        0.07870650162186511,
        2.8566581437627288,
    ),
    "tp 2": (
        0.11812618778899078,
        0.12364556593301697,
        0.9891393392464014,
        0.09906670933333334,
        0.09383415067321502,
        0.2830477848082724,
        0.13810658372301415,
        3.747807784694539,
    ),
    "SOL": (
        0.0010186453333333335,
        0.0012610986666666667,
        0.02151446025749916,
        0.0008405333333333333,
        0.0006205866666666668,
        0.019860266666666668,
        0.0014920319999999997,
        0.09614785792517695,
    ),
    "experts": (
        0.142167212875414,
        0.1478340414923574,
        0.9551007366855386,
        0.12642538608438555,
        0.12117225882905355,
        0.31050251979751176,
        0.16231725237808128,
        3.57110926274233,
    ),
}


def estimates(model, loads=LOADS):
    return [model.estimate_forward_pass_time_ms(iteration(*load)) for load in loads]


@pytest.mark.parametrize(
    ("changes", "recorded"), [({}, "tp 1"), ({"tp": 2}, "tp 2"), ({"database_mode": "SOL"}, "SOL")]
)
def test_estimates_of_a_dense_model_are_the_recorded_ones(build, changes, recorded):
    assert estimates(build(**changes)) == pytest.approx(RECORDED[recorded], rel=1e-12)


@pytest.mark.parametrize("mode", ["SILICON", "SOL"])
def test_a_model_that_does_not_fit_yields_no_latency(build, systems, mode):
    # Two layers of 589,824 parameters, and 524,288 of embedding and logits, of two bytes.
    systems.hardware(gpu={"mem_capacity": 3_000_000})
    with pytest.raises(errors.InfeasibleMemoryError, match="need 3407872 bytes, 3000000 are available") as caught:
        build(database_mode=mode, fallback_policy="allow")
    assert caught.value.smallest_tp == 2


def test_a_model_that_just_fits_is_priced(build, systems):
    systems.hardware(gpu={"mem_capacity": 3_407_873})
    assert build().estimate_forward_pass_time_ms(decode(4, 1000)) > 0


def test_estimates_of_a_model_with_experts_are_the_recorded_ones(moe_config):
    found = estimates(ForwardPassPerfModel.best_available(moe_config))
    assert found == pytest.approx(RECORDED["experts"], rel=1e-12)


def test_measurements_faster_than_light_are_priced_as_recorded(build, systems):
    systems.table(f"gemm/vllm/{tiny.VERSION}", "gemm_perf", tiny.gemm_rows(1e-6))
    recorded = (0.021269399577981535, 0.0204322655600696, 0.13660639185333637, 0.013183658666666669)
    assert estimates(build(), LOADS[:4]) == pytest.approx(recorded, rel=1e-12)


@pytest.mark.parametrize(
    ("kernel", "recorded"), [("k1", 20.100759212875413), ("k2", 40.10075921287542), ("old", 80.10075921287542)]
)
def test_the_kernel_asked_for_prices_the_experts_as_recorded(moe_config, systems, kernel, recorded):
    rows = tiny.expert_rows(kernel_source="k1", default_eligible=True, latency=10.0)
    rows += tiny.expert_rows(kernel_source="k2", default_eligible=False, latency=20.0)
    systems.table(f"moe/vllm/{tiny.VERSION}", "moe_perf", rows)
    systems.table("moe/vllm/0.20.0", "moe_perf", tiny.expert_rows(kernel_source="old", latency=40.0))
    model = ForwardPassPerfModel.best_available(moe_config | {"moe_kernel_source": kernel})
    assert estimates(model, LOADS[:1]) == pytest.approx([recorded], rel=1e-12)


def test_estimate_many_equals_the_single_calls(build):
    model = build(tp=2)
    model.tune_with_fpms([[prefill(64, 0.0002)]] * 5)
    many = [iteration(*load) for load in LOADS] + [{}, [iteration(*LOADS[0]), iteration(*LOADS[2])]]
    assert model.estimate_many(many).tolist() == [model.estimate_forward_pass_time_ms(one) for one in many]


def test_an_iteration_takes_as_long_as_its_slowest_rank(build):
    model = build()
    ranks = [iteration(*load) for load in (LOADS[0], LOADS[2], LOADS[3])]
    assert model.estimate_forward_pass_time_ms(ranks) == max(estimates(model, (LOADS[0], LOADS[2], LOADS[3])))
    assert model.estimate_forward_pass_time_ms([{}, ranks[0], {}]) == estimates(model, LOADS[:1])[0]


def test_nothing_scheduled_takes_no_time(build):
    model = build()
    for idle in ({}, [{}, {}], iteration(1, 0, 500)):
        assert model.estimate_forward_pass_time_ms(idle) == 0.0
        assert model.estimate_forward_pass_detailed(idle) == {
            "latency_ms": 0.0,
            "native_latency_ms": 0.0,
            "correction_factor": 1.0,
            "max_rank": None,
            "ranks": [],
        }


def test_any_worker_type_prices_any_iteration(build):
    for worker_type in ("prefill", "decode"):
        assert estimates(build(worker_type=worker_type)) == estimates(build())


# --- V1: selection ---


def failed(model):
    return [failure.split(":")[0] for failure in model.diagnostics()["provenance"]["selection_failures"]]


def test_auto_takes_the_operators_first(build):
    diagnostics = build(estimation_mode="auto").diagnostics()
    assert (diagnostics["source"], diagnostics["readiness"], diagnostics["last_warning"]) == ("aic", "ready", None)
    assert diagnostics["provenance"]["selected_estimation_mode"] == "op_level"


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({"estimation_mode": "auto", "system": "nosuch"}, ["OpLevel", "FpmInterpolation"]),
        ({"system": "nosuch", "fallback_policy": "regression"}, ["OpLevel"]),
        ({"system": "nosuch", "fallback_policy": "allow"}, ["OpLevel", "FpmInterpolation"]),
        ({"backend": "trtllm", "fallback_policy": "regression"}, ["OpLevel"]),
        ({"tp": 3, "fallback_policy": "regression"}, ["OpLevel"]),
        ({"backend_version": "current", "fallback_policy": "regression"}, ["OpLevel"]),
        ({"model": "nobody/nothing", "fallback_policy": "regression"}, ["OpLevel"]),
        ({"database_mode": "HYBRID", "fallback_policy": "regression"}, ["OpLevel"]),
    ],
)
def test_where_the_operators_cannot_a_regression_stands_in_and_says_why(build, changes, failures):
    model = build(**changes)
    diagnostics = model.diagnostics()
    assert failed(model) == failures
    assert (diagnostics["source"], diagnostics["readiness"]) == ("fallback_regression", "unsupported_config")
    assert diagnostics["last_warning"].startswith("OpLevel: ")
    assert diagnostics["provenance"]["selected_systems_root"] is None


def test_from_whole_forward_tables_allow_falls_to_the_operators(build, systems):
    model = build(estimation_mode="fpm_interpolation", fallback_policy="allow")
    assert failed(model) == ["FpmInterpolation"]
    assert model.diagnostics()["provenance"]["selected_systems_root"] == str(systems.path)
    assert estimates(model) == estimates(build())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"system": "x10"}, errors.UnknownSystemError, "no system 'x10' .*nearest: x100"),
        ({"backend": "trtllm"}, errors.PerfDataNotAvailableError, "no trtllm 0.24.0 data for x100 .*present: none"),
        ({"backend_version": "9.9.9"}, errors.PerfDataNotAvailableError, "9.9.9 data .*present: 0.24.0"),
        ({"backend_version": "current"}, errors.UnlistedVersionError, "'current' has no meaning; name a version"),
        ({"tp": 3}, errors.UnsupportedModelError, "tp 3 does not divide the 4 attention heads"),
        ({"model": "nobody/nothing"}, errors.UnsupportedModelError, "nobody/nothing"),
        ({"gemm_quant_mode": "bogus"}, errors.ConfigError, "gemm_quant_mode 'bogus' is unknown; use one of bfloat16"),
        ({"dcp": 2}, ValueError, "dcp"),
        ({"database_mode": "HYBRID"}, errors.MissingCapabilityError, "database_mode 'HYBRID'.* use SILICON or SOL"),
        ({"database_mode": "EMPIRICAL"}, errors.MissingCapabilityError, "database_mode 'EMPIRICAL'"),
    ],
)
def test_denied_a_fallback_the_reason_is_the_error(build, changes, error, message):
    with pytest.raises(error, match=message):
        build(fallback_policy="deny", **changes)


@pytest.mark.parametrize("broken", [{"gemm_quant_mode": "bogus"}, {"nextn": -1}])
def test_what_no_other_estimator_could_mend_is_raised_at_once(build, broken):
    with pytest.raises(ValueError, match=next(iter(broken))):
        build(estimation_mode="auto", **broken)


def test_a_corrupt_table_is_not_hidden_by_a_fallback(build, systems):
    place = systems.path / "data/x100" / f"gemm/vllm/{tiny.VERSION}" / "gemm_perf.parquet"
    place.write_bytes(place.read_bytes()[:100])
    with pytest.raises(errors.PerfDataCorruptError, match="gemm_perf.parquet"):
        build(estimation_mode="auto", fallback_policy="allow")


def test_the_first_root_that_can_answer_is_taken(build, systems, tmp_path):
    described, empty = Systems(tmp_path / "described"), tmp_path / "empty"
    described.hardware()
    empty.mkdir()
    roots = [str(empty), str(described.path), str(systems.path)]
    model = build(systems_paths=roots)
    assert model.diagnostics()["provenance"]["selected_systems_root"] == str(systems.path)
    assert failed(model) == []
    assert estimates(model) == estimates(build())


def test_of_several_roots_that_cannot_the_last_one_is_reported(build, tmp_path):
    described = Systems(tmp_path / "described")
    described.hardware()
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.UnknownSystemError, match="no system 'x100' in .*empty"):
        build(systems_paths=[str(described.path), str(tmp_path / "empty")])


@pytest.mark.parametrize("version", [None, "0.24.0"])
def test_a_root_that_only_describes_hardware_prices_nothing(build, tmp_path, version):
    described = Systems(tmp_path / "described")
    described.hardware()
    changes = {"systems_paths": [str(described.path)], "backend_version": version}
    expected = (errors.UnlistedVersionError, "has no vllm data of x100.*give backend_version")
    if version:
        expected = (errors.PerfDataNotAvailableError, "no vllm 0.24.0 data for x100")
    with pytest.raises(expected[0], match=expected[1]):
        build(**changes)
    assert failed(build(estimation_mode="auto", **changes)) == ["OpLevel", "FpmInterpolation"]


def test_an_omitted_version_is_the_newest_measured_one(build, systems):
    systems.table("gemm/vllm/0.9.0", "gemm_perf", tiny.gemm_rows())
    model = build(backend_version=None)
    assert model.diagnostics()["provenance"]["config"]["backend_version"] == tiny.VERSION


TABLES = {
    "gemm_perf": "gemm",
    "context_attention_perf": "attention",
    "generation_attention_perf": "attention",
    "custom_allreduce_perf": "comm",
}


@pytest.mark.parametrize(
    ("table", "tp", "roles"),
    [
        ("gemm_perf", 1, ("prefill", "decode", "aggregated")),
        ("context_attention_perf", 1, ("prefill", "aggregated")),
        ("generation_attention_perf", 1, ("decode", "aggregated")),
        ("custom_allreduce_perf", 1, ()),
        ("custom_allreduce_perf", 2, ("prefill", "decode", "aggregated")),
    ],
)
def test_a_worker_needs_the_tables_of_its_phases(build, systems, table, tp, roles):
    (systems.path / "data/x100" / TABLES[table] / "vllm" / tiny.VERSION / f"{table}.parquet").unlink()
    for role in ("prefill", "decode", "aggregated"):
        if role in roles:
            with pytest.raises(errors.PerfDataNotAvailableError, match=f"no {table} data for vllm 0.24.0 on x100"):
                build(worker_type=role, tp=tp)
            assert failed(build(worker_type=role, tp=tp, fallback_policy="regression")) == ["OpLevel"]
        else:
            build(worker_type=role, tp=tp)
    # The speed of light needs none.
    build(database_mode="SOL", tp=tp)


def test_experts_need_their_table_and_their_kernel(moe_config, systems):
    with pytest.raises(errors.PerfDataNotAvailableError, match="moe_kernel_source 'other'; measured: moe_torch_flow"):
        ForwardPassPerfModel.best_available(moe_config | {"moe_kernel_source": "other"})
    (systems.path / f"data/x100/moe/vllm/{tiny.VERSION}/moe_perf.parquet").unlink()
    with pytest.raises(errors.PerfDataNotAvailableError, match="no moe_perf data"):
        ForwardPassPerfModel.best_available(moe_config | {"systems_paths": [str(systems.path)]})


def test_the_provenance_pins_what_was_selected(build, systems):
    provenance = build(estimation_mode="auto", backend_version=None, transfer_policy=["xop", "xshape"]).diagnostics()[
        "provenance"
    ]
    pinned = provenance["config"]
    assert provenance["requested_estimation_mode"] == "auto"
    assert (pinned["estimation_mode"], pinned["fallback_policy"]) == ("op_level", "deny")
    assert (pinned["backend_version"], pinned["database_mode"]) == (tiny.VERSION, "SILICON")
    assert pinned["transfer_policy"] == ["xshape", "xop"]
    assert pinned["systems_paths"] == [provenance["selected_systems_root"]] == [str(systems.path)]
    assert build().diagnostics()["provenance"]["config"]["transfer_policy"] == ["xshape", "xquant", "xprofile", "xop"]


@pytest.mark.parametrize(
    "changes", [{}, {"database_mode": "SOL"}, {"estimation_mode": "auto", "backend_version": None}]
)
def test_the_provenance_configuration_repeats_the_selection(build, changes):
    first = build(**changes)
    pinned = first.diagnostics()["provenance"]["config"]
    again = ForwardPassPerfModel.best_available(pinned)
    assert again.diagnostics()["provenance"]["config"] == pinned
    assert estimates(again) == estimates(first)


# --- V4: native correction ---


def correction(**fields):
    return {"estimator_config": {"correction": fields}}


def observe(model, metrics, factor, times=1):
    """Tune with an iteration that took `factor` times its native estimate."""
    native_s = model.estimate_forward_pass_detailed(metrics)["native_latency_ms"] / 1000
    ranks = [metrics] if isinstance(metrics, dict) else metrics
    model.tune_with_fpms([[rank | {"wall_time": native_s * factor} for rank in ranks]] * times)


def factor_of(model, metrics):
    return model.estimate_forward_pass_detailed(metrics)["correction_factor"]


def test_observations_at_twice_the_native_estimate_double_it(build):
    model = build(**correction(min_observations=2))
    native = estimates(model, LOADS[:1])[0]
    observe(model, prefill(64), 2.0)
    assert (factor_of(model, prefill(64)), model.diagnostics()["source"]) == (1.0, "aic")
    observe(model, prefill(64), 2.0)
    diagnostics = model.diagnostics()
    assert (diagnostics["source"], diagnostics["retained_observations"]) == ("aic_with_correction", 2)
    assert diagnostics["correction_ready_buckets"] == 1
    detailed = model.estimate_forward_pass_detailed(prefill(64))
    assert detailed["correction_factor"] == pytest.approx(2.0)
    assert detailed["native_latency_ms"] == native
    assert detailed["latency_ms"] == native * detailed["correction_factor"]
    assert detailed["latency_ms"] == model.estimate_forward_pass_time_ms(prefill(64))


@pytest.mark.parametrize(
    ("observed", "bounds", "expected"), [(90.0, {}, 2.0), (0.01, {}, 0.5), (3.0, {"max": 4.0}, 3.0)]
)
def test_factors_stay_in_their_bounds(build, observed, bounds, expected):
    model = build(**correction(min_observations=2, factor_bounds=bounds))
    observe(model, prefill(64), observed, times=2)
    assert factor_of(model, prefill(64)) == pytest.approx(expected)


def test_factors_never_compound(build):
    model = build(**correction(min_observations=1, sampling={"max_observations": 4}))
    for _ in range(4):
        observe(model, prefill(64), 1.5)
    assert factor_of(model, prefill(64)) == pytest.approx(1.5)


def test_on_a_tie_the_last_rank_receives_the_sample(build):
    # Coordinates sum to 1010 on both ranks.
    model = build(**correction(min_observations=1))
    observe(model, [prefill(1010), decode(10, 1000)], 1.5)
    assert factor_of(model, decode(10, 1000)) == pytest.approx(1.5)
    assert factor_of(model, prefill(1010)) == 1.0


def test_the_busiest_rank_stands_for_the_iteration(build):
    model = build(**correction(min_observations=1))
    observe(model, prefill(800), 1.5)
    assert factor_of(model, [prefill(800), decode(4, 700)]) == pytest.approx(1.5)
    assert factor_of(model, [prefill(800), decode(4, 900)]) == 1.0


def test_observations_beyond_the_range_are_dropped(build):
    model = build(**correction(min_observations=1, max_num_tokens=1000))
    observe(model, prefill(1001), 1.5)
    assert model.diagnostics()["retained_observations"] == 0
    observe(model, prefill(1000), 1.5)
    assert model.diagnostics()["retained_observations"] == 1
    assert factor_of(model, prefill(1000)) == pytest.approx(1.5)
    assert factor_of(model, prefill(1001)) == 1.0


def test_one_observation_corrects_the_ranks_of_an_iteration(build):
    model = build(**correction(min_observations=1))
    observe(model, prefill(64), 1.5)
    assert factor_of(model, [prefill(64), decode(2, 10)]) == pytest.approx(1.5)


def test_each_workload_has_its_own_store(build):
    model = build(**correction(min_observations=1))
    mixed = iteration(1, 64, 0, 2, 100)
    for metrics, factor in ((prefill(64), 1.2), (decode(4, 400), 1.4), (mixed, 1.6)):
        observe(model, metrics, factor)
    found = [factor_of(model, metrics) for metrics in (prefill(64), decode(4, 400), mixed)]
    assert found == pytest.approx([1.2, 1.4, 1.6])
    assert model.get_min_correction_factor() == pytest.approx(1.2)
    assert model.get_max_correction_factor() == pytest.approx(1.6)
    assert model.get_avg_correction_factor() == pytest.approx(1.4)


def test_without_correction_tuning_only_validates(build):
    model = build(**correction(enabled=False))
    observe(model, prefill(64), 1.5, times=9)
    assert factor_of(model, prefill(64)) == 1.0
    assert model.get_avg_correction_factor() is None
    diagnostics = model.diagnostics()
    assert (diagnostics["source"], diagnostics["retained_observations"]) == ("aic", 0)
    with pytest.raises(errors.MetricsError):
        model.tune_with_fpms([[{"version": 2}]])


def test_before_any_observation_there_are_no_factors(build):
    model = build()
    assert model.get_min_correction_factor() is model.get_max_correction_factor() is None
    assert model.regression_store_diagnostics() == []


def test_tuning_with_an_iteration_that_cannot_be_priced_is_an_error_after_those_before(build):
    model = build(**correction(min_observations=1))
    native_s = estimates(model, LOADS[:1])[0] / 1000
    iterations = [[prefill(64, 1.5 * native_s)], [iteration(3, 2, wall_time=1.0)], [prefill(64, native_s)]]
    with pytest.raises(errors.PerfDataNotAvailableError, match="context_attention"):
        model.tune_with_fpms(iterations)
    assert factor_of(model, prefill(64)) == pytest.approx(1.5)


def test_the_slowest_rank_is_named(build):
    model = build()
    ranks = [{}, prefill(16), prefill(256), prefill(256)]
    assert model.estimate_forward_pass_detailed(ranks)["max_rank"] == 2
    assert model.estimate_forward_pass_detailed(prefill(16))["max_rank"] == 0


def test_readiness_is_told_per_store(build):
    model = build(**correction(min_observations=2))
    observe(model, decode(4, 400), 1.5, times=2)
    observe(model, prefill(64), 1.5)
    report = model.readiness_report()
    assert (report["kind"], report["ready"], report["stores"]) == ("op_level", True, [])
    summary = {key: report["correction"][key] for key in ("enabled", "mode", "ready")}
    assert summary == {"enabled": True, "mode": "fixed", "ready": True}
    assert [tuple(store.values()) for store in report["correction"]["stores"]] == [
        ("prefill", False, "below_min_observations", 1, 0),
        ("decode", True, None, 2, 1),
        ("mixed", False, "below_min_observations", 0, 0),
    ]
    disabled = build(**correction(enabled=False)).readiness_report()["correction"]
    assert (disabled["enabled"], disabled["ready"], disabled["stores"]) == (False, False, [])


def test_the_topology_names_the_deployment(build):
    topology = build(tp=2, backend_version=None).deployment_topology()
    assert (topology["estimation_mode"], topology["system"], topology["tp"]) == ("op_level", "x100", 2)
    assert topology["backend_version"] == tiny.VERSION
    assert topology["correction_limits"]["max_num_tokens"] == 8192
    assert build(**correction(enabled=False)).deployment_topology()["correction_limits"] is None


# --- static queries ---


def test_a_static_prefill_is_one_pass(build):
    model = build()
    [expected] = estimates(model, [(2, 100, 0, 0, 0)])
    assert model.static_phase_latency(batch_size=2, input_tokens=50, output_tokens=9, prefill=True) == expected
    assert model.predict_prefill_latency(2, 50) == expected
    assert model.predict_prefill_latency_total(2, 100, 0) == expected
    [expected] = estimates(model, [(2, 60, 40, 0, 0)])
    assert model.predict_prefill_latency(2, 50, 20) == expected
    assert model.predict_prefill_latency_total(2, 60, 40) == expected
    assert model.predict_prefill_latency_total(2, 0, 41) == 0.0


@pytest.mark.parametrize(
    ("batch", "tokens", "cached", "isl", "prefix"),
    [(2, 61, 41, 51, 20), (48, 68, 7046, 148, 146), (7, 500, 3, 71, 0), (2, 11, 7, 9, 3), (2, 11, 5, 8, 2)],
)
def test_totals_that_do_not_divide_keep_the_whole_tokens_of_prompt_and_prefix(
    build, batch, tokens, cached, isl, prefix
):
    model = build()
    expected = model.predict_prefill_latency(batch, isl, prefix)
    assert model.predict_prefill_latency_total(batch, tokens, cached) == expected


def test_a_static_decode_is_priced_every_32_tokens(build):
    model = build()
    steps = {position: model.predict_decode_latency_total(3, 3 * position) for position in (5, 37, 69)}

    def total(output_tokens):
        return model.static_phase_latency(batch_size=3, input_tokens=4, output_tokens=output_tokens, prefill=False)

    assert [total(0), total(1), total(2)] == [0.0, 0.0, steps[5]]
    assert total(70) == pytest.approx(32 * steps[5] + 32 * steps[37] + 5 * steps[69])
    assert steps[5] == estimates(model, [(0, 0, 0, 3, 15)])[0]


def test_draft_tokens_widen_static_decode_but_not_estimates(build):
    plain, drafting = build(), build(nextn=2)
    step = {"batch_size": 3, "input_tokens": 4, "output_tokens": 2, "prefill": False}
    # (2 + 2) / 2 layers, and three times the batch.
    wider = plain.static_phase_latency(**step | {"batch_size": 9})
    assert drafting.static_phase_latency(**step) == pytest.approx(2 * wider)
    assert estimates(drafting, LOADS[3:4])[0] == pytest.approx(2 * estimates(plain, LOADS[3:4])[0])
    assert estimates(drafting, LOADS[:1]) == estimates(plain, LOADS[:1])


def test_static_queries_are_not_corrected(build):
    model = build(**correction(min_observations=1))
    before = model.predict_prefill_latency(1, 64)
    observe(model, prefill(64), 1.5)
    assert model.predict_prefill_latency(1, 64) == before
    assert model.estimate_forward_pass_time_ms(prefill(64)) == pytest.approx(1.5 * before)


NAMES = (
    *("embedding", "add_norm_1", "qkv_gemm", "attention", "proj_gemm", "add_norm_2", "gate_ffn1_gemm", "act_gate"),
    *("ffn2_gemm", "logits_gemm", "embedding_ar", "ar_1", "ar_2", "p2p"),
)


@pytest.mark.parametrize("mode", ["SILICON", "SOL"])
def test_diagnostics_list_the_operators_of_one_step(build, mode):
    model = build(tp=2, database_mode=mode)
    step = {"batch_size": 2, "input_tokens": 50, "output_tokens": 2}
    for is_prefill, phase in ((True, "context"), (False, "generation")):
        rows = model.static_phase_diagnostics(batch_size=2, context_length=50, prefill=is_prefill)
        assert [row["name"] for row in rows] == [f"{phase}_{name}" for name in NAMES]
        total = model.static_phase_latency(**step, prefill=is_prefill)
        assert sum(row["latency_ms"] for row in rows) == pytest.approx(total)
        limits = [row["details"]["sol"] for row in rows]
        assert all(row["latency_ms"] >= sol["latency_ms"] for row, sol in zip(rows, limits, strict=True))
        if mode == "SOL":
            assert [row["latency_ms"] for row in rows] == [sol["latency_ms"] for sol in limits]
    sources = {row["source"] for row in rows}
    assert sources == ({"sol"} if mode == "SOL" else {"silicon", "empirical"})


def test_operators_of_one_name_are_one_row(config, systems, tmp_path):
    # gpt-oss: windowed and full attention alternate.
    shape = tiny.MOE_CONFIG | {"architectures": ["GptOssForCausalLM"], "sliding_window": 128}
    model = tiny.write_model(tmp_path / "oss", **shape)
    for table, rows in (("context", tiny.prefill_rows), ("generation", tiny.decode_rows)):
        both = rows() + rows(window_size=128, latency=0.5)
        systems.table(f"attention/vllm/{tiny.VERSION}", f"{table}_attention_perf", both)
    built = ForwardPassPerfModel.best_available(
        config | {"model": str(model), "tp": 2, "moe_tp_size": 1, "moe_ep_size": 2}
    )
    rows = built.static_phase_diagnostics(batch_size=1, context_length=64, prefill=True)
    names = [row["name"] for row in rows]
    assert names.count("context_attention") == 1
    [attention] = [row for row in rows if row["name"] == "context_attention"]
    # One layer of either kind; the windowed one alone takes 0.5 ms.
    assert 0.5 < attention["latency_ms"] < 0.6
    assert attention["details"]["sol"]["latency_ms"] > 0


@pytest.mark.parametrize(
    ("query", "arguments", "named"),
    [
        (
            "static_phase_latency",
            {"batch_size": 0, "input_tokens": 4, "output_tokens": 2, "prefill": True},
            "batch_size",
        ),
        ("static_phase_latency", {"batch_size": 1, "input_tokens": 0, "output_tokens": 2, "prefill": True}, "isl 0"),
        (
            "static_phase_latency",
            {"batch_size": 1, "input_tokens": -1, "output_tokens": 2, "prefill": False},
            "input_tokens",
        ),
        (
            "static_phase_latency",
            {"batch_size": 1, "input_tokens": 4, "output_tokens": -1, "prefill": True},
            "output_tokens",
        ),
        (
            "static_phase_latency",
            {"batch_size": 2.0, "input_tokens": 4, "output_tokens": 2, "prefill": False},
            "batch_size",
        ),
        (
            "static_phase_latency",
            {"batch_size": True, "input_tokens": 4, "output_tokens": 2, "prefill": False},
            "batch_size",
        ),
        (
            "static_phase_latency",
            {"batch_size": 2**32, "input_tokens": 4, "output_tokens": 2, "prefill": False},
            "batch_size",
        ),
        (
            "static_phase_latency",
            {"batch_size": 2**17, "input_tokens": 2**17, "output_tokens": 2, "prefill": True},
            "batch_size x",
        ),
        ("static_phase_diagnostics", {"batch_size": 0, "context_length": 4, "prefill": True}, "batch_size"),
        (
            "static_phase_diagnostics",
            {"batch_size": 1, "context_length": 4, "prefill": True, "prefix": 4},
            "no token to compute",
        ),
        ("static_phase_diagnostics", {"batch_size": 1, "context_length": 4, "prefill": True, "prefix": -1}, "prefix"),
        ("static_phase_diagnostics", {"batch_size": 1, "context_length": 4, "prefill": False, "prefix": 1}, "prefix"),
        ("static_phase_diagnostics", {"batch_size": 1, "context_length": None, "prefill": False}, "context_length"),
        ("predict_prefill_latency", {"bs": 0, "isl": 4}, "batch_size"),
        ("predict_prefill_latency", {"bs": 1, "isl": 4, "prefix": 5}, "no token to compute"),
        ("predict_prefill_latency", {"bs": 1, "isl": "4"}, "isl"),
        (
            "predict_prefill_latency_total",
            {"batch_size": 3, "total_prefill_tokens": 2, "total_kv_read_tokens": 0},
            "every prefill request",
        ),
        (
            "predict_prefill_latency_total",
            {"batch_size": 3, "total_prefill_tokens": 9, "total_kv_read_tokens": -1},
            "total_kv_read",
        ),
        (
            "predict_prefill_latency_total",
            {"batch_size": 0, "total_prefill_tokens": 9, "total_kv_read_tokens": 1},
            "batch_size",
        ),
        ("predict_decode_latency_total", {"batch_size": 0, "total_past_kv_tokens": 9}, "batch_size"),
        ("predict_decode_latency_total", {"batch_size": 1, "total_past_kv_tokens": 2**40}, "total_past_kv_tokens"),
        (
            "predict_decode_latency_total",
            {"batch_size": 1, "total_past_kv_tokens": float("nan")},
            "total_past_kv_tokens",
        ),
    ],
)
def test_bad_arguments_of_static_queries_are_named(build, query, arguments, named):
    with pytest.raises(errors.ConfigError, match=named):
        getattr(build(), query)(**arguments)


def test_static_queries_take_any_integer_type(build):
    model = build()
    assert model.predict_prefill_latency(np.int64(2), np.int32(50)) == model.predict_prefill_latency(2, 50)


def test_queries_of_other_kinds_are_refused_or_empty(build):
    model = build()
    assert model.fpm_decode_kv_ceiling() is None
    assert model.fpm_query_coverage() is None
    with pytest.raises(errors.UnsupportedQueryError, match="flush_updates"):
        model.flush_updates()


def test_a_closed_model_answers_nothing(build):
    model = build()
    model.close()
    for query in (
        lambda: model.estimate_forward_pass_time_ms({}),
        lambda: model.estimate_forward_pass_detailed({}),
        lambda: model.tune_with_fpms([]),
        lambda: model.static_phase_diagnostics(batch_size=1, context_length=4, prefill=True),
        model.diagnostics,
        model.readiness_report,
    ):
        with pytest.raises(AttributeError, match="closed"):
            query()


# --- what cannot be priced ---


def refusal(model, *load):
    with pytest.raises(errors.FpmSdkError) as raised:
        model.estimate_forward_pass_time_ms(iteration(*load))
    return raised.value


def test_a_miss_names_the_operator_the_query_and_the_remedy(build):
    fault = refusal(build(kvcache_quant_mode="int8"), 2, 100, 37)
    assert isinstance(fault, errors.PerfDataNotAvailableError)
    assert str(fault).startswith(
        "perf database error: no measurement answers context_attention at batch 2, length 50, "
    )
    assert "prefix 18, 100 tokens (x100, vllm 0.24.0); use data that cover this shape" in str(fault)


def test_requests_without_a_token_each_are_a_miss(build):
    assert "length 0" in str(refusal(build(), 3, 2))


def test_a_group_that_was_not_measured_is_a_miss(build, systems):
    rows = [row for row in tiny.all_reduce_rows() if row["num_gpus"] == 4]
    systems.table(f"comm/vllm/{tiny.VERSION}", "custom_allreduce_perf", rows)
    assert "context_embedding_ar" in str(refusal(build(tp=2), 1, 64))


@pytest.mark.parametrize("mode", ["SILICON", "SOL"])
@pytest.mark.parametrize("load", [(1, 64), (0, 0, 0, 4, 100), (1, 64, 0, 4, 100)])
def test_a_dtype_without_flops_is_named_in_every_mode(build, mode, load):
    fault = refusal(build(gemm_quant_mode="fp8", database_mode=mode), *load)
    assert isinstance(fault, errors.MissingSystemFlopsError)
    assert "qkv_gemm" in str(fault)
    assert "x100, vllm 0.24.0 has no FLOPS for its compute dtype; choose another quantisation" in str(fault)


def test_flops_are_missed_before_data(build):
    # Neither FLOPS nor rows of fp8 exist.
    # Neither dtype has rows, and static scales need tables that are not there at all.
    for mode in ("fp8", "fp8_static"):
        assert isinstance(refusal(build(gemm_quant_mode=mode), 1, 64), errors.MissingSystemFlopsError)


def test_a_mixed_pass_names_its_decode_attention(build):
    fault = refusal(build(kvcache_quant_mode="fp8", database_mode="SOL"), 1, 64, 0, 4, 100)
    assert "generation_attention at batch 4, length 25" in str(fault)


def test_the_rank_at_fault_is_explained(build):
    model = build()
    with pytest.raises(errors.PerfDataNotAvailableError, match="batch 3, length 0"):
        model.estimate_forward_pass_time_ms([prefill(64), iteration(3, 2)])
    with pytest.raises(errors.PerfDataNotAvailableError, match="batch 3, length 0"):
        model.estimate_forward_pass_detailed([prefill(64), iteration(3, 2)])
    with pytest.raises(errors.PerfDataNotAvailableError, match="batch 3, length 0"):
        model.estimate_many([prefill(64), iteration(3, 2)])


def test_static_queries_explain_a_miss_too(build):
    model = build(kvcache_quant_mode="int8")
    for query in (
        lambda: model.predict_prefill_latency(1, 64),
        lambda: model.static_phase_diagnostics(batch_size=1, context_length=64, prefill=True),
        lambda: model.static_phase_diagnostics(batch_size=1, context_length=64, prefill=False),
        lambda: model.predict_decode_latency_total(1, 64),
    ):
        with pytest.raises(errors.PerfDataNotAvailableError, match="attention at batch 1"):
            query()


@pytest.mark.parametrize("load", [(2**32 - 1, 2**32 - 1), (1, 2**32 - 1), (0, 0, 0, 2**32 - 1, 2**32 - 1)])
def test_the_largest_counts_are_priced(build, load):
    [estimate] = estimates(build(), [load])
    assert np.isfinite(estimate)
    assert estimate > 1000.0


# --- data that vanish or change ---


def test_a_model_does_not_need_its_data_any_more(build, systems):
    model = build()
    before = estimates(model)
    shutil.rmtree(systems.path)
    assert estimates(model) == before
    assert model.static_phase_diagnostics(batch_size=1, context_length=64, prefill=True)


def test_data_that_change_after_loading_change_no_model_of_this_process(build, systems):
    before = estimates(build())
    systems.table(f"gemm/vllm/{tiny.VERSION}", "gemm_perf", tiny.gemm_rows(3.0))
    assert estimates(build()) == before


def test_data_that_vanish_before_loading_are_not_available(build, systems, config):
    with pytest.raises(errors.UnsupportedModelError):
        build(tp=3)  # looks at the directories, loads attention tables
    shutil.rmtree(systems.path / "data/x100/gemm")
    with pytest.raises(errors.PerfDataNotAvailableError, match="gemm_perf"):
        build()


# --- concurrency ---


@pytest.fixture
def switch_threads_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*calls):
    """Run calls at once and return what they returned."""
    barrier = threading.Barrier(len(calls))
    results = [None] * len(calls)

    def run(number, call):
        barrier.wait()
        results[number] = call()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_models_built_at_once_share_one_load_of_each_table(build, monkeypatch, switch_threads_often):
    loads = []
    load = database.PerfDatabase._load

    def counted(self, name):
        loads.append(name)
        return load(self, name)

    monkeypatch.setattr(database.PerfDatabase, "_load", counted)
    models = in_threads(*[lambda tp=tp: build(tp=tp) for tp in (1, 2, 1, 2, 1, 2)])
    assert sorted(loads) == sorted(set(loads))
    for model, recorded in zip(models, ("tp 1", "tp 2") * 3, strict=True):
        assert estimates(model) == pytest.approx(RECORDED[recorded], rel=1e-12)


def test_every_estimate_while_tuning_is_that_of_a_prefix(build, switch_threads_often):
    settings = correction(min_observations=2, factor_bounds={"min": None, "max": None})
    native = estimates(build(), LOADS[:1])[0]
    calls = [prefill(64, native * (0.5 + i / 100) / 1000) for i in range(200)]
    serial = build(**settings)
    answers = [serial.estimate_forward_pass_time_ms(prefill(64))]
    for call in calls:
        serial.tune_with_fpms(call)
        answers.append(serial.estimate_forward_pass_time_ms(prefill(64)))
    assert len(set(answers)) > 150
    model = build(**settings)
    batch = FpmBatch.from_dicts([prefill(64), prefill(64)])
    done = threading.Event()

    def tune():
        for call in calls:
            model.tune_with_fpms(call)
        done.set()

    def estimate():
        seen = []
        while not done.is_set():
            seen.append(model.estimate_forward_pass_time_ms(prefill(64)))
        return seen

    def estimate_pairs():
        seen = []
        while not done.is_set():
            seen.append(model.estimate_many(batch).tolist())
        return seen

    _, singles, pairs = in_threads(tune, estimate, estimate_pairs)
    position = 0
    for answer in singles:
        position = answers.index(answer, position)  # never goes back
    assert all(first == second and first in answers for first, second in pairs)
    assert model.estimate_forward_pass_time_ms(prefill(64)) == answers[-1]


# --- pricing of replays ---

MIXED = {
    "num_prefill": 2,
    "sum_prefill_end_tokens": 107,
    "sum_prefill_past_tokens": 7,
    "num_decode": 4,
    "sum_decode_tokens": 1004,
    "kv_capacity_tokens": 100_000,
}


def price(model, **shape):
    return price_pass(PassPricer(FpmTiming(model._estimator.serving), True, 1.0, 1.0), **shape)


@pytest.mark.parametrize("factor", [None, 1.5])
def test_a_mixed_pass_costs_what_the_model_estimates_for_the_mixed_iteration(build, factor):
    model = build(**correction(min_observations=1))
    # A decode step is asked for by known tokens, the newest one of each request included.
    mixed = iteration(2, 100, 7, 4, 1004)
    if factor:
        observe(model, mixed, factor)
        assert factor_of(model, mixed) == pytest.approx(factor)
    total, rest, composed = price(model, **MIXED)
    assert (rest, composed) == (0.0, True)
    # Durations are whole nanoseconds.
    assert total == pytest.approx(model.estimate_forward_pass_time_ms(mixed), abs=5.1e-7)


def test_pure_passes_cost_what_the_model_estimates(build):
    model = build()
    parts = price(model, num_prefill=2, sum_prefill_end_tokens=107, sum_prefill_past_tokens=7)
    assert parts == (pytest.approx(estimates(model, [(2, 100, 6, 0, 0)])[0], abs=5.1e-7), 0.0, False)
    parts = price(model, num_decode=4, sum_decode_tokens=1004, kv_capacity_tokens=100_000)
    assert parts == (0.0, pytest.approx(estimates(model, [(0, 0, 0, 4, 1004)])[0], abs=5.1e-7), False)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_pass_that_cannot_be_priced_ends_with_the_models_own_explanation(build, mixed):
    # Its parts could be priced where only decode attention is missing; they do not stand in.
    model = build(kvcache_quant_mode="fp8", database_mode="SOL")
    shape = MIXED if mixed else {key: MIXED[key] for key in ("num_decode", "sum_decode_tokens", "kv_capacity_tokens")}
    with pytest.raises(errors.MissingSystemFlopsError, match="generation_attention at batch 4"):
        price(model, **shape)


def test_finding_17_prefill_latency_takes_the_batch_as_bs_without_a_measured_profile(build):
    model = build()
    assert model.predict_prefill_latency(bs=2, isl=50, prefix=20) == model.predict_prefill_latency(2, 50, 20)
