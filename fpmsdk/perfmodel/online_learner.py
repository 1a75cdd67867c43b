"""The learner behind a checkpoint: from its files to stores that go on learning, and back.

Source: regression-and-learned.md sections 4.2 and 4.7.
"""

import os
import time
from typing import Any, NamedTuple

import numpy as np

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.learned_online import OnlineLearner
from fpmsdk._ext.online import OnlineStore
from fpmsdk.config.schema import shown
from fpmsdk.errors import LearnedModelError, StateSnapshotError
from fpmsdk.files import sha256
from fpmsdk.learned.artifact import Artifact, StoreForest, Tree
from fpmsdk.learned.identity import require_identity
from fpmsdk.learned.online_seed import seed_arrays
from fpmsdk.learned.runtime_checkpoint import (
    RuntimeCheckpoint,
    RuntimeState,
    is_runtime_manifest,
    read_runtime_checkpoint,
)
from fpmsdk.learned.training_checkpoint import (
    MANIFEST_FILE,
    Read,
    TrainingCheckpoint,
    checkpoint_error,
    read_training_checkpoint,
)
from fpmsdk.perfmodel.online_state import LEARNER_STORE, ONLINE_MODEL, ONLINE_STORE, check_online_store
from fpmsdk.perfmodel.state_registry import STATES
from fpmsdk.snapshot.state import StatePart

# What of `estimator_config.fpm_learned` names files and not behaviour.
_PLACES = ("artifact_path", "checkpoint_path", "source_sha256")


class Learned(NamedTuple):
    """A learner with what it came from.

    `artifact` is what the checkpoint's `model.json` says; `source_path` and `source_sha256` name the training
    checkpoint behind it; `rejected` counts iterations without a valid time; `grouping_ms` tells how long grouping took,
    by kind.
    """

    learner: OnlineLearner
    artifact: Artifact
    source_path: str
    source_sha256: str
    rejected: int
    grouping_ms: dict[str, float]


def controls_of(config: dict[str, Any]) -> dict[str, Any]:
    """The controls of an online learner in a canonical configuration."""
    learned = config["estimator_config"]["fpm_learned"]
    return {name: value for name, value in learned.items() if name not in _PLACES}


def load_learner(config: dict[str, Any], read: Read) -> Learned:
    """The learner of the checkpoint that a canonical configuration names, a training or a runtime one.

    Parameters
    ----------
    config: canonical configuration of mode `fpm_learned`.
    read: gives the content of a file by its path.

    Raises
    ------
    LearnedModelError: the checkpoint is damaged, changed since it was pinned, of another version or deployment, or was
        saved under other controls.
    PerfDataNotAvailableError: a file cannot be read.
    """
    folder = config["estimator_config"]["fpm_learned"]["checkpoint_path"]
    manifest = pinned_manifest(config, read)
    if is_runtime_manifest(manifest):
        return _resumed(config, folder, read)
    return _seeded(config, folder, read)


def checkpoint_artifact(config: dict[str, Any], read: Read) -> tuple[Artifact, bytes]:
    """The forests of the checkpoint that a canonical configuration names, and their file.

    Raises
    ------
    As `load_learner`.
    """
    folder = config["estimator_config"]["fpm_learned"]["checkpoint_path"]
    checkpoint: RuntimeCheckpoint | TrainingCheckpoint
    if is_runtime_manifest(pinned_manifest(config, read)):
        checkpoint = read_runtime_checkpoint(folder, read)
        identity = checkpoint.state.identity
    else:
        checkpoint = read_training_checkpoint(folder, read)
        identity = checkpoint.identity
    require_worker_type(checkpoint.artifact, config)
    require_identity(identity, config, folder)
    return checkpoint.artifact, checkpoint.artifact.to_json_bytes()


