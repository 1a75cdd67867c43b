"""Instrumentation of a made-up engine, written out file by file."""

import hashlib
import json

from fpmsdk.collect.fake_observations import observation_records
from fpmsdk.collect.instrumentation import freeze_instrumentation, load_instrumentation, loader_binding
from fpmsdk.collect.probe_launch import expected_ranks, phases_of
from fpmsdk.collect.topology import Topology

_OBSERVER = """class Worker:
    def told(self):
        return "observed"


class InstrumentedScheduler:
    pass
"""
MANIFEST = {
    "schema_version": "aisimulate-runtime-instrumentation/v1",
    "runtime": {
        "framework": "vllm",
        "version": "0.27.0",
        "source_revision": "4" * 40,
        "source_files": {"vllm/v1/worker/gpu_worker.py": "5" * 64},
    },
    "files": ["instrumentation/__init__.py", "instrumentation/observer.py", "instrumentation/notes.md"],
    "worker_class": "instrumentation.observer.Worker",
    "scheduler_class": "instrumentation.observer.InstrumentedScheduler",
    "observation_schema": "aisimulate-runtime-observation/v1",
    "source_notes": "instrumentation/notes.md",
}


def write_bundle(folder):
    """The path of the manifest of a small sound bundle, written into `folder`."""
    package = folder / "instrumentation"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "observer.py").write_text(_OBSERVER)
    (package / "notes.md").write_text("Read at the pinned revision.\n")
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    return folder / "manifest.json"


SYSTEMS = {
    "h200_sxm": {"sm": 90, "memory_bytes": 151397597184, "node": 8},
    "gb200": {"sm": 100, "memory_bytes": 198674743296, "node": 4},
    "cpu_host": {"sm": None, "memory_bytes": 25276510208, "node": 1},
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
REVISION = "b" * 40


def write_systems(folder):
    """A systems root with two GPUs of the specification and a CPU, for FPMSDK_SYSTEMS_PATH."""
    folder.mkdir(parents=True)
    for name, told in SYSTEMS.items():
        (folder / f"{name}.yaml").write_text(
            f"data_dir: data/{name}\n"
            "gpu: {mem_bw: 4.8e+12, bfloat16_tc_flops: 9.9e+14, "
            f"mem_capacity: {told['memory_bytes']}, sm_version: {'null' if told['sm'] is None else told['sm']}}}\n"
            f"node: {{num_gpus_per_node: {told['node']}, intra_node_bw: 9.0e+11, inter_node_bw: 5.0e+10}}\n"
            "misc: {nccl_mem: {1: 0}, other_mem: 0}\n"
        )
        (folder / "data" / name).mkdir(parents=True)
    return folder


def launch_facts(model_config, *, topology=None, worker_type=None, gpu="h200_sxm", **collection):
    """Launch facts of the small model, in defaults of a probe."""
    topology = {"tp": 1, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1, **(topology or {})}
    return {
        **({} if worker_type is None else {"worker_type": worker_type}),
        "identity": {
            "model": "org/model",
            "model_revision": REVISION,
            "model_kind": "moe" if topology["moe_tp"] * topology["moe_ep"] > 1 else "dense",
            "framework": "vllm",
            "framework_version": "0.27.0",
            "gpu": gpu,
            "interconnect": "nvswitch",
        },
        "topology": topology,
        "precision": {
            "gemm_quant_mode": "bfloat16",
            "moe_quant_mode": "bfloat16",
            "fmha_quant_mode": "bfloat16",
            "kvcache_quant_mode": "bfloat16",
            "comm_quant_mode": "half",
        },
        "collection": {
            "max_model_len": 128,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "gpu_memory_utilization": 0.9,
            "prefill_cudagraph_policy": "runtime",
            **collection,
        },
        "model_config": {
            "path": str(model_config),
            "sha256": hashlib.sha256(model_config.read_bytes()).hexdigest(),
        },
        "deployment": {"executor": "kubernetes", "image": "registry/engine:1"},
    }


def write_observations(root, bundle_path, launches, *, pool=None, change=None):
    """Evidence as a probe leaves it: frozen bundle, launch manifests, one record a rank; the path of its index.

    `change(label, phase, name, record)` may alter a record before it is written.
    """
    root.mkdir(parents=True)
    frozen = freeze_instrumentation(load_instrumentation(bundle_path), root / "attempts" / "instrumentation")
    index = {"schema_version": "aisimulate-runtime-observations/v1", "configurations": {}}
    for label, launch in launches.items():
        attempt = {
            "attempt_id": hashlib.sha256(label.encode()).hexdigest()[:32],
            "status": "completed",
            "bundle": {"manifest": "attempts/instrumentation/manifest.json", "sha256": frozen.sha256},
            "phases": {},
        }
        system = SYSTEMS[launch["identity"]["gpu"]]
        for phase in phases_of(launch.get("worker_type")):
            context = {
                "schema_version": "aisimulate-runtime-probe-launch/v1",
                "configuration": label,
                "attempt_id": attempt["attempt_id"],
                "phase": phase,
                "bundle_sha256": frozen.sha256,
                "instrumentation_binding": loader_binding(),
                "launch": launch,
                "sampling": {"max_new_token_samples": 2, "max_kv_read_token_samples": 2, "max_batch_size_samples": 2},
                "expected_ranks": expected_ranks(Topology.from_document(launch["topology"])),
            }
            folder = root / "attempts" / label / phase
            records = observation_records(
                context, frozen, sm_version=system["sm"], total_memory_bytes=system["memory_bytes"], pool=pool
            )
            files = {folder / "runtime-probe-context.json": context}
            for name, record in records.items():
                if change is not None:
                    change(label, phase, name, record)
                files[folder / "raw" / "node0000" / name] = record
            references = [reference(root, path, value) for path, value in files.items()]
            attempt["phases"][phase] = {
                "status": "completed",
                "launch_manifest": references[0],
                "artifacts": [{**entry, "kind": "observation"} for entry in references[1:]],
            }
        index["configurations"][label] = {
            "launch": launch,
            "active_attempt_id": attempt["attempt_id"],
            "attempts": [attempt],
        }
    (root / "observations.json").write_text(json.dumps(index))
    return root / "observations.json"


def reference(root, path, value):
    """The file of a JSON value below `root`, written, as `{path, sha256}`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return {"path": path.relative_to(root).as_posix(), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
