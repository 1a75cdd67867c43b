"""The public surface of the model object (fpm-model.md sections 2, 4 and 5; clients.md sections 2 and 8)."""

import copy
import pickle
from collections import UserDict
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from fpmsdk import (
    ForwardPassPerfModel,
    ForwardPassPerfModelConfig,
    FpmBatch,
    errors,
    sample,
)
from fpmsdk.metrics import decode_frame
from fpmsdk.perfmodel.select import candidates

IDENTITY = {"model": "m", "system": "s", "backend": "vllm", "estimation_mode": "fpm_regression"}


def build(worker_type="aggregated", **fields):
    return ForwardPassPerfModel.best_available(IDENTITY | {"worker_type": worker_type} | fields)


def rank(wall_time=0.0, **scheduled):
    return {"wall_time": wall_time, "scheduled_requests": scheduled}


def decode(requests=2, kv_tokens=10, wall_time=0.0):
    return rank(wall_time, num_decode_requests=requests, sum_decode_kv_tokens=kv_tokens)


def features(model, store):
    """Rows of fit features that a store has learned, oldest first."""
    arrays = getattr(model._estimator, store).arrays
    return arrays["features"][: arrays["extent"][0]].tolist()


# --- selection (section 4, V1) ---


@pytest.mark.parametrize(
    ("mode", "policy", "expected"),
    [
        ("auto", "deny", ("op_level", "fpm_interpolation", "fpm_regression")),
        ("auto", "regression", ("op_level", "fpm_interpolation", "fpm_regression")),
        ("fpm_interpolation", "allow", ("fpm_interpolation", "op_level", "fpm_regression")),
        ("op_level", "allow", ("op_level", "fpm_interpolation", "fpm_regression")),
        ("op_level", "regression", ("op_level", "fpm_regression")),
        ("fpm_regression", "regression", ("fpm_regression",)),
        ("fpm_regression", "allow", ("fpm_regression", "op_level", "fpm_interpolation")),
        ("fpm_interpolation", "deny", ("fpm_interpolation",)),
    ],
)
def test_candidate_order(mode, policy, expected):
    assert candidates(mode, policy) == expected


def test_auto_over_an_unknown_system_falls_back_to_regression_and_says_why():
    diagnostics = build(estimation_mode="auto", system="nosuch").diagnostics()
    provenance = diagnostics["provenance"]
    assert (diagnostics["source"], diagnostics["readiness"]) == ("fallback_regression", "unsupported_config")
    assert [failure.split(":")[0] for failure in provenance["selection_failures"]] == [
        "OpLevel",
        "FpmInterpolation",
    ]
    assert diagnostics["last_warning"] == "; ".join(provenance["selection_failures"])
    assert provenance["requested_estimation_mode"] == "auto"
    assert provenance["selected_estimation_mode"] == "fpm_regression"
    assert provenance["selected_systems_root"] is None


def test_a_denied_candidate_is_an_error_that_says_how_to_get_data(monkeypatch):
    monkeypatch.setattr("fpmsdk.config.systems.packaged_systems_root", lambda: None)
    with pytest.raises(errors.UnknownSystemError, match="set FPMSDK_SYSTEMS_PATH to a systems root"):
        build(estimation_mode="op_level", system="nosuch")


def test_the_provenance_configuration_repeats_the_selection():
    model = build(estimation_mode="auto", fallback_policy="allow")
    pinned = model.diagnostics()["provenance"]["config"]
    assert (pinned["estimation_mode"], pinned["fallback_policy"]) == ("fpm_regression", "deny")
    again = ForwardPassPerfModel.best_available(pinned).diagnostics()["provenance"]
    assert (again["config"], again["selection_failures"]) == (pinned, [])


@pytest.mark.parametrize("weight", [-1, 0, "NaN", "Infinity"])
def test_feature_weights_are_checked_when_a_regression_is_built(weight):
    fields = {"estimator_config": {"features": {"ffn_token_weight": weight}}}
    with pytest.raises(errors.ConfigError, match="estimator_config.features.ffn_token_weight: expected a finite"):
        build(**fields)