def pinned_manifest(config: dict[str, Any], read: Read) -> bytes:
    """The manifest of the checkpoint that a canonical configuration pins.

    Raises
    ------
    LearnedModelError: it changed since it was pinned.
    """
    learned = config["estimator_config"]["fpm_learned"]
    content = read(os.path.join(learned["checkpoint_path"], MANIFEST_FILE))
    if sha256(content) != learned["source_sha256"].lower():
        raise checkpoint_error(
            learned["checkpoint_path"],
            MANIFEST_FILE,
            f"expected SHA-256 {learned['source_sha256']!r}, as source_sha256 pins it, found {sha256(content)!r}; "
            "it changed since it was pinned",
        )
    return content


def require_worker_type(artifact: Artifact, config: dict[str, Any]) -> None:
    """Raise `LearnedModelError` unless forests are those of a configuration's role."""
    if artifact.worker_type != config["worker_type"]:
        raise LearnedModelError(
            f"learned forward-pass model: worker_type: expected {config['worker_type']!r}, that of the configuration, "
            f"found {artifact.worker_type!r}",
            "worker_type",
        )


def _seeded(config: dict[str, Any], folder: str, read: Read) -> Learned:
    checkpoint = read_training_checkpoint(folder, read)
    artifact, controls = checkpoint.artifact, controls_of(config)
    require_worker_type(artifact, config)
    require_identity(checkpoint.identity, config, folder)
    stores, grouping_ms, last_id = {}, {}, -1
    for kind, rows in checkpoint.stores.items():
        begin = time.perf_counter()
        arrays = seed_arrays(artifact.stores[kind], rows, grouping=controls["history_bin_grouping"])
        grouping_ms[kind] = (time.perf_counter() - begin) * 1e3
        stores[kind] = OnlineStore(arrays, controls, WORKLOAD_KINDS.index(kind))
        _check_leaves(stores[kind], rows.min_samples_leaf, folder, kind)
        last_id = max(last_id, int(rows.row_ids.max()))
    learner = OnlineLearner(
        artifact.worker_type, artifact.features, artifact.target == "log_ms", stores, (0, last_id + 1)
    )
    return Learned(learner, artifact, folder, checkpoint.sha256, 0, grouping_ms)


def _check_leaves(store: OnlineStore, min_samples_leaf: int, folder: str, kind: str) -> None:
    trees, rows = store.forest.leaf_rows()
    if len(rows) and rows.min() < min_samples_leaf:
        tree = int(trees[np.argmin(rows)])
        raise checkpoint_error(
            folder,
            f"stores.{kind}.trees[{tree}]",
            f"expected at least min_samples_leaf {min_samples_leaf} rows in every leaf, found {int(rows.min())}",
        )


def _resumed(config: dict[str, Any], folder: str, read: Read) -> Learned:
    checkpoint = read_runtime_checkpoint(folder, read)
    artifact, state, controls = checkpoint.artifact, checkpoint.state, controls_of(config)
    require_worker_type(artifact, config)
    require_identity(state.identity, config, folder)
    for name in sorted(set(controls) | set(state.controls)):
        if state.controls.get(name) != controls.get(name):
            raise checkpoint_error(
                folder,
                f"state.bin, controls.{name}",
                f"online controls differ from saved runtime state: expected {shown(state.controls.get(name))}, as "
                f"saved, found {shown(controls.get(name))}",
            )
    try:
        clock, stores = _restored(state.parts, artifact, controls)
    except StateSnapshotError as fault:
        raise checkpoint_error(folder, "state.bin", str(fault)) from None
    accepted, next_row_id, rejected = clock
    learner = OnlineLearner(
        artifact.worker_type, artifact.features, artifact.target == "log_ms", stores, (accepted, next_row_id)
    )
    for kind, store in stores.items():
        _check_published(store, artifact.stores[kind], folder, kind)
    return Learned(learner, artifact, state.source_path, state.source_sha256, rejected, dict.fromkeys(stores, 0.0))


