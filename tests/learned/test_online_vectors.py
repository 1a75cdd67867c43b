"""The online learner equals the public peer: every prediction before its tune, every counter, every reported id."""

import json

import msgspec
import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, sample
from fpmsdk.learned.artifact import read_artifact
from tests.learned.checkpoints import config_of
from tests.learned.recorded import eval_frames, vectors

ONLINE = vectors()["online"]
TWO_RANKS = vectors()["two_ranks"]
MEASURED = ("training_state_bytes", "history_grouping_ms")


def same(found, expected):
    assert len(found) == len(expected)
    assert [value is None for value in found] == [value is None for value in expected]
    numbers = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    np.testing.assert_allclose([a for a, _ in numbers], [b for _, b in numbers], rtol=1e-9, atol=0.0)


def counted(report):
    """A report without what is measured and not learned."""
    stores = {
        kind: {name: value for name, value in store.items() if name not in MEASURED}
        for kind, store in report["stores"].items()
    }
    return {name: value for name, value in report.items() if name not in MEASURED} | {"stores": stores}


def picked(report, shape):
    """The entries of a report that another one has."""
    return {
        name: picked(report[name], value) if isinstance(value, dict) else report[name] for name, value in shape.items()
    }


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_model_predicts_and_counts_as_recorded(name, tmp_path):
    case = ONLINE[name]
    model = ForwardPassPerfModel.best_available(config_of(case["config"], tmp_path))
    middle = {entry["before_frame"]: entry["learned"] for entry in case["middle"]}
    predictions = []
    for number, frame in enumerate(eval_frames()):
        if number in middle:
            assert picked(model.learned_online_diagnostics(), middle[number]) == middle[number]
        predictions.append(model.estimate_forward_pass_time_ms([frame]))
        model.tune_with_fpms([[frame]])
    same(predictions, case["predictions"])
    assert counted(model.learned_online_diagnostics()) == case["learned"]
    report = model.diagnostics()
    assert picked(report, case["diagnostics"]) == case["diagnostics"]
    if "after_flush" in case:
        model.flush_updates()
        same(
            [model.estimate_forward_pass_time_ms([frame]) for frame in eval_frames()[-20:]],
            case["after_flush"]["predictions"],
        )
        assert counted(model.learned_online_diagnostics()) == case["after_flush"]["learned"]
    if "final_forest" in case:
        same_forests(model.export_learned_artifact(), case["final_forest"])


def same_forests(artifact, expected):
    stores = read_artifact(json.dumps(artifact).encode()).stores
    assert set(stores) == set(expected)
    for kind, store in stores.items():
        assert store.baseline == expected[kind]["baseline"]
        for tree, recorded in zip(store.trees, expected[kind]["trees"], strict=True):
            same_subtree(tree, 0, recorded, 0)


def same_subtree(tree, node, recorded, other):
    is_leaf = recorded["left"][other] < 0
    assert (tree.left[node] < 0) == is_leaf
    if is_leaf:
        np.testing.assert_allclose(tree.value[node], recorded["value"][other], rtol=1e-9, atol=1e-15)
        return
    assert (tree.feature[node], tree.threshold[node]) == (recorded["feature"][other], recorded["threshold"][other])
    same_subtree(tree, tree.left[node], recorded, recorded["left"][other])
    same_subtree(tree, tree.right[node], recorded, recorded["right"][other])


@pytest.mark.parametrize("name", ["online_structural", "online_leaf_only"])
def test_iterations_of_two_ranks_are_learned_as_recorded(name, tmp_path):
    case = TWO_RANKS["runs"][name]
    model = ForwardPassPerfModel.best_available(config_of(case["config"], tmp_path))
    predictions = []
    for iteration in two_rank_iterations():
        predictions.append(model.estimate_forward_pass_time_ms(iteration))
        model.tune_with_fpms([iteration])
    same(predictions, case["predictions"])
    assert picked(model.diagnostics(), case["diagnostics"]) == case["diagnostics"]
    assert counted(model.learned_online_diagnostics()) == case["learned"]


def two_rank_iterations():
    frames = [msgspec.msgpack.decode(frame) for frame in sample.eval_frames()]
    return [[frames[one] | {"dp_rank": 0}, frames[two] | {"dp_rank": 1}] for one, two in TWO_RANKS["eval_pairs"]]


def test_one_call_with_many_iterations_learns_as_many_calls_with_one(tmp_path):
    config = config_of(ONLINE["structural_batches"]["config"], tmp_path)
    one, many = ForwardPassPerfModel.best_available(config), ForwardPassPerfModel.best_available(config)
    for frame in eval_frames()[:200]:
        one.tune_with_fpms([[frame]])
    many.tune_with_fpms([[frame] for frame in eval_frames()[:200]])
    assert counted(one.learned_online_diagnostics()) == counted(many.learned_online_diagnostics())
    queries = eval_frames()[200:300]
    assert [one.estimate_forward_pass_time_ms(q) for q in queries] == [
        many.estimate_forward_pass_time_ms(q) for q in queries
    ]