def test_dataclass_and_mapping_build_the_same_model():
    config = ForwardPassPerfModelConfig("m", "s", "vllm", "aggregated", estimation_mode="fpm_regression")
    assert ForwardPassPerfModel.best_available(config).diagnostics() == build().diagnostics()


@pytest.mark.parametrize("arguments", [{}, {"config": IDENTITY, "state_snapshot": "x"}])
def test_exactly_one_source_is_accepted(arguments):
    with pytest.raises(errors.ConfigError, match="exactly one of config and state_snapshot"):
        ForwardPassPerfModel.best_available(**arguments)


@pytest.mark.parametrize("broken", [{"estimation_mode": "bogus"}, {"worker_type": "agg"}, {"typo": 1}])
def test_a_refused_configuration_is_a_value_error_naming_the_field(broken):
    with pytest.raises(ValueError, match=next(iter(broken))):
        build(**broken)


# --- estimates (V2, clients.md 2.3) ---


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        [{}, {}],
        {"bogus": 1},
        rank(num_prefill_requests=1, sum_prefill_kv_tokens=10),
        {"scheduled_requests": {}, "queued_requests": {"num_prefill_requests": 3}},
    ],
)
def test_an_empty_pass_takes_exactly_no_time(metrics):
    assert build().estimate_forward_pass_time_ms(metrics) == 0.0
    assert build().estimate_many([metrics]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([], "at least one rank"),
        (rank(sum_prefill_tokens=5), "sum_prefill_tokens is positive but num_prefill_requests is 0"),
        (rank(sum_prefill_kv_tokens=5), "sum_prefill_kv_tokens is positive but num_prefill_requests is 0"),
        (rank(sum_decode_kv_tokens=5), "sum_decode_kv_tokens is positive but num_decode_requests is 0"),
        (rank(num_prefill_requests=1, sum_prefill_tokens=10, extend_lengths=[10]), "given together"),
        (
            rank(num_prefill_requests=1, sum_prefill_tokens=10, extend_lengths=[10, 1], past_kv_lengths=[0, 1]),
            "exactly",
        ),
        (
            rank(num_prefill_requests=1, sum_prefill_tokens=10, extend_lengths=[], past_kv_lengths=[]),
            "exactly",
        ),
        ({"version": 2}, "version is not supported; expected 1"),
        ({"version": 1.0}, r"version: expected an integer from 0 to 4294967295, found 1.0 \(float\)"),
        ({"wall_time": None}, "wall_time: expected a finite number, found None"),
        ({"wall_time": float("nan")}, "wall_time: expected a finite number, found nan"),
        ({"wall_time": float("inf")}, "wall_time: expected a finite number, found inf"),
        ({"wall_time": 10**400}, "wall_time: expected a finite number"),
        ({"wall_time": "1"}, r"wall_time: expected a finite number, found '1' \(str\)"),
        ({"worker_id": 3}, r"worker_id: expected a string, found 3 \(int\)"),
        (
            {"scheduled_requests": None},
            "scheduled_requests: expected an object with the fields of that section, found None",
        ),
        ({"queued_requests": [1]}, "queued_requests: expected an object"),
        ({"counter_id": 2**64}, "counter_id: expected an integer from 0 to 18446744073709551615"),
        (rank(num_decode_requests=2**32), "scheduled_requests.num_decode_requests: expected an integer"),
        (rank(num_decode_requests=-1), r"scheduled_requests.num_decode_requests: .*found -1 \(int\)"),
        (rank(num_decode_requests=True), r"found True \(bool\)"),
        (rank(num_decode_requests=np.array([3])), r"num_decode_requests: expected an integer .*\(ndarray\)"),
        ({"wall_time": np.array([1.0, 2.0])}, r"wall_time: expected a finite number, found .*\(ndarray\)"),
        ({"scheduled_requests": {1, 2}}, r"scheduled_requests: expected an object .*\(set\)"),
        ({"scheduled_requests": np.zeros(3)}, r"scheduled_requests: expected an object .*\(ndarray\)"),
        ({"scheduled_requests": object()}, r"scheduled_requests: expected an object .*\(object\)"),
        ({"queued_requests": 1j}, r"queued_requests: expected an object .*\(complex\)"),
        (rank(num_decode_requests=5.0), r"found 5.0 \(float\)"),
        (
            rank(var_decode_kv_tokens=float("nan")),
            "scheduled_requests.var_decode_kv_tokens: expected a finite",
        ),
        (
            rank(num_decode_requests=1, extend_lengths=[-1], past_kv_lengths=[1]),
            r"extend_lengths\[0\]: .*found -1",
        ),
        (
            rank(num_decode_requests=1, extend_lengths="x", past_kv_lengths=[1]),
            "extend_lengths: expected a list",
        ),
        ({"queued_requests": {"sum_decode_kv_tokens": -1}}, "queued_requests.sum_decode_kv_tokens"),
        (5, "found int"),
        (None, "found NoneType"),
        ("x", "found str"),
        ([[{}]], "found list"),
        ([{}, 5], "found int"),
    ],
)
def test_malformed_metrics_are_refused(metrics, message):
    with pytest.raises(errors.MetricsError, match=message):
        build().estimate_forward_pass_time_ms(metrics)


