"""What observers in the workers of a fake engine write: resolved settings, and the cache that was allocated.

Source: collector.md sections 7.1 and 8.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.fake_cpus import write_cpu_files
from fpmsdk.collect.fake_documents import graph_settings, is_async
from fpmsdk.collect.fake_launch import FakeLaunch
from fpmsdk.collect.fake_observations import write_observation_records
from fpmsdk.collect.paths import PROVENANCE
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_evidence

# Of a model whose configuration does not say; the cache of other models is theirs.
_LAYERS, _KV_HEADS, _HEAD_DIM = 4, 8, 128


def write_worker_files(launch: FakeLaunch) -> None:
    """Write what the classes that the command names would observe. Raises `OSError`."""
    worker = launch.flags.get("--worker-cls", "")
    if worker.startswith("fpm_runtime_instrumentation."):
        write_observation_records(launch.results)
        return
    if not worker.startswith("fpm_memory_worker.") or launch.faults.legacy:
        return
    write_cpu_files(launch)
    source = launch.results / PROVENANCE
    provenance = read_document(source)
    resolved = resolved_config(launch)
    for dp_rank in range(launch.topology.dp):
        shared = {
            "schema_version": 1,
            "backend_version": launch.version,
            "dp_rank": dp_rank,
            "collector_provenance": provenance,
            "resolved_config": resolved,
        }
        for tp_rank in range(launch.topology.tp):
            name = f"worker-dp{dp_rank}-tp{tp_rank}-pp0.json"
            ranks = {"tp_rank": tp_rank, "pp_rank": 0}
            execution = {
                **shared,
                **ranks,
                "schema_name": "aisimulate_fpm_runtime_execution",
                "execution_provenance": None,
                "provenance_source": file_evidence(source),
                "status": "observed",
                "attention_groups": [
                    {
                        "kv_cache_group_id": 0,
                        "backend_class": "FlashAttentionBackend",
                        "layer_names": _layer_names(launch),
                    }
                ],
                "graph_config": resolved["compilation_config"],
                "per_point_dispatch": "unreported",
            }
            write_document(launch.results / f"fpm-execution-{name}", execution)
            if worker == "fpm_memory_worker.FpmResourceWorker":
                memory = {**shared, **ranks, **_worker_memory(launch, tp_rank)}
                write_document(launch.results / f"fpm-memory-{name}", memory)
        if worker == "fpm_memory_worker.FpmResourceWorker":
            scheduler = {**shared, **_scheduler_memory(launch)}
            write_document(launch.results / f"fpm-memory-scheduler-dp{dp_rank}.json", scheduler)


def resolved_config(launch: FakeLaunch) -> dict[str, Any]:
    """The settings that the engine resolved."""
    flags, topology, graphs = launch.flags, launch.topology, graph_settings(launch)
    config = _text_config(launch)
    eager = "--enforce-eager" in flags
    return {
        "model_config": {
            "model": launch.model,
            "revision": flags.get("--revision"),
            **_loaded_commit(launch),
            "dtype": f"torch.{config.get('dtype') or config.get('torch_dtype') or 'bfloat16'}",
            "quantization": None,
            "max_model_len": launch.limits.max_model_len,
            "enforce_eager": eager,
        },
        "cache_config": {
            "cache_dtype": flags.get("--kv-cache-dtype", "auto"),
            "gpu_memory_utilization": float(flags.get("--gpu-memory-utilization", 0.9)),
            "enable_prefix_caching": launch.prefix_caching,
            "kv_cache_memory_bytes": None,
            "num_gpu_blocks_override": None,
        },
        "scheduler_config": {
            "max_num_batched_tokens": launch.limits.max_num_batched_tokens,
            "max_num_seqs": launch.limits.max_num_seqs,
            "async_scheduling": is_async(launch),
        },
        "parallel_config": {
            "tensor_parallel_size": topology.tp,
            "pipeline_parallel_size": 1,
            "data_parallel_size": topology.dp,
            "data_parallel_size_local": topology.dp,
            "data_parallel_external_lb": False,
            "enable_expert_parallel": "--enable-expert-parallel" in flags,
            "enable_eplb": "--enable-eplb" in flags,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "kernel_config": {"moe_backend": "auto"},
        "compilation_config": {
            "mode": "NONE" if eager else "VLLM_COMPILE",
            "cudagraph_mode": graphs["mode"],
            "cudagraph_capture_sizes": graphs["capture_sizes"],
            "max_cudagraph_capture_size": graphs["max_capture_size"],
        },
        "quantization_config": None,
        "offload_config": {
            "offload_backend": "auto",
            "uva": {"cpu_offload_gb": 0},
            "prefetch": {"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1},
        },
    }


def _loaded_commit(launch: FakeLaunch) -> dict[str, str]:
    # Engines state the commit of a checkpoint that they found in a local cache of the hub.
    revision = launch.capability.get("revision")
    return {"loaded_config_commit_hash": revision} if revision and re.fullmatch("[0-9a-f]{40}", revision) else {}


def _layer_names(launch: FakeLaunch) -> list[str]:
    layers = _text_config(launch).get("num_hidden_layers") or _LAYERS
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]


def _layer_page_bytes(launch: FakeLaunch) -> int:
    """Bytes of one block of one layer on one rank: keys and values of its own heads."""
    text = _text_config(launch)
    heads = text.get("num_attention_heads") or _KV_HEADS
    kv_heads = text.get("num_key_value_heads") or (heads if "num_attention_heads" in text else _KV_HEADS)
    head_dim = text.get("head_dim") or (text["hidden_size"] // heads if "hidden_size" in text else _HEAD_DIM)
    element_bytes = 1 if "fp8" in launch.flags.get("--kv-cache-dtype", "auto") else 2
    own_heads = max(1, kv_heads // launch.topology.tp)
    return int(2 * launch.limits.block_size * own_heads * head_dim * element_bytes)


def _text_config(launch: FakeLaunch) -> Mapping[str, Any]:
    text: Mapping[str, Any] = launch.config.get("text_config") or launch.config
    return text


def _group(launch: FakeLaunch) -> dict[str, Any]:
    return {
        "layer_names": _layer_names(launch),
        "spec_type": "vllm.v1.kv_cache_interface.FullAttentionSpec",
        "sliding_window": None,
        "block_size_tokens": launch.limits.block_size,
    }


def _worker_memory(launch: FakeLaunch, tp_rank: int) -> dict[str, Any]:
    names, layer_page = _layer_names(launch), _layer_page_bytes(launch)
    page = len(names) * layer_page
    allocated = launch.num_blocks * page
    classes = dict.fromkeys(names, "vllm.attention.layer.Attention")
    storages = [
        {"device": f"cuda:{tp_rank}", "pointer": (layer + 1) << 40, "size_bytes": launch.num_blocks * layer_page}
        for layer in range(len(names))
    ]
    return {
        "schema_name": "aisimulate_fpm_runtime_memory",
        "kind": "worker",
        "status": "resolved",
        "effective_offloader": "vllm.model_executor.offloader.base.NoopOffloader",
        "cache": {
            "num_blocks": launch.num_blocks,
            "allocated_cache_bytes": allocated,
            "available_cache_bytes": allocated + page,
            "groups": [{**_group(launch), "kind": "attention", "layer_classes": classes}],
            "storages": storages,
        },
    }


def _scheduler_memory(launch: FakeLaunch) -> dict[str, Any]:
    return {
        "schema_name": "aisimulate_fpm_runtime_memory",
        "kind": "scheduler",
        "status": "resolved",
        "cache": {
            "groups": [_group(launch)],
            "num_blocks": launch.num_blocks,
            "initial_free_blocks": launch.num_blocks - 1,
            "reserved_blocks": 1,
            "null_block_id": 0,
            "pool_count": 1,
            "watermark_blocks": 0,
        },
    }


def write_resolved_config(launch: FakeLaunch) -> None:
    """Write the dump that the command asks for. Raises `OSError`."""
    path = launch.flags.get("--dump-config-to")
    if path:
        write_document(Path(path), {"config": {"engine_args": dict(launch.flags)}, "runtime": resolved_config(launch)})
