"""Which precision a checkpoint runs in: one test a rule of op-level.md section 4.2."""

import pytest

from fpmsdk.config.modes import GEMM_MODES, MOE_MODES
from fpmsdk.errors import ConfigError, UnsupportedModelError
from fpmsdk.opgraph import infer_precision
from fpmsdk.opgraph.quantization import ACCEPTED, CACHE_BYTES, MODES
from tests.opgraph.checkpoints import BLOCK_FP8, DEEPSEEK_V3, QWEN3_30B, QWEN3_32B, deployment, model

FP8 = {"quant_method": "fp8"}


def inferred(config=None, sidecar=None, base=QWEN3_30B, backend="trtllm", **fields):
    quantization = {} if config is None else {"quantization_config": config}
    checkpoint = model(base | quantization, sidecar and {"quantization": sidecar})
    return infer_precision(checkpoint, deployment(backend, **fields))


def weights(config=None, sidecar=None, **rest):
    precision = inferred(config, sidecar, **rest)
    return precision.gemm, precision.moe


def attention(config=None, sidecar=None, **rest):
    precision = inferred(config, sidecar, **rest)
    return precision.kv_cache, precision.fmha


def test_an_unquantised_checkpoint_runs_in_bfloat16():
    assert inferred()[:5] == ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "half")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FP8, ("fp8_static", "fp8")),
        (FP8 | {"activation_scheme": "static"}, ("fp8_static", "fp8")),
        (FP8 | {"activation_scheme": "dynamic"}, ("fp8", "fp8")),
        (FP8 | {"config_groups": {"a": {"input_activations": {"dynamic": True}}}}, ("fp8", "fp8")),
        (FP8 | {"config_groups": {"a": {"weights": {"dynamic": False}}}}, ("fp8_static", "fp8")),
        (BLOCK_FP8, ("fp8_block", "fp8_block")),
        ({"quant_algo": "fp8_block"}, ("fp8_block", "fp8_block")),
        ({"quant_algo": "NVFP4"}, ("nvfp4", "nvfp4")),
        ({"quant_method": "mxfp4"}, ("bfloat16", "w4a16_mxfp4")),
        ({"quantization_method": "w4a16_mxfp4"}, ("bfloat16", "w4a16_mxfp4")),
    ],
)
def test_algorithms(config, expected):
    assert weights(config) == expected


def test_the_sidecar_wins_over_the_configuration():
    assert weights(FP8, {"quant_algo": "NVFP4"}) == ("nvfp4", "nvfp4")
    assert weights({"quant_method": "modelopt"}, {"quant_algo": "FP8"}) == ("fp8_static", "fp8")


def test_quant_algo_wins_over_quant_method():
    assert weights({"quant_algo": "nvfp4", "quant_method": "fp8"}) == ("nvfp4", "nvfp4")


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "modelopt"])
def test_an_unknown_algorithm_is_an_unsupported_model(algorithm):
    with pytest.raises(UnsupportedModelError, match=algorithm):
        inferred({"quant_method": algorithm})


def group(bits, kind, **rest):
    return {"weights": {"num_bits": bits, "type": kind, **rest}}


def compressed(*ignored, **groups):
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": list(ignored)}


@pytest.mark.parametrize(
    ("groups", "mode"),
    [
        (group(4, "int"), "int4_wo"),
        (group(8, "float"), "fp8"),
        (group(8, "float", strategy="block"), "fp8_block"),
        (group(8, "float", block_structure=[128, 128]), "fp8_block"),
    ],
)
def test_compressed_tensors_take_the_mode_of_the_first_group(groups, mode):
    assert weights(compressed(a=groups)) == (mode, mode)


def test_compressed_tensors_keep_ignored_parts_in_bfloat16():
    fp8 = group(8, "float")
    assert weights(compressed("re:.*self_attn.*", a=fp8)) == ("bfloat16", "fp8")
    assert weights(compressed("model.layers.0.self_attn.q_proj", a=fp8)) == ("bfloat16", "fp8")
    assert weights(compressed("re:.*mlp.experts.*", a=fp8)) == ("fp8", "bfloat16")
    assert weights(compressed("re:.*shared_experts.*", "lm_head", a=fp8)) == ("fp8", "fp8")


def test_compressed_eight_bit_integers_have_no_expert_mode_but_serve_dense_models():
    with pytest.raises(UnsupportedModelError, match="experts as int8_wo"):
        inferred(compressed(a=group(8, "int")))
    assert weights(compressed(a=group(8, "int")), base=QWEN3_32B) == ("int8_wo", "bfloat16")


