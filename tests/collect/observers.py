"""What observers in engine processes write beside the rank files of tests, and the launch files of their cell."""

import json
import shlex

from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.collect.runtime_settings import LaunchedSettings
from fpmsdk.documents.canonical import digest
from tests.collect.native import ATTEMPT, PLAN, cell_of, decode_sweep, unit, with_measurements, write

REVISION = "c" * 40
OVERRIDES = {"K8sConfig": {"extra_env": []}}
CELL = cell_of("decode", "dep", dp=2, moe_ep=2)
RANKS = [(0, 0, 0), (1, 0, 0)]
LIMITS = LaunchedSettings(
    topology=CELL.topology,
    max_model_len=2048,
    max_num_batched_tokens=512,
    max_num_seqs=16,
    gpu_memory_utilization=0.9,
    gemm_quant_mode="bfloat16",
    moe_quant_mode="bfloat16",
    kv_cache_dtype="bfloat16",
)


def plan_of(cell=CELL, **options):
    """A plan like the recorded one of one cell, with further options."""
    document = json.loads(json.dumps(PLAN.document))
    document["options"] |= options
    document["cells"] = [cell.document()]
    document["generator_config_sha256"] = digest(OVERRIDES)
    return CollectionPlan.from_document(document | {"sha256": plan_digest(document)})


FLAGS = [
    "--model",
    PLAN.model_path,
    "--revision",
    REVISION,
    "--max-model-len",
    "2048",
    "--max-num-batched-tokens",
    "512",
    "--max-num-seqs",
    "16",
    "--gpu-memory-utilization",
    "0.9",
    "--data-parallel-size",
    "2",
    "--no-async-scheduling",
]


def launch_files(cell_dir, plan, flags=FLAGS, nodes=2, model=PLAN.model_path):
    """The archived launch of a cell."""
    for name in ("fpm_env.sh", "collector-runtime-env.sh"):
        (cell_dir / name).write_text("#!/bin/sh\n")
    (cell_dir.parent.parent / "generator-overrides.json").write_text(json.dumps(OVERRIDES))
    (cell_dir / "generator-request.json").write_text(json.dumps({"ServiceConfig": {"model_path": model}}))
    command = shlex.join(["python3", "-m", "dynamo.vllm", *flags])
    (cell_dir / "run.sh").write_text(f"#!/bin/sh\nengine_command=({command})\n")
    spec = {"kind": "LeaderWorkerSet", "spec": {"replicas": 1, "leaderWorkerTemplate": {"size": nodes}}}
    (cell_dir / "k8s_deploy.yaml").write_text(json.dumps(spec))


GRAPHS = {
    "mode": "VLLM_COMPILE",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [1, 2, 4],
    "max_cudagraph_capture_size": 4,
}