def test_lists_that_match_the_counts_are_accepted():
    metrics = rank(num_prefill_requests=1, sum_prefill_tokens=10, extend_lengths=[10], past_kv_lengths=[0])
    assert build().estimate_forward_pass_time_ms(metrics) is None
    absent = rank(num_prefill_requests=1, sum_prefill_tokens=10, extend_lengths=None, past_kv_lengths=None)
    assert build().estimate_forward_pass_time_ms(absent) is None


@pytest.mark.parametrize(
    ("worker_type", "metrics"),
    [("prefill", decode()), ("decode", rank(num_prefill_requests=1, sum_prefill_tokens=1))],
)
def test_work_of_the_other_role_is_an_error(worker_type, metrics):
    model = build(worker_type)
    with pytest.raises(errors.MetricsError, match=f"{worker_type} regression worker received scheduled"):
        model.estimate_forward_pass_time_ms(metrics)
    with pytest.raises(errors.MetricsError, match=f"{worker_type} regression worker received scheduled"):
        model.tune_with_fpms([[metrics]])


def test_every_form_of_an_iteration_gives_the_same_estimate():
    model = build()
    frames = sample.train_frames()[:400]
    model.tune_with_fpms(FpmBatch.from_frames(frames))
    batch = model.estimate_many(FpmBatch.from_frames(frames))
    for frame, expected in zip(frames, batch, strict=True):
        message = decode_frame(frame)
        scheduled = {
            name: getattr(message.scheduled_requests, name) for name in message.scheduled_requests.__struct_fields__
        }
        as_dict = {"wall_time": message.wall_time, "scheduled_requests": scheduled}
        plain_object = SimpleNamespace(wall_time=0.0, scheduled_requests=SimpleNamespace(**scheduled))
        forms = (frame, message, as_dict, [as_dict], [frame], plain_object)
        answers = {model.estimate_forward_pass_time_ms(form) for form in forms}
        assert answers == {None if np.isnan(expected) else expected}


@pytest.mark.parametrize("wrap", [MappingProxyType, UserDict])
def test_any_mapping_is_read_like_a_dict(wrap):
    model = build("decode")
    for requests in range(1, 9):
        model.tune_with_fpms(decode(requests, 100, requests / 1000))
    plain = decode(3, 100)
    wrapped = wrap({"scheduled_requests": wrap(plain["scheduled_requests"])})
    assert model.estimate_forward_pass_time_ms(wrapped) == model.estimate_forward_pass_time_ms(plain) > 0.0


class Shrinking:
    """A rank whose attribute empties the list that holds it."""

    def __init__(self, ranks):
        self.ranks = ranks

    @property
    def scheduled_requests(self):
        self.ranks.clear()
        return {}


