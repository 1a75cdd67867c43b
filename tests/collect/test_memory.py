import json

import pytest

from fpmsdk.collect.memory import resolve_memory
from fpmsdk.errors import CollectionError, EvidenceError
from tests.collect.observers import ATTEMPT, CELL, GRAPHS, LIMITS, REVISION, attempt, plan_of

OPEN = {"vllm_max_model_len": 2048, "gpu_memory_utilization": 0.9}
DOWNGRADED = GRAPHS | {"cudagraph_mode": "PIECEWISE"}


def resolve(campaign, change=None, after=None, launched=LIMITS, **options):
    plan = plan_of(**OPEN)
    raw = attempt(campaign, plan, change=change)
    if after is not None:
        after(raw)
    options = {"backend_version": "0.27.0", "attempt_id": ATTEMPT, "launched": launched, **options}
    return resolve_memory(plan, CELL, raw, **options)


def on_memory(kind, path, value, dp=None):
    """A change of the memory observations of one kind, of one rank or of all."""

    def change(name, document):
        if not name.startswith(f"fpm-memory-{kind}") or (dp is not None and document["dp_rank"] != dp):
            return
        *folders, last = path.split(".")
        inside = document
        for folder in folders:
            inside = inside[int(folder) if folder.isdigit() else folder]
        inside[last] = value

    return change


def test_the_capacity_is_that_of_the_smallest_rank_and_a_page_costs_a_block(tmp_path):
    found = resolve(tmp_path, model_revision=REVISION, requested_graphs={"cudagraph_mode": "FULL_AND_PIECEWISE"})
    assert (found["max_num_tokens"], found["max_batch_size"], found["cache_layout"]) == (512, 16, "grouped")
    assert found["cache_groups"] == [
        {
            "name": "runtime_group_0",
            "kind": "attention",
            "num_layers": 2,
            "block_size_tokens": 16,
            "page_size_bytes": 1024,
            "sliding_window": None,
        }
    ]
    memory = found["runtime_memory"]
    assert (memory["kv_cache_bytes"], memory["gpu_memory_utilization"], memory["max_model_len"]) == (
        998 * 1024,
        0.9,
        2048,
    )
    provenance = json.loads(memory["provenance"])
    assert provenance["source"] == "vllm_initialized_cache"
    assert provenance["rank_capacities"] == [
        {"dp_rank": 0, "tp_rank": 0, "kv_cache_bytes": 999 * 1024},
        {"dp_rank": 1, "tp_rank": 0, "kv_cache_bytes": 998 * 1024},
    ]
    assert "enable_prefix_caching" not in provenance["runtime_settings"]["cache_config"]
    assert "enable_prefix_caching" in provenance["resolved_config"]["cache_config"]
    assert [one["path"] for one in provenance["artifacts"]] == [
        "node0000/fpm-memory-scheduler-dp0.json",
        "node0000/fpm-memory-worker-dp0-tp0-pp0.json",
        "node0001/fpm-memory-scheduler-dp1.json",
        "node0001/fpm-memory-worker-dp1-tp0-pp0.json",
    ]


def test_a_worker_may_take_back_graphs_of_its_launch(tmp_path):
    def change(name, document):
        if name.startswith("fpm-memory-worker"):
            document["initial_compilation_config"] = GRAPHS
            document["resolved_config"]["compilation_config"] = DOWNGRADED

    assert resolve(tmp_path, change)["runtime_memory"]["kv_cache_bytes"] == 998 * 1024


