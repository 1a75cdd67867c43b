"""One set of resources from what every cell observed, and which observations do not go together.

Source: onboarding.md section 7 (step 7) and section 10.
"""

import copy
import json

import pytest

from fpmsdk.errors import EvidenceError
from fpmsdk.onboard.finalize_memory import merged_memory

GROUP = {
    "name": "runtime_group_0",
    "kind": "attention",
    "num_layers": 2,
    "block_size_tokens": 16,
    "page_size_bytes": 1024,
    "sliding_window": None,
}
WORKER_GROUPS = [{"layer_names": ["a", "b"], "block_size_tokens": 16}]
PROVENANCE = {
    "source": "vllm_initialized_cache",
    "runtime_settings": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "artifacts": [
        {"path": "/raw/scheduler.json", "sha256": "0" * 64, "evidence": {"kind": "scheduler"}},
        {
            "path": "/raw/worker.json",
            "sha256": "1" * 64,
            "evidence": {"kind": "worker", "cache": {"groups": WORKER_GROUPS}},
        },
    ],
}


def observed(usable_blocks, **changes):
    provenance = copy.deepcopy(PROVENANCE)
    changes.pop("change", lambda _: None)(provenance)
    memory = {
        "kv_cache_bytes": usable_blocks * 1024,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 128,
        "provenance": json.dumps(provenance),
    }
    memory |= changes.pop("memory", {})
    return {
        "cache_layout": "grouped",
        "cache_groups": [GROUP],
        "max_num_tokens": 64,
        "max_batch_size": 4,
        "provenance": "observed",
        "runtime_memory": memory,
        **changes,
    }


def merge(*observations, keeps_linear=False):
    named = {f"cell-{place}": observation for place, observation in enumerate(observations)}
    return merged_memory(named, {"schema_version": "test"}, keeps_linear=keeps_linear)


def test_the_capacity_is_the_least_of_all_cells():
    merged, _ = merge(observed(999), observed(899))
    assert merged.resources["runtime_memory"]["kv_cache_bytes"] == 920576


def test_the_manifest_names_the_records_and_does_not_repeat_them():
    merged, whole = merge(observed(999), observed(899))
    assert json.loads(merged.resources["runtime_memory"]["provenance"]) == whole
    assert whole["observation_provenance"] == "source_references"
    assert whole["schema_version"] == "test"
    for observation, blocks in zip(whole["cell_observations"], (999, 899), strict=True):
        assert observation["runtime_memory"]["kv_cache_bytes"] == blocks * 1024
        artifacts = json.loads(observation["runtime_memory"]["provenance"])["artifacts"]
        assert artifacts == [
            {"path": "/raw/scheduler.json", "sha256": "0" * 64},
            {"path": "/raw/worker.json", "sha256": "1" * 64},
        ]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"change": lambda found: found["runtime_settings"]["compilation_config"].update(cudagraph_mode="FULL")},
            "different engine settings",
        ),
        (
            {"change": lambda found: found["artifacts"][1]["evidence"]["cache"]["groups"][0].update(layer_names=["a"])},
            "different cache groups of the workers",
        ),
        ({"max_batch_size": 8}, "different limits and cache layout"),
        ({"cache_groups": [GROUP | {"page_size_bytes": 2048}]}, "different limits and cache layout"),
        ({"memory": {"gpu_memory_utilization": 0.8}}, "different limits and cache layout"),
        ({"change": lambda found: found.update(runtime_settings={})}, "lacks the settings"),
        ({"change": lambda found: found["artifacts"].pop()}, "no cache groups of a worker"),
        ({"cache_layout": "linear", "cache_groups": [], "kv_bytes_per_token": 64}, "grouped runtime memory"),
    ],
)
def test_observations_of_different_engines_are_refused_with_their_cells(other, words):
    with pytest.raises(EvidenceError, match=rf"cell-1.*{words}"):
        merge(observed(999), observed(899, **other))


def test_a_collection_without_observations_cannot_be_finalised():
    with pytest.raises(EvidenceError, match="no cell of the collection has observed its memory"):
        merge()


def test_a_linear_profile_stays_linear_and_keeps_the_measured_groups():
    merged, whole = merge(observed(999), keeps_linear=True)
    assert (merged.resources["cache_layout"], merged.resources["kv_bytes_per_token"]) == ("linear", 64)
    assert "cache_groups" not in merged.resources
    assert merged.measured_groups == [GROUP]
    assert whole["cell_observations"][0]["cache_layout"] == "grouped"


def test_a_linear_profile_whose_groups_have_a_window_is_refused():
    with pytest.raises(EvidenceError, match="have no one rate"):
        merge(observed(999, cache_groups=[GROUP | {"sliding_window": 32}]), keeps_linear=True)
