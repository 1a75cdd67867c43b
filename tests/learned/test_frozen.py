"""The frozen kind: which sources a configuration takes, what the model says of itself, what it refuses."""

import json

import pytest

from fpmsdk import ForwardPassPerfModel, Trace, errors, replay_trace
from tests.learned.recorded import artifact_bytes, artifact_path, config_with, vectors

BASE = vectors()["identity_config"]
IDLE = {"scheduled_requests": {}}
DECODE = {"scheduled_requests": {"num_decode_requests": 4, "sum_decode_kv_tokens": 4000}}
PREFILL = {"scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 64}}
CROSS_RANK = [DECODE, PREFILL]


def config(path, **changes):
    learned = {"artifact_path": str(path), "adaptation": "frozen"}
    return BASE | {"estimator_config": {"fpm_learned": learned}} | changes


def document(name="main"):
    return json.loads(artifact_bytes(name))


def written(folder, changed):
    path = folder / "changed.json"
    path.write_text(json.dumps(changed))
    return path


@pytest.fixture
def model(tmp_path):
    return ForwardPassPerfModel.best_available(config(artifact_path(tmp_path, "main")))


def lists(extend, past):
    requests = {"num_decode_requests": len(extend), "sum_decode_kv_tokens": sum(past)}
    return {"scheduled_requests": requests | {"extend_lengths": extend, "past_kv_lengths": past}}


def request_artifact(worker_type="aggregated"):
    leaf = {"left": [-1], "right": [-1], "feature": [0], "threshold": [0.0], "value": [0.5]}
    return {
        "schema": "aic_fpm_learned_forward_perf",
        "schema_version": 1,
        "worker_type": worker_type,
        "target": "log_ms",
        "features": ["req_batch_size"],
        "stores": {"pure_decode": {"baseline": 1.0, "trees": [leaf]}},
    }


# --- sources ---


def test_the_identity_of_another_deployment_is_refused(tmp_path):
    changed = document()
    changed["metadata"]["identity"]["tp"] = 4
    with pytest.raises(errors.LearnedModelError, match="identity.tp: expected 1, .* found 4"):
        ForwardPassPerfModel.best_available(config(written(tmp_path, changed)))


def test_without_an_identity_a_model_is_built_and_says_so(tmp_path):
    changed = document()
    del changed["metadata"]["identity"]
    model = ForwardPassPerfModel.best_available(config(written(tmp_path, changed)))
    assert model.learned_online_diagnostics()["identity_verified"] is False
    assert model.estimate_forward_pass_time_ms(DECODE) > 0.0


def test_the_worker_type_has_to_be_that_of_the_configuration(tmp_path):
    path = written(tmp_path, request_artifact("decode"))
    with pytest.raises(errors.LearnedModelError, match="worker_type: expected 'aggregated'.*found 'decode'"):
        ForwardPassPerfModel.best_available(config(path))


def test_a_source_that_changed_after_it_was_pinned_is_refused(tmp_path):
    path = artifact_path(tmp_path, "main")
    canonical = ForwardPassPerfModel.normalize_config(config(path))
    path.write_bytes(artifact_bytes("main") + b" ")
    with pytest.raises(errors.ConfigError, match="source_sha256"):
        ForwardPassPerfModel.best_available(canonical)


def test_a_malformed_source_is_refused_by_its_place_and_earlier_models_stay_usable(tmp_path):
    path = artifact_path(tmp_path, "main")
    earlier = ForwardPassPerfModel.best_available(config(path))
    before = earlier.estimate_forward_pass_time_ms(DECODE)
    path.write_bytes(artifact_bytes("main")[:1000])
    with pytest.raises(errors.LearnedModelError, match="invalid JSON"):
        ForwardPassPerfModel.best_available(config(path))
    assert earlier.estimate_forward_pass_time_ms(DECODE) == before


def test_a_missing_source_is_missing_data_and_no_other_mode_is_tried(tmp_path):
    with pytest.raises(errors.PerfDataNotAvailableError, match="none.json"):
        ForwardPassPerfModel.best_available(config(tmp_path / "none.json"))
    with pytest.raises(errors.ConfigError, match="fallback_policy deny"):
        ForwardPassPerfModel.best_available(config(tmp_path / "none.json", fallback_policy="regression"))


def test_path_text_and_mapping_give_the_same_model(tmp_path):
    path = artifact_path(tmp_path, "main")
    sources = (str(path), path, artifact_bytes("main").decode(), document())
    estimates = {ForwardPassPerfModel.from_learned(s).estimate_forward_pass_time_ms(DECODE) for s in sources}
    assert len(estimates) == 1


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("/none.json", errors.PerfDataNotAvailableError, "/none.json"),
        ('{"a": 1}', errors.LearnedModelError, "schema"),
        ("{", errors.LearnedModelError, "invalid JSON"),
        ({}, errors.LearnedModelError, "schema"),
        ({"schema": object()}, errors.LearnedModelError, "no JSON document"),
        (5, TypeError, "expected str, bytes or os.PathLike object, not int"),
    ],
)
def test_sources_that_are_no_artifact_are_refused(source, error, message):
    with pytest.raises(error, match=message):
        ForwardPassPerfModel.from_learned(source)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"zzz": 1}, "zzz"),
        ({"max_observations": 0}, "estimator_config.fpm_regression.sampling.max_observations"),
        ({"max_observations": 4}, "estimator_config.correction"),
        ({"correction_mode": "zzz"}, "correction_mode"),
        ({"bucket_count": 15}, "bucket_count"),
    ],
)
def test_options_of_an_artifact_alone_are_checked(options, path):
    with pytest.raises(errors.ConfigError) as refusal:
        ForwardPassPerfModel.from_learned(document(), options)
    assert refusal.value.path == path


