"""Observations that real engines of three versions wrote on a CPU: what an import makes of them.

Recorded by `python -m tests.observers.real PYTHON FOLDER --record FILE`; only whose attempt they are of is replaced.
Source: collector.md section 8.5, vllm-facts.md section 4.
"""

import copy
import gzip
import json
from pathlib import Path

import pytest

from fpmsdk.collect.observation_index import validate_observations
from fpmsdk.collect.observers import bundled_versions
from tests.collect.observed import write_observations, write_systems
from tests.observers.models import MODELS

VERSIONS = ("0.27.0", "0.28.0", "0.31.0")
BOUND = (
    "attempt_id",
    "bundle_sha256",
    "configuration",
    "instrumentation_binding",
    "launch",
    "source_identity",
    "runtime",
)


def recorded(version):
    place = Path(__file__).parent / "recorded" / f"observations_cpu_{version}.json.gz"
    return json.loads(gzip.decompress(place.read_bytes()))


@pytest.fixture
def observed(tmp_path, monkeypatch):
    """Import recorded observations of a model, altered or not."""
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(write_systems(tmp_path / "systems")))

    def imported(version, name, alter=lambda record: None, tensor_parallel=1):
        told = recorded(version)[name]
        launch = copy.deepcopy(next(iter(told.values()))["launch"])
        config = tmp_path / "config.json"
        config.write_text(json.dumps(MODELS[name]["config"]))
        launch["model_config"]["path"] = str(config)
        launch["topology"]["tp"] = tensor_parallel

        def change(label, phase, file, record):
            source = copy.deepcopy(told[f"{phase} {record['kind']}"])
            for field in (*BOUND, "tp_rank"):
                source.pop(field)
            record |= source
            record["resolved_config"]["parallel_config"]["tensor_parallel_size"] = tensor_parallel
            alter(record)

        index = write_observations(tmp_path / "probe", bundled_versions()[version], {"tp": launch}, change=change)
        return validate_observations(index, {"tp": launch})["tp"]

    return imported


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cache_of_full_attention_is_one_group_and_the_null_block_is_no_capacity(observed, version):
    result = observed(version, "dense")
    assert (result.status, result.diagnostics) == ("complete", [])
    (group,) = result.resources["cache_groups"]
    # 128 tokens * 2 heads * (32 + 32) * 2 bytes * 2 layers.
    assert (group["num_layers"], group["block_size_tokens"], group["page_size_bytes"]) == (2, 128, 65_536)
    blocks = [record["cache"]["num_blocks"] for record in recorded(version)["dense"].values()]
    assert result.resources["runtime_memory"]["kv_cache_bytes"] == (min(blocks) - 1) * 65_536


@pytest.mark.parametrize("version", VERSIONS)
def test_groups_that_alias_each_other_are_charged_the_whole_block(observed, version):
    result = observed(version, "hybrid")
    assert (result.status, result.diagnostics) == ("complete", [])
    sliding, full = result.resources["cache_groups"]
    assert (sliding["sliding_window"], full["sliding_window"]) == (64, None)
    assert {sliding["page_size_bytes"], full["page_size_bytes"]} == {65_536}
    worker = recorded(version)["hybrid"]["prefill worker"]["cache"]
    # 0.31 puts all layers into one storage; before, each slot had its own.
    assert len(worker["storages"]) == (1 if version == "0.31.0" else 2)
    assert sorted(len(place["shared_by"]) for place in worker["tensor_allocations"]) == [2, 2]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_cpu_does_not_establish_is_listed(observed, version):
    result = observed(version, "dense")
    assert [told.partition(":")[0] for told in result.provenance["not_established"]] == [
        "hardware.gpu",
        "hardware.sm",
        "lifecycle.capture_completed",
        "cache.semantics.storage",
    ]


def only(kind, alter, tp_rank=None):
    def change(record):
        if record["kind"] == kind and (tp_rank is None or record["tp_rank"] == tp_rank):
            alter(record)

    return change


def shrink(record):
    record["cache"]["groups"][0]["block_size_tokens"] = 64


UNSOUND = {
    "an SM": (only("worker", lambda r: r["hardware"].update(sm=90)), "hardware.sm"),
    "another device": (only("worker", lambda r: r["hardware"].update(device_type="cuda")), "hardware.device_type"),
    "no name": (only("worker", lambda r: r["hardware"].update(device_name=" ")), "hardware.device_name"),
    "more than the machine": (
        only("worker", lambda r: r["hardware"].update(total_memory_bytes=1)),
        "exceed the 1 bytes",
    ),
    "hbm": (only("worker", lambda r: r["cache"]["semantics"].update(storage="hbm")), "cache.semantics"),
    "a size of the cache": (
        lambda r: r["resolved_config"]["cache_config"].update(kv_cache_memory_bytes=2**30),
        "the cache must be sized by the engine",
    ),
    "a layer that is not aliased": (
        only("worker", lambda r: r["cache"]["tensor_allocations"][0]["shared_by"].pop()),
        "cover every layer",
    ),
    "memory that is counted twice": (
        only("worker", lambda r: r["cache"]["storages"].append(dict(r["cache"]["storages"][0]))),
        "each must be listed once",
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", UNSOUND)
def test_a_real_record_that_was_altered_makes_no_resources(observed, version, name):
    alter, message = UNSOUND[name]
    result = observed(version, "hybrid", alter)
    assert result.status == "incomplete"
    assert message in result.diagnostics[0]


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (None, None),
        # vLLM gives every rank the blocks of the smallest; one that has others is of no shared pool.
        (lambda record: record["cache"].update(num_blocks=8), "num_blocks: expected 8"),
        (shrink, "worker and scheduler report different geometry"),
        (lambda record: record["hardware"].update(device_name="another"), "hardware of phases and ranks"),
    ],
)
def test_a_rank_whose_memory_differs_is_told(observed, alter, message):
    change = {} if alter is None else {"alter": only("worker", alter, tp_rank=1)}
    result = observed("0.27.0", "dense", **change, tensor_parallel=2)
    if message is None:
        assert [entry["tp_rank"] for entry in result.provenance["rank_capacities"]] == [0, 1, 0, 1]
    else:
        assert result.status == "incomplete"
        assert message in result.diagnostics[0]
