"""The causal selector equals the public peer: predictions, every decision, evidence and calibrations."""

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel
from fpmsdk.learned.artifact import StoreForest
from fpmsdk.learned.training_checkpoint import write_training_checkpoint
from tests.learned.checkpoints import config_of, recorded_checkpoint, stump
from tests.learned.recorded import eval_frames, vectors
from tests.learned.test_online_vectors import picked, same, two_rank_iterations

SELECTOR = vectors()["selector"]
CASES = SELECTOR | {"two_ranks": vectors()["two_ranks"]["runs"]["selector"]}


def moved(state):
    return ["s" if state["selected"] == "stable" else "o", state["streak"], state["switches"]]


@pytest.mark.parametrize("name", CASES)
def test_a_selector_predicts_and_decides_as_recorded(name, tmp_path):
    case = CASES[name]
    model = ForwardPassPerfModel.best_available(config_of(case["config"], tmp_path))
    iterations = two_rank_iterations() if name == "two_ranks" else [[frame] for frame in eval_frames()]
    iterations = iterations[: len(case["predictions"])]
    predictions, decisions = [], []
    for iteration, key in zip(iterations, case["key"], strict=True):
        predictions.append(model.estimate_forward_pass_time_ms(iteration))
        model.tune_with_fpms([iteration])
        states = model.learned_selector_diagnostics()["states"]
        decisions.append(None if key is None else moved(states[key]))
    same(predictions, case["predictions"])
    assert decisions == case["after_tune"]
    report = model.learned_selector_diagnostics()
    for state, expected in zip(report["states"], case["selector"]["states"], strict=True):
        for error in ("stable_ewma", "online_ewma"):
            assert state[error] == (None if expected[error] is None else pytest.approx(expected[error], rel=1e-9))
        assert state | {"stable_ewma": 0, "online_ewma": 0} == expected | {"stable_ewma": 0, "online_ewma": 0}
    assert {k: v for k, v in report.items() if k != "states"} == {
        k: v for k, v in case["selector"].items() if k != "states"
    }
    assert picked(model.diagnostics(), case["diagnostics"]) == case["diagnostics"]


def test_the_learning_expert_is_a_learner_alone_whatever_the_frozen_forests_read(tmp_path):
    # They read one feature of four; rebuilt trees read others.
    original = recorded_checkpoint("main")
    store = original.stores["pure_decode"]
    trained = original.artifact.stores["pure_decode"]
    root = stump(int(trained.trees[0].feature[0]), float(trained.trees[0].threshold[0]), -0.1, 0.1)
    forest = StoreForest(trained.baseline, (root,) * 6)
    artifact = original.artifact._replace(stores={"pure_decode": forest})
    write_training_checkpoint(
        tmp_path / "checkpoint", original._replace(artifact=artifact, stores={"pure_decode": store})
    )
    shared = {"recent_window": 8, "history_weight": 0.25, "history_weight_ramp_observations": 8, "update_every": 4}
    models = []
    for adaptation in ("causal_selector", "online"):
        learned = {"checkpoint_path": str(tmp_path / "checkpoint"), "adaptation": adaptation} | shared
        config = vectors()["identity_config"] | {"estimator_config": {"fpm_learned": learned}}
        model = ForwardPassPerfModel.best_available(config)
        model.tune_with_fpms([[frame] for frame in eval_frames()[:300]])
        models.append(model)
    selector, alone = (model._kind._learned.learner.trained()["pure_decode"].saved() for model in models)
    assert selector.keys() == alone.keys()
    for name, array in selector.items():
        np.testing.assert_array_equal(array, alone[name], err_msg=name)
    # Otherwise this would prove nothing.
    assert set(selector["feature"][selector["left"] >= 0].tolist()) - {int(root.feature[0])}
