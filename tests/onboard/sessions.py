"""Drafts of a small session, whose context digests were recorded from the peer's `onboard checkpoint`."""

import copy

PROFILE = {
    "schema_version": 1,
    "model": "org/model",
    "model_revision": "rev-1",
    "architecture": "LlamaForCausalLM",
    "context_length": 8192,
    "num_experts": 0,
    "provenance": "declared",
    "deployments": [
        {
            "system": "h200_sxm",
            "backend": "vllm",
            "backend_version": "0.27.0",
            "tp": 2,
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
                "kv_bytes_per_token": 1024,
                "max_num_tokens": 8192,
                "max_batch_size": 256,
                "weights_bytes": 1,
                "activations_bytes": 1,
                "runtime_overhead_bytes": 0,
                "comm_overhead_bytes": 0,
                "provenance": "x",
            },
        }
    ],
}
DRAFT = {
    "identity": {
        "model": "org/model",
        "model_revision": "rev-1",
        "model_kind": "dense",
        "gpu": "h200_sxm",
        "interconnect": "nvswitch",
        "framework_version": "0.27.0",
    },
    "search": {"tensor_parallel": 2, "context_length": 8192},
    "collection": {"prefill_cudagraph_policy": "runtime", "gpu_memory_utilization": 0.9},
    "fpm_profile": PROFILE,
}


def draft_of(role):
    """The draft of one serving role."""
    draft = copy.deepcopy(DRAFT)
    draft["worker_type"] = draft["fpm_profile"]["deployments"][0]["worker_type"] = role
    return draft


def write_files(folder):
    """The files that `SESSION` refers to."""
    for name, key in (("config.json", "a"), ("out.json", "b"), ("collector.json", "c")):
        (folder / name).write_text(f'{{"{key}":1}}')


# One complete draft without a role, one of a role, and inputs alone.
SESSION = {
    "inputs": {"gpu": "h200_sxm"},
    "validation_inputs": {"trace": "t"},
    "artifacts": {"config": {"path": "config.json"}},
    "configurations": {
        "tp2": {
            "draft_request": DRAFT,
            "artifacts": {
                "measured": {"path": "out.json", "scope": "collection"},
                "validated": {"path": "out.json", "scope": "validation"},
                "collector": {"path": "collector.json", "kind": "collector_checkpoint", "scope": "collection"},
            },
        },
        "dep": {"inputs": {"attention_data_parallel": 4}},
        "role": {"draft_request": draft_of("decode")},
    },
}
