"""Launch facts of a probe, and which model paths of a running engine are the launched model.

Source: collector.md section 8.4, onboarding.md section 3.5.
"""

import copy
import json

import pytest

from fpmsdk.collect.probe_launch import deployed_model, is_selected_model, launched_settings, normalized_launch
from fpmsdk.errors import OnboardError
from tests.collect.observed import CONFIG, REVISION, launch_facts

SNAPSHOT = f"/hub/models--org--model/snapshots/{REVISION}"


@pytest.fixture
def facts(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    return launch_facts(config)


@pytest.mark.parametrize(
    ("observed", "is_selected"),
    [
        ("org/model", True),
        (SNAPSHOT, True),
        (f"{SNAPSHOT}/", False),
        (f"{SNAPSHOT}/x", False),
        (f"/hub/../hub/models--org--model/snapshots/{REVISION}", False),
        (f"hub/models--org--model/snapshots/{REVISION}", False),
        (f"/hub/models--org--model/snapshots/{REVISION[:12]}", False),
        ("/hub/models--org--model/snapshots/main", False),
        ("/hub/models--org--model/snapshots/" + "c" * 40, False),
        (f"/hub/models--org--other/snapshots/{REVISION}", False),
        ("/models/model", False),
        (None, False),
    ],
)
def test_a_hub_snapshot_counts_with_its_repository_and_full_revision(facts, observed, is_selected):
    assert is_selected_model(observed, normalized_launch(facts)) == is_selected


def test_a_branch_has_no_snapshot_that_could_count(facts):
    facts["identity"]["model_revision"] = "rev-1"
    assert not is_selected_model("/hub/models--org--model/snapshots/rev-1", facts)


@pytest.mark.parametrize(
    ("cache", "path"),
    [
        (None, "org/model"),
        ("claim", "org/model"),
        ("claim:/models:org/model", "/models/org/model"),
    ],
)
def test_a_model_cache_that_names_a_path_is_what_the_engine_loads(facts, cache, path):
    facts["deployment"]["model_cache"] = cache
    assert deployed_model(facts) == path
    assert is_selected_model(path, facts)


@pytest.mark.parametrize(
    "cache", ["claim:/models", "claim::org", "claim:/models:/org", "claim:/models:../org", "a:b:c:d"]
)
def test_a_model_cache_names_mount_and_path_or_neither(facts, cache):
    facts["deployment"]["model_cache"] = cache
    with pytest.raises(OnboardError, match="model_cache"):
        deployed_model(facts)


def test_defaults_are_written_out_and_the_input_stays(facts):
    before = copy.deepcopy(facts)
    launch = normalized_launch(facts)
    assert facts == before
    assert launch["collection"]["max_prefill_cudagraph_size"] is None
    assert (launch["collection"]["async_scheduling"], launch["collection"]["warmup_iterations"]) == (False, 5)
    assert launch["deployment"]["container_mount"] == []
    assert normalized_launch(launch) == launch


def test_a_release_label_of_the_runtime_decides_nothing(facts):
    labelled = copy.deepcopy(facts)
    labelled["deployment"]["dynamo_version"] = "1.6.1"
    assert normalized_launch(labelled) == normalized_launch(facts)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("identity", {"model": ""}, "identity.model: expected text"),
        ("identity", {"model_revision": "LATEST"}, "a pinned revision"),
        ("identity", {"framework": "sglang"}, "identity.framework: expected vllm"),
        ("identity", {"model_kind": "both"}, "dense or moe"),
        ("identity", {"framework_version": None}, "identity.framework_version"),
        ("identity", {"runtime_framework_version": " "}, "runtime_framework_version"),
        ("topology", {"pp": 2}, "pp 1 and cp 1"),
        ("topology", {"tp": True}, "topology.tp: expected a positive integer"),
        ("topology", {"ep": 1}, "expected the axes"),
        ("precision", {"kvcache_quant_mode": "auto"}, "precision.kvcache_quant_mode"),
        ("precision", {"comm_quant_mode": "fp8"}, "half, which is what is collected"),
        ("precision", {"enable_eplb": 0}, "precision.enable_eplb: expected true or false"),
        ("collection", {"max_num_seqs": 0}, "collection.max_num_seqs"),
        ("collection", {"gpu_memory_utilization": 1.5}, "a fraction above 0"),
        ("collection", {"prefill_cudagraph_policy": "none"}, "runtime or explicit"),
        ("collection", {"max_prefill_cudagraph_size": 8}, "nothing under policy runtime"),
        ("collection", {"async_scheduling": True}, "async_scheduling: expected false"),
        ("collection", {"warmup_iterations": -1}, "warmup_iterations"),
        ("model_config", {"sha256": "x"}, "model_config.sha256"),
        ("model_config", {"source_files": {"other.json": "0" * 64}}, "hf_quant_config.json, or nothing"),
        ("deployment", {"executor": "ssh"}, "deployment.executor: expected kubernetes"),
        ("deployment", {"image": "a b"}, "deployment.image"),
        ("deployment", {"container_mount": ["/a:/a"]}, "no mounts and no CPU policy with executor kubernetes"),
        ("deployment", {"executor": "slurm", "namespace": "ns"}, "no namespace with executor slurm"),
        ("deployment", {"executor": "slurm", "cpus_per_task": 4}, "both cpus_per_task and cpu_bind"),
        ("deployment", {"executor": "slurm", "container_mount": ["a,b"]}, "mounts without commas"),
    ],
)
def test_a_fact_that_cannot_be_launched_is_named(facts, section, change, message):
    facts[section] = {**facts[section], **change}
    with pytest.raises(OnboardError, match=message):
        normalized_launch(facts)


@pytest.mark.parametrize(
    ("kind", "topology", "message"),
    [
        ("dense", {"dp": 2}, "of 1 for a dense model"),
        ("moe", {"tp": 2}, "equal to tp"),
    ],
)
def test_a_topology_that_contradicts_the_model_has_no_observation(facts, kind, topology, message):
    facts["identity"]["model_kind"] = kind
    facts["topology"] |= topology
    with pytest.raises(OnboardError, match=message):
        launched_settings(normalized_launch(facts))
