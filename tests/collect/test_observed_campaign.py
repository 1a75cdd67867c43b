"""Observations of a campaign under a probe: attempts that are kept, evidence that changed, plans that differ.

Source: collector.md sections 0 and 8.4, onboarding.md section 6.5.
"""

import copy
import json
import shutil

import pytest

from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.executors import executor_factory
from fpmsdk.collect.instrumentation import load_instrumentation
from fpmsdk.collect.observed_campaign import (
    CampaignObservations,
    check_observed_plan,
    observation_archive,
    requested_observation,
)
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.planner import build_plan
from fpmsdk.collect.probe_launch import normalized_launch
from fpmsdk.errors import EvidenceError, OnboardError
from tests.collect.observed import CONFIG, REVISION, launch_facts, write_bundle, write_systems

PROFILE = {
    "schema_version": 1,
    "model": "org/model",
    "model_revision": REVISION,
    "architecture": "LlamaForCausalLM",
    "context_length": 4096,
    "num_experts": 0,
    "provenance": "by hand",
    "deployments": [
        {
            "system": "h200_sxm",
            "backend": "vllm",
            "backend_version": "0.27.0",
            "tp": 1,
            "dp": 1,
            "moe_tp": 1,
            "moe_ep": 1,
            "gemm_quant_mode": "bfloat16",
            "moe_quant_mode": "bfloat16",
            "fmha_quant_mode": "bfloat16",
            "comm_quant_mode": "half",
            "kv_cache_dtype": "bfloat16",
            "resources": {
                "cache_layout": "linear",
                "kv_bytes_per_token": 64,
                "max_num_tokens": 64,
                "max_batch_size": 4,
                "provenance": "by hand",
            },
        }
    ],
}


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """Options of a campaign under a probe, changed by flags; its plan and its archive."""
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(write_systems(tmp_path / "systems")))
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    launch = launch_facts(config, max_model_len=2048)
    launch["deployment"] = {"executor": "fake", "image": "registry/engine:1"}
    launch = normalized_launch(launch)
    (tmp_path / "launch.json").write_text(json.dumps(launch))
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    manifest = write_bundle(tmp_path / "bundle")
    flags = {
        "--backend": "vllm",
        "--model-path": "org/model",
        "--gpu": "h200_sxm",
        "--fpm-max-gpus": "1",
        "--fpm-max-model-len": "2048",
        "--fpm-max-num-batched-tokens": "64",
        "--fpm-max-num-seqs": "4",
        "--fpm-max-prefill-isl": "64",
        "--fpm-max-prefill-batch-size": "4",
        "--fpm-prefill-cudagraph-policy": "runtime",
        "--fpm-gpu-memory-utilization": "0.9",
        "--fpm-backend-version": "0.27.0",
        "--fpm-model-profile": str(tmp_path / "profile.json"),
        "--fpm-model-config": str(config),
        "--fpm-executor": "fake",
        "--fpm-runtime-instrumentation": str(manifest),
        "--fpm-runtime-launch": str(tmp_path / "launch.json"),
        "--fpm-runtime-configuration": "tp1",
        "--checkpoint-dir": str(tmp_path / "checkpoint"),
        "--fpm-artifact-root": str(tmp_path / "artifacts"),
        "--fpm-database-root": str(tmp_path / "data"),
    }

    def make(**changed):
        words = [word for flag in {**flags, **changed}.items() for word in flag]
        options = parse_arguments(words)
        return options, build_plan(options, runtime_observation=requested_observation(options))

    return make


def collect(options, plan, **given):
    return run_campaign(
        plan,
        executor=executor_factory("fake"),
        artifact_root=options.artifact_root,
        checkpoint_dir=options.checkpoint_dir,
        database_root=options.database_root,
        deployment=options.deployment,
        smoke=True,
        limit=2,
        observations=archive(options, plan),
        **given,
    )


def archive(options, plan):
    bundle = load_instrumentation(options.runtime_instrumentation)
    return CampaignObservations(
        plan, bundle, artifact_root=options.artifact_root, checkpoint_dir=options.checkpoint_dir, smoke=True
    )


def index_of(outcome):
    return json.loads((outcome.campaign_root / "runtime-observations.json").read_text())["configurations"]["tp1"]


def test_every_attempt_is_kept_under_the_one_attempt_of_the_campaign(campaign):
    options, plan = campaign()
    outcome = collect(options, plan)
    assert outcome.errors == []
    checkpoint = json.loads(outcome.checkpoint.read_text())
    (attempt,) = index_of(outcome)["attempts"]
    assert checkpoint["runtime_observation_attempt_id"] == attempt["attempt_id"]
    assert checkpoint["runtime_observations"] == str(outcome.campaign_root / "runtime-observations.json")
    assert attempt["status"] == "captured"
    for cell in plan.cells:
        kept = attempt["phases"][cell.workload_kind]
        assert (kept["cell_id"], kept["collector_attempt_id"]) == (
            cell.cell_id,
            checkpoint["cells"][cell.cell_id]["attempt_id"],
        )


