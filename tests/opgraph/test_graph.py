"""Operator lists: equal to the recorded ones, and the rules of op-level.md section 4.4 one by one."""

import pytest

from fpmsdk.opgraph import build_graph
from fpmsdk.opgraph.ops import Fallback, Overlap
from tests.opgraph.checkpoints import (
    BLOCK_FP8,
    CHECKPOINTS,
    DEEPSEEK_V3,
    GPT_OSS_120B,
    LLAMA_8B,
    QWEN3_30B,
    QWEN3_32B,
    deployment,
    graph,
    model,
    named,
)
from tests.vectors import load_vectors

PEER, OLDER_PEER = load_vectors("op_level_peer_0.13"), load_vectors("op_level_peer")
MOE4 = {"tp": 4, "moe_tp_size": 1, "moe_ep_size": 4}
MOE8 = {"tp": 8, "moe_tp_size": 1, "moe_ep_size": 8}

# Names of a recorded flat configuration in a deployment.
FLAT = {
    "tp_size": "tp",
    "pp_size": "pp",
    "weight_dtype": "gemm_quant_mode",
    "moe_dtype": "moe_quant_mode",
    "activation_dtype": "fmha_quant_mode",
    "kv_cache_dtype": "kvcache_quant_mode",
    "moe_tp_size": "moe_tp_size",
    "moe_ep_size": "moe_ep_size",
    "kv_block_size": "kv_block_size",
}

# Fields that the older generation of the record does not have.
LATER_ENGINE_FIELDS = (
    "forward_model",
    "fpm_parquet_path",
    "fpm_fmha_dtype",
    "decoder_replay",
    "dcp_size",
    "moe_kernel_source",
)
LATER_OP_FIELDS = {
    "ContextAttention": {"apply_rope", "dcp_size"},
    "GenerationAttention": {"use_qk_norm", "scale_num_tokens", "verify_query_tokens", "dcp_size"},
    "Moe": {"moe_kernel_source"},
    "ContextMla": {"dcp_size"},
    "GenerationMla": {"dcp_size"},
    "MlaModuleContext": {"dcp_size"},
    "MlaModuleGeneration": {"dcp_size"},
}


def recorded_lanes(spec):
    lanes = {}

    def visit(op):
        [(kind, fields)] = op.items()
        if "lane_order" in fields:
            lanes[kind] = tuple(fields["lane_order"])
        for group in ("fallback", "group_a", "group_b"):
            for inner in fields.get(group, ()):
                visit(inner)

    for op in (*spec["context_ops"], *spec["generation_ops"]):
        visit(op)
    return lanes


def rebuilt(vectors, name):
    flat, spec = vectors["configs"][name], vectors["engine_specs"][name]
    fields = {FLAT[key]: value for key, value in flat.items() if key in FLAT}
    lanes = recorded_lanes(spec)
    return build_graph(
        model(CHECKPOINTS[flat["model_name"]], name=flat["model_name"]),
        deployment(flat["backend"], attention_dp=flat["attention_dp_size"] or 1, nextn=flat.get("nextn", 0), **fields),
        lambda kind, table: lanes[kind],
    )


@pytest.mark.parametrize("name", PEER["engine_specs"])
def test_recorded_specifications(name):
    assert rebuilt(PEER, name).to_dict() == PEER["engine_specs"][name]


@pytest.mark.parametrize("name", OLDER_PEER["engine_specs"])
def test_recorded_specifications_of_the_older_generation_differ_in_added_fields_only(name):
    older = OLDER_PEER["engine_specs"][name]
    spec = rebuilt(OLDER_PEER, name).to_dict()
    engine = {key: value for key, value in spec["engine"].items() if key not in LATER_ENGINE_FIELDS}
    assert engine == older["engine"] | {"nextn": older["engine"].get("nextn")}
    for phase in ("context_ops", "generation_ops"):
        assert [as_older(op) for op in spec[phase]] == [as_older(op) for op in older[phase]]


def as_older(op):
    [(kind, fields)] = op.items()
    kept = {key: value for key, value in fields.items() if key not in LATER_OP_FIELDS.get(kind, ())}
    for group in ("fallback", "group_a", "group_b"):
        if group in kept:
            kept[group] = [as_older(inner) for inner in kept[group]]
    return {kind: kept | ({"primary": as_older(kept["primary"])} if "primary" in kept else {})}