EXPERT, LINEAR = "model.layers.0.mlp.experts.3", "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({EXPERT: "NVFP4", LINEAR: "FP8"}, ("fp8_static", "nvfp4")),
        ({EXPERT: "MXFP8", LINEAR: "NVFP4"}, ("nvfp4", "fp8_block")),
        ({EXPERT: "W4A16_NVFP4", LINEAR: "MXFP8"}, ("fp8_block", "w4a16_nvfp4")),
        ({EXPERT: "e4m3", LINEAR: "w4a16_nvfp4"}, ("w4a16_nvfp4", "fp8")),
        ({"model.layers.0.mlp.shared_expert.up": "fp4"}, ("nvfp4", "bfloat16")),
        ({}, ("bfloat16", "bfloat16")),
    ],
)
def test_mixed_precision_reads_the_layers(layers, expected):
    metadata = {"quantized_layers": {target: {"quant_algo": algorithm} for target, algorithm in layers.items()}}
    assert weights(None, {"quant_algo": "MIXED_PRECISION"} | metadata) == expected
    assert weights({"quant_algo": "mixed-precision"} | metadata) == expected


def test_mixed_precision_keeps_the_base_method_for_linear_layers():
    layers = {"quantized_layers": {EXPERT: "NVFP4", LINEAR: "NVFP4"}}
    assert weights(BLOCK_FP8, {"quant_algo": "MIXED_PRECISION"} | layers) == ("fp8_block", "nvfp4")


def test_mixed_precision_reads_groups_with_their_targets():
    groups = {
        "a": group(4, "float") | {"targets": [EXPERT]},
        "b": group(8, "float", group_size=32) | {"targets": ["x"]},
    }
    assert weights({"quant_algo": "MIXED_PRECISION", "config_groups": groups}) == ("fp8_block", "nvfp4")


# KV cache and attention.


@pytest.mark.parametrize("algorithm", ["fp8", "fp8_block", "nvfp4"])
def test_low_precision_weights_pull_cache_and_attention_to_fp8(algorithm):
    assert attention({"quant_algo": algorithm}) == ("fp8", "fp8")


@pytest.mark.parametrize("written", ["none", "None", " NONE "])
@pytest.mark.parametrize("config", [FP8, BLOCK_FP8, {"quant_algo": "nvfp4"}, {"quant_method": "mxfp4"}])
def test_an_explicit_none_means_an_unquantised_cache_and_attention(config, written):
    assert attention(config | {"kv_cache_quant_algo": written}) == ("bfloat16", "bfloat16")
    assert attention(None, {"quant_algo": "FP8", "kv_cache_quant_algo": written}) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("entry", [{}, {"kv_cache_quant_algo": None}, {"kv_cache_quant_algo": ""}])
def test_a_missing_or_null_entry_keeps_the_inference(entry):
    assert attention(FP8 | entry) == ("fp8", "fp8")
    assert attention({"quant_method": "mxfp4"} | entry) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("name", ["fp8", "FP8", "e4m3", "e5m2"])
@pytest.mark.parametrize("field", ["kv_cache_quant_algo", "kv_cache_quant_method", "kv_cache_dtype"])
def test_names_of_an_fp8_cache(field, name):
    assert attention({"quant_method": "mxfp4", field: name}) == ("fp8", "fp8")


@pytest.mark.parametrize("name", ["fp16", "float16", "bf16", "bfloat16"])
def test_a_sixteen_bit_cache_of_sixteen_bit_weights_stays(name):
    assert attention({"quant_method": "mxfp4", "kv_cache_dtype": name}) == ("bfloat16", "bfloat16")


def test_a_sixteen_bit_cache_does_not_resist_fp8_weights():
    assert attention(FP8 | {"kv_cache_dtype": "bf16"}) == ("fp8", "fp8")


def test_an_fp8_cache_without_any_algorithm_leaves_attention_alone():
    assert attention({"kv_cache_quant_algo": "fp8"}) == ("fp8", "bfloat16")


@pytest.mark.parametrize("name", ["int8", "fp4", "auto"])
def test_any_other_cache_algorithm_is_an_unsupported_model(name):
    with pytest.raises(UnsupportedModelError, match=f"unsupported kv cache algorithm '{name}'"):
        inferred(FP8 | {"kv_cache_quant_algo": name})


