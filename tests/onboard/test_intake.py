"""Intake of `config.json`: names of fields, text decoders, layouts, and what is refused by name."""

import hashlib

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.hub_snapshots import is_selected_model, snapshot_of
from fpmsdk.onboard.intake import load_model_config
from tests.onboard.models import INKLING, MIXTRAL, SMALL, WINDOWED, write_config

UNKNOWN = {"architectures": ["NewForCausalLM"], "num_hidden_layers": 2, "max_position_embeddings": 64}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_the_hash_is_that_of_the_bytes(tmp_path):
    path = write_config(tmp_path, SMALL)
    assert load_model_config(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("config", "suggestions"),
    [
        (SMALL, {"architecture": "LlamaForCausalLM", "context_length": 8192, "num_experts": 0, "model_kind": "dense"}),
        (MIXTRAL,
         {"architecture": "MixtralForCausalLM", "context_length": 8192, "num_experts": 4, "model_kind": "moe"}),
        (without(SMALL, "architectures", "max_position_embeddings") | {"n_positions": 32},
         {"architecture": "LlamaForCausalLM", "context_length": 32, "num_experts": 0, "model_kind": "dense"}),
        (SMALL | {"_name_or_path": "org/model"},
         {"model": "org/model", "architecture": "LlamaForCausalLM", "context_length": 8192, "num_experts": 0,
          "model_kind": "dense"}),
        (UNKNOWN, {"architecture": "NewForCausalLM", "context_length": 64}),
        (UNKNOWN | {"n_routed_experts": 0},
         {"architecture": "NewForCausalLM", "context_length": 64, "num_experts": 0, "model_kind": "dense"}),
    ],
)  # fmt: skip
def test_identity_and_limits_are_suggested(tmp_path, config, suggestions):
    assert load_model_config(write_config(tmp_path, config)).suggestions == suggestions


def test_a_text_decoder_is_read_and_its_wrapper_identifies_the_checkpoint(tmp_path):
    text = without(SMALL, "architectures", "model_type", "torch_dtype")
    wrapper = {
        "architectures": ["WrapperForConditionalGeneration"],
        "hidden_size": 999,
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"hidden_size": 7},
    }
    found = load_model_config(write_config(tmp_path, wrapper))
    assert found.suggestions["architecture"] == "WrapperForConditionalGeneration"
    assert found.decoder_architecture is None
    assert (found.raw["hidden_size"], found.raw["torch_dtype"]) == (16, "bfloat16")
    assert found.runtime_layout == ("unrecognized architecture WrapperForConditionalGeneration",)
    named = load_model_config(write_config(tmp_path, wrapper | {"text_config": text | {"model_type": "llama"}}))
    assert named.decoder_architecture == "LlamaForCausalLM"
    assert named.suggestions["architecture"] == "WrapperForConditionalGeneration"
    assert named.runtime_layout == ()


def test_metadata_of_the_wrapper_is_taken_only_where_the_text_section_has_none(tmp_path):
    outer = {"torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}, "quant_algo": "fp8"}
    config = outer | {"text_config": SMALL | {"quant_algo": "nvfp4"}}
    found = load_model_config(write_config(tmp_path, config)).raw
    assert (found["torch_dtype"], found["quant_algo"]) == ("bfloat16", "nvfp4")
    assert "quantization_config" not in found


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "intermediate_size"])
def test_null_is_absence_where_a_checkpoint_may_leave_it_out(tmp_path, name):
    assert name not in load_model_config(write_config(tmp_path, SMALL | {name: None})).notes


