"""Training checkpoints of the recorded forests, and small ones made by hand."""

import math
from functools import cache

import msgspec
import numpy as np

from fpmsdk import FpmBatch, sample
from fpmsdk._ext.forest_features import FeatureProgram
from fpmsdk.learned.artifact import Artifact, StoreForest, Tree, read_artifact
from fpmsdk.learned.training_checkpoint import (
    TrainingCheckpoint,
    TrainingStore,
    write_training_checkpoint,
)
from tests.learned.recorded import artifact_bytes, vectors


@cache
def train_frames():
    return tuple(msgspec.msgpack.decode(frame) for frame in sample.train_frames())


@cache
def train_features(name, features):
    if name == "ranks":
        frames = train_frames()
        pairs = vectors()["two_ranks"]["train_pairs"]
        iterations = [[frames[one] | {"dp_rank": 0}, frames[two] | {"dp_rank": 1}] for one, two in pairs]
    else:
        first, last = vectors()["train_frames"]
        iterations = [[frame] for frame in train_frames()[first:last]]
    return FeatureProgram(features).matrix(FpmBatch.from_dicts(iterations).columns)[0]


@cache
def recorded_checkpoint(name):
    """The checkpoint that the public trainer wrote of a recorded forest."""
    artifact = read_artifact(artifact_bytes(name))
    features = train_features(name, artifact.features)
    stores = {}
    for kind, store in vectors()["forests"][name]["checkpoint"]["stores"].items():
        ids, targets = np.array(store["row_ids"]), np.array(store["y"])
        stores[kind] = TrainingStore(
            np.ascontiguousarray(features[ids]),
            targets,
            np.exp(targets),
            ids,
            tuple(np.array(limits) for limits in store["bin_thresholds"]),
            store["learning_rate"],
            store["l2_regularization"],
            store["min_samples_leaf"],
            store["max_depth"],
            store["max_leaf_nodes"],
        )
    return TrainingCheckpoint(artifact, artifact.identity, stores)


def written_checkpoint(folder, name="main"):
    path = folder / f"checkpoint-{name}"
    write_training_checkpoint(path, recorded_checkpoint(name))
    return path


def config_of(recorded, folder):
    """A recorded configuration with the placeholder of its checkpoint replaced by a directory."""
    learned = recorded["estimator_config"]["fpm_learned"]
    name = learned["checkpoint_path"].removeprefix("<checkpoint ").removesuffix(">")
    changed = learned | {"checkpoint_path": str(written_checkpoint(folder, name))}
    return recorded | {"estimator_config": recorded["estimator_config"] | {"fpm_learned": changed}}


def stump(feature, threshold, low, high):
    """A tree of one split."""
    return Tree(
        np.array([1, -1, -1], np.int32),
        np.array([2, -1, -1], np.int32),
        np.array([feature, 0, 0], np.int16),
        np.array([threshold, 0.0, 0.0]),
        np.array([0.0, low, high]),
        np.array([1, 0, 0], np.uint8),
    )


def stepped_checkpoint(identity):
    """Two stumps over decode batches of 1 to 4 requests, five rows each, 10 ms a request."""
    requests = np.repeat(np.arange(1.0, 5.0), 5)
    store = TrainingStore(
        requests[:, None].copy(),
        10.0 * requests,
        10.0 * requests,
        np.arange(20),
        (np.array([1.5, 2.5, 3.5]),),
        0.1,
        0.0,
        2,
        None,
        2,
    )
    forest = StoreForest(25.0, (stump(0, 2.5, -1.0, 1.0), stump(0, 2.5, -0.9, 0.9)))
    artifact = Artifact("decode", "ms", ("num_decode_requests",), {"pure_decode": forest}, {"identity": identity})
    return TrainingCheckpoint(artifact, identity, {"pure_decode": store})


def decode_iteration(requests, wall_ms):
    return {
        "wall_time": wall_ms / 1000.0,
        "scheduled_requests": {"num_decode_requests": requests, "sum_decode_kv_tokens": 100 * requests},
    }


def finite(values):
    return all(value is not None and math.isfinite(value) for value in values)