@pytest.mark.parametrize(
    ("scheme", "cache"),
    [
        ({"type": "float", "num_bits": 8}, "fp8"),
        ({"type": "float", "num_bits": 4}, "fp8"),
        ({"type": "float", "num_bits": 16}, "bfloat16"),
        ({"type": "fp8_e4m3"}, "fp8"),
        ({"type": "int", "num_bits": 8}, "bfloat16"),
        ({"type": "float"}, "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_kv_cache_scheme(scheme, cache):
    assert attention({"quant_method": "mxfp4", "kv_cache_scheme": scheme})[0] == cache


def test_a_named_algorithm_wins_over_the_scheme():
    scheme = {"kv_cache_scheme": {"type": "float", "num_bits": 8}}
    assert attention({"quant_method": "mxfp4", "kv_cache_dtype": "bf16"} | scheme)[0] == "bfloat16"


def test_the_cache_entry_of_the_sidecar_wins():
    sidecar = {"quant_algo": "FP8", "kv_cache_quant_algo": "none"}
    assert attention(FP8 | {"kv_cache_dtype": "fp8"}, sidecar) == ("bfloat16", "bfloat16")


def test_vllm_runs_inferred_attention_in_bfloat16():
    assert attention(FP8, backend="vllm") == ("fp8", "bfloat16")


def test_sglang_runs_latent_attention_of_a_bfloat16_checkpoint_in_bfloat16_on_hopper():
    assert attention(base=DEEPSEEK_V3, backend="sglang") == ("fp8", "bfloat16")
    assert attention(base=DEEPSEEK_V3, backend="sglang", sm_version=100) == ("fp8", "fp8")
    assert attention(base=DEEPSEEK_V3, backend="sglang", backend_version="0.5.13") == ("fp8", "fp8")
    assert attention(base=DEEPSEEK_V3, backend="sglang", attention_backend="triton") == ("fp8", "fp8")


def test_explicit_modes_win_and_change_nothing_else():
    modes = {
        "gemm_quant_mode": "fp8_ootb",
        "moe_quant_mode": "w4afp8",
        "fmha_quant_mode": "fp8",
        "kvcache_quant_mode": "int8",
        "comm_quant_mode": "int8",
    }
    assert inferred(FP8, backend="vllm", **modes)[:5] == ("fp8_ootb", "w4afp8", "fp8", "int8", "int8")
    assert attention(FP8, kvcache_quant_mode="bfloat16") == ("bfloat16", "fp8")


@pytest.mark.parametrize("field", ACCEPTED)
def test_an_unknown_mode_names_the_accepted_ones(field):
    with pytest.raises(ConfigError, match=", ".join(ACCEPTED[field])) as caught:
        inferred(**{field: "fp7"})
    assert caught.value.path == field
    assert not isinstance(caught.value, UnsupportedModelError)


def test_every_accepted_mode_has_its_costs():
    assert set(GEMM_MODES) | set(MOE_MODES) | set(ACCEPTED["fmha_quant_mode"]) == set(MODES)
    assert {mode.compute for mode in MODES.values()} == {"bfloat16", "int8", "fp8", "fp4"}
    assert CACHE_BYTES == {"bfloat16": 2, "int8": 1, "fp8": 1}


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["*self_attn*"], "q kv o"),
        (["model.layers.0.self_attn.q_b_proj"], "q"),
        (["*q_a_proj*", "*kv_a_proj*"], "q kv"),
        (["*o_proj*"], "o"),
        (["lm_head"], ""),
    ],
)
@pytest.mark.parametrize("field", ["modules_to_not_convert", "exclude_modules", "ignore"])
def test_latent_projections_that_the_checkpoint_keeps_unquantised(field, patterns, kept):
    precision = inferred(BLOCK_FP8 | {field: patterns}, base=DEEPSEEK_V3)
    assert precision.attention_bf16 == frozenset(kept.split())


def test_shared_experts_stay_unquantised_where_the_checkpoint_says_so_and_nobody_objects():
    config = BLOCK_FP8 | {"ignore": ["*mlp.shared_experts*"]}
    assert inferred(config, base=DEEPSEEK_V3).shared_experts == "bfloat16"
    assert inferred(config, base=DEEPSEEK_V3, gemm_quant_mode="fp8_block").shared_experts == "fp8_block"
    assert inferred(BLOCK_FP8, base=DEEPSEEK_V3).shared_experts == "fp8_block"