DENSE = (
    "embedding add_norm_1 qkv_gemm attention proj_gemm add_norm_2 gate_ffn1_gemm act_gate ffn2_gemm logits_gemm "
    "embedding_ar ar_1 ar_2 p2p"
)
MOE_CONTEXT = (
    "embedding add_norm_1 qkv_gemm attention proj_gemm add_norm_2 router_gemm moe_pre_dispatch moe moe_post_dispatch "
    "embedding_ar p2p"
)
MOE_GENERATION = MOE_CONTEXT.replace("post_dispatch ", "post_dispatch logits_gemm ")
LATENT_CONTEXT = (
    "embedding add_norm_1 mla_block add_norm_2 shared_gate_up_gemm shared_act_gate shared_ffn2_gemm router_gemm "
    "moe_pre_dispatch moe moe_post_dispatch logits_gemm p2p"
)
LATENT_GENERATION = "embedding add_norm_1 mla_block add_norm_2 moe_overlap logits_gemm p2p"


@pytest.mark.parametrize(
    ("config", "fields", "context", "generation"),
    [
        (LLAMA_8B, {"tp": 2}, DENSE, DENSE),
        (QWEN3_30B, MOE4, MOE_CONTEXT, MOE_GENERATION),
        (GPT_OSS_120B, MOE4, f"attention {MOE_CONTEXT}", f"attention {MOE_GENERATION}"),
        (DEEPSEEK_V3, MOE8, LATENT_CONTEXT, LATENT_GENERATION),
    ],
)
def test_order_of_operators(config, fields, context, generation):
    spec = graph(config, **fields)
    for phase, ops, names in (("context", spec.context_ops, context), ("generation", spec.generation_ops, generation)):
        assert [op.name for op in ops] == [f"{phase}_{name}" for name in names.split()]


def test_decode_scales_with_multi_token_prediction_and_prefill_does_not():
    plain, predicting = graph(LLAMA_8B, pp=2), graph(LLAMA_8B, pp=2, nextn=1)
    assert predicting.context_ops == plain.context_ops
    factors = {
        op.scale_factor / before.scale_factor
        for op, before in zip(predicting.generation_ops, plain.generation_ops, strict=True)
    }
    assert factors == {33 / 32}


def test_operators_are_not_divided_by_pipeline_stages():
    one, three = named(graph(LLAMA_8B).context_ops), named(graph(LLAMA_8B, pp=3).context_ops)
    assert three["context_p2p"].scale_factor == 2.0
    del one["context_p2p"], three["context_p2p"]
    assert one == three


def test_key_value_heads_are_replicated_beyond_their_number():
    attention = named(graph(LLAMA_8B, tp=16).context_ops)["context_attention"]
    assert (attention.n, attention.n_kv) == (2, 1)


def test_alternating_windows_take_half_the_layers_each():
    windowed, full = (op for op in graph(GPT_OSS_120B, **MOE4).generation_ops if op.name == "generation_attention")
    assert (windowed.window_size, windowed.scale_factor) == (128, 18.0)
    assert (full.window_size, full.scale_factor) == (0, 18.0)


def test_mistral_attention_has_the_declared_window():
    config = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert named(graph(config).context_ops)["context_attention"].window_size == 4096


def test_lanes_are_asked_for_by_kind_and_table():
    asked = set()
    build_graph(model(LLAMA_8B), deployment("vllm"), lambda *question: asked.add(question) or ("default",))
    assert asked == {
        ("ContextAttention", "context_attention_perf"),
        ("GenerationAttention", "generation_attention_perf"),
    }


def test_vllm_adds_the_reductions_that_latent_models_do_elsewhere():
    spec = graph(DEEPSEEK_V3, "vllm", **MOE8)
    reduction = named(spec.context_ops)["context_tp_allreduce"]
    assert (reduction.scale_factor, reduction.tp_size) == (122.0, 8)
    assert spec.context_ops[-2] is reduction