def test_an_artifact_alone_stands_for_a_placeholder_deployment():
    topology = ForwardPassPerfModel.from_learned(document()).deployment_topology()
    assert (topology["model"], topology["system"], topology["backend"]) == ("from_learned", "from_learned", "vllm")


# --- estimates ---


def test_an_untrained_store_has_no_answer_and_learns_nothing(model):
    assert model.estimate_forward_pass_time_ms(CROSS_RANK) is None
    model.tune_with_fpms([[rank | {"wall_time": 0.01} for rank in CROSS_RANK]])
    assert model.diagnostics()["retained_observations"] == 0


def test_without_work_the_latency_is_zero(model):
    assert model.estimate_forward_pass_time_ms(IDLE) == 0.0
    assert model.estimate_forward_pass_detailed([IDLE, IDLE])["latency_ms"] == 0.0


@pytest.mark.parametrize(
    ("worker_type", "metrics", "message"),
    [
        ("decode", PREFILL, "decode .*worker received .*prefill"),
        ("prefill", DECODE, "prefill .*worker received .*decode"),
    ],
)
def test_work_of_another_role_is_refused(worker_type, metrics, message):
    changed = request_artifact(worker_type) | {"features": ["num_active_ranks"]}
    changed["stores"] = {f"pure_{worker_type}": changed["stores"]["pure_decode"]}
    model = ForwardPassPerfModel.from_learned(changed)
    for call in (model.estimate_forward_pass_time_ms, lambda one: model.tune_with_fpms([[one]])):
        with pytest.raises(errors.MetricsError, match=message):
            call(metrics)


def test_request_features_need_lists_on_every_active_rank():
    model = ForwardPassPerfModel.from_learned(request_artifact())
    assert model.estimate_forward_pass_time_ms(lists([1], [5])) == 4.4816890703380645
    for metrics in (DECODE, [lists([1], [5]), DECODE]):
        with pytest.raises(errors.MetricsError, match="per-request features"):
            model.estimate_forward_pass_time_ms(metrics)
        with pytest.raises(errors.MetricsError, match="iteration 1: .*per-request features"):
            model.estimate_many([lists([1], [5]), metrics])
        with pytest.raises(errors.MetricsError, match="per-request features"):
            model.tune_with_fpms([metrics if isinstance(metrics, list) else [metrics]])  # whatever it took
    assert model.estimate_forward_pass_time_ms(PREFILL) is None  # nobody reads features of an untrained store


def test_tuning_keeps_the_iterations_before_the_one_that_is_refused():
    model = ForwardPassPerfModel.from_learned(request_artifact(), {"min_observations": 1})
    good = lists([1], [5]) | {"wall_time": 0.006}
    with pytest.raises(errors.MetricsError, match="iteration 1"):
        model.tune_with_fpms([[good], [DECODE | {"wall_time": 0.006}], [good]])
    assert model.diagnostics()["retained_observations"] == 2  # in the fixed and in the dynamic store


