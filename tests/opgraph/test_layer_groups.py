"""Models whose layers differ: the groups that a checkpoint declares, their operators and their caches."""

import pytest

from fpmsdk.errors import ModelConfigError, UnsupportedModelError
from fpmsdk.opgraph.kv_layout import kv_bytes_per_sequence, kv_tokens
from fpmsdk.opgraph.precision import Precision
from tests.opgraph.checkpoints import experts, graph, model, named, shape

BF16 = Precision()
FULL, WINDOWED = "full_attention", "sliding_attention"
SIZES = (4, 1024, 16, 4, 128, 4096, 32000, 8192)

LLAMA4 = shape(
    "Llama4ForConditionalGeneration",
    *SIZES,
    num_local_experts=16,
    num_experts_per_tok=1,
    intermediate_size_mlp=8192,
    interleave_moe_layer_step=2,
    attention_chunk_size=512,
)
MIMO = shape(
    "MiMoV2FlashForCausalLM",
    *SIZES,
    **experts(16, 2, 512),
    hybrid_layer_pattern=[0, 1, 1, 0],
    moe_layer_freq=[0, 1, 1, 1],
    sliding_window_size=128,
    swa_num_key_value_heads=8,
    v_head_dim=64,
    swa_v_head_dim=64,
)
STEP = shape(
    "Step3p5ForCausalLM",
    *SIZES,
    moe_num_experts=16,
    moe_top_k=2,
    moe_intermediate_size=512,
    layer_types=[FULL, WINDOWED, WINDOWED, FULL],
    first_k_dense_replace=1,
    sliding_window=512,
    share_expert_dim=256,
)
GEMMA4 = shape(
    "Gemma4ForConditionalGeneration",
    *SIZES,
    **experts(128, 8, 512),
    layer_types=[WINDOWED, WINDOWED, WINDOWED, FULL],
    sliding_window=512,
    num_global_key_value_heads=2,
    global_head_dim=256,
    attention_k_eq_v=True,
)
MUSE = shape(
    "MuseGlimmerForConditionalGeneration", *SIZES, layer_types=[WINDOWED, FULL, WINDOWED, WINDOWED], sliding_window=512
)


def block(heads_in_group=4, multiplier=3.0, attention=True, ffn=True):
    return {
        "attention": {"n_heads_in_group": heads_in_group, "no_op": not attention},
        "ffn": {"ffn_mult": multiplier, "no_op": not ffn},
    }


NAS = shape("DeciLMForCausalLM", *SIZES, block_configs=[block(), block(), block(attention=False), block(ffn=False)])
NAS |= {"num_key_value_heads": None, "intermediate_size": None}


def groups(config):
    return [(group.name, group.count, group.window, group.has_experts) for group in model(config).groups]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA4, [("global", 2, 0, True), ("swa_dense", 2, 512, False)]),
        (LLAMA4 | {"interleave_moe_layer_step": 1}, [("global", 2, 0, True), ("swa", 2, 512, True)]),
        (MIMO, [("global", 1, 0, True), ("swa", 2, 128, True), ("global_dense", 1, 0, False)]),
        (STEP, [("global", 1, 0, True), ("swa", 2, 512, True), ("global_dense", 1, 0, False)]),
        (GEMMA4, [("swa", 3, 512, True), ("global", 1, 0, True)]),
        (MUSE, [("swa", 3, 512, False), ("global", 1, 0, False)]),
        (NAS, [("", 2, 0, False), ("", 1, 0, False), ("", 1, 0, False)]),
    ],
)
def test_groups_of_a_checkpoint(config, expected):
    assert groups(config) == expected


def test_windowed_layers_have_their_own_heads():
    full, windowed, _ = model(MIMO).groups
    assert (full.kv_heads, full.head_size, full.value_size, full.kv_width) == (4, 128, 64, 192)
    assert (windowed.kv_heads, windowed.head_size, windowed.value_size) == (8, 128, 64)
    other = {"num_attention_heads": 24, "head_dim": 64}
    full, windowed, _ = model(STEP | {"attention_other_setting": other}).groups
    assert (full.heads, full.head_size, windowed.heads, windowed.head_size) == (16, 128, 24, 64)


def test_shared_keys_and_values_are_projected_once_and_cached_twice():
    windowed, full = model(GEMMA4).groups
    assert (windowed.kv_width, full.kv_heads, full.head_size, full.kv_width) == (256, 2, 256, 256)
    assert model(GEMMA4 | {"attention_k_eq_v": False}).groups[1].kv_width == 512
    plain = model(GEMMA4 | {"num_global_key_value_heads": None, "global_head_dim": None}).groups[1]
    assert (plain.kv_heads, plain.head_size) == (4, 128)