def _restored(
    content: bytes, artifact: Artifact, controls: dict[str, Any]
) -> tuple[tuple[int, int, int], dict[str, OnlineStore]]:
    parts = STATES.decode(content)
    expected = [(LEARNER_STORE, ONLINE_MODEL.name), *((kind, ONLINE_STORE.name) for kind in artifact.stores)]
    found = [(part.store, part.layout.name) for part in parts]
    if found != expected:
        raise StateSnapshotError(f"stores: expected {expected}, found {found}")
    accepted, next_row_id, rejected = parts[0].arrays["clock"].tolist()
    stores, total = {}, 0
    for part in parts[1:]:
        try:
            check_online_store(part.arrays, controls, len(artifact.features))
            stores[part.store] = OnlineStore(part.arrays, controls, WORKLOAD_KINDS.index(part.store))
            stores[part.store].check_restored()
        except StateSnapshotError as fault:
            raise StateSnapshotError(f"store {part.name}: {fault}") from None
        total += stores[part.store].counters()["accepted_observations"]
        for name, limit in (("stamps", accepted), ("row_ids", next_row_id - 1)):
            largest = int(part.arrays[name].max(initial=0))
            if largest > max(limit, 0):
                raise StateSnapshotError(f"store {part.name}: field {name}: expected at most {limit}, found {largest}")
    if total != accepted:
        raise StateSnapshotError(f"store {LEARNER_STORE}: accepted_observations: expected {total}, found {accepted}")
    return (accepted, next_row_id, rejected), stores


def _check_published(store: OnlineStore, saved: StoreForest, folder: str, kind: str) -> None:
    # The forests beside the state are what its trees say.
    mine = store_forest(store)
    same = mine.baseline == saved.baseline and len(mine.trees) == len(saved.trees)
    for one, other in zip(mine.trees, saved.trees, strict=False):
        same = same and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in Tree._fields)
    if not same:
        raise checkpoint_error(folder, f"model.json, stores.{kind}", "expected the trees of state.bin, found others")


def store_forest(store: OnlineStore) -> StoreForest:
    """The trees of a store as an artifact holds them."""
    trees = (
        Tree(
            tree["left"],
            tree["right"],
            np.maximum(tree["feature"], 0).astype(np.int16),
            tree["threshold"],
            tree["value"],
            tree["missing_left"].astype(np.uint8),
        )
        for tree in store.trees()
    )
    return StoreForest(store.forest.baseline, tuple(trees))


def published_artifact(learned: Learned) -> Artifact:
    """The artifact of a learner's trees as they are now."""
    stores = {kind: store_forest(store) for kind, store in learned.learner.trained().items()}
    return learned.artifact._replace(stores=stores)


def learner_parts(learned: Learned, rejected: int) -> list[StatePart]:
    """Copies of everything that a learner keeps; `rejected` counts iterations without a valid time so far."""
    clock = np.array([*learned.learner.clocks(), rejected], np.int64)
    stores = learned.learner.trained()
    return [
        StatePart(LEARNER_STORE, ONLINE_MODEL, {"clock": clock}),
        *(StatePart(kind, ONLINE_STORE, _ordered(store.saved())) for kind, store in stores.items()),
    ]


def _ordered(arrays: dict[str, Any]) -> dict[str, Any]:
    return {item.name: arrays[item.name] for item in ONLINE_STORE.fields}


def runtime_checkpoint(
    learned: Learned, config: dict[str, Any], identity: dict[str, Any], rejected: int, *, source_path: str
) -> RuntimeCheckpoint:
    """A learner as a runtime checkpoint.

    Parameters
    ----------
    config: canonical configuration, for the controls.
    identity: of the deployment.
    rejected: iterations without a valid time, so far.
    source_path: of the training checkpoint; empty inside a saved state.
    """
    state = RuntimeState(
        controls=controls_of(config),
        identity=identity,
        source_path=source_path,
        source_sha256=learned.source_sha256,
        parts=bytes(STATES.encode(learner_parts(learned, rejected))),
    )
    return RuntimeCheckpoint(published_artifact(learned), state)
