"""Saved learners: what lies in the snapshot, what has to have happened before, and every rule of their state."""

import json
import os
import threading

import msgspec
import pytest

from fpmsdk import ForwardPassPerfModel, errors, inspect_state_snapshot
from fpmsdk.files import sha256
from fpmsdk.learned.runtime_checkpoint import read_runtime_checkpoint, runtime_files
from fpmsdk.perfmodel.online_learner import load_learner
from fpmsdk.perfmodel.state_registry import STATES
from tests.snapshot.kinds import LEARNING, continued, iterations, learning_config
from tests.snapshot.tampering import edited, repinned

BATCHES = "learned online batches"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Model, snapshot and configuration of every learner, by name."""
    folder = tmp_path_factory.mktemp("learners")
    found = {}
    for name in LEARNING:
        model = ForwardPassPerfModel.best_available(learning_config(folder, **LEARNING[name]))
        model.tune_with_fpms([[rank] for rank in iterations(learning_config(folder), "train", 302)])
        found[name] = model, folder / name, model.save_state_snapshot(folder / name)
    return found


@pytest.fixture
def copy_of(saved, tmp_path):
    def copied(name):
        model = saved[name][0]
        folder = tmp_path / name
        return folder, model.save_state_snapshot(folder)

    return copied


@pytest.mark.parametrize("name", ["learned online", "learned causal_selector"])
def test_subtrees_were_rebuilt_before_the_save(saved, name):
    stores = saved[name][0].learned_online_diagnostics()["stores"].values()
    assert sum(store["rebuilt_nodes"] for store in stores) > 0


def test_rows_that_wait_are_saved_and_not_flushed(saved):
    model, _, config = saved[BATCHES]
    waiting = {kind: store["pending_rows"] for kind, store in model.learned_online_diagnostics()["stores"].items()}
    assert sum(waiting.values()) > 0
    restored = ForwardPassPerfModel.best_available(config)
    found = restored.learned_online_diagnostics()["stores"]
    assert {kind: store["pending_rows"] for kind, store in found.items()} == waiting


@pytest.mark.parametrize("name", LEARNING)
def test_a_snapshot_holds_the_checkpoint_without_the_path_of_its_source(saved, name):
    _, folder, config = saved[name]
    assert sorted(os.listdir(folder / "online")) == ["manifest.json", "model.json", "state.bin"]
    assert config["estimator_config"]["fpm_learned"]["checkpoint_path"] == str(folder / "online")
    assert read_runtime_checkpoint(folder / "online").state.source_path == ""
    assert (folder / "learned").exists() == (name == "learned causal_selector")
    kind = "causal_selector" if name == "learned causal_selector" else "online"
    assert inspect_state_snapshot(folder)["kind"] == f"learned_{kind}"


@pytest.mark.parametrize("name", ["learned online", "learned causal_selector"])
def test_a_model_that_rejects_tuning_does_not_flush(saved, name):
    restored = ForwardPassPerfModel.best_available(saved[name][2])
    with pytest.raises(errors.TuningRejectedError):
        restored.flush_updates()


@pytest.mark.parametrize("name", ["learned online", "learned causal_selector"])
@pytest.mark.parametrize("file", ["manifest.json", "model.json", "state.bin"])
def test_a_checkpoint_that_changed_is_refused_and_one_that_is_gone_not_found(copy_of, name, file):
    folder, config = copy_of(name)
    path = folder / "online" / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    with pytest.raises(errors.StateSnapshotError, match=f"online/{file}"):
        ForwardPassPerfModel.best_available(config)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        ForwardPassPerfModel.best_available(config)


def test_a_forest_of_another_state_is_refused(copy_of):
    folder, _ = copy_of("learned online")
    checkpoint = read_runtime_checkpoint(folder / "online")
    kind, store = next(iter(checkpoint.artifact.stores.items()))
    trees = (store.trees[0]._replace(value=store.trees[0].value + 0.5), *store.trees[1:])
    stores = checkpoint.artifact.stores | {kind: store._replace(trees=trees)}
    config = replaced(folder, checkpoint._replace(artifact=checkpoint.artifact._replace(stores=stores)))
    with pytest.raises(errors.StateSnapshotError, match=f"model.json, stores.{kind}: expected the trees of state.bin"):
        ForwardPassPerfModel.best_available(config)


def replaced(folder, checkpoint):
    """Write another checkpoint into a snapshot, behind digests that fit."""
    files = runtime_files(checkpoint)
    for name, content in files.items():
        (folder / "online" / name).write_bytes(content)

    def repin(document):
        for record in document["files"]:
            if record["path"].startswith("online/"):
                content = files[record["path"].removeprefix("online/")]
                record |= {"size": len(content), "sha256": sha256(content)}
        document["identity"]["estimator_config"]["fpm_learned"]["source_sha256"] = sha256(files["manifest.json"])

    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["estimator_config"]["fpm_learned"]["source_sha256"] = sha256(files["manifest.json"])
    path.write_text(json.dumps(config))
    return repinned(folder, change=repin)


def set_to(store, name, place, value):
    def edit(arrays):
        arrays[f"{store} ({'online_model' if store == 'learner' else 'online_store'})"][name].reshape(-1)[place] = value

    return edit


def cut(name, store="pure_decode"):
    def edit(arrays):
        arrays[f"{store} (online_store)"][name] = arrays[f"{store} (online_store)"][name][:-1]

    return edit


EDITS = {
    "a threshold out of order": (set_to("pure_decode", "thresholds", 1, -5.0), "thresholds: expected strictly incr"),
    "a threshold too many": (set_to("pure_decode", "threshold_start", 1, 0), "threshold_start"),
    "a column that is not there": (set_to("pure_decode", "column_of", 0, 9), "column_of"),
    "a code beyond the bins": (set_to("pure_decode", "columns", 3, 250), "columns: expected codes up to"),
    "more rows than can be counted": (set_to("pure_decode", "group_rows", 0, 2**63 - 1), "group_rows: expected fewer"),
    "more nodes than groups need": (set_to("pure_decode", "tree_slots", 0, 2**40), "tree_slots: expected at most"),
    "no learning rate": (set_to("pure_decode", "rates", 1, 0.0), "rates: expected a learning rate above 0"),
    "a child before its parent": (set_to("pure_decode", "left", 1, 0), "nodes in preorder"),
    "a tree without its end": (set_to("pure_decode", "tree_nodes", 0, 3), "tree_nodes"),
    "a budget below its leaves": (set_to("pure_decode", "budget", 1, 1), "budget of tree 0"),
    "a split of no feature": (set_to("pure_decode", "feature", 0, 99), "feature: expected below 4"),
    "a split of no bin": (set_to("pure_decode", "bin", 0, 255), "bin: expected a bin of its feature"),
    "a value inside a tree": (set_to("pure_decode", "value", 0, 0.5), "value: expected 0.0 at inner nodes"),
    "rows out of order": (set_to("pure_decode", "row_ids", 1, 0), "row_ids: expected ascending"),
    "a row from the future": (set_to("pure_decode", "stamps", -1, 1 << 40), "stamps: expected at most 301"),
    "an id that was not given yet": (set_to("pure_decode", "row_ids", -1, 1 << 40), "row_ids: expected at most"),
    "a derivative of no row": (set_to("pure_decode", "gradients", -1, 77.0), "recent_gradient: expected .* rounding"),
    "a derivative of a fixed tree": (set_to("pure_decode", "gradients", 0, 0.5), "gradients: expected 0.0 of trees"),
    "more rows than there are": (set_to("pure_decode", "clock", 0, 999), "recent_rows, pending_rows"),
    "a batch that should have run": (set_to("pure_decode", "clock", 1, 4), "recent_rows, pending_rows"),
    "publications of no update": (set_to("pure_decode", "clock", 4, 1), "clock \\(publications\\)"),
    "observations of nobody": (set_to("learner", "clock", 0, 5000), "accepted_observations: expected 301"),
    "a row without its codes": (cut("codes"), "codes"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_state_that_no_learner_leaves_behind_is_refused_by_field(saved, name):
    edit, message = EDITS[name]
    _, folder, config = saved[BATCHES]
    checkpoint = read_runtime_checkpoint(folder / "online")
    state = msgspec.structs.replace(checkpoint.state, parts=edited(checkpoint.state.parts, edit))
    files = runtime_files(checkpoint._replace(state=state))
    pinned = json.loads(json.dumps(config))
    pinned["estimator_config"]["fpm_learned"]["source_sha256"] = sha256(files["manifest.json"])
    with pytest.raises(errors.LearnedModelError, match=message):
        load_learner(pinned, lambda path: files[os.path.basename(path)])


SELECTOR_EDITS = {
    "errors before anything was seen": ("stable_ewma", 0, 0.5, "0.0 without observations"),
    "observations of an untrained store": ("observations", 6, 3, "0, as nothing was trained"),
    "a streak that should have switched": ("streak", 1, 1, "streak of pure_decode, decode: expected below 1"),
    "switches beyond the observations": ("switches", 1, 10_000, "switches of pure_decode, decode"),
    "an expert that no switch selected": ("online_selected", 0, 1, "online_selected of pure_decode, prefill"),
}


@pytest.mark.parametrize("name", SELECTOR_EDITS)
def test_evidence_that_no_stream_gives_is_refused_by_key(copy_of, name):
    field, key, value, message = SELECTOR_EDITS[name]
    folder, _ = copy_of("learned causal_selector")

    def edit(arrays):
        arrays["selector (causal_selector)"][field][key] = value

    config = repinned(folder, state=edited((folder / "state.bin").read_bytes(), edit))
    with pytest.raises(errors.StateSnapshotError, match=message):
        ForwardPassPerfModel.best_available(config)


def test_the_stores_of_a_learner_are_those_of_its_forests(saved):
    _, folder, config = saved["learned online"]
    checkpoint = read_runtime_checkpoint(folder / "online")
    parts = STATES.decode(checkpoint.state.parts)
    state = msgspec.structs.replace(checkpoint.state, parts=STATES.encode(parts[:-1]))
    files = runtime_files(checkpoint._replace(state=state))
    pinned = json.loads(json.dumps(config))
    pinned["estimator_config"]["fpm_learned"]["source_sha256"] = sha256(files["manifest.json"])
    with pytest.raises(errors.LearnedModelError, match="stores: expected .*pure_prefill"):
        load_learner(pinned, lambda path: files[os.path.basename(path)])


def test_a_learner_saved_while_another_thread_tunes_is_that_of_some_call(saved, tmp_path):
    # Copies are taken under the lock of tuning, so that the forests and the state of one checkpoint agree.
    _, _, config = saved["learned online"]
    model = ForwardPassPerfModel.best_available(continued(config))
    frames = iterations(config, "eval", 200)
    tuning = threading.Thread(target=lambda: [model.tune_with_fpms([[frame]]) for frame in frames])
    tuning.start()
    for number in range(5):
        pinned = model.save_state_snapshot(tmp_path / str(number))
        restored = ForwardPassPerfModel.best_available(pinned)
        assert 301 <= restored.learned_online_diagnostics()["model_version"] <= 501
    tuning.join()
