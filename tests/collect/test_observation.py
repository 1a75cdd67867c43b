"""Observations of a running engine: what makes them complete, and everything that makes them none.

Source: collector.md sections 8.2 and 8.5, onboarding.md section 6.3.
"""

import copy
import json

import pytest

from fpmsdk.collect.fake_observations import FakePool
from fpmsdk.collect.observation_index import validate_observation_phase, validate_observations
from fpmsdk.collect.probe_launch import normalized_launch
from fpmsdk.errors import EvidenceError, OnboardError
from tests.collect.observed import CONFIG, launch_facts, write_bundle, write_observations, write_systems

EXPLICIT = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


@pytest.fixture(autouse=True)
def systems(tmp_path, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(write_systems(tmp_path / "systems")))


@pytest.fixture
def probe(tmp_path):
    """Write evidence of launches made with the given options; returns the index and the launches."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    bundle = write_bundle(tmp_path / "bundle")

    def write(options=None, *, pool=None, change=None):
        launches = {
            label: normalized_launch(launch_facts(config, **one)) for label, one in (options or {"tp1": {}}).items()
        }
        return write_observations(tmp_path / "probe", bundle, launches, pool=pool, change=change), launches

    return write


def test_sound_observations_become_resources(probe):
    index, launches = probe()
    observed = validate_observations(index, launches)["tp1"]
    assert observed.status == "complete"
    resources = copy.deepcopy(observed.resources)
    # One block of the pool holds 512 bytes of each of two layers; 999 of 1000 blocks are free.
    assert resources.pop("cache_groups") == [
        {
            "name": "runtime_group_0",
            "kind": "attention",
            "num_layers": 2,
            "block_size_tokens": 16,
            "page_size_bytes": 1024,
            "sliding_window": None,
        }
    ]
    assert resources["runtime_memory"].pop("kv_cache_bytes") == 1022976
    provenance = json.loads(resources["runtime_memory"].pop("provenance"))
    assert provenance == observed.provenance
    del resources["provenance"]
    assert resources == {
        "cache_layout": "grouped",
        "max_num_tokens": 64,
        "max_batch_size": 4,
        "runtime_memory": {"gpu_memory_utilization": 0.9, "max_model_len": 128},
    }
    assert [(one["phase"], one["kv_cache_bytes"]) for one in provenance["rank_capacities"]] == [
        ("prefill", 1022976),
        ("decode", 1022976),
    ]
    assert provenance["instrumentation"]["import_binding"] == "verified"


def test_capacity_is_that_of_the_smallest_rank(probe):
    def smaller(label, phase, name, record):
        if phase == "decode" and record["dp_rank"] == 1 and record["kind"] == "scheduler":
            record["cache"].update(
                initial_free_blocks=900,
                reserved_blocks=100,
                permanent_reserved_block_ids=list(range(100)),
            )

    index, launches = probe({"dep": {"topology": {"dp": 2, "moe_ep": 2}}}, change=smaller)
    observed = validate_observations(index, launches)["dep"]
    assert observed.resources["runtime_memory"]["kv_cache_bytes"] == 900 * 1024


def test_every_group_is_charged_the_whole_page(probe):
    # Two groups share both storages: a block of either takes its slot in each of them.
    index, launches = probe(pool=FakePool(windows_tokens=(None, 32)))
    groups = validate_observations(index, launches)["tp1"].resources["cache_groups"]
    assert [(group["page_size_bytes"], group["sliding_window"]) for group in groups] == [(1024, None), (1024, 32)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_single_role_needs_its_own_phase_alone(probe, role):
    index, launches = probe({"one": {"worker_type": role}})
    observed = validate_observations(index, launches)["one"]
    assert {one["phase"] for one in observed.provenance["rank_capacities"]} == {role}


def test_explicit_captures_are_compared_in_every_phase_of_a_role(probe):
    options = {"worker_type": "aggregated", "prefill_cudagraph_policy": "explicit", "max_prefill_cudagraph_size": 64}
    index, launches = probe({"one": options})
    settings = validate_observations(index, launches)["one"].provenance["runtime_settings"]
    assert settings["compilation_config"]["cudagraph_capture_sizes"] == EXPLICIT


def test_a_shared_profile_needs_one_set_of_graphs_and_the_way_out_is_told(probe):
    # Without a role explicit captures are those of prefill alone, so that decode captures its own.
    index, launches = probe({"one": {"prefill_cudagraph_policy": "explicit", "max_prefill_cudagraph_size": 64}})
    (diagnostic,) = validate_observations(index, launches)["one"].diagnostics
    assert "serving roles of their own" in diagnostic


def test_a_worker_may_take_graphs_back_as_its_backend_does(probe):
    def downgraded(label, phase, name, record):
        if record["kind"] == "worker":
            graphs = record["resolved_config"]["compilation_config"]
            record["initial_compilation_config"] = dict(graphs)
            graphs["cudagraph_mode"] = "PIECEWISE"

    index, launches = probe(change=downgraded)
    assert validate_observations(index, launches)["tp1"].status == "complete"


def of(kind):
    return lambda record: record["kind"] == kind


def settings(section, **values):
    return lambda record: record["resolved_config"][section].update(values)


def cache(**values):
    return lambda record: record["cache"].update(values)


def tensor(**values):
    return lambda record: record["cache"]["layer_tensors"]["model.layers.0.attn"].update(values)


def group(**values):
    return lambda record: record["cache"]["groups"][0].update(values)


def every(field, **values):
    return lambda record: record[field].update(values)


# What is changed in every record of a kind, and what the diagnostic says.
UNSOUND = {
    "schema": ("worker", lambda r: r.update(schema_version="v2"), "schema_version"),
    "attempt": ("worker", lambda r: r.update(attempt_id="0" * 32), "attempt_id"),
    "phase": ("scheduler", lambda r: r.update(phase="other"), "phase"),
    "bundle": ("worker", lambda r: r.update(bundle_sha256="0" * 64), "bundle_sha256"),
    "identity": ("worker", every("identity", model="org/other"), "identity"),
    "launch": ("worker", lambda r: r["launch"]["collection"].update(max_num_seqs=5), "launch"),
    "config": ("worker", lambda r: r.update(model_config_sha256="0" * 64), "model_config_sha256"),
    "sidecar": (
        "worker",
        lambda r: r.update(model_config_source_files={"hf_quant_config.json": "0" * 64}),
        "model_config_source_files",
    ),
    "engine version": ("worker", every("runtime", version="0.28.0"), "runtime"),
    "image": ("scheduler", every("runtime", image="registry/engine:2"), "runtime"),
    "unresolved": ("worker", lambda r: r.update(unresolved_fields=["cache"]), "unresolved_fields"),
    "no word on unresolved": ("worker", lambda r: r.pop("unresolved_fields"), "unresolved_fields"),
    "error": ("worker", lambda r: r.update(error="boom"), "unresolved_fields"),
    "kind": ("scheduler", lambda r: r.update(kind="router"), "kind"),
    "warm-up": ("worker", every("lifecycle", warmup_completed=False), "lifecycle.warmup_completed"),
    "capture": ("worker", every("lifecycle", capture_completed=1), "lifecycle.capture_completed"),
    "too early": ("worker", every("lifecycle", measurement="before_warmup"), "lifecycle.measurement"),
    "scheduler not ready": ("scheduler", every("lifecycle", cache_initialized=None), "lifecycle.cache_initialized"),
    "gpu": ("worker", every("hardware", gpu="gb200"), "hardware.gpu"),
    "sm": ("worker", every("hardware", sm=100), "hardware.sm"),
    "device": ("worker", every("hardware", device_name="NVIDIA GH200"), "hardware.device_name"),
    "memory": ("worker", every("hardware", total_memory_bytes=1000), "exceed the 1000 bytes of the device"),
    "context": ("worker", settings("model_config", max_model_len=64), "model_config.max_model_len"),
    "fraction": ("worker", settings("cache_config", gpu_memory_utilization=0.8), "gpu_memory_utilization"),
    "whole fraction": ("worker", settings("cache_config", gpu_memory_utilization=1), "gpu_memory_utilization"),
    "tokens": ("scheduler", settings("scheduler_config", max_num_batched_tokens=128), "max_num_batched_tokens"),
    "sequences": ("worker", settings("scheduler_config", max_num_seqs=True), "max_num_seqs"),
    "async": ("worker", settings("scheduler_config", async_scheduling=True), "async_scheduling"),
    "tp": ("worker", settings("parallel_config", tensor_parallel_size=2), "tensor_parallel_size"),
    "prefill cp": ("worker", settings("parallel_config", prefill_context_parallel_size=2), "prefill_context"),
    "eplb": ("worker", settings("parallel_config", enable_eplb=True), "enable_eplb"),
    "ep": ("worker", settings("parallel_config", enable_expert_parallel=True), "enable_expert_parallel"),
    "kv dtype": ("worker", settings("cache_config", cache_dtype="fp8"), "cache_config.cache_dtype"),
    "quantised": ("worker", settings("model_config", quantization="awq"), "no supported precision"),
    "other precision": (
        "worker",
        lambda r: (
            r["resolved_config"]["model_config"].update(quantization="modelopt_fp4"),
            r["resolved_config"].update(
                quantization_config={
                    "type": "vllm.model_executor.layers.quantization.modelopt.ModelOptNvFp4Config",
                    "quant_method": "NVFP4",
                }
            ),
            r["resolved_config"]["model_config"].update(dtype="torch.float16"),
            r["resolved_config"]["cache_config"].update(cache_dtype="bfloat16"),
        ),
        "launched for gemm bfloat16",
    ),
    "no precision": ("worker", lambda r: r["resolved_config"].pop("quantization_config"), "not fully reported"),
    "offload": (
        "worker",
        lambda r: r["resolved_config"]["offload_config"]["uva"].update(cpu_offload_gb=1),
        "cpu_offload_gb",
    ),
    "offloader": ("worker", lambda r: r.update(effective_offloader="x.Uva"), "effective_offloader"),
    "fixed cache": ("worker", settings("cache_config", num_gpu_blocks_override=10), "num_gpu_blocks_override"),
    "graph mode": ("worker", settings("compilation_config", cudagraph_mode="SOME"), "cudagraph_mode"),
    "capture beyond tokens": (
        "worker",
        settings("compilation_config", cudagraph_capture_sizes=[128], max_cudagraph_capture_size=128),
        "cudagraph_capture_sizes",
    ),
    "largest capture": ("worker", settings("compilation_config", max_cudagraph_capture_size=4), "max_cudagraph"),
    "eager": ("worker", settings("model_config", enforce_eager=True), "enforce_eager contradicts"),
    "speculation": ("worker", lambda r: r["resolved_config"].update(speculative_config={"n": 1}), "speculative"),
    "transfer": ("worker", lambda r: r["resolved_config"].update(kv_transfer_config={"n": 1}), "kv_transfer"),
    "model": ("worker", settings("model_config", model="org/other"), "not the launched model"),
    "snapshot of a branch": (
        "worker",
        settings("model_config", model="/hub/models--org--model/snapshots/main"),
        "not the launched model",
    ),
    "revision": ("worker", settings("model_config", revision="a" * 40), "pinned and not reported"),
    "loaded commit": (
        "worker",
        settings("model_config", loaded_config_commit_hash="a" * 40),
        "loaded_config_commit_hash",
    ),
    "compute dtype": (
        "worker",
        lambda r: (
            r["resolved_config"]["model_config"].update(dtype="torch.float16"),
            r["resolved_config"]["cache_config"].update(cache_dtype="bfloat16"),
        ),
        "launched for gemm bfloat16",
    ),
    "worker and scheduler differ": (
        "scheduler",
        settings("cache_config", enable_prefix_caching="both"),
        "worker and scheduler of one rank differ in cache_config",
    ),
    "unaudited downgrade": (
        "worker",
        lambda r: (
            r.update(initial_compilation_config=dict(r["resolved_config"]["compilation_config"])),
            r["resolved_config"]["compilation_config"].update(cudagraph_mode="FULL"),
        ),
        "worker and scheduler of one rank differ in compilation_config",
    ),
    "no imports": ("worker", lambda r: r.pop("instrumentation_binding"), "instrumentation_binding"),
    "failed import": ("worker", every("instrumentation_binding", status="failed"), "instrumentation_binding"),
    "imported file": (
        "worker",
        lambda r: r["instrumentation_binding"]["imports"]["instrumentation.observer"].update(sha256="0" * 64),
        "sha256",
    ),
    "imported elsewhere": (
        "worker",
        lambda r: r["instrumentation_binding"]["imports"]["instrumentation.observer"].update(path="/opt/observer.py"),
        "path",
    ),
    "imported class": (
        "worker",
        lambda r: r["instrumentation_binding"]["classes"].update(worker_class="instrumentation.observer.Other"),
        "worker_class",
    ),
    "importer": ("scheduler", every("instrumentation_binding", loader_sha256="0" * 64), "loader_sha256"),
    "worker out of range": ("worker", lambda r: r.update(tp_rank=1), "tp_rank"),
    "scheduler with a tp rank": ("scheduler", lambda r: r.update(tp_rank=0), "second scheduler"),
    "semantics": ("worker", lambda r: r["cache"]["semantics"].update(offload=True), "cache.semantics"),
    "blocks": ("scheduler", cache(num_blocks=999), "num_blocks"),
    "pools": ("scheduler", cache(pool_count=2), "pool_count"),
    "watermark": ("scheduler", cache(watermark_blocks=1), "watermark_blocks"),
    "free": ("scheduler", cache(initial_free_blocks=1000, reserved_blocks=0), "null block"),
    "reserved": ("scheduler", cache(permanent_reserved_block_ids=[]), "permanent_reserved_block_ids"),
    "null block": ("scheduler", cache(null_block_id=5), "permanent_reserved_block_ids"),
    "pool id": ("scheduler", cache(pool_id="pool-1"), "pool_id"),
    "group pools": ("scheduler", cache(group_pool_ids=[]), "group_pool_ids"),
    "over budget": ("worker", cache(available_cache_bytes=1_000_000), "exceed the profiled budget"),
    "storage sum": ("worker", lambda r: r["cache"]["storages"][0].update(size_bytes=512), "allocated are"),
    "storage twice": ("worker", lambda r: r["cache"]["storages"][1].update(pointer=1 << 32), "listed once"),
    "storage on two devices": ("worker", lambda r: r["cache"]["storages"][1].update(device="cuda:1"), "one device"),
    "storage on the cpu": (
        "worker",
        lambda r: [storage.update(device="cpu") for storage in r["cache"]["storages"]],
        "hardware.device_type: expected 'cpu', on which the cache is, found 'cuda'",
    ),
    "storage elsewhere": (
        "worker",
        lambda r: [storage.update(device="xpu:0") for storage in r["cache"]["storages"]],
        "expected cuda:N or cpu, found 'xpu:0'",
    ),
    "a cpu of a described gpu": (
        "worker",
        lambda r: (
            r["hardware"].update(device_type="cpu", sm=None),
            [storage.update(device="cpu") for storage in r["cache"]["storages"]],
        ),
        "the description of the system of 'h200_sxm' states SM 90",
    ),
    "geometry": ("scheduler", group(block_size_tokens=32), "different geometry"),
    "spec": ("worker and scheduler", group(spec_type="vllm.v1.kv_cache_interface.MambaSpec"), "spec_type"),
    "window of full attention": ("worker and scheduler", group(sliding_window=8), "sliding_window"),
    "layer twice": (
        "worker and scheduler",
        group(layer_names=["model.layers.0.attn", "model.layers.0.attn"]),
        "named twice",
    ),
    "class of a layer": ("worker", lambda r: r["cache"]["groups"][0]["layer_classes"].popitem(), "layer_classes"),
    "convolution": (
        "worker",
        lambda r: r["cache"]["groups"][0]["layer_classes"].update(
            {"model.layers.0.attn": "vllm.models.inkling.nvidia.sconv_swa_attn.InklingConvState"}
        ),
        "contradicts the kind",
    ),
    "retained": ("worker and scheduler", group(extra_retained_tokens=1), "extra_retained_tokens"),
    "retained unknown": ("worker and scheduler", group(extra_retained_tokens=False), "extra_retained_tokens"),
    "chunked": ("worker and scheduler", group(attention_chunk_size=8), "attention_chunk_size"),
    "group dtype": ("worker and scheduler", group(dtype="torch.float16"), "dtype"),
    "layer without memory": ("worker", lambda r: r["cache"]["layer_tensors"].popitem(), "layer_tensors"),
    "layer not allocated": ("worker", lambda r: r["cache"]["tensor_allocations"].pop(), "every storage"),
    "layer allocated twice": (
        "worker",
        lambda r: r["cache"]["tensor_allocations"].append(dict(r["cache"]["tensor_allocations"][0])),
        "exactly once",
    ),
    "one group in one slot": (
        "worker",
        lambda r: r["cache"]["tensor_allocations"][0].update(shared_by=["model.layers.0.attn", "model.layers.1.attn"]),
        "cannot share a slot",
    ),
    "allocation size": ("worker", lambda r: r["cache"]["tensor_allocations"][0].update(size=512), "with its size"),
    "allocation offset": ("worker", lambda r: r["cache"]["tensor_allocations"][0].update(offset=2), "packed"),
    "packed stride": ("worker", lambda r: r["cache"]["tensor_allocations"][0].update(block_stride=8), "block_stride"),
    "tensor storage": ("worker", tensor(storage_id="storage-1"), "storage_id"),
    "tensor offset": ("worker", tensor(storage_offset_bytes=2), "storage_offset_bytes"),
    "rank of shape": ("worker", tensor(shape=[1000, 256]), "equal length"),
    "unaligned": ("worker", tensor(stride_bytes=[511, 256, 16, 8, 2]), "multiples of 2"),
    "overlapping axes": ("worker", tensor(stride_bytes=[512, 256, 16, 6, 2]), "overlap"),
    "beyond the storage": ("worker", tensor(stride_bytes=[1024, 256, 16, 8, 2]), "exceed"),
    "kernel blocks": ("worker", tensor(kernel_block_size_tokens=8), "do not make axis"),
    "block axis": ("worker", tensor(block_axis=1), "do not make axis"),
    "element": ("worker", tensor(element_size_bytes=1), "contradicts bfloat16"),
    "page": ("worker and scheduler", group(spec_page_size_bytes=256), "larger than"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_records_are_told_and_no_resources_come_of_them(probe, name):
    kinds, alter, message = UNSOUND[name]

    def change(label, phase, file, record):
        if record["kind"] in kinds:
            alter(record)

    index, launches = probe(change=change)
    observed = validate_observations(index, launches)["tp1"]
    assert (observed.status, observed.resources) == ("incomplete", None)
    (diagnostic,) = observed.diagnostics
    assert diagnostic.startswith("tp1: ")
    assert message in diagnostic


def packed(record):
    # Both layers in one storage, one behind the other inside every block.
    held = record["cache"]
    held["storages"] = [{"storage_id": "s", "device": "cuda:0", "pointer": 4096, "size_bytes": 1_024_000}]
    held["tensor_allocations"] = [
        {
            "storage_id": "s",
            "size": 1_024_000,
            "shared_by": [f"model.layers.{n}.attn"],
            "block_stride": 1024,
            "offset": n * 512,
        }
        for n in (0, 1)
    ]
    for n in (0, 1):
        held["layer_tensors"][f"model.layers.{n}.attn"].update(
            storage_id="s", storage_offset_bytes=n * 512, stride_bytes=[1024, 256, 16, 8, 2]
        )


@pytest.mark.parametrize(
    ("name", "alter", "message"),
    [
        ("packed", lambda held: None, None),
        ("slots overlap", lambda held: held["tensor_allocations"][1].update(offset=256), "overlap another allocation"),
        ("beyond the slot", lambda held: held["tensor_allocations"][1].update(offset=768), "exceed the slot"),
        (
            "step",
            lambda held: held["layer_tensors"]["model.layers.0.attn"].update(stride_bytes=[512, 256, 16, 8, 2]),
            "must step 1024",
        ),
        (
            "block wider than its page",
            lambda held: held["layer_tensors"]["model.layers.0.attn"].update(stride_bytes=[1024, 512, 16, 8, 2]),
            "exceeds its page",
        ),
        ("mixed", lambda held: held["tensor_allocations"][1].update(block_stride=0), "only packed allocations"),
    ],
)
def test_packed_layers_own_their_part_of_every_block(probe, name, alter, message):
    def change(label, phase, file, record):
        if record["kind"] == "worker":
            packed(record)
            alter(record["cache"])

    index, launches = probe(change=change)
    observed = validate_observations(index, launches)["tp1"]
    if message is None:
        assert observed.status == "complete"
    else:
        assert message in observed.diagnostics[0]


def planes(record):
    # Both layers in one storage, the pages of one after those of the other.
    packed(record)
    held = record["cache"]
    for n in (0, 1):
        held["tensor_allocations"][n].update(block_stride=512, offset=n * 512_000)
        held["layer_tensors"][f"model.layers.{n}.attn"].update(
            storage_offset_bytes=n * 512_000, stride_bytes=[512, 256, 16, 8, 2]
        )


@pytest.mark.parametrize(
    ("name", "alter", "message"),
    [
        ("planes", lambda held: None, None),
        ("same plane", lambda held: held["tensor_allocations"][1].update(offset=0), "overlaps another allocation"),
        ("between planes", lambda held: held["tensor_allocations"][1].update(offset=511_488), "planes of 1000 pages"),
        ("behind the last", lambda held: held["tensor_allocations"][1].update(offset=1_024_000), "planes of 1000"),
        ("page too large", lambda held: held["tensor_allocations"][0].update(block_stride=256), "pages of 512 bytes"),
        (
            "step",
            lambda held: held["layer_tensors"]["model.layers.0.attn"].update(stride_bytes=[1024, 256, 16, 8, 2]),
            "must step 512",
        ),
    ],
)
def test_layers_may_follow_each_other_in_planes_of_one_storage(probe, name, alter, message):
    def change(label, phase, file, record):
        if record["kind"] == "worker":
            planes(record)
            alter(record["cache"])

    index, launches = probe(change=change)
    observed = validate_observations(index, launches)["tp1"]
    if message is None:
        assert observed.status == "complete"
        assert observed.resources["cache_groups"][0]["page_size_bytes"] == 1024
    else:
        assert message in observed.diagnostics[0]


@pytest.mark.parametrize(
    ("strides", "message"),
    [
        ([512, 256, 16, 8, 2], None),
        # Keys of all blocks before values of all blocks: the other layer has both side by side in its block.
        ([256, 256_000, 16, 8, 2], "give different bytes"),
    ],
)
def test_layers_that_share_memory_give_every_block_the_same_bytes(probe, strides, message):
    def change(label, phase, file, record):
        if record["kind"] == "worker":
            record["cache"]["layer_tensors"]["model.layers.2.attn"]["stride_bytes"] = strides

    index, launches = probe(pool=FakePool(windows_tokens=(None, 32)), change=change)
    observed = validate_observations(index, launches)["tp1"]
    if message is None:
        assert observed.status == "complete"
    else:
        assert message in observed.diagnostics[0]


def records(index):
    return sorted(index.parent.glob("attempts/*/*/raw/*/*.json"))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("tampered", lambda path: path.write_text(path.read_text().replace("0.27.0", "0.27.1")), "was changed"),
        ("truncated", lambda path: path.write_bytes(path.read_bytes()[:-10]), "was changed"),
        ("gone", lambda path: path.unlink(), "missing"),
        (
            "linked",
            lambda path: (path.rename(path.with_suffix(".real")), path.symlink_to(path.with_suffix(".real"))),
            "symbolic link",
        ),
        ("swapped", lambda path: path.write_bytes(records_beside(path)[1].read_bytes()), "was changed"),
    ],
)
def test_evidence_that_is_not_what_was_recorded_is_refused(probe, name, damage, message):
    index, launches = probe()
    damage(records(index)[0])
    observed = validate_observations(index, launches)["tp1"]
    assert observed.status == "incomplete"
    assert message in observed.diagnostics[0]


def records_beside(path):
    return sorted(path.parent.glob("*.json"))


def rewritten(index, change):
    document = json.loads(index.read_text())
    change(document["configurations"]["tp1"])
    index.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rank missing", lambda c: c["attempts"][0]["phases"]["decode"]["artifacts"].pop(), "every rank must report"),
        (
            "rank twice",
            lambda c: c["attempts"][0]["phases"]["decode"]["artifacts"].append(
                c["attempts"][0]["phases"]["decode"]["artifacts"][0]
            ),
            "listed twice",
        ),
        ("phase missing", lambda c: c["attempts"][0]["phases"].pop("decode"), "expected prefill, decode"),
        ("no attempts", lambda c: c.update(attempts=[]), "is none of"),
        ("attempts of one name", lambda c: c["attempts"].append(c["attempts"][0]), "an attempt_id of its own"),
        ("no active attempt", lambda c: c.pop("active_attempt_id"), "active_attempt_id"),
        ("other launch", lambda c: c["launch"]["collection"].update(max_num_seqs=2), "launch"),
        ("other bundle", lambda c: c["attempts"][0]["bundle"].update(sha256="0" * 64), "bundle.sha256"),
        ("way out", lambda c: c["attempts"][0]["bundle"].update(manifest="../manifest.json"), "relative"),
        ("malformed", lambda c: c["attempts"][0].update(bundle=None), "malformed evidence"),
        ("malformed phases", lambda c: c["attempts"][0].update(phases=[1]), "expected prefill, decode"),
    ],
)
def test_an_index_that_does_not_hold_together_is_told(probe, name, change, message):
    index, launches = probe()
    rewritten(index, change)
    observed = validate_observations(index, launches)["tp1"]
    assert observed.status == "incomplete"
    assert message in observed.diagnostics[0]


def test_one_configuration_does_not_spoil_another(probe):
    def change(label, phase, file, record):
        if label == "bad":
            record.update(error="boom")

    index, launches = probe({"good": {}, "bad": {}}, change=change)
    observed = validate_observations(index, launches)
    assert [observed[label].status for label in ("good", "bad")] == ["complete", "incomplete"]


def test_a_configuration_without_observations_is_its_own_diagnostic(probe):
    index, launches = probe()
    observed = validate_observations(index, {"other": launches["tp1"]})
    assert "no observations of it" in observed["other"].diagnostics[0]


def test_one_phase_is_checked_alone(probe):
    index, launches = probe()
    rewritten(index, lambda c: c["attempts"][0]["phases"].pop("decode"))
    attempt = json.loads(index.read_text())["configurations"]["tp1"]["active_attempt_id"]
    observed = validate_observation_phase(index, "tp1", launches["tp1"], phase="prefill", attempt_id=attempt)
    assert {one["phase"] for one in observed.provenance["rank_capacities"]} == {"prefill"}
    with pytest.raises(EvidenceError, match="active_attempt_id"):
        validate_observation_phase(index, "tp1", launches["tp1"], phase="prefill", attempt_id="0" * 32)
    with pytest.raises(EvidenceError, match="expected decode"):
        validate_observation_phase(index, "tp1", launches["tp1"], phase="decode", attempt_id=attempt)


@pytest.mark.parametrize("content", ["[]", "{}", '{"schema_version": "v1", "configurations": {}}', "not json"])
def test_an_index_of_another_kind_is_bad_input(tmp_path, content):
    (tmp_path / "observations.json").write_text(content)
    with pytest.raises(OnboardError, match=r"observations\.json"):
        validate_observations(tmp_path / "observations.json", {"tp1": {}})


def test_a_linked_index_is_bad_input(probe):
    index, launches = probe()
    link = index.with_name("link.json")
    link.symlink_to(index)
    with pytest.raises(OnboardError, match="symbolic link"):
        validate_observations(link, launches)


def test_a_system_without_description_confirms_nothing(probe, tmp_path, monkeypatch):
    index, launches = probe()
    (tmp_path / "none").mkdir()
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(tmp_path / "none"))
    assert "h200_sxm" in validate_observations(index, launches)["tp1"].diagnostics[0]