def settings(phase="decode"):
    """What a worker resolved that was launched as above."""
    return {
        "model_config": {
            "model": PLAN.model_path,
            "revision": REVISION,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "max_model_len": 2048,
            "enforce_eager": False,
        },
        "cache_config": {
            "cache_dtype": "auto",
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": phase == "prefill",
            "kv_cache_memory_bytes": None,
            "num_gpu_blocks_override": None,
        },
        "scheduler_config": {"max_num_batched_tokens": 512, "max_num_seqs": 16, "async_scheduling": False},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 2,
            "data_parallel_size_local": 1,
            "data_parallel_external_lb": False,
            "enable_expert_parallel": True,
            "enable_eplb": False,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "kernel_config": {"moe_backend": "auto"},
        "compilation_config": GRAPHS,
        "quantization_config": None,
        "offload_config": {
            "offload_backend": "auto",
            "uva": {"cpu_offload_gb": 0},
            "prefetch": {"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1},
        },
    }


def _write(folder, name, document):
    (folder / name).write_text(json.dumps(document))


def attempt(campaign, plan=None, cell=CELL, flags=FLAGS, change=None):
    """A complete attempt of two ranks on two nodes; `change` is given every observation before it is written.

    Returns the folder of the raw results.
    """
    plan = plan or plan_of(cell)
    raw = campaign / "cells" / cell.cell_id / "raw"
    write(raw, cell, with_measurements(decode_sweep()))
    launch_files(raw.parent, plan, flags)
    for name, folder, observed in observations(raw, plan, cell):
        document = json.loads(json.dumps(observed))
        if change is not None:
            change(name, document)
        if document.get("status") != "absent":
            _write(folder, name, document)
    return raw


def observations(raw, plan, cell):
    """File name, folder and document of every observation of an attempt."""
    for dp, tp, pp in RANKS:
        folder = unit(raw / f"node{dp:04d}", cell, plan_sha256=plan.sha256)
        provenance = json.loads((folder / "collector-provenance.json").read_text())
        ranks = {"dp_rank": dp, "tp_rank": tp, "pp_rank": pp}
        common = {"collector_provenance": provenance, "backend_version": "0.27.0"}
        execution = {
            "schema_name": "aisimulate_fpm_runtime_execution",
            "schema_version": 1,
            "status": "observed",
            "attention_groups": [{"kv_cache_group_id": 0, "backend_class": "Flash", "layer_names": ["a"]}],
            "graph_config": GRAPHS,
            "resolved_config": settings(),
        }
        yield f"fpm-execution-worker-dp{dp}-tp{tp}-pp{pp}.json", folder, execution | common | ranks
        for kind, places in (("worker", ranks), ("scheduler", ranks | {"tp_rank": None, "pp_rank": None})):
            memory = {
                "schema_name": "aisimulate_fpm_runtime_memory",
                "schema_version": 1,
                "kind": kind,
                "status": "resolved",
                "resolved_config": settings(),
                "cache": pool(kind, dp),
            }
            if kind == "worker":
                memory["effective_offloader"] = "vllm.model_executor.offloader.base.NoopOffloader"
            suffix = f"-dp{dp}" + (f"-tp{tp}-pp{pp}" if kind == "worker" else "")
            yield f"fpm-memory-{kind}{suffix}.json", folder, memory | common | places
        for kind in ("launcher", "worker", "scheduler"):
            yield from _cpu(kind, folder, provenance, ranks)


def pool(kind, dp):
    """A pool of 1000 blocks of 1024 bytes of which one is reserved on rank 0 and two on rank 1."""
    group = {
        "layer_names": ["a", "b"],
        "spec_type": "vllm.v1.kv_cache_interface.FullAttentionSpec",
        "sliding_window": None,
        "block_size_tokens": 16,
    }
    if kind == "scheduler":
        return {
            "groups": [group],
            "num_blocks": 1000,
            "initial_free_blocks": 999 - dp,
            "reserved_blocks": 1 + dp,
            "null_block_id": 0,
            "pool_count": 1,
            "watermark_blocks": 0,
        }
    return {
        "groups": [group | {"kind": "attention", "layer_classes": {"a": "Attention", "b": "Attention"}}],
        "num_blocks": 1000,
        "allocated_cache_bytes": 1_024_000,
        "available_cache_bytes": 1_024_512,
        "storages": [{"device": "cuda:0", "pointer": 4096, "size_bytes": 1_024_000}],
    }


def _cpu(kind, folder, provenance, ranks):
    # Each node has CPUs 0 to 3; the launcher's process is 1, the worker's 2, the scheduler's 3.
    measurement = {
        "launcher": "before_engine_start",
        "worker": "after_warmup",
        "scheduler": "scheduler_initialized",
    }[kind]
    pid = {"launcher": 1, "worker": 2, "scheduler": 3}[kind]
    cpus = [0, 1, 2, 3] if kind == "launcher" else [0, 1]
    places = {"launcher": {}, "worker": ranks, "scheduler": {"dp_rank": ranks["dp_rank"]}}[kind]
    suffix = {
        "launcher": "",
        "worker": "-dp{dp_rank}-tp{tp_rank}-pp{pp_rank}",
        "scheduler": "-dp{dp_rank}",
    }[kind].format(**ranks)
    document = {
        "schema_name": "aisimulate_fpm_cpu_affinity",
        "schema_version": 1,
        "kind": kind,
        "measurement": measurement,
        "collector_provenance": provenance,
        "hostname": folder.name,
        "pid": pid,
        "observer_thread_id": pid,
        "main_thread_allowed_cpus": cpus,
        "threads": [{"tid": pid, "allowed_cpus": cpus}],
        "thread_ids_before": [pid],
        "thread_ids_after": [pid],
        "thread_errors": [],
        "errors": [],
        "status": "observed",
        **dict.fromkeys(("dp_rank", "tp_rank", "pp_rank")),
        **places,
    }
    if kind == "launcher":
        document |= {"requested_cpus_per_task": 4, "cpu_bind": "cores", "local_gpu_count": 1}
    yield f"fpm-cpu-{kind}{suffix}.json", folder, document


SLURM = {"executor": "slurm", "slurm_cpus_per_task": 4, "slurm_cpu_bind": "cores"}
__all__ = ["ATTEMPT", "CELL", "FLAGS", "LIMITS", "REVISION", "SLURM", "attempt", "launch_files", "plan_of"]
