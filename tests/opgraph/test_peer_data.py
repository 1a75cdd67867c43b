"""Graphs of the configurations bundled with a data package, against those that the peer built from them."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from fpmsdk.errors import FpmSdkError, ModelConfigError, UnsupportedModelError
from fpmsdk.opgraph import build_graph, read_model_config
from fpmsdk.opgraph.model_config import bundled_models
from tests.opgraph.checkpoints import deployment
from tests.vectors import load_vectors

pytestmark = pytest.mark.peer_data

FIELDS = {
    "tp_size": "tp",
    "pp_size": "pp",
    "attention_dp_size": "attention_dp",
    "dcp_size": "dcp",
    "shared_layer": "enable_shared_layer",
}


@pytest.fixture(scope="module")
def bundle():
    folder = Path(os.environ["FPMSDK_TEST_SYSTEMS_013"]).parent / "model_configs"
    assert folder.is_dir()
    return folder


def digest(spec):
    return hashlib.sha256(json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def test_every_recorded_deployment_builds_the_same_graph_or_fails(bundle):
    """Lane orders are left out: they depend on tables."""
    differing = []
    for case, expected in load_vectors("opgraph_peer"):
        fields = {FIELDS.get(key, key): value for key, value in case.items() if key not in ("model_path", "backend")}
        if fields.get("transfer_policy"):
            fields["transfer_policy"] = tuple(fields["transfer_policy"])
        try:
            model = read_model_config(case["model_path"], [bundle])
            built = digest(build_graph(model, deployment(case["backend"], **fields), lambda *_: ()).to_dict())
        except FpmSdkError:
            built = None
        if built != expected:
            differing.append(case)
    assert differing == []


def test_every_bundled_configuration_is_read_or_refused_by_its_architecture(bundle):
    models = [
        name for name in bundled_models([bundle]) if (bundle / f"{name.replace('/', '--')}_config.json").is_file()
    ]
    refused = set()
    for name in models:
        try:
            read_model_config(name, [bundle])
        except ModelConfigError as fault:
            raise AssertionError(f"{name}: {fault}") from fault
        except UnsupportedModelError:
            refused.add(name)
    assert len(models) - len(refused) >= 40
