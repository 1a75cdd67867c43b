"""The causal selector equals the public peer: predictions, every decision, evidence and calibrations."""

import pytest

from fpmsdk import ForwardPassPerfModel
from tests.learned.checkpoints import config_of
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
