"""Profiles, checkpoints and configurations of whole-forward models for tests."""

import json

from tests.perfdb.pairs import VERSION

DEPLOYMENT = {
    "system": "x100",
    "backend": "vllm",
    "backend_version": VERSION,
    "tp": 1,
    "dp": 1,
    "moe_tp": 1,
    "moe_ep": 1,
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "resources": {
        "cache_layout": "linear",
        "kv_bytes_per_token": 10,
        "max_num_tokens": 8192,
        "max_batch_size": 64,
        "provenance": "declared",
    },
}

# What one rank holds beside its cache; without these its memory is still to be measured.
DECLARED = {"weights_bytes": 100, "activations_bytes": 20, "runtime_overhead_bytes": 30, "comm_overhead_bytes": 50}
IN_MEMORY = DEPLOYMENT | {"resources": DEPLOYMENT["resources"] | DECLARED}


def profile(model, *deployments, **changes):
    return {
        "schema_version": 1,
        "model": str(model),
        "model_revision": "0123456789abcdef0123456789abcdef01234567",
        "architecture": "TinyForCausalLM",
        "context_length": 65536,
        "num_experts": 0,
        "provenance": "test",
        "deployments": list(deployments) or [DEPLOYMENT],
        **changes,
    }


def checkpoint(folder, architecture="TinyForCausalLM", **fields):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    return folder


def direct_config(model, systems, table, **changes):
    interpolation = {"method": "direct", "fpm_parquet_path": str(table)} | changes.pop("interpolation", {})
    return {
        "model": str(model),
        "system": "x100",
        "backend": "vllm",
        "backend_version": VERSION,
        "worker_type": "aggregated",
        "fpm_profile": profile(model),
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        "estimation_mode": "fpm_interpolation",
        "systems_paths": [str(systems)],
        "estimator_config": {"fpm_interpolation": interpolation},
        **changes,
    }


def rank(num_prefill=0, prefill_tokens=0, prefill_kv=0, num_decode=0, decode_kv=0):
    return {
        "scheduled_requests": {
            "num_prefill_requests": num_prefill,
            "sum_prefill_tokens": prefill_tokens,
            "sum_prefill_kv_tokens": prefill_kv,
            "num_decode_requests": num_decode,
            "sum_decode_kv_tokens": decode_kv,
        }
    }
