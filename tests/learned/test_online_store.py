"""Rules of the online learner: weights, batches, ages, splits, draws, and what holds whatever it is fed.

Numbers are those of the specification's examples.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk import ForwardPassPerfModel, errors
from fpmsdk._ext.online import OnlineStore
from fpmsdk._ext.online_split import SplitSearch, key_of_node
from fpmsdk.config.estimator import FPM_LEARNED
from fpmsdk.learned.artifact import StoreForest, Tree
from fpmsdk.learned.identity import learned_identity
from fpmsdk.learned.online_seed import ids_digest, seed_arrays
from fpmsdk.learned.training_checkpoint import TrainingStore, write_training_checkpoint
from fpmsdk.perfmodel.online_state import ONLINE_STORE, check_online_store
from tests.learned.checkpoints import decode_iteration, recorded_checkpoint, stepped_checkpoint, stump

BASE = {
    "model": "tiny",
    "system": "cpu",
    "backend": "vllm",
    "worker_type": "decode",
    "estimation_mode": "fpm_learned",
    "fallback_policy": "deny",
}
EXACT = {"split_sampling_rate": 1.0, "split_rank_tolerance": 0.0}
UNWEIGHTED = {"history_weight": None, "history_weight_ramp_observations": 0}


@pytest.fixture
def stepped(tmp_path):
    """A model of two stumps over batches of one to four requests."""
    identity = learned_identity(ForwardPassPerfModel.normalize_config(BASE | {"estimation_mode": "fpm_regression"}))
    path = tmp_path / "checkpoint"
    write_training_checkpoint(path, stepped_checkpoint(identity))

    def build(**controls):
        learned = {"checkpoint_path": str(path)} | controls
        return ForwardPassPerfModel.best_available(BASE | {"estimator_config": {"fpm_learned": learned}})

    return build


def predictions(model):
    return [model.estimate_forward_pass_time_ms(decode_iteration(requests, 1.0)) for requests in (1, 4)]


def counters(model):
    return model.learned_online_diagnostics()["stores"]["pure_decode"]


STEPS = {
    "lazy": (UNWEIGHTED, [23.371487603305784, 26.9], [23.371487603305784, 27.352479338842976]),
    "eager": (
        UNWEIGHTED | {"derivative_refresh": "eager"},
        [23.35909090909091, 26.9],
        [23.35909090909091, 27.331818181818182],
    ),
    "half": (
        {"history_weight": 0.5, "history_weight_ramp_observations": 0},
        [25.033333333333335, 26.9],
        [24.55, 29.3375],
    ),
    "ramp": (
        {"history_weight": 0.5, "history_weight_ramp_observations": 4},
        [23.919266272189347, 26.9],
        [23.974090909090908, 28.35544938016529],
    ),
    "window": (UNWEIGHTED | {"recent_window": 1}, [23.371487603305784, 26.9], [23.1, 27.352479338842976]),
    "step": (
        UNWEIGHTED | {"update_step": 0.5},
        [23.236053719008265, 26.9],
        [23.304080578512398, 27.126756198347106],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_leaves_move_as_in_the_worked_example(stepped, name):
    controls, first, second = STEPS[name]
    model = stepped(update_mode="leaf_only", **controls)
    model.tune_with_fpms(decode_iteration(1, 30.0))
    assert predictions(model) == pytest.approx(first, rel=1e-14)
    model.tune_with_fpms(decode_iteration(4, 60.0))
    assert predictions(model) == pytest.approx(second, rel=1e-14)


def test_trees_are_rebuilt_as_in_the_worked_example(stepped):
    model = stepped(history_weight=0.1, history_weight_ramp_observations=0, **EXACT)
    model.tune_with_fpms(decode_iteration(1, 30.0))
    assert predictions(model) == pytest.approx([25.803846153846155, 27.85], rel=1e-14)
    assert (counters(model)["rebuilt_nodes"], counters(model)["eager_updates"]) == (6, 1)
    (store,) = model.export_learned_artifact()["stores"].values()
    assert [tree["threshold"][0] for tree in store["trees"]] == [3.5, 3.5]
    model.tune_with_fpms(decode_iteration(4, 60.0))
    assert predictions(model) == pytest.approx([25.671978021978024, 31.459972299168975], rel=1e-14)
    assert counters(model)["lazy_updates"] == 1


WEIGHTS = [
    (400, 0.1, 32, 64, {1: (0.9718828125, 12.246875), 16: (0.552, 12.2), 32: (0.108, 12.15), 40: (0.11, 9.9)}),
    (300, 0.1, 8, 4, {4: (0.5506666666666666, 34.7), 6: (0.5506666666666666, 34.7)}),
]


@pytest.mark.parametrize(("anchors", "weight", "ramp", "window", "expected"), WEIGHTS)
def test_weights_of_rows_ramp_up_with_the_recent_ones(anchors, weight, ramp, window, expected):
    store = constant_store(anchors, history_weight=weight, history_weight_ramp_observations=ramp, recent_window=window)
    for observation in range(1, max(expected) + 1):
        store.learn_rows(np.ones((1, 1)), np.array([5.0]), 1000 + observation, observation)
        if observation in expected:
            assert store.weights() == pytest.approx(expected[observation], rel=1e-12)


def controls(**changes):
    return FPM_LEARNED.read({}) | {"update_mode": "leaf_only"} | changes


def one_store(rows, targets, trees, **changes):
    thresholds = []
    for feature in range(rows.shape[1]):
        values = np.unique(rows[:, feature][~np.isnan(rows[:, feature])])
        thresholds.append((values[1:] + values[:-1]) / 2)
    settings = controls(**changes)
    store = TrainingStore(rows, targets, targets, np.arange(len(rows)), tuple(thresholds), 0.1, 0.0, 2, None, None)
    forest = StoreForest(float(targets.mean()), tuple(trees))
    return OnlineStore(seed_arrays(forest, store, grouping=settings["history_bin_grouping"]), settings, 0)


def constant_store(anchors, **changes):
    return one_store(np.ones((anchors, 1)), np.full(anchors, 5.0), [], **changes)


def test_batches_wait_and_the_window_evicts_the_oldest(stepped):
    model = stepped(update_mode="leaf_only", recent_window=4, update_every=3)
    seen = []
    for _ in range(8):
        model.tune_with_fpms(decode_iteration(2, 21.0))
        seen.append((counters(model)["recent_rows"], counters(model)["evicted_observations"]))
    assert seen == [(0, 0)] * 2 + [(3, 0)] * 3 + [(4, 2)] * 3
    assert counters(model)["pending_rows"] == 2
    model.flush_updates()
    found = counters(model)
    assert (found["recent_rows"], found["evicted_observations"], found["publications"]) == (4, 4, 3)
    model.flush_updates()
    assert counters(model)["publications"] == 3


def test_rows_leave_at_their_age(stepped):
    model = stepped(update_mode="leaf_only", recent_max_age_observations=3)
    for _ in range(6):
        model.tune_with_fpms(decode_iteration(2, 21.0))
    assert (counters(model)["recent_rows"], counters(model)["evicted_observations"]) == (3, 3)


def test_every_so_many_lazy_batches_one_is_eager(stepped):
    model = stepped(update_mode="leaf_only", eager_refresh_interval=5)
    eager = []
    for _ in range(10):
        model.tune_with_fpms(decode_iteration(2, 21.0))
        eager.append(counters(model)["eager_updates"])
    assert eager == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]


def test_iterations_without_a_time_are_rejected_and_idle_ones_are_not(stepped):
    model = stepped()
    model.tune_with_fpms([decode_iteration(2, 0.0)])
    model.tune_with_fpms([{"wall_time": 0.01, "scheduled_requests": {}}])
    assert model.learned_online_diagnostics()["rejected_observations"] == 1
    assert counters(model)["accepted_observations"] == 0


def test_the_serving_trees_change_at_a_batch_and_not_before(stepped):
    model = stepped(update_mode="leaf_only", update_every=3)
    before = predictions(model)
    for _ in range(2):
        model.tune_with_fpms(decode_iteration(4, 90.0))
        assert predictions(model) == before
    model.tune_with_fpms(decode_iteration(4, 90.0))
    assert predictions(model) != before


@pytest.mark.parametrize("mode", ["leaf_only", "structural"])
def test_a_batch_with_numbers_too_large_leaves_everything_as_it_was(stepped, mode):
    model = stepped(update_mode=mode, **EXACT)
    for observation in range(12):
        model.tune_with_fpms(decode_iteration(1 + observation % 4, 30.0))
    before, forest = predictions(model), model.export_learned_artifact()
    model.tune_with_fpms(decode_iteration(2, 1e308))
    found = counters(model)
    if mode == "structural":
        assert found["update_failures"] == 1
        assert predictions(model) == before
        assert model.export_learned_artifact() == forest
        assert (found["recent_rows"], found["pending_rows"]) == (12, 0)
    model.tune_with_fpms(decode_iteration(2, 20.0))
    assert all(math.isfinite(value) for value in predictions(model))


# --- draws ---


def test_the_key_of_a_node_is_the_public_hash_of_its_place():
    # XXH64, seed 0, of five little-endian numbers; the values are those of the reference implementation.
    assert key_of_node(0, 0, 0, 1, 0) == 4928936280806497302
    assert key_of_node(7, 3, 149, 21, 5) == 7885150006013739218
    assert key_of_node(2**64 - 1, 1, 2, 3, 4) == 13861800016426447202


@pytest.mark.parametrize(
    ("bins", "rate", "drawn"), [([2], 0.5, 1), ([8, 8], 0.5, 7), ([8, 8], 0.05, 1), ([200], 0.3, 59)]
)
def test_a_node_draws_its_share_of_candidates(bins, rate, drawn):
    search = SplitSearch(np.array(bins, np.int32), np.arange(len(bins), dtype=np.int32), 0.0, 2, rate)
    seen = set()
    for key in range(40):
        candidates = search.drawn(key_of_node(0, 0, key, 1, 0), -1)
        assert len(candidates) == drawn
        seen.update(candidates)
        kept = search.num_candidates - 1
        assert kept in search.drawn(key_of_node(0, 0, key, 1, 0), kept)
        assert len(search.drawn(key_of_node(0, 0, key, 1, 0), kept)) == drawn
    # Every candidate has its chance.
    assert len(seen) > 0.85 * search.num_candidates


def test_the_seed_decides_what_is_drawn():
    rows, targets = past()

    def learned(seed):
        changed = {"update_mode": "structural", "split_sampling_rate": 0.3, "split_rank_tolerance": 0.0, "seed": seed}
        store = one_store(rows, targets, [stump(0, 5.5, -0.5, 0.5)] * 6, **changed)
        feed(store, [(i % 9, float(i % 7), 1.0 + 0.9 * (i % 5)) for i in range(40)], 0)
        return store.predict_rows(rows).tolist()

    assert learned(3) == learned(3)
    assert learned(3) != learned(4)


# --- what holds whatever is learned ---

OBSERVATIONS = st.lists(
    st.tuples(st.integers(0, 12), st.one_of(st.floats(0.0, 12.0), st.just(math.nan)), st.floats(-3.0, 9.0)),
    min_size=1,
    max_size=40,
)
CONTROLS = st.fixed_dictionaries(
    {
        "update_mode": st.sampled_from(["leaf_only", "structural"]),
        "derivative_refresh": st.sampled_from(["lazy", "eager"]),
        "recent_window": st.integers(1, 12),
        "update_every": st.integers(1, 4),
        "history_weight": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "history_weight_ramp_observations": st.sampled_from([0, 4]),
        "mutable_tree_tail": st.sampled_from([None, 1, 2]),
        "split_sampling_rate": st.sampled_from([0.3, 1.0]),
        "split_rank_tolerance": st.sampled_from([0.0, 0.1]),
        "eager_refresh_interval": st.sampled_from([3, 32]),
        "seed": st.integers(0, 5),
    }
)


def past():
    numbers = np.random.default_rng(5)
    rows = np.stack([numbers.integers(0, 12, 60).astype(float), numbers.integers(0, 6, 60) * 2.0], axis=1)
    rows[::9, 1] = np.nan
    return rows, rows[:, 0] * 0.4 + np.nan_to_num(rows[:, 1], nan=3.0) * 0.2


@settings(max_examples=80, deadline=None)
@given(OBSERVATIONS, CONTROLS)
def test_a_store_restored_after_any_history_is_the_same_and_learns_the_same(observations, changed):
    rows, targets = past()
    trees = [stump(0, 5.5, -0.5, 0.5), stump(1, 3.0, -0.1, 0.2), stump(0, 2.5, -0.2, 0.1)]
    settings_of = controls(**changed)
    store = one_store(rows, targets, trees, **changed)
    half = len(observations) // 2
    feed(store, observations[:half], 0)
    saved = {item.name: store.saved()[item.name] for item in ONLINE_STORE.fields}
    ONLINE_STORE.check(saved)
    check_online_store(saved, settings_of, 2)
    restored = OnlineStore(saved, settings_of, 0)
    restored.check_restored()
    same_state(store, restored)
    feed(store, observations[half:], half)
    feed(restored, observations[half:], half)
    same_state(store, restored)


@settings(max_examples=40, deadline=None)
@given(OBSERVATIONS, CONTROLS)
def test_what_is_learned_does_not_depend_on_how_many_histograms_are_kept(observations, changed):
    rows, targets = past()
    trees = [
        Tree(
            np.array([1, 3, 5, -1, -1, -1, -1], np.int32),
            np.array([2, 4, 6, -1, -1, -1, -1], np.int32),
            np.array([0, 1, 1, 0, 0, 0, 0], np.int16),
            np.array([5.5, 3.0, 5.0, 0.0, 0.0, 0.0, 0.0]),
            np.array([0.0, 0.0, 0.0, -0.4, -0.1, 0.1, 0.5]),
            np.ones(7, np.uint8),
        )
    ] * 2
    changed = changed | {"update_mode": "structural"}
    stores = [one_store(rows, targets, trees, **changed, **kept) for kept in ({}, {"kept_cells": 0})]
    for store in stores:
        feed(store, observations, 0)
    same_state(*stores)


@settings(max_examples=60, deadline=None)
@given(OBSERVATIONS, CONTROLS)
def test_leaves_hold_their_rows_and_trees_keep_their_budgets(observations, changed):
    rows, targets = past()
    store = one_store(rows, targets, [stump(0, 5.5, -0.5, 0.5), stump(1, 3.0, -0.1, 0.2)], **changed)
    feed(store, observations, 0)
    trees, held = store.forest.leaf_rows()
    for tree in range(2):
        assert held[trees == tree].sum() == len(rows)
    counts, _ = store.forest.node_arrays()
    assert (counts <= 3).all()
    found = store.counters()
    assert found["recent_rows"] <= changed["recent_window"]
    assert found["publications"] == found["eager_updates"] + found["lazy_updates"]
    assert np.isfinite(store.predict_rows(rows)).all()


@pytest.mark.parametrize("mode", ["leaf_only", "structural"])
def test_an_eager_store_is_that_of_its_rows_alone(mode):
    # With every derivative anew, leaves depend on the rows at hand and not on those that came and went.
    rows, targets = past()
    trees = [stump(0, 5.5, -0.5, 0.5), stump(1, 3.0, -0.1, 0.2)]
    shared = {"update_mode": mode, "derivative_refresh": "eager", "recent_window": 6, "split_rank_tolerance": 1.0}
    long, short = one_store(rows, targets, trees, **shared), one_store(rows, targets, trees, **shared)
    observations = [(i % 9, float(i % 7), 1.0 + 0.3 * (i % 5)) for i in range(40)]
    feed(long, observations, 0)
    feed(short, observations[-6:], 34)
    np.testing.assert_array_equal(long.predict_rows(rows), short.predict_rows(rows))


def feed(store, observations, start):
    for number, (one, two, target) in enumerate(observations, start + 1):
        store.learn_rows(np.array([[float(one), two]]), np.array([target]), 100 + number, number)


def same_state(one, other):
    first, second = one.saved(), other.saved()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def ladder(leaves):
    """A tree that splits off one value after the other: x <= 0.5, x <= 1.5 and so on."""
    splits = range(leaves - 1)
    children = [number for split in splits for number in (2 * split + 1, -1)] + [-1]
    return Tree(
        np.array(children, np.int32),
        np.array([number + 1 if number >= 0 else -1 for number in children], np.int32),
        np.zeros(2 * leaves - 1, np.int16),
        np.array([number for split in splits for number in (split + 0.5, 0.0)] + [0.0]),
        np.zeros(2 * leaves - 1),
        np.ones(2 * leaves - 1, np.uint8),
    )


@pytest.mark.parametrize("mode", ["leaf_only", "structural"])
@pytest.mark.parametrize("leaves", [2, 64, 65, 200])
def test_every_row_of_the_past_is_in_the_leaf_that_its_values_lead_to(mode, leaves):
    # Value v occurs 2 + v % 3 times; the missing ones go left at the root.
    repeats = [2 + value % 3 for value in range(leaves)]
    rows = np.array([[float(value)] for value in range(leaves) for _ in range(repeats[value])] + [[math.nan]] * 5)
    store = one_store(rows, np.ones(len(rows)), [ladder(leaves)] * 2, update_mode=mode)
    trees, held = store.forest.leaf_rows()
    repeats[0] += 5
    for tree in range(2):
        assert held[trees == tree].tolist() == repeats


@pytest.mark.parametrize(
    ("field", "value", "message"), [("generation", 1, "generation: expected 0"), ("budget", 3, "budget: expected 4")]
)
def test_a_state_whose_trees_were_rebuilt_is_not_one_where_only_leaves_learn(field, value, message):
    rows, targets = past()
    store = one_store(rows, targets, [stump(0, 5.5, -0.5, 0.5), stump(1, 3.0, -0.1, 0.2)])
    saved = {item.name: store.saved()[item.name] for item in ONLINE_STORE.fields}
    check_online_store(saved, controls(), 2)
    saved[field][0] = value
    saved["tree_slots"][0] = 2 * saved["budget"][0] - 1
    with pytest.raises(errors.StateSnapshotError, match=message):
        check_online_store(saved, controls(), 2)
    check_online_store(saved, controls(update_mode="structural"), 2)


def test_features_that_bin_every_row_alike_share_a_column():
    store = recorded_checkpoint("main").stores["pure_decode"]
    forest = recorded_checkpoint("main").artifact.stores["pure_decode"]
    arrays = seed_arrays(forest, store, grouping=True)
    # A decode iteration has neither prefill tokens nor pairs: those two features are one constant column.
    assert arrays["column_of"].tolist() == [0, 1, 2, 2]
    assert (len(arrays["group_rows"]), arrays["group_rows"].sum()) == (279, 1158)
    assert ids_digest(store.row_ids).hex() == "d44482e105c772cb4615662c7a8e73f3211d5a9c5e645a83b677da51363a66b6"


# --- degenerate input ---


@pytest.mark.parametrize("mode", ["leaf_only", "structural"])
def test_constant_targets_and_a_single_observation_stay_finite(mode):
    store = one_store(np.ones((1, 1)), np.array([2.0]), [], update_mode=mode)
    store.learn_rows(np.ones((1, 1)), np.array([2.0]), 1, 1)
    assert store.predict_rows(np.ones((1, 1))).tolist() == [2.0]
    rows, _ = past()
    store = one_store(rows, np.full(len(rows), 4.0), [stump(0, 5.5, 0.0, 0.0)], update_mode=mode)
    for number in range(1, 30):
        store.learn_rows(rows[number : number + 1].copy(), np.array([4.0]), number, number)
    assert store.predict_rows(rows).tolist() == [4.0] * len(rows)
    assert store.counters()["update_failures"] == 0


@pytest.mark.parametrize("mode", ["leaf_only", "structural"])
def test_missing_values_are_learned_like_a_value(mode):
    rows, targets = past()
    targets = targets + np.where(np.isnan(rows[:, 1]), 2.0, 0.0)
    trees = [stump(1, 3.0, 0.0, 0.0)] * 40
    store = one_store(rows, targets, trees, update_mode=mode, recent_window=200, **EXACT)
    gap = [(4, math.nan, 9.0), (4, 4.0, 1.0)] * 40
    feed(store, gap, 0)
    missing, present = store.predict_rows(np.array([[4.0, math.nan], [4.0, 4.0]]))
    if mode == "structural":
        assert missing > present + 2.0
    assert np.isfinite([missing, present]).all()


@pytest.mark.slow
def test_ten_million_observations():
    rows, targets = past()
    store = one_store(rows, targets, [stump(0, 5.5, -0.5, 0.5)] * 5, recent_window=50)
    numbers = np.random.default_rng(1)
    block = 100_000
    for start in range(0, 10_000_000, block):
        drifting = np.stack(
            [numbers.integers(0, 12, block).astype(float), numbers.integers(0, 12, block) * 1.0], axis=1
        )
        store.learn_rows(drifting, drifting[:, 0] * 0.4 + start / 1e7, 100 + start, 1 + start)
    found = store.counters()
    assert (found["accepted_observations"], found["recent_rows"], found["update_failures"]) == (10_000_000, 50, 0)
    assert np.isfinite(store.predict_rows(rows)).all()
    assert store.nbytes() < 1_000_000


def test_the_errors_of_a_learner_name_what_it_needs(stepped, tmp_path):
    model = stepped()
    with pytest.raises(errors.LearnedModelError, match="takes a new directory, found ''"):
        model.save_online_checkpoint("")
    with pytest.raises(FileNotFoundError) as missing:
        model.save_online_checkpoint(tmp_path / "none" / "saved")
    assert missing.value.filename == str(tmp_path / "none" / "saved")
    (tmp_path / "there").mkdir()
    with pytest.raises(errors.LearnedModelError, match="there: the destination exists"):
        model.save_online_checkpoint(tmp_path / "there")
    assert model.get_min_correction_factor() is None
    with pytest.raises(errors.ConfigError, match="correction.enabled false"):
        ForwardPassPerfModel.best_available(
            BASE | {"estimator_config": {"fpm_learned": {"checkpoint_path": "x"}, "correction": {"enabled": True}}}
        )
