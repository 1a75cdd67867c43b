"""Drafts of profiles: estimates, cache groups, overrides, and what stays open."""

import json

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.draft import derive_profile
from fpmsdk.onboard.geometry import RequestFieldError
from fpmsdk.onboard.intake import load_model_config
from fpmsdk.onboard.request import SupportRequest
from tests.onboard.models import BFLOAT16, IDENTITY, INKLING, LARGE, MIXTRAL, SMALL, WINDOWED, write_config

DECLARED = {"weights_bytes": 100, "activations_bytes": 20, "runtime_overhead_bytes": 30, "comm_overhead_bytes": 50}
BLOCKS = {"cache_block_sizes": {"full_attention": 16, "sliding_attention": 16}}
LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "num_experts": 8, "max_position_embeddings": 8192}


def request(tp=1, kind="dense", **sections):
    search = {"tensor_parallel": tp, "context_length": 4096} | sections.pop("search", {})
    return SupportRequest.model_validate({"identity": IDENTITY | {"model_kind": kind}, "search": search} | sections)


def draft(folder, config, asked=None, **overrides):
    return derive_profile(load_model_config(write_config(folder, config)), asked, BFLOAT16 | overrides)


@pytest.mark.parametrize(
    ("config", "tp", "weights", "kv", "activations"),
    [
        (SMALL, 1, 13472, 64, 73400320),
        (SMALL, 2, 6816, 32, 73400320),
        (LARGE, 1, 137978462208, 327680, 1476395008),
        (LARGE, 2, 68990550016, 163840, 872415232),
        (LARGE, 4, 34496593920, 81920, 671088640),
        (LARGE, 8, 17249615872, 40960, 671088640),
    ],
)
def test_the_estimates_of_the_specification(tmp_path, systems, config, tp, weights, kv, activations):
    found = draft(tmp_path, config, request(tp)).resolved
    assert found["weights_bytes"] == weights
    assert found["kv_bytes_per_token"] == kv
    assert found["activations_bytes"] == activations


@pytest.mark.parametrize(("tp", "comm"), [(1, 0), (2, 358612992), (4, 411041792)])
def test_reservations_are_those_of_the_described_hardware(tmp_path, systems, tp, comm):
    found = draft(tmp_path, SMALL | {"num_key_value_heads": 4}, request(tp)).resolved
    assert (found["runtime_overhead_bytes"], found["comm_overhead_bytes"]) == (3758096384, comm)


def test_communication_is_estimated_of_pure_tensor_parallelism_alone(tmp_path, systems):
    asked = request(2, "moe", search={"moe_tensor_parallel": 1, "moe_expert_parallel": 2})
    assert "comm_overhead_bytes" not in draft(tmp_path, MIXTRAL, asked).resolved


def test_a_system_without_description_leaves_reservations_open(tmp_path, systems):
    asked = request().replaced({"identity": {"gpu": "unheard_of"}})
    found = draft(tmp_path, SMALL, asked)
    assert found.profile is not None and "runtime_overhead_bytes" not in found.resolved


# Tensors of the small model at TP 1, in bfloat16, by hand: what each change adds to 13472 bytes.
@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (SMALL | {"tie_word_embeddings": True}, 13472 - 2 * 64 * 16),
        (SMALL | {"attention_bias": True}, 13472 + 2 * 2 * (16 + 8 + 8 + 16)),
        (SMALL | {"mlp_bias": True}, 13472 + 2 * 2 * (32 + 32 + 16)),
        (SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, 13472 + 2 * 2 * (16 + 8 + 8)),
        (SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, 13472 + 2 * 2 * (4 + 4)),
        (SMALL | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, 13472),
        (SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": True}, None),
        (SMALL | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": True}, None),
        (SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "mlp_bias": True}, None),
        (SMALL | {"vocab_size": 65}, None),
        (SMALL | {"use_qk_norm": True}, None),
        (SMALL | {"num_nextn_predict_layers": 1}, None),
        (SMALL | {"intermediate_size": None}, None),
        (SMALL | {"quantization_config": {"quant_method": "fp8"}}, None),
    ],
)  # fmt: skip
def test_tensors_are_counted_where_they_are_known(tmp_path, systems, config, weights):
    assert draft(tmp_path, config, request()).resolved.get("weights_bytes") == weights


def test_experts_are_divided_and_the_router_is_not(tmp_path, systems):
    pure = draft(tmp_path, MIXTRAL, request(2, "moe")).resolved["weights_bytes"]
    tep = request(2, "moe", search={"moe_tensor_parallel": 1, "moe_expert_parallel": 2})
    # 4 experts of 3 * 16 * 32 elements, half of them on a rank either way.
    assert draft(tmp_path, MIXTRAL, tep).resolved["weights_bytes"] == pure
    # As the dense model on two ranks, whose MLP is 3 * 16 * 16 elements in each of two layers.
    assert pure == 6816 + 2 * 2 * (4 * 3 * 16 * 16 - 3 * 16 * 16 + 16 * 4)