def test_infinity_may_stand_where_nothing_reads(tmp_path):
    path = write_config(tmp_path, '{"architectures": ["LlamaForCausalLM"], "time_step_limit": [0.0, Infinity]}')
    assert load_model_config(path).decoder_architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("[]", "one object"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("{", "invalid JSON"),
        ("version https://git-lfs", "git lfs pull"),
        ('{"hidden_size": 1e400}', "hidden_size must be an integer"),
        ('{"quantization_config": {"quant_method": NaN}}', "finite"),
        (SMALL | {"hidden_size": True}, "hidden_size must be an integer"),
        (SMALL | {"hidden_size": "16"}, "hidden_size must be an integer"),
        (SMALL | {"vocab_size": None}, "vocab_size must be an integer"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts must be an integer"),
        (SMALL | {"n_embd": 32}, "hidden_size is given under several names"),
        (SMALL | {"dtype": "float16"}, "dtype and torch_dtype disagree"),
        (SMALL | {"architectures": ["A", "B"]}, "exactly one class"),
        (SMALL | {"model_type": "qwen3"}, "contradicts architectures"),
        (SMALL | {"num_local_experts": 4}, "contradicts the dense"),
        (MIXTRAL | {"num_local_experts": 0}, "must be positive"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "exceeds the 4 experts"),
        (SMALL | {"num_key_value_heads": 3}, "must divide num_attention_heads"),
        (MIXTRAL | {"first_k_dense_replace": 3}, "exceeds the 2 layers"),
        (SMALL | {"n_shared_experts": -1}, "n_shared_experts must be an integer"),
        (SMALL | {"_name_or_path": "a", "name_or_path": "b"}, "disagree"),
        ({"text_config": {}}, "text_config must be an object"),
        ({"text_config": SMALL | {"text_config": SMALL}}, "text_config.text_config"),
        (SMALL | {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (SMALL | {"attention_bias": 1}, "attention_bias must be true or false"),
        (SMALL | {"kv_lora_rank": 512}, "kv_lora_rank contradict the full attention"),
        (SMALL | {"attention_k_eq_v": True}, "attention_k_eq_v contradict"),
        (SMALL | {"use_sconv": True, "sconv_kernel_size": 4}, "convolution state is known of"),
        (SMALL | {"layer_types": ["full_attention"]}, "one entry for each of 2 layers"),
        (SMALL | {"sliding_window": 8, "sliding_window_size": 9}, "disagree"),
        (SMALL | {"sliding_window": 8, "max_window_layers": 1}, "provide layer_types"),
        (SMALL | {"layer_types": ["sliding_attention"] * 2}, "need a positive sliding_window"),
        (SMALL | {"use_sliding_window": True}, "needs a positive sliding_window"),
        (SMALL | {"use_sliding_window": False, "sliding_window": 8, "local_layer_ids": [0]}, "contradicts layers"),
        (SMALL | {"sliding_window": 8, "local_layer_ids": [0, 0]}, "distinct"),
        (SMALL | {"sliding_window": 8, "local_layer_ids": [2]}, "below num_hidden_layers"),
        (SMALL | {"sliding_window": 8, "local_layer_ids": [0], "layer_types": ["full_attention"] * 2}, "different"),
        (SMALL | {"sliding_window": 8, "attn_type_list": [1, 1]}, "attn_type_list of full attention"),
        (UNKNOWN | {"layer_types": ["linear_attention", ""]}, "must hold text"),
        (UNKNOWN | {"attn_type_list": [0, "1"]}, "must hold integers"),
        (without(INKLING, "use_sconv"), "use_sconv must be true"),
        (without(INKLING, "sconv_kernel_size"), "needs sconv_kernel_size"),
        (INKLING | {"conv_kernel_size": 5}, "must be equal"),
        (INKLING | {"dtype": "float16"}, "dtype must be bfloat16"),
        (SMALL | {"quantization_config": []}, "quantization_config must be an object"),
        (SMALL | {"quantization_config": {"quant_method": "fp8", "quant_algo": "NVFP4"}}, "contradicts quant_algo"),
        (SMALL | {"quantization_config": {"weight_block_size": [128]}}, "must be two integers"),
        (SMALL | {"quantization_config": {"ignore": "lm_head"}}, "must be a list"),
        (SMALL | {"quantization_config": {"config_groups": {"g": {"weights": {"num_bits": 8.0}}}}}, "num_bits"),
        (SMALL | {"quantization_config": {"kv_cache_scheme": "FP4"}}, "must be an object or FP8"),
    ],
)  # fmt: skip
def test_what_is_malformed_or_contradictory_is_refused_by_file_and_field(tmp_path, config, found):
    path = write_config(tmp_path, config)
    with pytest.raises(OnboardError, match=found) as fault:
        load_model_config(path)
    assert str(fault.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("config", "reasons"),
    [
        (SMALL, ()),
        (SMALL | {"sliding_window": 8}, ()),
        (SMALL | {"sliding_window": 8, "use_sliding_window": False}, ()),
        (WINDOWED, ()),
        (INKLING, ()),
        (UNKNOWN, ("unrecognized architecture NewForCausalLM",)),
        (UNKNOWN | {"sliding_window": 8}, ()),
        (UNKNOWN | {"sliding_window": 8, "hybrid_layer_pattern": [0, 1]},
         ("unrecognized architecture NewForCausalLM",)),
        (UNKNOWN | {"layer_types": ["linear_attention", "full_attention"], "ssm_state_size": 16},
         ("layer_types linear_attention x1", "recurrent-state field ssm_state_size")),
        (SMALL | {"attn_type_list": [0, 1]}, ("attn_type_list 0 x1",)),
        (SMALL | {"attn_type_list": [1, 1]}, ()),
        ({"architectures": ["MambaForCausalLM"]}, ("recurrent architecture MambaForCausalLM",)),
        ({"architectures": ["GlmMoeDsaForCausalLM"], "layer_types": ["deepseek_sparse_attention"]}, ()),
        ({"architectures": ["DeepseekV3ForCausalLM"], "layer_types": ["deepseek_sparse_attention"]},
         ("layer_types deepseek_sparse_attention x1",)),
    ],
)  # fmt: skip
def test_a_cache_that_the_file_does_not_establish_is_left_to_the_probe(tmp_path, config, reasons):
    assert load_model_config(write_config(tmp_path, config)).runtime_layout == reasons


def test_a_probed_layout_may_have_no_attention_heads(tmp_path):
    config = UNKNOWN | {"num_key_value_heads": 0, "head_dim": 0, "kv_lora_rank": 0, "linear_attn_config": {}}
    assert load_model_config(write_config(tmp_path, config)).runtime_layout
    with pytest.raises(OnboardError, match="head_dim"):
        load_model_config(write_config(tmp_path, SMALL | {"head_dim": 0}))


REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_linked_config_of_a_hub_cache_is_read_with_the_sidecar_beside_the_link(tmp_path):
    snapshot = tmp_path / "models--org--model" / "snapshots" / REVISION
    blobs = tmp_path / "models--org--model" / "blobs"
    target = write_config(blobs, SMALL)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(target)
    (snapshot / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    found = load_model_config(snapshot / "config.json")
    assert found.path == snapshot / "config.json"
    assert "hf_quant_config.json" in found.source_files
    assert found.notes["hub_snapshot"] == f"org/model at revision {REVISION}, by its directory"


@pytest.mark.parametrize(
    ("path", "selected"),
    [
        (f"/hub/models--org--model/snapshots/{REVISION}", True),
        ("org/model", True),
        (f"/hub/models--org--model/snapshots/{REVISION[:12]}", False),
        ("/hub/models--org--model/snapshots/main", False),
        (f"/hub/models--org--model/snapshots/{'f' * 40}", False),
        (f"/hub/models--org--other/snapshots/{REVISION}", False),
        (f"/hub/models--org--model/snapshots/{REVISION}/sub", False),
        (f"/hub/../models--org--model/snapshots/{REVISION}", False),
        (f"hub/models--org--model/snapshots/{REVISION}", False),
    ],
)
def test_a_snapshot_is_the_model_only_at_its_full_revision(path, selected):
    assert is_selected_model(path, "org/model", REVISION) is selected
    assert (snapshot_of(path) == ("org/model", REVISION)) is (selected and path[0] == "/")