def test_a_correction_is_learned_from_the_uncorrected_estimate(model):
    before = model.estimate_forward_pass_time_ms(DECODE)
    for _ in range(2):
        model.tune_with_fpms([[DECODE | {"wall_time": 1.5 * before / 1000.0}]] * 5)
        assert model.estimate_forward_pass_time_ms(DECODE) == pytest.approx(1.5 * before, rel=1e-12)


def test_a_replay_prices_its_passes_by_the_forest(model):
    trace = Trace.from_arrays([0.0], prompt_tokens=[64], output_tokens=[1])
    report = replay_trace(trace, launch={"engine": {}}, timing=model)
    expected_ms = model.estimate_forward_pass_time_ms(PREFILL)
    assert report.summary["mean_ttft_ms"] == pytest.approx(expected_ms, abs=1e-6)


def test_a_replay_of_request_features_is_refused():
    document = request_artifact()
    document["stores"]["pure_prefill"] = document["stores"]["pure_decode"]
    trace = Trace.from_arrays([0.0], prompt_tokens=[64], output_tokens=[1])
    with pytest.raises(errors.MetricsError, match="per-request features"):
        replay_trace(trace, launch={"engine": {}}, timing=ForwardPassPerfModel.from_learned(document))


# --- reports ---


def test_readiness_names_trained_and_untrained_stores(model):
    report = model.readiness_report()
    assert report["ready"] is True
    assert {store["store"]: store["reason"] for store in report["stores"]} == {
        "pure_decode": None,
        "contains_locally_mixed": None,
        "cross_rank_aggregated": "no_trained_store",
        "pure_prefill": None,
    }
    assert (report["correction"]["enabled"], report["correction"]["mode"]) == (True, "hybrid")
    assert [store["reason"] for store in report["correction"]["stores"]] == ["below_min_observations"] * 3


def test_store_diagnostics_are_those_of_the_role(model):
    assert [(store["workload_kind"], store["ready"]) for store in model.regression_store_diagnostics()] == [
        ("pure_decode", True),
        ("contains_locally_mixed", True),
        ("cross_rank_aggregated", False),
        ("pure_prefill", True),
    ]
    decode = ForwardPassPerfModel.from_learned(request_artifact("decode"))
    assert [store["workload_kind"] for store in decode.regression_store_diagnostics()] == ["pure_decode"]


def test_a_detailed_estimate_has_no_parts(model):
    assert model.estimate_forward_pass_detailed(DECODE) == {
        "latency_ms": model.estimate_forward_pass_time_ms(DECODE),
        "native_latency_ms": None,
        "correction_factor": None,
        "max_rank": None,
        "ranks": [],
    }


def test_metadata_belongs_to_the_caller(model):
    model.learned_metadata()["identity"]["tp"] = 9
    assert model.learned_metadata()["identity"]["tp"] == 1


def test_an_export_holds_the_forests_without_corrections(model):
    before = model.estimate_forward_pass_time_ms(DECODE)
    model.tune_with_fpms([[DECODE | {"wall_time": 1.5 * before / 1000.0}]] * 5)
    exported = model.export_learned_artifact()
    assert exported == document()
    assert ForwardPassPerfModel.from_learned(exported).estimate_forward_pass_time_ms(DECODE) == before


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda model: model.flush_updates(), "flush_updates needs an online"),
        (lambda model: model.save_online_checkpoint("checkpoint"), "save_online_checkpoint needs an online"),
        (lambda model: model.explain(DECODE), "explain needs a native"),
        (lambda model: model.fpm_decode_kv_ceiling(), "fpm_decode_kv_ceiling needs a native"),
    ],
)
def test_queries_of_other_kinds_are_refused(model, call, needed):
    with pytest.raises(errors.UnsupportedQueryError, match=needed):
        call(model)


def test_a_frozen_model_says_what_it_is(tmp_path):
    recorded = vectors()["frozen"]["no_correction"]["config"]
    model = ForwardPassPerfModel.best_available(config_with(recorded, tmp_path))
    assert "fpm_learned" in repr(model)
    assert model.diagnostics()["provenance"]["selected_estimation_mode"] == "fpm_learned"
    assert model.deployment_topology()["correction_limits"] is None


def test_identity_is_that_of_the_artifact_trained_for_it():
    assert (
        ForwardPassPerfModel.learned_identity(BASE | {"estimation_mode": "op_level"})
        == (document()["metadata"]["identity"])
    )
