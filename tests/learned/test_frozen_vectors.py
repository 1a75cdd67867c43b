"""Frozen forests equal the public peer bit for bit: every prediction before its tune, factors and diagnostics."""

import msgspec
import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, sample
from fpmsdk.metrics import FpmBatch
from tests.learned.checkpoints import config_of
from tests.learned.recorded import artifact_bytes, config_with, eval_frames, vectors

FROZEN = vectors()["frozen"]
FROM_LEARNED = vectors()["from_learned"]
TWO_RANKS = vectors()["two_ranks"]


def predicted(model, iterations):
    predictions = []
    for iteration in iterations:
        predictions.append(model.estimate_forward_pass_time_ms(iteration))
        model.tune_with_fpms([iteration])
    return predictions


def check_reports(model, case):
    report = model.diagnostics()
    assert {key: report[key] for key in case["diagnostics"]} == case["diagnostics"]
    assert model.learned_online_diagnostics() == case["learned"]
    if "factors" in case:
        assert case["factors"] == {
            "min": model.get_min_correction_factor(),
            "max": model.get_max_correction_factor(),
            "avg": model.get_avg_correction_factor(),
        }


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_model_predicts_and_reports_as_recorded(name, tmp_path):
    case = FROZEN[name]
    model = ForwardPassPerfModel.best_available(config_with(case["config"], tmp_path))
    iterations = [[frame] for frame in eval_frames()[: len(case["predictions"])]]
    assert predicted(model, iterations) == case["predictions"]
    check_reports(model, case)


@pytest.mark.parametrize("name", FROM_LEARNED)
def test_a_model_of_an_artifact_alone_predicts_and_reports_as_recorded(name):
    case = FROM_LEARNED[name]
    model = ForwardPassPerfModel.from_learned(artifact_bytes(case["forest"]).decode(), case["options"])
    iterations = [[frame] for frame in eval_frames()[: len(case["predictions"])]]
    assert predicted(model, iterations) == case["predictions"]
    assert model.learned_feature_names() == case["feature_names"]
    assert model.diagnostics()["provenance"] is None
    check_reports(model, case)


@pytest.mark.parametrize("source", ["checkpoint", "artifact"])
def test_iterations_of_two_ranks_are_predicted_as_recorded(source, tmp_path):
    case = TWO_RANKS["runs"]["frozen_hybrid"]
    config = config_of(case["config"], tmp_path)
    if source == "artifact":
        learned = {"artifact_path": "<artifact ranks>", "adaptation": "frozen"}
        estimator = case["config"]["estimator_config"] | {"fpm_learned": learned}
        config = config_with(case["config"] | {"estimator_config": estimator}, tmp_path)
    model = ForwardPassPerfModel.best_available(config)
    frames = [msgspec.msgpack.decode(frame) for frame in sample.eval_frames()]
    iterations = [[frames[one] | {"dp_rank": 0}, frames[two] | {"dp_rank": 1}] for one, two in TWO_RANKS["eval_pairs"]]
    assert predicted(model, iterations) == case["predictions"]
    check_reports(model, case)


@pytest.mark.parametrize("name", ["hybrid_small_limits", "wide_hybrid", "wide_no_correction"])
def test_a_batch_is_estimated_like_its_iterations_one_by_one(name, tmp_path):
    model = ForwardPassPerfModel.best_available(config_with(FROZEN[name]["config"], tmp_path))
    model.tune_with_fpms([[frame] for frame in eval_frames()[:300]])
    one_by_one = [model.estimate_forward_pass_time_ms(frame) for frame in eval_frames()]
    batch = model.estimate_many(FpmBatch.from_frames(eval_frames()))
    np.testing.assert_array_equal(batch, np.array(one_by_one, float))
