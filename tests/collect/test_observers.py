"""What the bundled observers read of an engine, on objects shaped as those of vLLM 0.27 and 0.31.

Records of real engines are in test_observed_engines.py.
Source: collector.md sections 8.2 to 8.5, vllm-facts.md sections 4.1 and 4.2.
"""

import copy
import hashlib
import json
from types import SimpleNamespace

import pytest

from fpmsdk.collect.instrumentation import load_instrumentation
from fpmsdk.collect.observers import bundled_versions
from fpmsdk.collect.observers.vllm_observers import records
from fpmsdk.collect.observers.vllm_observers.cache import Unresolved, scheduler_cache, worker_cache
from fpmsdk.collect.observers.vllm_observers.sources import SourceChangedError, check_sources, check_version

BLOCKS, TOKENS = 8, 32
PAGE = TOKENS * 2 * 64 * 2


class FullAttentionSpec:
    block_size, page_size_bytes, dtype = TOKENS, PAGE, "torch.bfloat16"


class SlidingWindowSpec(FullAttentionSpec):
    sliding_window, extra_retained_tokens = 64, 0


class MambaSpec:
    block_size, page_size_bytes = 900, PAGE


class Tensor:
    """A view of a storage, as torch has it; strides and offset are in elements of two bytes."""

    device = "cpu"

    def __init__(self, pointer, storage_bytes, offset=0, shape=(BLOCKS, 2, TOKENS, 64)):
        self.storage = SimpleNamespace(data_ptr=lambda: pointer, nbytes=lambda: storage_bytes)
        self.offset, self.shape = offset, shape

    def untyped_storage(self):
        return self.storage

    def storage_offset(self):
        return self.offset

    def element_size(self):
        return 2

    def stride(self):
        return (4096, 2048, 64, 1)


def group(spec, *layers, **more):
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers), is_eagle_group=False, **more)


def layers_of(tensors):
    return {name: SimpleNamespace(kv_cache=tensor) for name, tensor in tensors.items()}


def hybrid_027():
    """Two groups of two layers; one storage for each slot, which a layer of each group shares."""
    storages = {n: (4096 * (n + 1), BLOCKS * PAGE) for n in (0, 1)}
    tensors = {f"{kind}{n}": Tensor(*storages[n]) for kind in "sf" for n in (0, 1)}
    plan = [SimpleNamespace(size=BLOCKS * PAGE, shared_by=[f"s{n}", f"f{n}"], offset=0, block_stride=0) for n in (0, 1)]
    return plan, tensors


