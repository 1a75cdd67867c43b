"""Shapes of the public checkpoints that the recorded figures were made with, and deployments of them."""

from fpmsdk.opgraph import Deployment, build_graph
from fpmsdk.opgraph.model_config import parse_model_config

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def shape(architecture, *sizes, **rest):
    return {"architectures": [architecture], **dict(zip(SIZES, sizes, strict=True)), "torch_dtype": "bfloat16", **rest}


def experts(count, topk, inter, **rest):
    return {"num_experts": count, "num_experts_per_tok": topk, "moe_intermediate_size": inter, **rest}


QWEN3_32B = shape("Qwen3ForCausalLM", 64, 5120, 64, 8, 128, 25600, 151936, 40960)
LLAMA_8B = shape("LlamaForCausalLM", 32, 4096, 32, 8, None, 14336, 128256, 131072)
QWEN3_30B = shape("Qwen3MoeForCausalLM", 48, 2048, 32, 4, 128, 6144, 151936, 40960, **experts(128, 8, 768))
QWEN3_235B = shape("Qwen3MoeForCausalLM", 94, 4096, 64, 4, 128, 12288, 151936, 40960, **experts(128, 8, 1536))
GPT_OSS_120B = shape(
    *("GptOssForCausalLM", 36, 2880, 64, 8, 64, 2880, 201088, 131072),
    num_local_experts=128,
    num_experts_per_tok=4,
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
)
DEEPSEEK_V3 = shape(
    *("DeepseekV3ForCausalLM", 61, 7168, 128, 128, None, 18432, 129280, 163840),
    n_routed_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    v_head_dim=128,
    quantization_config=BLOCK_FP8,
)

CHECKPOINTS = {
    "Qwen/Qwen3-32B": QWEN3_32B,
    "Qwen/Qwen3-32B-FP8": QWEN3_32B | {"quantization_config": BLOCK_FP8},
    "meta-llama/Meta-Llama-3.1-8B": LLAMA_8B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B,
    "Qwen/Qwen3-235B-A22B": QWEN3_235B,
    "openai/gpt-oss-120b": GPT_OSS_120B,
    "deepseek-ai/DeepSeek-V3": DEEPSEEK_V3,
}

# Versions that the recorded figures resolved to.
VERSIONS = {"vllm": "0.24.0", "trtllm": "1.3.0rc20", "sglang": "0.5.14"}


def model(config, sidecar=None, name="model"):
    return parse_model_config(name, config, sidecar)


def deployment(backend="trtllm", **fields):
    facts = {"system": "h200_sxm", "backend_version": VERSIONS[backend], "sm_version": 90}
    return Deployment(backend=backend, **(facts | fields))


def default_lanes(kind, table):
    return ("default",)


def graph(config, backend="trtllm", sidecar=None, **fields):
    return build_graph(model(config, sidecar), deployment(backend, **fields), default_lanes)


def named(ops):
    """Operators by name; the name of a graph occurs once, except for attention of alternating models."""
    return {op.name: op for op in ops}
