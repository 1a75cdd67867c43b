"""Saved models as what prices a prediction. Source: predict-recommend.md sections 2.3 and 4, snapshot.md section 6."""

import copy

import pytest

from fpmsdk import ForwardPassPerfModel
from fpmsdk.errors import ConfigError, TimingError
from fpmsdk.prediction import predict

DEPLOYMENT = {"model": "org/m", "system": "h200_sxm", "backend": "vllm", "worker_type": "aggregated"}
CONFIG = {
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 40, "output_tokens": 3},
        "load": {"type": "concurrency", "concurrency": 1},
        "stop": {"requests": 3},
    },
    "engine": {
        "model": "org/m",
        "hardware": "h200_sxm",
        "estimation_mode": "fpm_regression",
        "workers": {"aggregated": {"kv_cache": {"capacity": {"type": "fixed", "blocks": 64}}}},
    },
}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """A regression of 1 ms a prompt token and 0.1 ms a cached token of a decode step."""
    model = ForwardPassPerfModel.best_available(DEPLOYMENT | {"estimation_mode": "fpm_regression"})
    for tokens in range(8, 104, 8):
        work = {"num_prefill_requests": 1, "sum_prefill_tokens": tokens}
        model.tune_with_fpms({"wall_time": 1e-3 * tokens, "scheduled_requests": work})
        work = {"num_decode_requests": 1, "sum_decode_kv_tokens": tokens}
        model.tune_with_fpms({"wall_time": 1e-4 * tokens, "scheduled_requests": work})
    folder = tmp_path_factory.mktemp("saved") / "snapshot"
    model.save_state_snapshot(folder)
    return str(folder)


def priced_by(snapshot, **changes):
    config = copy.deepcopy(CONFIG)
    config["engine"] |= {"estimator_config": {"state_snapshot": {"path": snapshot}}} | changes
    return config


def test_what_a_saved_model_has_learned_prices_a_prediction(snapshot, tmp_path):
    report = predict(priced_by(snapshot), tmp_path).report
    assert report["mean_ttft_ms"] == pytest.approx(40.0)
    # The second token is computed with the KV of 40 tokens, the third with that of 41.
    assert report["mean_itl_ms"] == pytest.approx((4.0 + 4.1) / 2)
    provenance = report["prediction_provenance"]["aggregated"]
    assert provenance["estimator"] == "fpm_regression"
    assert provenance["state_snapshot"]["path"] == snapshot


def test_every_difference_between_a_saved_model_and_the_deployment_is_told_and_nothing_is_written(snapshot, tmp_path):
    worker = {"parallelism": {"tensor": 2}, "kv_cache": {"capacity": {"type": "fixed", "blocks": 64}}}
    config = priced_by(snapshot, hardware="b200_sxm", model="org/other", workers={"aggregated": worker})
    config["engine"]["estimator_config"]["correction"] = {"enabled": False}
    with pytest.raises(ConfigError) as caught:
        predict(config, tmp_path / "output")
    _, _, told = str(caught.value).partition("is of another deployment: ")
    assert told.split("; ") == [
        "model is 'org/other', the snapshot has 'org/m'",
        "system is 'b200_sxm', the snapshot has 'h200_sxm'",
        "tp is 2, the snapshot has 1",
        "estimator_config.correction.enabled is False, the snapshot has True",
    ]
    assert not (tmp_path / "output").exists()


def test_a_mode_must_be_named_for_a_saved_model(snapshot, tmp_path):
    with pytest.raises(ConfigError, match="estimation_mode is 'auto', the snapshot has 'fpm_regression'"):
        predict(priced_by(snapshot, estimation_mode="auto"), tmp_path / "output")


def test_a_regression_that_has_seen_nothing_prices_no_prediction(tmp_path):
    with pytest.raises(TimingError, match="training observations required.*state_snapshot"):
        predict(CONFIG, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_learned_model_knows_whole_passes_and_prices_no_parts(tmp_path):
    config = copy.deepcopy(CONFIG)
    config["engine"]["estimation_mode"] = "fpm_learned"
    config["execution"] = {"mixed_pass_pricing": "separate"}
    with pytest.raises(ConfigError, match="fpm_learned prices whole passes.*use composed"):
        predict(config, tmp_path / "output")
    assert not (tmp_path / "output").exists()
