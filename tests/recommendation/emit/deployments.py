"""Deployments whose files are kept beside the tests."""

from typing import Any

MODEL, REVISION = "org/Mixture-8x1B", "0123456789abcdef0123456789abcdef01234567"
_MODES = {
    "gemm_quant_mode": "fp8_block",
    "moe_quant_mode": "fp8_block",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "fp8",
}
_SIZES = ("weights_bytes", "activations_bytes", "runtime_overhead_bytes", "comm_overhead_bytes")
_RESOURCES = {
    **dict.fromkeys(_SIZES, 1),
    "cache_layout": "linear",
    "kv_bytes_per_token": 1024,
    "max_num_tokens": 2048,
    "max_batch_size": 64,
    "provenance": "declared",
}
_PROFILE = {
    "schema_version": 1,
    "architecture": "MixtralForCausalLM",
    "num_experts": 8,
    "provenance": "test",
    "model": MODEL,
    "model_revision": REVISION,
    "context_length": 4096,
    "deployments": [
        {
            "system": "h200_sxm",
            "backend": "vllm",
            "backend_version": "0.27.0",
            **{"tp": 1, "dp": 4, "moe_tp": 1, "moe_ep": 4},
            **_MODES,
            "resources": _RESOURCES,
        }
    ],
}


def deployment(**engine: Any) -> dict[str, Any]:
    """A concrete configuration, as far as its files need it."""
    return {"engine": {"model": "org/Dense-8B", "hardware": "h200_sxm", "backend_version": "0.27.0", **engine}}


DEPLOYMENTS = {
    "replicas": deployment(
        context_length=8192,
        enable_chunked_prefill=True,
        workers={
            "aggregated": {
                "parallelism": {"replicas": 3, "tensor": 4},
                "scheduler": {"max_batched_tokens": 16384, "max_sequences": 512},
                "kv_cache": {"block_size": 32, "capacity": {"type": "default", "memory_fraction": 0.85}},
            }
        },
    ),
    "experts": deployment(
        model=MODEL,
        fpm_profile=_PROFILE,
        workers={
            "aggregated": {
                "parallelism": {"tensor": 1, "attention_data": 4, "moe_tensor": 1, "moe_expert": 4},
                "kv_cache": {"prefix_caching": False, "capacity": {"type": "fixed", "blocks": 5000}},
            }
        },
    ),
    "disaggregated": deployment(
        model="/models/dense 8b",
        mode="disaggregated",
        context_length=4096,
        workers={
            "prefill": {
                "parallelism": {"replicas": 2, "tensor": 2},
                "scheduler": {"max_batched_tokens": 8192, "max_sequences": 4},
            },
            "decode": {
                "parallelism": {"tensor": 8},
                "kv_cache": {
                    "block_size": 16,
                    "bytes_per_token": 65536,
                    "capacity": {"type": "fixed", "bytes": 40_000_000_000},
                },
            },
        },
    ),
}
