"""What observers inside an engine would report, for the fake engine: sound records of every rank of a launch.

The figures are made up; their form, bindings and sums are those of a real observation.
Source: collector.md sections 8.2, 8.5, onboarding.md section 10.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.collect.cache_pool import FULL_ATTENTION, SLIDING_WINDOW
from fpmsdk.collect.instrumentation import OBSERVATION_SCHEMA, InstrumentationBundle, load_instrumentation
from fpmsdk.collect.observation_geometry import SEMANTICS
from fpmsdk.collect.observation_index import described_system
from fpmsdk.collect.observer_staging import ARCHIVE_FILE, BUNDLE_FOLDER, CONTEXT_FILE, unpack_observers
from fpmsdk.collect.paths import WORK
from fpmsdk.collect.probe_launch import GRAPH_REQUEST_FIELDS, deployed_model
from fpmsdk.collect.sampling import capture_sizes, prefill_sampling
from fpmsdk.documents.canonical import read_document, write_document

_ELEMENT_BYTES = {"bfloat16": 2, "half": 2, "fp8": 1}
_GROUP_DTYPES = {"bfloat16": "torch.bfloat16", "half": "torch.float16", "fp8": "torch.uint8"}
_QUANTISATION = "vllm.model_executor.layers.quantization."
_QUANT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": ("modelopt_fp4", {"type": f"{_QUANTISATION}modelopt.ModelOptNvFp4Config", "quant_method": "NVFP4"}),
    "fp8_block": (
        "fp8",
        {
            "type": f"{_QUANTISATION}fp8.Fp8Config",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "fp8": (
        "fp8",
        {"type": f"{_QUANTISATION}fp8.Fp8Config", "activation_scheme": "dynamic", "weight_block_size": None},
    ),
    "fp8_static": (
        "fp8",
        {"type": f"{_QUANTISATION}fp8.Fp8Config", "activation_scheme": "static", "weight_block_size": None},
    ),
}
# What vLLM captures by default: up to twice the sequences, never beyond this.
_RUNTIME_CAPTURE_LIMIT = 512


@dataclass(frozen=True)
class FakePool:
    """A shared pool of cache blocks, the same on every rank.

    Parameters
    ----------
    num_blocks, reserved_blocks: blocks of the pool, and those that requests never get; block 0 is the null block.
    windows_tokens: one group of layers for each entry; None is full attention.
    layers_per_group: layers of every group; layers of different groups share storages.
    block_size_tokens, kv_heads, head_dim: geometry of a layer's block.

    >>> FakePool().page_bytes("bfloat16")
    1024
    """

    num_blocks: int = 1000
    reserved_blocks: int = 1
    windows_tokens: tuple[int | None, ...] = (None,)
    layers_per_group: int = 2
    block_size_tokens: int = 16
    kv_heads: int = 2
    head_dim: int = 4

    def layer_bytes(self, precision: str) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size_tokens * self.kv_heads * self.head_dim * _ELEMENT_BYTES[precision]

    def page_bytes(self, precision: str) -> int:
        """Bytes of one block of the pool."""
        return self.layers_per_group * self.layer_bytes(precision)


def observation_records(
    context: Mapping[str, Any],
    bundle: InstrumentationBundle,
    *,
    sm_version: int,
    total_memory_bytes: int,
    pool: FakePool | None = None,
) -> dict[str, dict[str, Any]]:
    """One record for every expected rank, by file name.

    Parameters
    ----------
    context: the launch context of one phase.
    bundle: the observers that the launch froze.
    sm_version, total_memory_bytes: of the described system.
    pool: the cache; `FakePool()` by default.
    """
    pool = pool or FakePool()
    records = {}
    for kind, ranks in (
        ("worker", context["expected_ranks"]["workers"]),
        ("scheduler", context["expected_ranks"]["schedulers"]),
    ):
        for number, rank in enumerate(ranks):
            record = _common(context, bundle, kind, number)
            record.update({"dp_rank": None, "tp_rank": None, "pp_rank": None, **rank})
            if kind == "worker":
                record.update(_worker(context, pool, sm_version, total_memory_bytes, number))
            else:
                record["lifecycle"] = {"measurement": "scheduler_initialized", "cache_initialized": True}
                record["cache"] = _scheduled(context, pool)
            name = "-".join(f"{axis.removesuffix('_rank')}{size}" for axis, size in rank.items())
            records[f"runtime-observation-{kind}-{name}.json"] = record
    return records


def write_observation_records(results: Path) -> None:
    """Write the records of all ranks into the results of a unit, as its staged observers would.

    Parameters
    ----------
    results: `raw/<unit>` of a cell; what was staged is in `local-runtime/<unit>`.

    Raises
    ------
    OnboardError: nothing was staged, or the system has no description.
    """
    work = results.parent.parent / "local-runtime" / results.name
    bundle = load_instrumentation(unpack_observers(work / ARCHIVE_FILE, work / BUNDLE_FOLDER))
    context = read_document(work / CONTEXT_FILE)
    spec = described_system(context["launch"]["identity"]["gpu"])
    records = observation_records(
        context, bundle, sm_version=spec.sm_version or 0, total_memory_bytes=spec.mem_capacity_bytes or 0
    )
    for name, record in records.items():
        write_document(results / name, record)


def _common(context: Mapping[str, Any], bundle: InstrumentationBundle, kind: str, number: int) -> dict[str, Any]:
    launch = context["launch"]
    config = launch["model_config"]
    record: dict[str, Any] = {
        "schema_version": OBSERVATION_SCHEMA,
        **{name: context[name] for name in ("attempt_id", "configuration", "phase", "bundle_sha256")},
        "kind": kind,
        "launch": launch,
        "identity": launch["identity"],
        "runtime": {**bundle.runtime, "image": launch["deployment"]["image"]},
        "source_identity": bundle.runtime,
        "model_config_sha256": config["sha256"],
        "loaded_model_config": {"path": f"{deployed_model(launch)}/config.json", "sha256": config["sha256"]},
        "model_config_source_files": config.get("source_files", {}),
        "resolved_config": _settings(launch, context["phase"]),
        "attention_backend": "FLASH_ATTN",
        "unresolved_fields": [],
    }
    if "instrumentation_binding" in context:
        record["instrumentation_binding"] = _receipt(context, bundle, number + (1000 if kind == "scheduler" else 1))
    return copy.deepcopy(record)


def _settings(launch: Mapping[str, Any], phase: str) -> dict[str, Any]:
    identity, topology, precision, collection = (
        launch[name] for name in ("identity", "topology", "precision", "collection")
    )
    base = "torch.float16" if precision["fmha_quant_mode"] == "half" else "torch.bfloat16"
    method, quant = _QUANT_CONFIGS.get(precision["gemm_quant_mode"], (None, None))
    kv = precision["kvcache_quant_mode"]
    return {
        "model_config": {
            "model": deployed_model(launch),
            "revision": identity["model_revision"],
            "dtype": base,
            "quantization": method,
            "max_model_len": collection["max_model_len"],
            "enforce_eager": collection["enforce_eager"],
        },
        "cache_config": {
            "cache_dtype": "fp8" if kv == "fp8" else "auto",
            "gpu_memory_utilization": float(collection["gpu_memory_utilization"]),
            "enable_prefix_caching": phase == "prefill",
            "kv_cache_memory_bytes": None,
            "num_gpu_blocks_override": None,
        },
        "scheduler_config": {
            "max_num_batched_tokens": collection["max_num_batched_tokens"],
            "max_num_seqs": collection["max_num_seqs"],
            "async_scheduling": False,
        },
        "parallel_config": {
            "tensor_parallel_size": topology["tp"],
            "pipeline_parallel_size": topology["pp"],
            "data_parallel_size": topology["dp"],
            "enable_expert_parallel": topology["moe_ep"] > 1,
            "enable_eplb": False,
            "decode_context_parallel_size": topology["cp"],
            "prefill_context_parallel_size": 1,
        },
        "kernel_config": {"moe_backend": precision["moe_backend"]},
        "compilation_config": _graphs(launch, phase),
        "quantization_config": quant,
        "offload_config": {
            "offload_backend": "auto",
            "uva": {"cpu_offload_gb": 0},
            "prefetch": {"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1},
        },
        "speculative_config": None,
        "kv_transfer_config": None,
    }


def _graphs(launch: Mapping[str, Any], phase: str) -> dict[str, Any]:
    collection = launch["collection"]
    tokens = collection["max_num_batched_tokens"]
    mode, graphs = "VLLM_COMPILE", collection.get("cudagraph_mode") or "FULL_AND_PIECEWISE"
    sizes = list(capture_sizes(min(tokens, 2 * collection["max_num_seqs"], _RUNTIME_CAPTURE_LIMIT)))
    explicit = collection["prefill_cudagraph_policy"] == "explicit"
    if explicit and (phase == "prefill" or launch.get("worker_type") is not None):
        sampling = prefill_sampling(
            tokens, max_batch_size=collection["max_num_seqs"], max_capture=collection["max_prefill_cudagraph_size"]
        )
        sizes = list(sampling.captures or ())
    requested = {name: collection[name] for name in GRAPH_REQUEST_FIELDS if collection.get(name) is not None}
    if "max_cudagraph_capture_size" in requested:
        sizes = list(capture_sizes(requested["max_cudagraph_capture_size"]))
    sizes = requested.get("cudagraph_capture_sizes", sizes)
    if collection["enforce_eager"]:
        mode, graphs, sizes = "NONE", "NONE", []
    if graphs == "NONE":
        sizes = []
    return {
        "mode": mode,
        "cudagraph_mode": graphs,
        "cudagraph_capture_sizes": sizes,
        "max_cudagraph_capture_size": max(sizes, default=0),
    }


def _groups(pool: FakePool, precision: str) -> list[dict[str, Any]]:
    return [
        {
            "layer_names": [
                f"model.layers.{index * pool.layers_per_group + layer}.attn" for layer in range(pool.layers_per_group)
            ],
            "spec_type": FULL_ATTENTION if window is None else SLIDING_WINDOW,
            "sliding_window": window,
            "block_size_tokens": pool.block_size_tokens,
            "pool_id": "pool-0",
            "extra_retained_tokens": 0,
            "attention_chunk_size": None,
            "dtype": _GROUP_DTYPES[precision],
            "spec_page_size_bytes": pool.layer_bytes(precision),
        }
        for index, window in enumerate(pool.windows_tokens)
    ]


def _scheduled(context: Mapping[str, Any], pool: FakePool) -> dict[str, Any]:
    groups = _groups(pool, context["launch"]["precision"]["kvcache_quant_mode"])
    return {
        "groups": groups,
        "num_blocks": pool.num_blocks,
        "initial_free_blocks": pool.num_blocks - pool.reserved_blocks,
        "reserved_blocks": pool.reserved_blocks,
        "null_block_id": 0,
        "permanent_reserved_block_ids": list(range(pool.reserved_blocks)),
        "pool_count": 1,
        "pool_id": "pool-0",
        "group_pool_ids": ["pool-0"] * len(groups),
        "watermark_blocks": 0,
    }


def _worker(
    context: Mapping[str, Any], pool: FakePool, sm_version: int, total_memory_bytes: int, number: int
) -> dict[str, Any]:
    system = context["launch"]["identity"]["gpu"]
    precision = context["launch"]["precision"]["kvcache_quant_mode"]
    groups = _groups(pool, precision)
    classes = "vllm.model_executor.layers.attention.Attention"
    layer_bytes, count = pool.layer_bytes(precision), pool.num_blocks
    storages, allocations, tensors = [], [], {}
    element = _ELEMENT_BYTES[precision]
    shape = [count, 2, pool.block_size_tokens, pool.kv_heads, pool.head_dim]
    strides = [element]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    for layer in range(pool.layers_per_group):
        name, shared = f"storage-{layer}", [group["layer_names"][layer] for group in groups]
        storages.append(
            {
                "storage_id": name,
                "device": "cuda:0",
                "pointer": (layer + 1) << 32,
                "size_bytes": count * layer_bytes,
            }
        )
        allocations.append(
            {"storage_id": name, "size": count * layer_bytes, "shared_by": shared, "block_stride": 0, "offset": 0}
        )
        for one in shared:
            tensors[one] = {
                "storage_id": name,
                "storage_offset_bytes": 0,
                "shape": shape,
                "stride_bytes": strides,
                "element_size_bytes": element,
                "block_axis": 0,
                "kernel_block_size_tokens": pool.block_size_tokens,
            }
    return {
        "lifecycle": {
            "measurement": "after_warmup",
            "cache_initialized": True,
            "warmup_completed": True,
            "capture_completed": True,
        },
        "hardware": {
            "gpu": system,
            "sm": sm_version,
            "device_name": f"NVIDIA {system.split('_')[0].upper()}",
            "total_memory_bytes": total_memory_bytes,
        },
        "effective_offloader": "vllm.model_executor.offloader.base.NoopOffloader",
        "cache": {
            "semantics": dict(SEMANTICS),
            "pool_id": "pool-0",
            "num_blocks": count,
            "allocated_cache_bytes": count * pool.page_bytes(precision),
            "available_cache_bytes": count * pool.page_bytes(precision) + 512,
            "groups": [
                {**group, "kind": "attention", "layer_classes": dict.fromkeys(group["layer_names"], classes)}
                for group in groups
            ],
            "storages": storages,
            "tensor_allocations": allocations,
            "layer_tensors": tensors,
        },
    }


def _receipt(context: Mapping[str, Any], bundle: InstrumentationBundle, pid: int) -> dict[str, Any]:
    root = f"{WORK}/{BUNDLE_FOLDER}"
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in bundle.files
        if name.endswith(".py")
    }
    return {
        **context["instrumentation_binding"],
        **{name: context[name] for name in ("attempt_id", "configuration", "phase", "bundle_sha256")},
        "expected_bundle_sha256": bundle.sha256,
        "status": "verified",
        "hostname": "fake-engine",
        "pid": pid,
        "root": root,
        "files": dict(bundle.files),
        "imports": {
            module: {"file": name, "path": f"{root}/{name}", "sha256": bundle.files[name]}
            for module, name in modules.items()
        },
        "classes": {field: bundle.manifest[field] for field in ("worker_class", "scheduler_class")},
    }