@pytest.mark.parametrize("fmha", ["fp8", "fp8_block"])
def test_activations_are_estimated_of_16_bit_attention(tmp_path, systems, fmha):
    assert "activations_bytes" not in draft(tmp_path, SMALL, request(), fmha_quant_mode=fmha).resolved


def test_heads_that_do_not_divide_name_the_option(tmp_path, systems):
    for config, tp, found in ((SMALL, 3, "4 num_attention_heads"), (SMALL | {"num_attention_heads": 12,
                              "num_key_value_heads": 3}, 2, "3 num_key_value_heads"), (SMALL | {
                              "intermediate_size": 33}, 2, "intermediate_size 33")):  # fmt: skip
        with pytest.raises(RequestFieldError, match=found) as fault:
            draft(tmp_path, config, request(tp))
        assert fault.value.path == "tensor_parallel"


def test_an_explicit_topology_with_stated_bytes_may_be_wide(tmp_path, systems):
    profile = draft(tmp_path, LARGE, request(16), **DECLARED).profile
    assert profile.deployments[0].tp == 16
    assert profile.deployments[0].resources.kv_bytes_per_token == 2 * 80 * 1 * 128 * 2


# --- groups ---


def test_packed_pages_of_full_and_windowed_layers(tmp_path, systems):
    found = draft(tmp_path, WINDOWED, request(1, "moe"), gemm_quant_mode="bfloat16", **BLOCKS)
    pages = {group["name"]: group["page_size_bytes"] for group in found.resolved["cache_groups"]}
    assert pages == {"full_attention": 131072, "sliding_attention": 393216}
    assert found.profile.deployments[0].resources.cache_layout == "grouped"


def test_windowed_layers_may_have_heads_of_their_own(tmp_path, systems):
    config = WINDOWED | {"swa_num_key_value_heads": 4, "swa_head_dim": 64, "swa_v_head_dim": 32}
    found = draft(tmp_path, config, request(1, "moe"), **BLOCKS).resolved["cache_groups"]
    assert found[1]["page_size_bytes"] == 6 * 4 * (64 + 32) * 16 * 2


def test_convolution_state_is_packed_to_powers_of_two(tmp_path, systems):
    found = draft(tmp_path, INKLING, request(2), **BLOCKS).resolved["cache_groups"]
    assert [(group["name"], group["num_layers"]) for group in found] == [
        ("full_attention", 2),
        ("full_convolution", 2),
        ("sliding_attention", 2),
        ("sliding_convolution", 2),
    ]
    # 2 layers, 2 heads of this rank, 2 * 128 + 2 * (1024 / 4) = 768 elements packed to 1024, 2 bytes, 4 tokens.
    assert found[1]["page_size_bytes"] == 2 * 2 * 1024 * 2 * 4
    assert (found[1]["block_size_tokens"], found[1]["sliding_window"]) == (4, 4)


def test_convolution_state_is_not_repeated(tmp_path, systems):
    with pytest.raises(RequestFieldError, match="exceeds the 4 key-value heads"):
        draft(tmp_path, INKLING, request(8), **BLOCKS)


@pytest.mark.parametrize(
    ("config", "overrides", "found"),
    [
        (WINDOWED, {"cache_layout": "linear"}, "contradict layers with a window"),
        (WINDOWED, {"kv_bytes_per_token": 64}, "contradict layers with a window"),
        (WINDOWED, {"cache_block_sizes": {"full_convolution": 4}}, "names full_convolution"),
        (SMALL, BLOCKS, "has no groups"),
        ({"architectures": ["NewForCausalLM"]}, {"cache_block_sizes": "whatever"}, "no groups of its own"),
        (SMALL, {"architecture": "Qwen3ForCausalLM"}, "architecture: config.json says"),
        (MIXTRAL, {"num_experts": 8}, "num_experts: config.json says 4"),
        (SMALL, {"context_length": 9000}, "exceeds 8192"),
    ],
)
def test_overrides_that_contradict_the_model_are_refused(tmp_path, systems, config, overrides, found):
    with pytest.raises(OnboardError, match=found):
        draft(tmp_path, config, **overrides)


def test_stated_groups_keep_layers_and_windows(tmp_path, systems):
    group = {"kind": "attention", "block_size_tokens": 16, "page_size_bytes": 4096}
    full = {"name": "a", "num_layers": 2, **group}
    window = {"name": "b", "num_layers": 6, "sliding_window": 128, **group}
    found = draft(tmp_path, WINDOWED, request(1, "moe"), cache_groups=[full, window])
    assert [entry["name"] for entry in found.resolved["cache_groups"]] == ["a", "b"]
    with pytest.raises(OnboardError, match="must keep the layers"):
        draft(tmp_path, WINDOWED, request(1, "moe"), cache_groups=[full, window | {"num_layers": 5}])