def test_prediction_layers_behind_the_decoder_are_left_out():
    longer = STEP | {"num_nextn_predict_layers": 2, "layer_types": [*STEP["layer_types"], FULL, FULL]}
    assert groups(longer) == groups(STEP)


@pytest.mark.parametrize("listed", ["1,2,3", [1, 2, 3]])
def test_expert_layers_may_be_enumerated(listed):
    assert groups(STEP | {"first_k_dense_replace": 0, "moe_layers_enum": listed}) == groups(STEP)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (MIMO | {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        (MIMO | {"moe_layer_freq": [0, 1, 2, 1]}, "moe_layer_freq"),
        (STEP | {"layer_types": None}, "layer_types"),
        (STEP | {"moe_layers_enum": "1,x"}, "moe_layers_enum"),
        (GEMMA4 | {"layer_types": [FULL] * 3}, "layer_types"),
        (MUSE | {"layer_types": [FULL, WINDOWED, FULL, "other"]}, "layer_types"),
        (MUSE | {"sliding_window": None}, "sliding_window"),
        (NAS | {"block_configs": None}, "block_configs"),
        (NAS | {"block_configs": [block("x")] + [block()] * 3}, "block_configs[0].attention.n_heads_in_group"),
        (NAS | {"block_configs": [block(multiplier=None)] + [block()] * 3}, "block_configs[0].ffn.ffn_mult"),
        (NAS | {"block_configs": [block(multiplier=1e308)] + [block()] * 3}, "block_configs[0].ffn.ffn_mult"),
    ],
)
def test_an_unusable_layout_is_a_fault_of_its_field(config, field):
    with pytest.raises(ModelConfigError) as caught:
        model(config)
    [fault] = caught.value.faults
    assert fault.startswith(f"{field} ")


MOE_LAYER = "attn_norm qkv_gemm attention proj_gemm moe_norm router_gemm moe_pre_dispatch moe moe_post_dispatch"
DENSE_LAYER = "attn_norm qkv_gemm attention proj_gemm ffn_norm gate_up_gemm act down_gemm"
GEMMA_LAYER = (
    "attn_norm qkv_gemm attention proj_gemm ffn_norm shared_mlp_gate_up_gemm shared_mlp_act shared_mlp_down_gemm "
    "router_gemm moe_pre_dispatch moe moe_post_dispatch"
)
MUSE_LAYER = "attn_norm qkv_gemm attention gate_gemm gate_mul proj_gemm ffn_norm mlp_gate_up_gemm mlp_act mlp_down_gemm"


NAS_FFN = "add_norm_2 gate_ffn1_gemm act_gate ffn2_gemm ar_2"
NAS_ATTENTION = "add_norm_1 qkv_gemm attention proj_gemm ar_1"
NAS_BLOCKS = f"embedding {NAS_ATTENTION} {NAS_FFN} {NAS_FFN} {NAS_ATTENTION} p2p logits_gemm"


def layer(group, names):
    return [name if name == "attention" else f"{group}_{name}" for name in names.split()]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LLAMA4,
            ["embedding", *layer("global", MOE_LAYER), *layer("swa_dense", DENSE_LAYER), "logits_gemm", "p2p"],
        ),
        (
            STEP,
            [
                "embedding",
                *layer("global", MOE_LAYER),
                *layer("swa", MOE_LAYER),
                *layer("global_dense", DENSE_LAYER),
                "logits_gemm",
                "p2p",
                "shared_expert_dense_gate_up_gemm",
                "shared_expert_dense_act",
                "shared_expert_dense_down_gemm",
            ],
        ),
        (GEMMA4, ["embedding", *layer("swa", GEMMA_LAYER), *layer("global", GEMMA_LAYER), "logits_gemm", "p2p"]),
        (
            MUSE,
            [
                "embedding",
                "embedding_ar",
                *layer("swa", MUSE_LAYER),
                *layer("global", MUSE_LAYER),
                "ar_1",
                "ar_2",
                "logits_gemm",
                "p2p",
            ],
        ),
        (
            NAS,
            NAS_BLOCKS.split(),
        ),
    ],
)
def test_order_of_operators(config, expected):
    spec = graph(config)
    assert [op.name for op in spec.context_ops] == [f"context_{name}" for name in expected]
    assert [op.name for op in spec.generation_ops] == [f"generation_{name}" for name in expected]


def test_operators_of_a_group_scale_with_its_layers():
    operators = named(graph(STEP, nextn=2).generation_ops)
    assert operators["generation_swa_qkv_gemm"].scale_factor == 2 * 6 / 4
    assert operators["generation_shared_expert_dense_act"].scale_factor == 3 * 6 / 4


