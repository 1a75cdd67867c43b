"""The recorded forests and streams of the public peer, as files and frames."""

import json
from functools import cache

from fpmsdk import sample
from tests.vectors import load_vectors


def vectors():
    return load_vectors("learned_peer")


@cache
def artifact_bytes(name):
    """An artifact as the peer's trainer wrote it."""
    return json.dumps(vectors()["forests"][name]["artifact"], separators=(",", ":")).encode()


def artifact_path(folder, name):
    path = folder / f"{name}.json"
    path.write_bytes(artifact_bytes(name))
    return path


def config_with(recorded, folder):
    """A recorded configuration with the placeholders of artifacts replaced by files."""
    learned = recorded["estimator_config"]["fpm_learned"]
    name = learned["artifact_path"].removeprefix("<artifact ").removesuffix(">")
    estimator = recorded["estimator_config"] | {
        "fpm_learned": learned | {"artifact_path": str(artifact_path(folder, name))}
    }
    return recorded | {"estimator_config": estimator}


@cache
def eval_frames():
    first, last = vectors()["eval_frames"]
    return tuple(sample.eval_frames()[first:last])