def hybrid_031():
    """The same groups; one storage for all, in which the layers of a group follow each other."""
    size = 2 * BLOCKS * PAGE
    tensors = {f"{kind}{n}": Tensor(4096, size, n * BLOCKS * PAGE // 2) for kind in "sf" for n in (0, 1)}
    plan = [
        SimpleNamespace(
            size=size, layers=[f"{kind}0", f"{kind}1"], layer_stride=BLOCKS * PAGE, block_stride=PAGE, offset=0
        )
        for kind in "sf"
    ]
    return plan, tensors


def observed(plan, tensors, groups=None, available=10**9):
    unresolved = Unresolved()
    config = SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_tensors=plan,
        kv_cache_groups=groups or [group(SlidingWindowSpec(), "s0", "s1"), group(FullAttentionSpec(), "f0", "f1")],
    )
    kernels = [TOKENS] * len(config.kv_cache_groups)
    return worker_cache(config, layers_of(tensors), kernels, available, unresolved), unresolved


@pytest.mark.parametrize(
    ("made", "places"),
    [
        # 8 blocks of 8,192 bytes are 65,536 bytes a layer.
        (
            hybrid_027,
            [("storage-0", 65_536, ["s0", "f0"], 0, 0), ("storage-1", 65_536, ["s1", "f1"], 0, 0)],
        ),
        (
            hybrid_031,
            [("storage-0", 131_072, ["s0", "f0"], 8192, 0), ("storage-0", 131_072, ["s1", "f1"], 8192, 65_536)],
        ),
    ],
)
def test_shared_memory_is_counted_once_and_its_aliases_are_named(made, places):
    cache, unresolved = observed(*made())
    assert unresolved.fields == []
    assert cache["allocated_cache_bytes"] == 131_072
    names = ("storage_id", "size", "shared_by", "block_stride", "offset")
    assert [tuple(place[name] for name in names) for place in cache["tensor_allocations"]] == places
    assert cache["semantics"]["storage"] == "host"


def test_views_are_told_in_bytes():
    cache, _ = observed(*hybrid_031())
    assert cache["layer_tensors"]["f1"] == {
        "storage_id": "storage-0",
        "storage_offset_bytes": 65_536,
        "shape": [8, 2, 32, 64],
        "stride_bytes": [8192, 4096, 128, 2],
        "element_size_bytes": 2,
        "block_axis": 0,
        "kernel_block_size_tokens": 32,
    }


def test_groups_keep_their_order_and_a_window_retains_nothing_beyond_it():
    cache, _ = observed(*hybrid_027())
    assert [(g["sliding_window"], g["extra_retained_tokens"]) for g in cache["groups"]] == [(64, 0), (None, 0)]
    assert [g["spec_type"].rpartition(".")[2] for g in cache["groups"]] == ["SlidingWindowSpec", "FullAttentionSpec"]


@pytest.mark.parametrize(
    ("groups", "tensors", "field"),
    [
        ([group(MambaSpec(), "s0", "s1"), group(FullAttentionSpec(), "f0", "f1")], {}, "cache.groups[0].spec_type"),
        (
            [group(SlidingWindowSpec(), "s0", "s1", host_resident=True), group(FullAttentionSpec(), "f0", "f1")],
            {},
            "cache.groups[0].host_resident",
        ),
        (None, {"f1": (Tensor(1, 1), Tensor(1, 1))}, "cache.layer_tensors[f1]"),
        (None, {"f1": Tensor(8192, 65_536, shape=(9, 2, 32, 64))}, "cache.layer_tensors[f1].block_axis"),
        # Neither of two axes of the size of the pool is outermost.
        (None, {"f1": Tensor(8192, 65_536, shape=(2, 8, 8, 64))}, "cache.layer_tensors[f1].block_axis"),
    ],
)
def test_what_cannot_be_told_is_named(groups, tensors, field):
    plan, known = hybrid_027()
    _, unresolved = observed(plan, known | tensors, groups)
    assert unresolved.fields[0] == field


def scheduler(*, free=7, pools=1):
    made = [
        SimpleNamespace(num_gpu_blocks=BLOCKS, get_num_free_blocks=lambda: free, null_block=SimpleNamespace(block_id=0))
        for _ in range(pools)
    ]
    managers = [SimpleNamespace(block_pool=made[n % pools]) for n in (0, 1)]
    manager = SimpleNamespace(
        block_pool=made[0], coordinator=SimpleNamespace(single_type_managers=managers), watermark_blocks=0
    )
    groups = [group(SlidingWindowSpec(), "s0", "s1"), group(FullAttentionSpec(), "f0", "f1")]
    return SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups), kv_cache_manager=manager)


def test_the_null_block_of_a_pool_is_reserved_for_good():
    unresolved = Unresolved()
    cache = scheduler_cache(scheduler(), unresolved)
    assert (cache["num_blocks"], cache["initial_free_blocks"], cache["reserved_blocks"]) == (8, 7, 1)
    assert (cache["permanent_reserved_block_ids"], cache["pool_count"], unresolved.fields) == ([0], 1, [])


@pytest.mark.parametrize(
    ("options", "field"),
    [({"free": 6}, "cache.permanent_reserved_block_ids"), ({"pools": 2}, "cache.pool_count")],
)
def test_blocks_that_nothing_explains_are_named(options, field):
    unresolved = Unresolved()
    scheduler_cache(scheduler(**options), unresolved)
    assert unresolved.fields == [field]


# --- the engine that was read ---