def test_a_head_gate_is_part_of_step_3_where_the_checkpoint_has_it():
    assert "context_global_attn_gate_gemm" not in named(graph(STEP).context_ops)
    operators = named(graph(STEP | {"use_head_wise_attn_gate": True}, tp=2, moe_tp_size=2, moe_ep_size=1).context_ops)
    assert operators["context_global_attn_gate_gemm"].n == 8
    assert operators["context_global_attn_gate"].bytes_per_token == 2 * (8 * 128 + 8) + 2 * 8 * 128


def test_full_layers_of_muse_do_not_rotate_their_keys():
    rotated = {op.window_size: op.apply_rope for op in graph(MUSE).context_ops if op.name == "context_attention"}
    assert rotated == {512: True, 0: False}


def test_gemma_4_without_experts_is_dense():
    dense = GEMMA4 | {"num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None}
    assert not any("moe" in op.name for op in graph(dense).context_ops)
    with pytest.raises(UnsupportedModelError):
        graph(dense, tp=2, moe_tp_size=1, moe_ep_size=2)


def test_small_routers_of_gemma_4_are_left_out():
    small = named(graph(GEMMA4 | {"num_experts": 64}).context_ops)
    assert "context_swa_router_gemm" not in small
    assert "context_swa_moe" in small


def test_parts_of_gemma_4_that_the_checkpoint_keeps_unquantised():
    def modes(*patterns, **fields):
        config = GEMMA4 | {"quantization_config": {"quant_algo": "NVFP4", "ignore": list(patterns)}}
        operators = named(graph(config, **fields).context_ops)
        names = ("qkv_gemm", "shared_mlp_act", "shared_mlp_down_gemm", "moe")
        return [operators[f"context_swa_{name}"].quant_mode for name in names if name != "shared_mlp_act"]

    assert modes() == ["nvfp4", "nvfp4", "nvfp4"]
    assert modes("model.layers.0.self_attn*") == ["bfloat16", "nvfp4", "nvfp4"]
    assert modes("model.layers.0.mlp*") == ["nvfp4", "bfloat16", "bfloat16"]
    assert modes("model.layers.0.self_attn*", gemm_quant_mode="nvfp4") == ["nvfp4", "nvfp4", "nvfp4"]


def test_context_parallel_ranks_gather_each_kind_of_attention():
    spec = graph(GEMMA4, "sglang", cp_size=2, moe_tp_size=1, moe_ep_size=2)
    gathers = {op.name: (op.scale_factor, op.hidden_size) for op in spec.context_ops if "all_gather" in op.name}
    assert gathers == {"context_cp_all_gather_swa": (3.0, 1024.0), "context_cp_all_gather_global": (1.0, 1024.0)}


def test_decode_dispatches_of_context_parallel_deployments_are_marked():
    plain = named(graph(STEP, "sglang").generation_ops)["generation_swa_moe_pre_dispatch"]
    split = named(graph(STEP, "sglang", cp_size=2, moe_tp_size=1, moe_ep_size=2).generation_ops)
    assert (plain.attn_cp_size, plain.is_context) == (1, True)
    marked = split["generation_swa_moe_pre_dispatch"]
    assert (marked.attn_cp_size, marked.is_context) == (2, False)


@pytest.mark.parametrize("fields", [{"nextn": 1}, {"backend": "sglang", "cp_size": 2}])
def test_searched_architectures_have_no_prediction_and_no_context_parallelism(fields):
    with pytest.raises(UnsupportedModelError):
        graph(NAS, **fields)


def test_intermediate_sizes_of_searched_blocks_are_rounded_up():
    # Two thirds of 2.6 x 1024 are 1774.9.
    blocks = [block(multiplier=2.6)] * 4
    assert model(NAS | {"block_configs": blocks}).groups[0].inter_size == 1792


def test_caches_of_windowed_groups_stop_growing():
    checkpoint = model(GEMMA4)
    windowed, full = 3 * 4 * 256 * 2, 2 * 512 * 2
    assert kv_bytes_per_sequence(checkpoint, BF16, 1, 1) == windowed + full
    assert kv_bytes_per_sequence(checkpoint, BF16, 1, 1512) == windowed * 512 + full * 1512
    assert kv_tokens(checkpoint, BF16, 1, windowed * 512 + full * 1512) == 1512


def test_chunked_attention_keeps_the_whole_sequence():
    checkpoint = model(LLAMA4)
    assert kv_bytes_per_sequence(checkpoint, BF16, 1, 1000) == 1000 * kv_bytes_per_sequence(checkpoint, BF16, 1, 1)


def test_blocks_without_attention_have_no_cache():
    assert kv_bytes_per_sequence(model(NAS), BF16, 1, 1) == 3 * 4 * 256 * 2
