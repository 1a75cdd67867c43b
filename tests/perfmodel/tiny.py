"""A tiny systems root with everything a small dense model needs, and that model.

Latencies follow smooth made-up formulas with irregular factors, so that no two operators cost the same.
"""

import json

from tests.perfdb.synthetic import ATTENTION, GEMM, MOE, Systems

VERSION = "0.24.0"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
MOE_CONFIG = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
SIZES = (1, 4, 16, 64, 256, 1024)


def write_model(path, **changes):
    """Write config.json into the directory `path` and return it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


def gemm_rows(scale=1.0):
    return [
        GEMM | {"m": m, "n": n, "k": k, "latency": scale * (0.004 + 1.3e-8 * m * (n + k))}
        for m in SIZES
        for n in (128, 256, 512, 1024)
        for k in (128, 256, 512)
    ]


def prefill_rows(**changes):
    return [
        ATTENTION
        | {"num_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64, "isl": isl, "batch_size": batch}
        | {"latency": 0.01 + 3.1e-8 * heads * batch * isl**1.7}
        | changes
        for heads in (2, 4)
        for isl in SIZES
        for batch in (1, 2, 4, 8)
    ]


def decode_rows(**changes):
    return [
        ATTENTION
        | {"num_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64, "isl": isl, "batch_size": batch}
        | {"step": 1, "latency": 0.006 + 7e-8 * heads * batch * isl}
        | changes
        for heads in (2, 4)
        for isl in SIZES
        for batch in (1, 2, 4, 8, 64)
    ]


def all_reduce_rows():
    return [
        {"num_gpus": gpus, "message_size": size, "latency": 0.005 * gpus + 1e-7 * size, "kernel_source": "vLLM"}
        | {"allreduce_dtype": "half", "backend": "vLLM"}
        for gpus in (2, 4)
        for size in (128, 4096, 262144)
    ]


def expert_rows(**changes):
    return [
        MOE
        | {"distribution": "power_law_1.2", "topk": 2, "num_experts": 64, "hidden_size": 256, "inter_size": 128}
        | {"moe_tp_size": 1, "moe_ep_size": 2, "num_tokens": tokens, "latency": 0.02 + 1.1e-5 * tokens}
        | changes
        for tokens in SIZES
    ]


def write_root(path, version=VERSION):
    """Write the systems root and return its writer."""
    systems = Systems(path)
    systems.hardware()
    for family, name, rows in (
        ("gemm", "gemm_perf", gemm_rows()),
        ("attention", "context_attention_perf", prefill_rows()),
        ("attention", "generation_attention_perf", decode_rows()),
        ("moe", "moe_perf", expert_rows()),
        ("comm", "custom_allreduce_perf", all_reduce_rows()),
    ):
        systems.table(f"{family}/vllm/{version}", name, rows)
    return systems
