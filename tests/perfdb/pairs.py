"""Whole-forward pairs, written by tests: rows in short form, each rule of the format open to mutation."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq

IDENTITY = {
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "moe_tp": 1,
    "moe_ep": 1,
    "cp": 1,
    "moe_backend": "auto",
    "attention_backend": "auto",
    "enable_wideep": False,
    "enable_eplb": False,
}
VERSION = "9.9.9-vec"


def row(kind, batch, tokens, kv, latency_ms, model="org/tiny", **changes):
    """One row of a table."""
    return {
        "cell_id": f"{model}-{kind}",
        "model_path": model,
        "system": "x100",
        "backend": "vllm",
        "backend_version": VERSION,
        "weight_quantization": "bfloat16",
        **IDENTITY,
        "workload_kind": kind,
        "batch_size": batch,
        "total_prefill_tokens": tokens,
        "total_kv_read_tokens": kv,
        "partition_policy": "balanced_v1",
        "latency_ms": latency_ms,
        **changes,
    }


def prefill(batch, tokens, kv, latency_ms, **changes):
    return row("prefill", batch, tokens, kv, latency_ms, **changes)


def decode(batch, kv, latency_ms, **changes):
    return row("decode", batch, 0, kv, latency_ms, **changes)


def write_pair(folder, rows, *, name="fpm_forward_perf", sidecar=None, **changes):
    """Write a table (rows or an Arrow table) with its sidecar; `changes` override sidecar keys, None removes them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    pq.write_table(table, path)
    document = {
        "schema_name": "aic_fpm_forward_perf",
        "schema_version": 6,
        "coordinate_system": "iteration_totals_balanced_v1",
        "measurement_policy": "dynamo_native_single_sample_v1",
        "system": "x100",
        "backend": "vllm",
        "backend_version": VERSION,
        "parquet_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "row_count": table.num_rows,
    } | changes
    document = {key: value for key, value in document.items() if value is not None}
    (folder / f"{name}.metadata.json").write_text(json.dumps(document) if sidecar is None else sidecar)
    return path