R = "resolved_config"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (on_memory("worker", "status", "unresolved"), CollectionError, "memory is unresolved"),
        (on_memory("worker", "schema_version", 2), EvidenceError, "expected schema aisimulate_fpm_runtime_memory 1"),
        (on_memory("worker", "collector_provenance", {}), EvidenceError, "of another plan, cell, attempt"),
        (on_memory("worker", "backend_version", "0.28.0"), EvidenceError, "or engine version"),
        (on_memory("worker", "kind", "other"), EvidenceError, "expected each worker rank and each scheduler"),
        (on_memory("worker", "dp_rank", 0), EvidenceError, "expected each worker rank"),
        (on_memory("worker", "pp_rank", False), EvidenceError, "expected each worker rank"),
        (on_memory("scheduler", "tp_rank", 0), EvidenceError, "expected each worker rank"),
        (
            on_memory("worker", "status", "absent", 1),
            EvidenceError,
            r"no memory observation of worker ranks .*\[\(1, 0\)\]",
        ),
        (on_memory("scheduler", "status", "absent", 1), EvidenceError, r"of the schedulers of dp ranks \[1\]"),
        (on_memory("worker", f"{R}.model_config.max_model_len", 4096), EvidenceError, "expected 2048 as launched"),
        (on_memory("scheduler", f"{R}.scheduler_config.async_scheduling", True), EvidenceError, "expected False"),
        (on_memory("worker", f"{R}.parallel_config.enable_expert_parallel", False), EvidenceError, "expected True"),
        (on_memory("worker", f"{R}.model_config.dtype", "torch.float16"), EvidenceError, "expected 'bfloat16'"),
        (on_memory("worker", f"{R}.offload_config.uva.cpu_offload_gb", 4), EvidenceError, "cpu_offload_gb: expected 0"),
        (on_memory("worker", "effective_offloader", "Uva"), EvidenceError, "NoopOffloader, found 'Uva'"),
        (on_memory("worker", f"{R}.compilation_config", DOWNGRADED), EvidenceError, "differ in compilation_config"),
        (
            on_memory("worker", f"{R}.model_config.model", "x", 1),
            EvidenceError,
            "differ from those of the other workers",
        ),
        (on_memory("worker", "cache", None), EvidenceError, "must report their pool"),
        (on_memory("worker", "cache.allocated_cache_bytes", 1_024_001), EvidenceError, "cache.storages"),
        (on_memory("scheduler", "cache.watermark_blocks", 1), EvidenceError, "watermark_blocks: expected 0"),
        (on_memory("scheduler", "cache.initial_free_blocks", 1000), EvidenceError, "scheduler cache"),
        (on_memory("worker", "cache.groups.0.kind", "state", 1), EvidenceError, "expected attention, or convolution"),
    ],
)
def test_observations_that_do_not_prove_the_capacity_are_refused(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        resolve(tmp_path, change)


def smaller_pages(name, document):
    if name.startswith("fpm-memory-worker-dp1"):
        document["cache"] |= {"allocated_cache_bytes": 512_000}
        document["cache"]["storages"][0]["size_bytes"] = 512_000


def test_all_ranks_have_pages_of_one_cost(tmp_path):
    with pytest.raises(EvidenceError, match="cache groups or the cost of a page differ"):
        resolve(tmp_path, smaller_pages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend_version": "0.28.0"}, "memory is resolved for vLLM 0.27.0 only"),
        ({"attempt_id": "b" * 32}, "attempt_id: expected 'bbbb"),
        ({"requested_graphs": {"cudagraph_mode": "FULL"}}, "cudagraph_mode: expected 'FULL' as launched"),
        ({"model_revision": "d" * 40}, "the engine loaded c+, pinned is d+"),
    ],
)
def test_the_attempt_must_be_the_accepted_one(tmp_path, options, message):
    with pytest.raises((EvidenceError, CollectionError), match=message):
        resolve(tmp_path, **options)


def test_an_observation_lies_in_the_folder_of_its_unit(tmp_path):
    def moves(raw):
        (raw / "node0000" / "deep").mkdir()
        name = "fpm-memory-scheduler-dp0.json"
        (raw / "node0000" / name).rename(raw / "node0000" / "deep" / name)

    with pytest.raises(EvidenceError, match="must lie in the folder of its unit"):
        resolve(tmp_path, after=moves)
