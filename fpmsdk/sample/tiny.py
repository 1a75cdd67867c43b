"""A made-up machine, model and measured kernels, small enough to try op-level models without performance data.

Latencies follow simple formulas and mean nothing. The files are those that docs/op-level.md describes; real data lie
in the same places.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SYSTEM, BACKEND, VERSION = "tiny_gpu", "vllm", "0.24.0"

_HARDWARE = """\
data_dir: data/tiny_gpu
gpu: {mem_bw: 1.0e+12, bfloat16_tc_flops: 1.0e+14, mem_capacity: 16000000000, sm_version: 90}
node: {num_gpus_per_node: 8, intra_node_bw: 4.5e+11, inter_node_bw: 5.0e+10}
misc: {nccl_mem: {1: 0}, other_mem: 0}
"""
_CHECKPOINT = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
_SIZES = (1, 16, 256, 2048)


def write_checkpoint(folder: str | Path) -> str:
    """Write the `config.json` of a dense four-layer model below `folder` and return the model's path.

    >>> import tempfile
    >>> from fpmsdk.opgraph import read_model_config
    >>> read_model_config(write_checkpoint(tempfile.mkdtemp())).num_layers
    4
    """
    path = Path(folder).absolute() / "tiny-model"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_CHECKPOINT))
    return str(path)


def write_systems(folder: str | Path) -> str:
    """Write a systems root with one system and the kernels of the model below `folder` and return its path.

    >>> import tempfile
    >>> from fpmsdk.perfdb import open_root
    >>> open_root(write_systems(tempfile.mkdtemp())).systems()
    ('tiny_gpu',)
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = Path(folder).absolute() / "systems"
    for name, rows in _kernels().items():
        family = "gemm" if name.startswith("gemm") else "attention"
        place = root / "data" / SYSTEM / family / BACKEND / VERSION
        place.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), place / f"{name}.parquet")
    (root / f"{SYSTEM}.yaml").write_text(_HARDWARE)
    return str(root)


def op_level_config(folder: str | Path) -> dict[str, Any]:
    """Write a root and a checkpoint below `folder` and return the configuration of an op-level model of them.

    >>> import tempfile
    >>> from fpmsdk import ForwardPassPerfModel
    >>> model = ForwardPassPerfModel.best_available(op_level_config(tempfile.mkdtemp()))
    >>> model.predict_prefill_latency(bs=1, isl=256) > 0
    True
    """
    return {
        "model": write_checkpoint(folder),
        "system": SYSTEM,
        "backend": BACKEND,
        "backend_version": VERSION,
        "worker_type": "aggregated",
        "estimation_mode": "op_level",
        "systems_paths": [write_systems(folder)],
    }


def _kernels() -> dict[str, list[dict[str, Any]]]:
    attention = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": 64, "window_size": 0}
    attention |= {"num_heads": 8, "num_key_value_heads": 2, "kernel_source": "tiny_kernel"}
    return {
        "gemm_perf": [
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 0.005 + 4e-11 * m * n * k}
            for m in _SIZES
            for n in (512, 2048)
            for k in (512, 2048)
        ],
        "context_attention_perf": [
            attention | {"isl": isl, "step": 0, "batch_size": batch, "latency": 0.01 + 2e-8 * batch * isl**2}
            for isl in _SIZES
            for batch in (1, 8)
        ],
        "generation_attention_perf": [
            attention | {"isl": isl, "step": 1, "batch_size": batch, "latency": 0.01 + 2e-6 * batch * isl}
            for isl in _SIZES
            for batch in (1, 64)
        ],
    }
