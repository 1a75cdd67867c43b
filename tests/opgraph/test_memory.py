"""Memory of one rank and the size of its KV cache: recorded estimates and the rules of op-level.md section 6."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.errors import ConfigError, InfeasibleMemoryError, ModelConfigError, UnsupportedModelError
from fpmsdk.opgraph import build_graph
from fpmsdk.opgraph.kv_layout import kv_breakdown, kv_bytes_per_sequence, kv_tokens
from fpmsdk.opgraph.memory import MIB, MemoryRequest, SystemMemory, estimate_kv_cache, weight_bytes
from fpmsdk.opgraph.naive_memory import estimate_kv_cache_naively
from fpmsdk.opgraph.precision import Precision
from tests.opgraph.checkpoints import (
    CHECKPOINTS,
    DEEPSEEK_V3,
    GPT_OSS_120B,
    LLAMA_8B,
    QWEN3_30B,
    QWEN3_32B,
    default_lanes,
    deployment,
    model,
)
from tests.vectors import load_vectors

H200 = SystemMemory(151397597184, {1: 0, 2: 358612992, 4: 411041792, 8: 411041792}, 3758096384)
BF16 = Precision()
KINDS = {"trtllm": "of_free", "vllm": "of_total", "sglang": "of_total"}


def request(backend="vllm", **fields):
    defaults = {"max_num_tokens": 8192, "memory_fraction_kind": KINDS[backend], "memory_fraction_value": 0.9}
    return MemoryRequest(**(defaults | fields))


def estimate(config, asked=None, backend="vllm", system=H200, **fields):
    checkpoint, deployed = model(config), deployment(backend, **fields)
    spec = build_graph(checkpoint, deployed, default_lanes)
    return estimate_kv_cache(checkpoint, deployed, spec, system, asked or request(backend))


@pytest.mark.parametrize("case", load_vectors("op_level_peer_0.13")["memory"], ids=lambda case: case["model"])
def test_recorded_estimates(case):
    args = dict(case["args"])
    asked = {key: args.pop(key) for key in tuple(args) if key in MemoryRequest.__struct_fields__}
    fields = {"tp": args["tp_size"]} | {key: args[key] for key in ("moe_tp_size", "moe_ep_size") if key in args}
    result = estimate(CHECKPOINTS[case["model"]], MemoryRequest(**asked), case["backend"], **fields)
    assert result.to_dict() == case["estimate"]
    assert result.num_gpu_blocks(16) == case["num_gpu_blocks_bs16"]


def test_pipeline_stages_divide_weights_but_not_the_cache():
    one, two = estimate(LLAMA_8B), estimate(LLAMA_8B, pp=2)
    assert two.memory_breakdown.weights_bytes * 2 == one.memory_breakdown.weights_bytes
    assert two.kv_size_per_token_bytes == one.kv_size_per_token_bytes


def test_sglang_counts_the_dense_layers_and_the_sharded_embedding_of_deepseek():
    fields = {"tp": 8, "moe_tp_size": 1, "moe_ep_size": 8}
    checkpoint, deployed = model(DEEPSEEK_V3), deployment("sglang", **fields)
    spec = build_graph(checkpoint, deployed, default_lanes)
    graph_weights = sum(op.weight_bytes for op in spec.context_ops)
    # Three dense layers instead of three expert layers, and an eighth of the embedding.
    expert = 3 * 7168 * 2048
    layer = expert * 256 // 8 + expert // 8 + 2 * 7168 * 256
    expected = graph_weights - 3 * (layer - 3 * 7168 * 18432 // 8) - 2 * 129280 * 7168 * 7 // 8
    assert weight_bytes(checkpoint, deployed, spec) == expected
    predicting = deployment("sglang", nextn=1, **fields)
    assert weight_bytes(checkpoint, predicting, spec) == graph_weights


@pytest.mark.parametrize(
    ("backend", "least"), [("vllm", 70 * MIB), ("trtllm", 70 * MIB), ("sglang", int(90 * MIB * 1.15))]
)
def test_activations_have_a_floor(backend, least):
    result = estimate(LLAMA_8B, request(backend, max_num_tokens=1), backend)
    assert result.memory_breakdown.activations_bytes == least


def test_sglang_reports_activations_without_charging_them():
    few, many = (estimate(LLAMA_8B, request("sglang", max_num_tokens=tokens), "sglang") for tokens in (8192, 16384))
    assert many.memory_breakdown.activations_bytes == 2 * few.memory_breakdown.activations_bytes
    assert many.total_kv_size_bytes == few.total_kv_size_bytes


def test_reservations_come_out_of_the_budget():
    plain = estimate(LLAMA_8B)
    reserved = estimate(LLAMA_8B, request(reserved_bytes=1000, cuda_graph_reserved_bytes=500))
    assert plain.total_kv_size_bytes - reserved.total_kv_size_bytes == 1500
    assert (reserved.memory_breakdown.reserved_bytes, reserved.memory_breakdown.cuda_graph_reserved_bytes) == (
        1000,
        500,
    )


def test_the_fraction_of_trtllm_applies_to_what_is_free():
    free = estimate(LLAMA_8B, request("trtllm", memory_fraction_value=1.0), "trtllm").total_kv_size_bytes
    half = estimate(LLAMA_8B, request("trtllm", memory_fraction_value=0.5), "trtllm").total_kv_size_bytes
    assert half == free // 2


def test_the_capacity_can_be_overridden():
    assert estimate(LLAMA_8B, request(capacity_bytes=80 * 10**9)).total_gpu_capacity_bytes == 80 * 10**9


def test_blocks_come_from_the_adjusted_size_where_there_is_one():
    result = estimate(LLAMA_8B, request(tolerance_fraction=0.5))
    assert result.num_gpu_blocks(16) == result.tolerance_adjusted.total_kv_size_tokens // 16
    assert math.isclose(result.tolerance_adjusted.total_kv_size_bytes, result.total_kv_size_bytes / 2, abs_tol=1)


@pytest.mark.parametrize("size", [0, -16, 16.0, True, None])
def test_the_block_size_is_a_positive_integer(size):
    with pytest.raises(ConfigError, match="block size"):
        estimate(LLAMA_8B).num_gpu_blocks(size)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"memory_fraction_kind": "of_free"}, "memory_fraction_kind"),
        ({"memory_fraction_value": 1.01}, "memory_fraction_value"),
        ({"memory_fraction_value": -0.1}, "memory_fraction_value"),
        ({"memory_fraction_value": math.nan}, "memory_fraction_value"),
        ({"tolerance_fraction": 1.0}, "tolerance_fraction"),
        ({"tolerance_fraction": -0.1}, "tolerance_fraction"),
        ({"tolerance_fraction": math.inf}, "tolerance_fraction"),
        ({"reserved_bytes": -1}, "reserved_bytes"),
        ({"reserved_bytes": True}, "reserved_bytes"),
        ({"cuda_graph_reserved_bytes": 0.5}, "cuda_graph_reserved_bytes"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
    ],
)
def test_unusable_requests_name_their_field(fields, path):
    with pytest.raises(ConfigError) as caught:
        estimate(LLAMA_8B, request(**fields))
    assert caught.value.path == path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_tensor_parallel_size_without_communication_memory_is_unsupported(tp):
    system = SystemMemory(H200.capacity_bytes, {8: 0}, 0)
    with pytest.raises(UnsupportedModelError, match="measured sizes are 8"):
        estimate(LLAMA_8B, tp=tp, system=system)


def test_beyond_eight_ranks_the_figures_of_eight_hold():
    assert estimate(QWEN3_32B, tp=16).memory_breakdown.comm_overhead_bytes == H200.comm_bytes[8]


# Growth of the cache.


def test_latent_caches_are_not_divided_by_tensor_parallelism():
    checkpoint = model(DEEPSEEK_V3)
    assert kv_bytes_per_sequence(checkpoint, BF16, 8, 1) == 61 * (512 + 64) * 2


def test_key_value_heads_are_divided_and_replicated():
    checkpoint = model(LLAMA_8B)
    assert [kv_bytes_per_sequence(checkpoint, BF16, tp, 1) // (2 * 128 * 32 * 2) for tp in (1, 4, 8, 16)] == [
        8,
        2,
        1,
        1,
    ]


def test_windowed_layers_stop_growing():
    checkpoint = model(GPT_OSS_120B)
    one = kv_bytes_per_sequence(checkpoint, BF16, 1, 1)
    assert kv_bytes_per_sequence(checkpoint, BF16, 1, 128) == 128 * one
    assert kv_bytes_per_sequence(checkpoint, BF16, 1, 1128) == 128 * one + 1000 * one / 2


def test_a_cache_that_stops_growing_holds_the_longest_sequence():
    checkpoint = model(LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096})
    full = kv_bytes_per_sequence(checkpoint, BF16, 1, 4096)
    assert kv_tokens(checkpoint, BF16, 1, full) == checkpoint.context_length
    assert kv_tokens(checkpoint, BF16, 1, full - 1) == 4095


@pytest.mark.parametrize("config", [LLAMA_8B, GPT_OSS_120B, DEEPSEEK_V3])
@given(budget=st.floats(0, 1e12))
def test_the_number_of_tokens_is_the_largest_that_fits(config, budget):
    checkpoint = model(config)
    tokens = kv_tokens(checkpoint, BF16, 4, budget)
    assert kv_bytes_per_sequence(checkpoint, BF16, 4, tokens) <= budget
    assert kv_bytes_per_sequence(checkpoint, BF16, 4, tokens + 1) > budget


# Without a graph.

BARE = {
    "architectures": ["UnheardOfForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
CAPACITY = 80 * 10**9
DENSE_PARAMETERS = 2 * 32000 * 1024 + 24 * (4 * 1024**2 + 3 * 1024 * 4096)


@pytest.fixture
def naive(tmp_path):
    def estimate_naively(config, asked=None, reservation=0.8, **fields):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return estimate_kv_cache_naively(
            str(tmp_path),
            deployment("vllm", **fields),
            asked or request(capacity_bytes=CAPACITY),
            reservation=reservation,
        )

    return estimate_naively


def test_a_dense_model_without_a_graph(naive):
    result = naive(BARE)
    assert result.kv_size_per_token_bytes == 2 * 4 * 64 * 24 * 2
    assert result.total_kv_size_bytes == math.floor((CAPACITY - 2 * DENSE_PARAMETERS) * 0.8)
    assert (result.source, result.memory_breakdown) == ("naive_fallback", None)
    assert "kvcache_quant_mode" not in result.to_dict()


def test_weights_without_a_graph_are_divided_by_their_ranks(naive):
    def weights(config, **fields):
        return CAPACITY - naive(config, reservation=1.0, **fields).total_kv_size_bytes

    assert weights(BARE, tp=2, pp=2) == 2 * DENSE_PARAMETERS // 4
    experts = BARE | {"num_experts": 16, "moe_intermediate_size": 512}
    always = 2 * 32000 * 1024 + 24 * 4 * 1024**2
    assert weights(experts, tp=2, moe_tp_size=1, moe_ep_size=2) == always + 24 * 16 * 3 * 1024 * 512


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("float8_e4m3fn", 1), (None, 2)])
def test_element_size_without_a_graph(naive, dtype, size):
    assert naive(BARE | {"torch_dtype": dtype}).kv_size_per_token_bytes == 2 * 4 * 64 * 24 * size


def test_spellings_of_other_families_without_a_graph(naive):
    config = {"architectures": ["X"], "n_embd": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 50257}
    assert naive(config).kv_size_per_token_bytes == 2 * 16 * 64 * 12 * 2


def test_multi_query_models_have_one_key_value_head(naive):
    assert naive(BARE | {"multi_query": True}).kv_size_per_token_bytes == 2 * 1 * 64 * 24 * 2


def test_latent_caches_without_a_graph(naive):
    assert naive(BARE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}).kv_size_per_token_bytes == 24 * 576 * 2


def test_windows_without_a_graph(naive):
    layer = 2 * 4 * 64 * 2
    budget = naive(BARE).total_kv_size_bytes
    growing = naive(BARE | {"sliding_window": 512, "sliding_window_pattern": 6})
    assert growing.total_kv_size_tokens == 512 + (budget - 24 * layer * 512) // (4 * layer)
    listed = naive(BARE | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 12})
    assert listed.total_kv_size_tokens == 512 + (budget - 24 * layer * 512) // (12 * layer)
    capped = naive(BARE | {"sliding_window": 512, "layer_types": ["sliding_attention"] * 24})
    assert capped.total_kv_size_tokens == 512
    unresolved = naive(BARE | {"sliding_window": 512})
    assert unresolved.total_kv_size_tokens == naive(BARE).total_kv_size_tokens


def test_missing_sizes_without_a_graph_are_listed_at_once(naive):
    with pytest.raises(ModelConfigError) as caught:
        naive({"architectures": ["X"], "num_hidden_layers": 24, "intermediate_size": 8})
    assert caught.value.faults == tuple(
        f"no usable value for {name}" for name in ("hidden", "vocab", "kv_heads", "head_size")
    )


@pytest.mark.parametrize(
    ("asked", "reservation", "path"),
    [
        ({}, 0.8, "capacity_bytes"),
        ({"capacity_bytes": CAPACITY}, 1.1, "reservation"),
        ({"capacity_bytes": CAPACITY}, math.nan, "reservation"),
        ({"capacity_bytes": 10**6}, 0.8, "tp"),
        ({"capacity_bytes": CAPACITY, "memory_fraction_kind": "of_free"}, 0.8, "memory_fraction_kind"),
    ],
)
def test_unusable_requests_without_a_graph(naive, asked, reservation, path):
    with pytest.raises(ConfigError) as caught:
        naive(BARE, request(**asked), reservation=reservation)
    assert caught.value.path == path


def test_experts_need_no_dense_intermediate_size_without_a_graph(naive):
    config = QWEN3_30B | {"architectures": ["X"], "intermediate_size": None}
    assert naive(config).total_kv_size_tokens > 0


# --- what does not fit ---


def refused(config, asked=None, **fields):
    with pytest.raises(InfeasibleMemoryError) as caught:
        estimate(config, asked, **fields)
    return caught.value


def test_a_deployment_that_does_not_fit_tells_bytes_and_the_smallest_tp_that_does():
    # 65.5 GB of weights, 1.3 GB of activations and 3.8 GB of runtime on half an H200 at 0.9.
    small = SystemMemory(68_000_000_000, H200.comm_bytes, H200.runtime_bytes)
    error = refused(QWEN3_32B, system=small)
    assert (error.available_bytes, error.smallest_tp) == (61_200_000_000, 2)
    parts = estimate(QWEN3_32B).memory_breakdown
    everything = sum(getattr(parts, field) for field in parts.__struct_fields__)
    assert error.needed_bytes == pytest.approx(everything, abs=4)
    assert f"needs {error.needed_bytes} bytes, 61200000000 are available" in str(error)
    assert "the smallest tensor-parallel size that fits is 2" in str(error)


@pytest.mark.parametrize("backend", sorted(KINDS))
@pytest.mark.parametrize("config", [QWEN3_32B, QWEN3_30B, LLAMA_8B], ids=lambda config: config["architectures"][0])
def test_the_smallest_tp_fits_and_half_of_it_does_not(backend, config):
    experts = {"moe_tp_size": 1, "moe_ep_size": 1} if "num_experts" in config else {}
    small = SystemMemory(13_000_000_000, H200.comm_bytes, H200.runtime_bytes)
    smallest = refused(config, backend=backend, system=small, **experts).smallest_tp
    grown = {name: smallest if name == "moe_tp_size" else 1 for name in experts}
    assert estimate(config, backend=backend, system=small, tp=smallest, **grown).total_kv_size_bytes > 0
    half = {name: smallest // 2 if name == "moe_tp_size" else 1 for name in experts}
    assert refused(config, backend=backend, system=small, tp=smallest // 2, **half).smallest_tp == smallest


def test_a_model_that_no_tp_makes_fit_says_so():
    error = refused(LLAMA_8B, system=SystemMemory(4_000_000_000, H200.comm_bytes, H200.runtime_bytes))
    assert error.smallest_tp is None
    assert "no tensor-parallel size" in str(error)


def test_weights_that_do_not_fit_without_a_graph(naive):
    with pytest.raises(InfeasibleMemoryError) as caught:
        naive(LLAMA_8B | {"architectures": ["X"]}, request(capacity_bytes=9_000_000_000))
    # 2 * 128256 * 4096 + 32 * (4 * 4096^2 + 3 * 4096 * 14336) parameters of two bytes
    assert (caught.value.needed_bytes, caught.value.smallest_tp) == (17670602752 + 1, 2)


@pytest.mark.parametrize(
    ("config", "tp", "parts"),
    [
        (LLAMA_8B, 1, [("attention", 32, 2 * 8 * 128 * 2, 0)]),
        (LLAMA_8B, 16, [("attention", 32, 2 * 1 * 128 * 2, 0)]),  # heads are replicated beyond one a rank
        (DEEPSEEK_V3, 1, [("latent", 61, (512 + 64) * 2, 0)]),
        (DEEPSEEK_V3, 8, [("latent", 61, (512 + 64) * 2, 0)]),  # the latent cache is not divided
        (GPT_OSS_120B, 1, [("attention", 18, 2 * 8 * 64 * 2, 128), ("attention", 18, 2 * 8 * 64 * 2, 0)]),
    ],
)
def test_the_cache_of_a_rank_is_told_by_kinds_of_layers(config, tp, parts):
    assert [tuple(part) for part in kv_breakdown(model(config), BF16, tp)] == parts


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
@pytest.mark.parametrize("tokens", [1, 4096])
def test_the_parts_of_the_cache_add_up(name, tokens):
    checkpoint = model(CHECKPOINTS[name])
    parts = kv_breakdown(checkpoint, BF16, 2)
    assert sum(part.bytes_of(tokens) for part in parts) == kv_bytes_per_sequence(checkpoint, BF16, 2, tokens)
    assert sum(part.num_layers for part in parts) <= checkpoint.num_layers