def test_every_changed_or_missing_source_file_is_named(tmp_path):
    (tmp_path / "same.py").write_bytes(b"a")
    (tmp_path / "changed.py").write_bytes(b"b")
    known = hashlib.sha256(b"a").hexdigest()
    runtime = {"version": "0.27.0", "source_files": dict.fromkeys(("same.py", "changed.py", "gone.py"), known)}

    def find(name):
        return tmp_path / name if (tmp_path / name).exists() else None

    changed = hashlib.sha256(b"b").hexdigest()
    with pytest.raises(SourceChangedError, match=rf"changed\.py has sha256 {changed}, not .*gone\.py is not") as told:
        check_sources(runtime, find)
    assert "same.py" not in str(told.value)


@pytest.mark.parametrize(
    ("revision", "version", "commit", "refused"),
    [
        ("ab" * 20, "0.27.0", None, None),
        ("ab" * 20, "0.27.0", "gabab", None),
        ("ab" * 20, "0.27.0", "gabba", "commit"),
        ("ab" * 20, "0.28.0", None, "vLLM 0.27.0, found 0.28.0"),
        # The digest of sources is no commit.
        ("ab" * 32, "0.27.0", "gffff", None),
    ],
)
def test_another_version_or_commit_is_refused(revision, version, commit, refused):
    runtime = {"version": "0.27.0", "source_revision": revision}
    if refused is None:
        check_version(runtime, version, commit)
    else:
        with pytest.raises(SourceChangedError, match=refused):
            check_version(runtime, version, commit)


@pytest.mark.parametrize("version", ["0.27.0", "0.28.0", "0.31.0"])
def test_a_bundled_manifest_is_sound_and_pins_what_is_read(version):
    bundle = load_instrumentation(bundled_versions()[version], version)
    pinned = bundle.runtime["source_files"]
    assert {"vllm/v1/core/block_pool.py", "vllm/v1/kv_cache_interface.py", "vllm/v1/worker/cpu_worker.py"} <= set(
        pinned
    )
    # Digests of vllm-facts.md section 4.6 of one file whose bytes differ in all three.
    assert pinned["vllm/v1/core/block_pool.py"][:8] == {
        "0.27.0": "51cad2fd",
        "0.28.0": "ddee56dc",
        "0.31.0": "05c73052",
    }.get(version)
    assert "InstrumentedScheduler" in bundle.manifest["scheduler_class"]


# --- the file of a record ---


@pytest.fixture
def launched(tmp_path, monkeypatch):
    manifest = {"runtime": {"framework": "vllm", "version": "0.27.0", "source_revision": "a" * 40, "source_files": {}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for name, place in ((records.MANIFEST, "manifest.json"), (records.FOLDER, ".")):
        monkeypatch.setenv(name, str(tmp_path / place))
    return tmp_path


def test_a_fault_of_the_observer_is_told_and_does_not_reach_the_engine(launched):
    path = records.write_record("worker", {"dp_rank": 1, "tp_rank": 0, "pp_rank": 0}, None, lambda unresolved: {})
    assert path.name == "runtime-observation-worker-dp1-tp0-pp0.json"
    record = json.loads(path.read_text())
    assert (record["dp_rank"], record["unresolved_fields"]) == (1, ["worker"])
    # The importer is there in an engine alone.
    assert "No module named 'fpm_runtime_instrumentation'" in record["error"]


def test_a_rank_is_never_observed_twice(launched):
    records.write_record("scheduler", {"dp_rank": 0}, None, lambda unresolved: {})
    before = copy.copy((launched / "runtime-observation-scheduler-dp0.json").read_bytes())
    with pytest.raises(FileExistsError):
        records.write_record("scheduler", {"dp_rank": 0}, None, lambda unresolved: {})
    assert (launched / "runtime-observation-scheduler-dp0.json").read_bytes() == before
    assert not list(launched.glob(".runtime-observation*"))


@pytest.mark.parametrize("beside", [["params.json", "config.json"], []])
def test_a_configuration_that_is_not_the_only_one_is_not_taken(tmp_path, beside):
    for name in beside:
        (tmp_path / name).write_text("{}")
    with pytest.raises(RuntimeError, match=r"expected config\.json and no params\.json"):
        records.loaded_model_config(SimpleNamespace(model=str(tmp_path)))