def test_a_resumption_keeps_the_attempt_and_copies_nothing_twice(campaign):
    options, plan = campaign()
    before = index_of(collect(options, plan))
    assert index_of(collect(options, plan, resume=True)) == before


def test_a_copy_that_no_index_tells_of_is_left_alone(campaign):
    options, plan = campaign()
    outcome = collect(options, plan)
    index_path = outcome.campaign_root / "runtime-observations.json"
    before = index_of(outcome)["attempts"][0]["phases"]["prefill"]
    index_path.unlink()
    cell = next(cell for cell in plan.cells if cell.workload_kind == "prefill")
    entry = json.loads(outcome.checkpoint.read_text())["cells"][cell.cell_id]
    archive(options, plan).record(cell, entry, outcome.campaign_root / "cells" / cell.cell_id)
    after = index_of(outcome)["attempts"][0]["phases"]["prefill"]
    assert after["launch_manifest"]["path"] != before["launch_manifest"]["path"]
    assert (outcome.campaign_root / before["launch_manifest"]["path"]).exists()


@pytest.mark.parametrize("damage", ["evidence", "context", "bundle"])
def test_kept_evidence_that_changed_is_told(campaign, damage):
    options, plan = campaign()
    outcome = collect(options, plan)
    cell = plan.cells[0]
    entry = json.loads(outcome.checkpoint.read_text())["cells"][cell.cell_id]
    attempt = index_of(outcome)["attempts"][0]
    phase = attempt["phases"][cell.workload_kind]
    place = {
        "evidence": phase["artifacts"][0]["path"],
        "context": phase["launch_manifest"]["path"],
        "bundle": attempt["bundle"]["manifest"].replace("manifest.json", "instrumentation/observer.py"),
    }[damage]
    (outcome.campaign_root / place).write_text("changed")
    kept = archive(options, plan)
    with pytest.raises(EvidenceError, match="was changed|were changed"):
        if damage == "bundle":
            kept.staged_files(None, entry["attempt_id"])
        else:
            kept.record(cell, entry, outcome.campaign_root / "cells" / cell.cell_id)


def test_a_passed_attempt_without_its_context_is_no_evidence(campaign, tmp_path):
    options, plan = campaign()
    outcome = collect(options, plan)
    cell = plan.cells[0]
    folder = tmp_path / "cell"
    shutil.copytree(outcome.campaign_root / "cells" / cell.cell_id, folder)
    (folder / "runtime-probe-context.json").unlink()
    entry = {"status": "passed", "attempt_id": "another"}
    with pytest.raises(EvidenceError, match="is missing, though the attempt has passed"):
        archive(options, plan).record(cell, entry, folder)


def test_other_observers_than_the_plan_froze_are_refused(campaign, tmp_path):
    options, plan = campaign()
    (tmp_path / "bundle" / "instrumentation" / "observer.py").write_text("class Worker: ...\n")
    with pytest.raises(EvidenceError, match="not the frozen observers"):
        archive(options, plan)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--fpm-max-model-len": "1024"}, "vllm_max_model_len: the collection has 1024, the probe had 2048"),
        ({"--fpm-gpu-memory-utilization": "0.8"}, "gpu_memory_utilization"),
        ({"--fpm-max-num-seqs": "2", "--fpm-max-prefill-batch-size": "2"}, "scheduler limits of"),
        ({"--fpm-prefill-cudagraph-policy": "explicit"}, "prefill_sampling.cudagraph_policy"),
        ({"--fpm-worker-type": "decode"}, "worker_type"),
        ({"--fpm-warmup-iterations": "3"}, "global_warmup_iterations"),
        ({"--namespace": "elsewhere"}, "deployment inputs"),
    ],
)
def test_a_collection_that_launches_something_else_than_the_probe_is_refused(campaign, changed, message):
    options, plan = campaign(**changed)
    with pytest.raises(OnboardError, match=message):
        observation_archive(options, plan)


def test_a_collection_without_observers_keeps_none(campaign):
    options, plan = campaign()
    document = copy.deepcopy(plan.document)
    document.pop("runtime_observation")
    bare = type(plan)(document, plan.cells)
    assert observation_archive(options, bare) is None
    bundle = load_instrumentation(options.runtime_instrumentation)
    check_observed_plan(plan, bundle, options.deployment, launch=plan.runtime_observation["launch"])