def test_vllm_runs_latent_attention_as_grouped_attention():
    fallback = named(graph(DEEPSEEK_V3, "vllm", **MOE8).generation_ops)["generation_mla_block"].fallback
    attention = named(fallback)["generation_attention"]
    assert (type(attention).__name__, attention.n, attention.n_kv, attention.head_size) == (
        "GenerationAttention",
        16,
        16,
        128,
    )


def test_absorbed_projections_run_in_fp8_unless_the_projections_are_unquantised():
    def mode(**config):
        block = named(graph(DEEPSEEK_V3 | config, **MOE8).generation_ops)["generation_mla_block"]
        return named(block.fallback)["generation_bmm_pre"].quant_mode

    assert mode() == "fp8"
    assert mode(quantization_config=BLOCK_FP8 | {"ignore": ["*self_attn*"]}) == "bfloat16"
    assert mode(quantization_config=None) == "bfloat16"


def test_projections_of_one_precision_have_a_module_and_mixed_ones_have_not():
    uniform = graph(DEEPSEEK_V3 | {"quantization_config": BLOCK_FP8 | {"ignore": ["*self_attn*"]}}, **MOE8)
    block = named(uniform.context_ops)["context_mla_block"]
    assert isinstance(block, Fallback)
    assert (block.primary.gemm_quant_mode, block.primary.native_num_heads) == ("bfloat16", 128)

    mixed = graph(DEEPSEEK_V3 | {"quantization_config": BLOCK_FP8 | {"ignore": ["*q_b_proj*"]}}, **MOE8)
    operators = named(mixed.context_ops)
    assert "context_mla_block" not in operators
    modes = {
        name: operators[f"context_{name}_gemm"].quant_mode for name in ("downscale", "q_b_proj", "kv_b_proj", "proj")
    }
    assert modes == {"downscale": "fp8_block", "q_b_proj": "bfloat16", "kv_b_proj": "fp8_block", "proj": "fp8_block"}


def test_decode_overlaps_routed_with_shared_experts():
    overlap = named(graph(DEEPSEEK_V3, **MOE8).generation_ops)["generation_moe_overlap"]
    assert isinstance(overlap, Overlap)
    assert [op.name.removeprefix("generation_") for op in overlap.group_a] == [
        "router_gemm",
        "moe_pre_dispatch",
        "moe",
        "moe_post_dispatch",
    ]
    assert all("shared" in op.name for op in overlap.group_b)


def test_only_prefill_is_split_by_context_parallelism():
    spec = graph(QWEN3_32B, "sglang", cp_size=2)
    assert {op.seq_split for op in spec.generation_ops if hasattr(op, "seq_split")} == {1}
    gather = named(spec.context_ops)["context_cp_all_gather"]
    # Keys and values of eight heads of 128 elements.
    assert (gather.hidden_size, gather.num_gpus, gather.seq_split) == (2048.0, 2, 1)
    attention = named(spec.context_ops)["context_attention"]
    assert attention.cp_size == 2
    assert {op.seq_split for op in spec.context_ops if op not in (gather, attention)} == {2}


def test_the_gathered_cache_is_counted_in_elements_of_the_communication_mode():
    spec = graph(QWEN3_32B, "sglang", cp_size=2, kvcache_quant_mode="fp8", comm_quant_mode="int8")
    gather = named(spec.context_ops)["context_cp_all_gather"]
    assert (gather.hidden_size, gather.dtype) == (2048.0, "int8")


def test_context_parallel_latent_modules_take_their_share_of_the_layers():
    spec = graph(DEEPSEEK_V3, "sglang", cp_size=4, moe_tp_size=1, moe_ep_size=4)
    block = named(spec.context_ops)["context_mla_block"]
    assert block.primary.scale_factor == 61 / 4
    dispatch = named(named(spec.generation_ops)["generation_moe_overlap"].group_a)["generation_moe_pre_dispatch"]
    assert (dispatch.attn_cp_size, dispatch.is_context) == (4, False)


def test_the_moe_kernel_is_passed_to_the_experts():
    spec = graph(QWEN3_30B, moe_kernel_source="moe_torch_flow", **MOE4)
    assert named(spec.context_ops)["context_moe"].moe_kernel_source == "moe_torch_flow"
    assert spec.engine["moe_kernel_source"] == "moe_torch_flow"