class Unconverted:
    """A length whose conversion empties the list that holds it."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __index__(self):
        self.lengths.clear()
        return 10


class Boastful(list):
    def __len__(self):
        return 2**62


def test_lists_that_change_or_lie_while_they_are_read_are_harmless():
    model = build()
    ranks = []
    ranks += [Shrinking(ranks), {}, {}, {}]
    assert model.estimate_forward_pass_time_ms(ranks) == 0.0
    lengths = []
    lengths += [Unconverted(lengths)] + [10] * 5000
    metrics = rank(num_prefill_requests=5001, sum_prefill_tokens=9, extend_lengths=lengths, past_kv_lengths=[1] * 5001)
    assert model.estimate_forward_pass_time_ms(metrics) is None
    with pytest.raises(MemoryError):
        model.estimate_forward_pass_time_ms(Boastful([{}]))


def test_ranks_of_different_iterations_are_taken_as_one_iteration():
    # As upstream: whether they belong together is the caller's to say, `group_ranks` compares the numbers.
    ranks = [decode(2, 10, 0.01) | {"counter_id": 50}, decode(3, 20, 0.02) | {"counter_id": 51}]
    model = build()
    model.tune_with_fpms([ranks])
    assert features(model, "pure_decode") == [[20.0, 5.0]]


def test_a_batch_of_another_library_is_refused_by_name():
    with pytest.raises(errors.MetricsError, match="iteration 0"):
        build().estimate_many(pa.table({"a": [1]}))


def test_numpy_scalars_are_numbers():
    model = build()
    for requests in range(1, 6):
        model.tune_with_fpms(decode(np.int64(requests), np.uint32(10), np.float32(requests / 1000)))
    assert model.estimate_forward_pass_time_ms(decode(3)) == pytest.approx(3.0, rel=1e-6)


def test_estimates_of_many_ranks_take_the_slowest_composition():
    model = build("decode")
    for requests in range(1, 9):
        model.tune_with_fpms(decode(requests, 100, requests / 1000))
    ranks = [decode(1, 10)] * 20
    assert model.estimate_forward_pass_time_ms(ranks) == pytest.approx(20.0, rel=1e-9)


def test_a_batch_is_refused_as_a_whole_and_names_the_iteration():
    model = build("decode")
    batch = FpmBatch.from_dicts([decode(), rank(num_prefill_requests=1, sum_prefill_tokens=1)])
    with pytest.raises(errors.MetricsError, match="iteration 1: decode regression worker"):
        model.estimate_many(batch)


def test_the_detailed_estimate_repeats_the_scalar_one():
    model = build()
    empty = {"native_latency_ms": None, "correction_factor": None, "max_rank": None, "ranks": []}
    assert model.estimate_forward_pass_detailed({}) == empty | {"latency_ms": 0.0}
    assert model.estimate_forward_pass_detailed(decode()) == empty | {"latency_ms": None}


# --- features (V3) ---


@pytest.mark.parametrize(
    ("worker_type", "ranks", "store", "expected"),
    [
        (
            "prefill",
            [{"num_prefill_requests": 2, "sum_prefill_tokens": 100, "sum_prefill_kv_tokens": 50}],
            "pure_prefill",
            [5100.0, 100.0],
        ),
        ("decode", [{"num_decode_requests": 4, "sum_decode_kv_tokens": 1000}], "pure_decode", [1000.0, 4.0]),
        (
            "aggregated",
            [
                {
                    "num_prefill_requests": 2,
                    "sum_prefill_tokens": 100,
                    "num_decode_requests": 4,
                    "sum_decode_kv_tokens": 1000,
                },
                {"num_decode_requests": 8, "sum_decode_kv_tokens": 3000},
            ],
            "contains_locally_mixed",
            [3550.0, 112.0],
        ),
        (
            "aggregated",
            [
                {
                    "num_prefill_requests": 2,
                    "sum_prefill_tokens": 100,
                    "num_decode_requests": 4,
                    "sum_decode_kv_tokens": 1000,
                },
                {
                    "num_prefill_requests": 1,
                    "sum_prefill_tokens": 10,
                    "num_decode_requests": 8,
                    "sum_decode_kv_tokens": 3000,
                },
            ],
            "contains_locally_mixed",
            [3550.0, 122.0],
        ),
    ],
)
def test_features_of_each_worker_type(worker_type, ranks, store, expected):
    model = build(worker_type)
    model.tune_with_fpms([[rank(0.01, **scheduled) for scheduled in ranks]])
    assert features(model, store) == [expected]


def test_feature_weights_scale_the_scores():
    weights = {"attention_kv_weight": 2.0, "prefill_attention_pair_weight": 3.0, "ffn_token_weight": 5.0}
    model = build("prefill", estimator_config={"features": weights})
    model.tune_with_fpms(rank(0.01, num_prefill_requests=2, sum_prefill_tokens=100, sum_prefill_kv_tokens=50))
    assert features(model, "pure_prefill") == [[2.0 * 50 + 3.0 * 5050, 500.0]]


# --- tuning (section 5.4, V2) ---


def test_the_target_is_the_largest_wall_time_of_all_ranks_idle_ones_included():
    model = build()
    model.tune_with_fpms([[rank(9.0), decode(2, 10)]])
    assert model._estimator.pure_decode.arrays["target_ms"][0] == 9000.0


@pytest.mark.parametrize("nothing", [[], None, (), {}, [{}], [[{}]]])
def test_nothing_to_learn_is_not_an_error(nothing):
    model = build()
    model.tune_with_fpms(nothing)
    assert model.diagnostics()["retained_observations"] == 0


@pytest.mark.parametrize(
    ("iterations", "retained"),
    [
        (decode(wall_time=0.1), 1),
        ([decode(wall_time=0.1), decode(wall_time=0.2)], 1),
        ([[decode(wall_time=0.1)], [decode(wall_time=0.2)]], 2),
        (((decode(wall_time=0.1),), (decode(wall_time=0.2),)), 2),
    ],
    ids=["one rank", "ranks of one iteration", "iterations", "tuples"],
)
def test_forms_of_the_tuning_argument(iterations, retained):
    model = build()
    model.tune_with_fpms(iterations)
    assert model.diagnostics()["retained_observations"] == retained


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([rank(sum_prefill_tokens=1)], "iteration 1: rank 0: .*num_prefill_requests is 0"),
        ([{"version": 3}], "iteration 1: rank 0: version is not supported"),
        ([], "iteration 1: an iteration needs at least one rank"),
    ],
)
def test_a_contradictory_iteration_stops_tuning_after_the_ones_before_it(broken, message):
    model = build()
    good = [decode(wall_time=0.1)]
    with pytest.raises(errors.MetricsError, match=message):
        model.tune_with_fpms([good, broken, good])
    assert model.diagnostics()["retained_observations"] == 1


@pytest.mark.parametrize("broken", [[rank(num_decode_requests="2")], [{"wall_time": float("nan")}], [5]])
def test_a_malformed_value_anywhere_stops_tuning_before_it_begins(broken):
    model = build()
    good = [decode(wall_time=0.1)]
    with pytest.raises(errors.MetricsError):
        model.tune_with_fpms([good, good, broken])
    assert model.diagnostics()["retained_observations"] == 0


def test_ranks_and_lists_of_ranks_are_not_mixed():
    with pytest.raises(errors.TuningError, match="ranks and lists of ranks are mixed"):
        build().tune_with_fpms([[{}], {}])


def test_iterations_that_teach_nothing_are_counted_by_reason():
    model = build()
    walls = [0.0, -1.0, float("nan"), float("inf"), 1e306, 0.1]
    model.tune_with_fpms(FpmBatch.from_dicts([decode(wall_time=wall) for wall in walls] + [{"wall_time": 1.0}]))
    assert model.skipped_iterations() == {
        "idle": 1,
        "zero_wall_time": 1,
        "negative_wall_time": 1,
        "non_finite_wall_time": 2,
        "non_finite_target": 1,
    }
    assert model.diagnostics()["retained_observations"] == 1


def test_a_positive_wall_time_of_any_rank_makes_the_others_irrelevant():
    model = build()
    model.tune_with_fpms(FpmBatch.from_dicts([[decode(wall_time=float("nan")), decode(wall_time=0.1), decode()]]))
    assert model.diagnostics()["retained_observations"] == 1


# --- reports ---


def test_the_caller_owns_the_diagnostics():
    model = build()
    first = model.diagnostics()
    first["provenance"]["config"]["estimator_config"]["fpm_regression"]["sampling"]["bins_per_axis"].append(9)
    first["provenance"]["selection_failures"].append("x")
    assert model.diagnostics() == build().diagnostics()


@pytest.mark.parametrize(
    ("worker_type", "stores"),
    [
        ("prefill", ["pure_prefill"]),
        ("decode", ["pure_decode"]),
        ("aggregated", ["pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill"]),
    ],
)
def test_stores_of_each_worker_type(worker_type, stores):
    assert [store["workload_kind"] for store in build(worker_type).regression_store_diagnostics()] == stores


def test_readiness_report_gives_a_reason_per_store():
    model = build("aggregated", estimator_config={"fpm_regression": {"min_observations": 2}})
    for requests in (1, 2):
        model.tune_with_fpms(decode(requests, 10, requests / 1000))
    for _ in range(2):
        model.tune_with_fpms(rank(0.1, num_prefill_requests=1, sum_prefill_tokens=7))
    report = model.readiness_report()
    assert (report["kind"], report["ready"], report["correction"]) == ("fpm_regression", True, None)
    assert {store["store"]: (store["ready"], store["reason"]) for store in report["stores"]} == {
        "pure_decode": (True, None),
        "contains_locally_mixed": (False, "below_min_observations"),
        "cross_rank_aggregated": (False, "below_min_observations"),
        "pure_prefill": (False, "no_usable_fit"),
    }


def test_deployment_topology_names_the_deployment():
    topology = build(tp=4, kv_block_size=32).deployment_topology()
    assert (topology["model"], topology["tp"], topology["kv_block_size"]) == ("m", 4, 32)
    assert topology["correction_limits"] is None


def test_launch_mismatches_are_those_of_the_model_configuration():
    launch = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 1.0, "decode_ms": 1.0}}, "dp_size": 2}
    launch["tensor_parallel_size"] = 2
    conflicts = build(tp=4, attention_dp=2).engine_launch_mismatches(launch)
    assert conflicts == ["tensor_parallel_size conflicts with canonical tp"]
    assert build(tp=2, attention_dp=2).engine_launch_mismatches(launch) == []


def test_a_regression_has_no_correction_factors_and_no_coverage():
    model = build()
    assert model.get_min_correction_factor() is None
    assert model.get_max_correction_factor() is None
    assert model.get_avg_correction_factor() is None
    assert model.fpm_query_coverage() is None


NATIVE_QUERIES = {
    "static_phase_latency": {"batch_size": 1, "input_tokens": 2, "output_tokens": 3, "prefill": True},
    "static_phase_diagnostics": {"batch_size": 1, "context_length": 2, "prefill": True},
    "predict_prefill_latency": {"bs": 1, "isl": 2},
    "predict_prefill_latency_total": {"batch_size": 1, "total_prefill_tokens": 2, "total_kv_read_tokens": 3},
    "predict_decode_latency_total": {"batch_size": 1, "total_past_kv_tokens": 2},
    "fpm_decode_kv_ceiling": {},
    "vision_operations": {"shapes": []},
    "flush_updates": {},
    "export_learned_artifact": {},
    "save_online_checkpoint": {"path": "x"},
}


@pytest.mark.parametrize("query", NATIVE_QUERIES)
def test_queries_of_other_kinds_are_refused_by_name(query):
    with pytest.raises(errors.UnsupportedQueryError, match=f"{query} needs an? "):
        getattr(build(), query)(**NATIVE_QUERIES[query])


@pytest.mark.parametrize("query", ["learned_feature_names", "learned_metadata", "learned_online_diagnostics"])
def test_reports_of_learned_models_are_none_for_others(query):
    assert getattr(build(), query)() is None
    assert build().learned_selector_diagnostics() is None


def test_a_closed_model_answers_nothing():
    model = build()
    model.close()
    model.close()
    with pytest.raises(AttributeError, match="this ForwardPassPerfModel is closed"):
        model.diagnostics()


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_models_are_not_copied(copier):
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copier(build())


def test_normalize_config_builds_nothing():
    assert ForwardPassPerfModel.normalize_config(IDENTITY | {"worker_type": "decode"})["tp"] == 1
