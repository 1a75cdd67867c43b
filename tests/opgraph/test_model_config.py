"""Finding and reading a checkpoint's config.json, and everything that can be wrong with it."""

import json

import pytest

from fpmsdk.errors import ModelConfigError, UnsupportedModelError
from fpmsdk.opgraph import read_model_config
from fpmsdk.opgraph.architectures import ARCHITECTURES
from fpmsdk.opgraph.model_config import bundled_models, parse_model_config
from fpmsdk.opgraph.spec import FAMILIES
from tests.opgraph.checkpoints import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, QWEN3_30B, QWEN3_32B, model

SIDECAR = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def faults(config):
    with pytest.raises(ModelConfigError) as caught:
        parse_model_config("model", config)
    return caught.value.faults


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(SIDECAR))
    return tmp_path


def test_a_directory_and_its_sidecar_are_read(checkpoint):
    read = read_model_config(str(checkpoint))
    assert (read.name, read.architecture, read.num_layers) == (str(checkpoint), "Qwen3ForCausalLM", 64)
    assert read.sidecar == SIDECAR["quantization"]


def test_a_file_is_read_with_the_sidecar_beside_it(checkpoint):
    assert read_model_config(str(checkpoint / "config.json")).sidecar == SIDECAR["quantization"]


def test_a_bundled_configuration_is_found_by_its_name(tmp_path):
    (tmp_path / "org--tiny_config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "org--tiny_hf_quant_config.json").write_text(json.dumps(SIDECAR))
    read = read_model_config("org/tiny", [tmp_path])
    assert (read.name, read.num_layers, read.sidecar) == ("org/tiny", 32, SIDECAR["quantization"])


def test_bundled_configurations_are_listed_without_their_sidecars(tmp_path):
    (tmp_path / "org--tiny_config.json").write_text("{}")
    (tmp_path / "org--tiny_hf_quant_config.json").write_text("{}")
    assert "org/tiny" in bundled_models([tmp_path])
    assert not any("hf_quant" in name for name in bundled_models([tmp_path]))


def test_an_unknown_model_names_the_nearest_bundled_ones(tmp_path):
    (tmp_path / "org--tiny-8B_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="org/tiny-8B"):
        read_model_config("org/tiny-9B", [tmp_path])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"{", "not a JSON document"),
        (b"[" * 100_000, "not a JSON document"),
        (b"{'a': 1}".replace(b"'", b'"') + bytes(1), "not a JSON document"),
        (b"[]", "must be an object, found list"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer.*git lfs pull"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}, "a": 2}', "c is given 2 times; a is given 2 times"),
    ],
)
def test_an_unreadable_file_is_a_fault_that_names_it(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=reason) as caught:
        read_model_config(str(tmp_path))
    assert caught.value.path == str(tmp_path / "config.json")


def test_an_unknown_architecture_names_the_nearest_supported_ones():
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeForCausalLM"):
        model(QWEN3_30B | {"architectures": ["Qwen4MoeForCausalLM"]})


@pytest.mark.parametrize("value", [None, [], "Qwen3ForCausalLM", [None], [""]])
def test_architectures_must_be_a_list_of_names(value):
    [fault] = faults(QWEN3_32B | {"architectures": value})
    assert fault.startswith("architectures must be a list of names")


def test_every_missing_null_and_ill_typed_field_is_listed_at_once():
    config = QWEN3_30B | {
        "num_hidden_layers": None,
        "hidden_size": "2048",
        "num_key_value_heads": None,
        "max_position_embeddings": -1,
        "num_experts": None,
    }
    del config["vocab_size"]
    assert faults(config) == (
        "num_hidden_layers is null",
        "hidden_size must be an integer not below 1, found '2048'",
        "num_key_value_heads is null",
        "vocab_size is missing",
        "max_position_embeddings must be an integer not below 1, found -1",
        "num_experts is null",
    )


@pytest.mark.parametrize("given", [{}, {"architectures": None}, {"architectures": [], "text_config": {"head_dim": 64}}])
def test_without_an_architecture_everything_that_all_need_is_listed_as_well(given):
    fault, *others = faults(given)
    assert fault.startswith("architectures")
    assert others == [
        f"{field} is missing"
        for field in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "max_position_embeddings",
        )
    ]


@pytest.mark.parametrize("value", [2**31, 2**63, 10**30])
@pytest.mark.parametrize("base", [QWEN3_32B, DEEPSEEK_V3], ids=["dense", "latent"])
@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
def test_counts_beyond_all_models_are_faults(base, field, value):
    [fault] = faults(base | {field: value})
    assert fault.startswith(f"{field} must not exceed")


def test_a_number_of_layers_that_could_not_be_walked_is_a_fault():
    assert faults(DEEPSEEK_V3 | {"num_hidden_layers": 100_001}) == (
        "num_hidden_layers must not exceed 100000, found 100001",
    )


