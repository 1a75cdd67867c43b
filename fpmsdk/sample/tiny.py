"""A made-up machine, model and measurements, small enough to try native models without performance data of one's own.

Latencies follow simple formulas and mean nothing. The files are those that docs/op-level.md and docs/whole-forward.md
describe; real data lie in the same places.
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
_CHECKPOINT: dict[str, Any] = {
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
_DEPLOYMENT = {
    "system": SYSTEM,
    "backend": BACKEND,
    "backend_version": VERSION,
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "tp": 1,
    "dp": 1,
    "moe_tp": 1,
    "moe_ep": 1,
}
_RESOURCES = {
    "weights_bytes": 20_000_000,
    "activations_bytes": 10_000_000,
    "runtime_overhead_bytes": 500_000_000,
    "comm_overhead_bytes": 0,
    "cache_layout": "linear",
    "kv_bytes_per_token": 2048,
    "max_num_tokens": 2048,
    "max_batch_size": 64,
    "provenance": "declared",
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


def whole_forward_config(folder: str | Path) -> dict[str, Any]:
    """Write also measured whole passes and return the configuration of a model that looks them up.

    Prefills of one to four requests take 2 ms and 1 ms for every 250 tokens; decode steps 3 ms and 1 ms for every 5,000
    cached tokens.

    >>> import tempfile
    >>> from fpmsdk import ForwardPassPerfModel
    >>> model = ForwardPassPerfModel.best_available(whole_forward_config(tempfile.mkdtemp()))
    >>> model.predict_prefill_latency_total(batch_size=1, total_prefill_tokens=500, total_kv_read_tokens=0)
    4.0
    """
    from fpmsdk.perfdb.forward_writer import publish_rows

    config = op_level_config(folder)
    table = str(Path(folder).absolute() / "passes.parquet")
    if not Path(table).exists():
        publish_rows(table, _passes(config["model"]))
    profile = {
        "schema_version": 1,
        "model": config["model"],
        "model_revision": "0" * 40,
        "architecture": _CHECKPOINT["architectures"][0],
        "context_length": _CHECKPOINT["max_position_embeddings"],
        "num_experts": 0,
        "provenance": "made up",
        "deployments": [_DEPLOYMENT | {"resources": _RESOURCES}],
    }
    interpolation = {"method": "direct", "fpm_parquet_path": table}
    return config | {
        "estimation_mode": "fpm_interpolation",
        "fpm_profile": profile,
        "estimator_config": {"fpm_interpolation": interpolation},
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


def _passes(model: str) -> list[dict[str, Any]]:
    cell = _DEPLOYMENT | {"pp": 1, "cp": 1, "moe_backend": "auto", "attention_backend": "auto"}
    cell |= {"enable_wideep": False, "enable_eplb": False, "cell_id": "tiny", "partition_policy": "balanced_v1"}
    cell |= {"model_path": model, "weight_quantization": "bfloat16"}

    def row(kind: str, batch: int, tokens: int, kv: int, latency_ms: float) -> dict[str, Any]:
        point = {"batch_size": batch, "total_prefill_tokens": tokens, "total_kv_read_tokens": kv}
        return cell | point | {"workload_kind": kind, "latency_ms": latency_ms}

    prefills = [(batch, tokens) for batch in (1, 2, 4) for tokens in (250, 500, 1000, 2000)]
    decodes = [(batch, kv) for batch in (1, 2, 4) for kv in (8, 500, 1000, 2000, 8000)]
    return [
        *(row("prefill", batch, tokens, 0, 2 + tokens / 250) for batch, tokens in prefills),
        *(row("decode", batch, 0, kv, 3 + kv / 5000) for batch, kv in decodes),
    ]
