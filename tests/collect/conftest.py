"""Plans that the upstream collector made, copies of them to damage, and campaigns of a small plan."""

import copy
import gzip
import json
from pathlib import Path

import pytest

from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.planner import build_plan
from fpmsdk.sample.tiny import write_systems

VECTORS = Path(__file__).parents[1] / "vectors"
LIMITS = ["--fpm-max-num-batched-tokens", "32", "--fpm-max-num-seqs", "4", "--fpm-prefill-cudagraph-policy", "runtime"]


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


@pytest.fixture
def small_plan(tmp_path, monkeypatch, peer_plans):
    """A plan of one dense cell for each phase."""
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(write_systems(tmp_path / "systems")))
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "test")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(peer_plans["dense_runtime"]["config"]))

    def plan(*further):
        model = ["--model-path", "example/dense", "--gpu", "tiny_gpu", "--fpm-model-config", str(config)]
        common = [*model, "--fpm-max-gpus", "1", "--fpm-backend-version", "0.27.0", "--fpm-executor", "fake", *LIMITS]
        return build_plan(parse_arguments([*common, *further]))

    return plan


@pytest.fixture
def run(tmp_path, small_plan):
    """Run a campaign in folders of the test; returns its errors and its checkpoint."""

    def campaign(plan=None, *, executor=FakeExecutor, **options):
        plan = plan or small_plan()
        outcome = run_campaign(
            plan,
            executor=executor,
            artifact_root=tmp_path / "artifacts",
            checkpoint_dir=tmp_path / "checkpoint",
            database_root=tmp_path / "data",
            **options,
        )
        document = json.loads(outcome.checkpoint.read_text())
        # The file is sorted by name; the cells ran prefill first.
        known = document["cells"]
        document["cells"] = {cell.cell_id: known[cell.cell_id] for cell in plan.cells if cell.cell_id in known}
        return [error["classification"] for error in outcome.errors], document, outcome

    return campaign