@pytest.mark.parametrize("value", [True, 1.0, "8", 0, -8, [8]])
def test_counts_are_positive_integers(value):
    [fault] = faults(QWEN3_32B | {"num_hidden_layers": value})
    assert fault == f"num_hidden_layers must be an integer not below 1, found {value!r}"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (QWEN3_32B | {"num_key_value_heads": 7}, "num_key_value_heads must divide num_attention_heads"),
        (LLAMA_8B | {"hidden_size": 4097}, "head_dim is missing"),
        (QWEN3_30B | {"num_local_experts": 64}, "num_local_experts and num_experts contradict each other: 64, 128"),
        (QWEN3_30B | {"num_experts_per_tok": 129}, "must not exceed the number of experts: 129 of 128"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": 62}, "first_k_dense_replace must not exceed num_hidden_layers"),
        (QWEN3_32B | {"quantization_config": "fp8"}, "quantization_config must be an object, found str"),
        (QWEN3_32B | {"quantization_config": {"ignore": "lm_head"}}, "quantization_config.ignore must be a list"),
        (QWEN3_32B | {"quantization_config": {"weight_block_size": 128}}, "weight_block_size must be a list"),
        (QWEN3_32B | {"quantization_config": {"weight_block_size": [0]}}, "must hold positive integers"),
        (QWEN3_32B | {"quantization_config": {"config_groups": {"a": {"weights": 4}}}}, "a.weights must be an object"),
    ],
)
def test_contradictions_are_faults(config, words):
    [fault] = faults(config)
    assert words in fault


def test_a_dense_model_needs_its_intermediate_size_and_a_moe_model_only_that_of_its_experts():
    assert faults(QWEN3_32B | {"intermediate_size": None}) == ("intermediate_size is null",)
    assert model(QWEN3_30B | {"intermediate_size": None}).moe_inter_size == 768


def test_expert_size_falls_back_to_the_intermediate_size():
    assert model(GPT_OSS_120B).moe_inter_size == 2880


@pytest.mark.parametrize("spelling", ["num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts"])
def test_spellings_of_the_number_of_experts(spelling):
    config = {key: value for key, value in QWEN3_30B.items() if key != "num_experts"}
    assert model(config | {spelling: 128}).num_experts == 128


@pytest.mark.parametrize("spelling", ["num_experts_per_tok", "top_k_experts", "moe_top_k"])
def test_spellings_of_experts_per_token(spelling):
    config = {key: value for key, value in QWEN3_30B.items() if key != "num_experts_per_tok"}
    assert model(config | {spelling: 6}).topk == 6


def test_head_size_is_declared_or_the_quotient():
    assert model(LLAMA_8B).head_size == 128
    assert model(LLAMA_8B | {"head_dim": 64}).head_size == 64
    assert model(LLAMA_8B | {"attention_head_dim": 96}).head_size == 96


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("LlamaForCausalLM", False), ("Qwen3ForCausalLM", True), ("Qwen2ForCausalLM", False)],
)
def test_query_and_key_normalisation_belongs_to_the_architecture(architecture, expected):
    assert model(QWEN3_32B | {"architectures": [architecture]}).use_qk_norm is expected


def test_a_multimodal_checkpoint_is_read_below_its_text_config():
    nested = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": QWEN3_32B | {"hidden_size": 8192}}
    assert model(nested).hidden_size == 8192
    del nested["text_config"]["vocab_size"]
    assert faults(nested) == ("text_config.vocab_size is missing",)


def test_root_quantisation_wins_over_that_of_the_text_config():
    text = QWEN3_32B | {"quantization_config": {"quant_method": "fp8"}}
    nested = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    assert model(nested).quantization == {"quant_method": "fp8"}
    assert model(nested | {"quantization_config": {"quant_method": "mxfp4"}}).quantization == {"quant_method": "mxfp4"}


def test_mistral_layers_have_the_declared_window_and_gpt_oss_layers_alternate():
    mistral = model(LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096})
    assert (mistral.attention_window, mistral.windowed_layers) == (4096, 32)
    plain = model(LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": None})
    assert (plain.attention_window, plain.windowed_layers) == (0, 0)
    gpt_oss = model(GPT_OSS_120B)
    assert (gpt_oss.attention_window, gpt_oss.windowed_layers) == (128, 18)


def test_moe_layers_follow_the_dense_prefix_and_the_frequency():
    assert model(DEEPSEEK_V3).num_moe_layers == 58
    assert model(DEEPSEEK_V3 | {"first_k_dense_replace": 1, "moe_layer_freq": 2}).num_moe_layers == 30


def test_every_architecture_belongs_to_a_family_that_can_be_built():
    assert {entry.family for entry in ARCHITECTURES.values()} == set(FAMILIES)
