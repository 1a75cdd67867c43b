"""Rows of made-up whole-forward tables: what every row states beside its point."""

from typing import Any

MODES = {
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
}
SIZES = {"tp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1}


def table_row(
    model: str, origin: dict[str, str], kind: str, batch: int, tokens: int, kv: int, latency_ms: float
) -> dict[str, Any]:
    """One measured point of `model`; `origin` names its system, backend and backend_version."""
    return {
        **origin,
        **MODES,
        **SIZES,
        "cell_id": "bench",
        "model_path": model,
        "weight_quantization": "bfloat16",
        "pp": 1,
        "cp": 1,
        "moe_backend": "auto",
        "attention_backend": "auto",
        "enable_wideep": False,
        "enable_eplb": False,
        "partition_policy": "balanced_v1",
        "workload_kind": kind,
        "batch_size": batch,
        "total_prefill_tokens": tokens,
        "total_kv_read_tokens": kv,
        "latency_ms": latency_ms,
    }