# --- what stays open ---


@pytest.mark.parametrize(
    ("config", "kind", "overrides", "missing"),
    [
        (SMALL, "dense", {}, set()),
        (WINDOWED, "moe", {}, {"cache_block_sizes"}),
        (WINDOWED, "moe", {"cache_block_sizes": {"full_attention": 16}}, {"cache_block_sizes"}),
        (LATENT | {"torch_dtype": "bfloat16"}, "moe", {}, {"cache_layout", "kv_bytes_per_token"}),
        (LATENT, "moe", {"cache_layout": "linear", "kv_bytes_per_token": 70272}, {"gemm_quant_mode", "moe_quant_mode"}),
        (SMALL | {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float",
         "dynamic": True}}}, "dense", {}, {"kv_bytes_per_token"}),
    ],
)  # fmt: skip
def test_open_fields_have_reasons(tmp_path, systems, config, kind, overrides, missing):
    found = draft(tmp_path, config, request(1, kind), **overrides)
    assert set(found.missing) == missing
    assert (found.profile is None) is bool(missing)


def test_attention_and_cache_never_follow_from_weights(tmp_path, systems):
    found = derive_profile(load_model_config(write_config(tmp_path, SMALL)), request())
    assert set(found.missing) == {"fmha_quant_mode", "kv_cache_dtype", "kv_bytes_per_token"}


def test_a_cache_of_a_probe_is_not_asked_for_and_claims_are_kept(tmp_path, systems):
    config = {"architectures": ["NewForCausalLM"], "num_experts": 0, "max_position_embeddings": 64, **{
        "torch_dtype": "bfloat16"}}  # fmt: skip
    asked = request(search={"context_length": 64}, workload={"input_tokens": 8, "output_tokens": 8})
    found = draft(tmp_path, config, asked, kv_bytes_per_token=64)
    assert found.missing == {} and found.profile is None
    assert set(found.pending_runtime) == {"cache_geometry"}
    assert "compares it with the probe" in found.sources["kv_bytes_per_token"]


@pytest.mark.parametrize(
    ("config", "sections", "field"),
    [
        (SMALL, {"search": {"context_length": 8193}}, "context_length"),
        (MIXTRAL, {}, "model_kind"),
    ],
)
def test_a_request_that_contradicts_the_model_names_the_option(tmp_path, systems, config, sections, field):
    with pytest.raises(RequestFieldError) as fault:
        draft(tmp_path, config, request(**sections))
    assert fault.value.path == field


def test_one_limit_of_the_scheduler_is_stated_once(tmp_path, systems):
    asked = request(collection={"max_num_tokens": 4096})
    assert draft(tmp_path, SMALL, asked, max_num_tokens=4096).resolved["max_num_tokens"] == 4096
    with pytest.raises(OnboardError, match="collection says 4096 and the override 2048"):
        draft(tmp_path, SMALL, asked, max_num_tokens=2048)


# --- the profile ---


def test_estimates_declare_no_memory(tmp_path, systems):
    resources = draft(tmp_path, SMALL, request()).profile.deployments[0].resources
    assert resources.memory_source == "pending"
    assert resources.declared() == (None, None, None, None)
    planned = json.loads(resources.provenance)["planning_estimates"]
    assert planned["weights_bytes"]["value"] == 13472


def test_all_four_stated_bytes_declare_memory(tmp_path, systems):
    part = dict(list(DECLARED.items())[:3])
    assert draft(tmp_path, SMALL, request(), **part).profile.deployments[0].resources.memory_source == "pending"
    resources = draft(tmp_path, SMALL, request(), **DECLARED).profile.deployments[0].resources
    assert (resources.memory_source, resources.declared()) == ("declared", (100, 20, 30, 50))
    assert json.loads(resources.provenance)["planning_estimates"] == {}


@pytest.mark.parametrize("role", [None, "prefill", "decode", "aggregated"])
def test_a_profile_records_identity_sources_and_role(tmp_path, systems, role):
    asked = request(2).replaced({"worker_type": role})
    profile = draft(tmp_path, SMALL, asked).profile
    record = json.loads(profile.provenance)
    assert record["config_sha256"] == load_model_config(tmp_path / "config.json").sha256
    assert record["fields"]["kv_bytes_per_token"]["value"] == 32
    assert record["parallelism"] == asked.parallelism()
    assert record.get("worker_type") == role == profile.deployments[0].worker_type
    assert asked.replaced({"fpm_profile": profile.model_dump(mode="json")}).profile_deployment() is not None
