"""Plans that the upstream collector made, and copies of them to damage."""

import copy
import gzip
import json
from pathlib import Path

import pytest

VECTORS = Path(__file__).parents[1] / "vectors"


@pytest.fixture(scope="session")
def peer_plans():
    """Plans by name: the arguments and the model's configuration they were made of, and the document."""
    return json.loads(gzip.decompress((VECTORS / "collect_plans_peer.json.gz").read_bytes()))


@pytest.fixture
def dense_plan(peer_plans):
    return copy.deepcopy(peer_plans["dense_runtime"]["plan"])


@pytest.fixture
def moe_plan(peer_plans):
    return copy.deepcopy(peer_plans["moe"]["plan"])
