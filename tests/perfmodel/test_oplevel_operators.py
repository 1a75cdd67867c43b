"""From graph records and tables to compiled operators: which slice serves an operator, and at which rates.

What the operators make of a slice is in tests/ext. Source: op-level.md sections 1.5 and 3.
"""

import pytest

from fpmsdk.opgraph import ops
from fpmsdk.perfdb import open_database, open_root
from fpmsdk.perfmodel.oplevel_operators import OperatorCompiler
from fpmsdk.perfmodel.oplevel_tables import tables_of
from tests.perfdb.fixtures import own_cache  # noqa: F401
from tests.perfdb.synthetic import ATTENTION, GEMM, MLA, MOE, Systems, rows

MISS, NO_FLOPS = 1, 2
# M(500 bytes) = 0.002 ms; 1e6 FLOP take 1 ms.
GPU = {
    "mem_bw": 1e9,
    "mem_bw_empirical_scaling_factor": 0.5,
    "mem_empirical_constant_latency": 1e-6,
    "bfloat16_tc_flops": 1e9,
    "fp8_tc_flops": 2e9,
}
FAMILIES = {
    "gemm": "gemm",
    "attention": "attention",
    "mla": "mla",
    "moe": "moe",
    "scale": "quantize",
    "allreduce": "comm",
}


@pytest.fixture
def systems(tmp_path):
    built = Systems(tmp_path / "systems")
    built.hardware(gpu=GPU)
    built.table("gemm/vllm/0.24.0", "gemm_perf", [GEMM])
    return built


def put(systems, name, content):
    family = next((folder for part, folder in FAMILIES.items() if part in name), None)
    place = f"{family}/vllm/0.24.0" if family else f"comm/{name.removesuffix('_perf')}/2.26.2"
    systems.table(place, name, content)


def compiler(systems):
    root = open_root(systems.path)
    return OperatorCompiler(root.spec("x100"), tables_of(open_database(root, "x100", "vllm", "0.24.0")))


def ask(systems, op, batch=1, seq_len=1, prefix=0, tokens=None, *, at_sol=False):
    tokens = batch * seq_len if tokens is None else tokens
    return compiler(systems).compile(op).ask(batch, seq_len, prefix, tokens, at_sol)


def latency(systems, op, *query, **options):
    return ask(systems, op, *query, **options)[1]


# --- GEMM ---


def gemm(n=64, k=32, quant_mode="bfloat16", **fields):
    return ops.Gemm(name="gemm", scale_factor=1.0, n=n, k=k, quant_mode=quant_mode, **fields)


def test_a_measurement_faster_than_light_is_taken_as_the_speed_of_light(systems):
    # 2 x 100 x 64 x 32 FLOP: 0.4096 ms.
    put(systems, "gemm_perf", rows(GEMM, {"m": 100, "latency": 0.001}, {"m": 1, "latency": 7.0}))
    assert latency(systems, gemm(), tokens=100) == pytest.approx(0.4096)
    assert latency(systems, gemm(), tokens=1) == 7.0


@pytest.mark.parametrize(
    ("mode", "math_ms", "memory_ms"),
    # 2 x 100 x 64 x 32 FLOP; 100 x 64 + 100 x 32 + 64 x 32 = 11648 elements.
    [("bfloat16", 0.4096, 0.023296), ("int8_wo", 0.4096, 0.011648), ("fp8_block", 0.2048, 0.011648)],
)
def test_a_mode_multiplies_at_its_rate_and_moves_its_bytes(systems, mode, math_ms, memory_ms):
    put(systems, "gemm_perf", rows(GEMM, {"gemm_dtype": mode, "m": 100}))
    assert ask(systems, gemm(quant_mode=mode), tokens=100)[4] == pytest.approx((math_ms, math_ms, memory_ms))


def test_a_mode_that_the_system_cannot_compute_is_without_flops(systems):
    assert ask(systems, gemm(quant_mode="nvfp4"), tokens=1)[0] == NO_FLOPS
    assert ask(systems, gemm(quant_mode="sq"), tokens=1)[0] == NO_FLOPS


def test_a_mode_without_rows_is_a_miss(systems):
    assert ask(systems, gemm(quant_mode="fp8_block"), tokens=1)[0] == MISS


def test_ties_between_sites_go_by_a_nested_walk_over_the_rows(systems):
    # Around (64, 64): one near site and four at one distance, of which three answer. The file begins with (32, 96) and
    # (128, 96), but a walk over m, then n, then k meets (128, 96) last: it is left out.
    order = [(1, 32, 96), (2, 128, 96), (1, 96, 128), (1, 96, 32), (1, 128, 96), (1, 64, 65)]
    order += [(2, 32, 96), (2, 96, 128), (2, 96, 32), (2, 64, 65)]
    slow = [GEMM | {"m": m, "n": n, "k": k, "latency": 1000.0 if n == 128 else 1.0} for m, n, k in order]
    put(systems, "gemm_perf", slow)
    without = [row for row in slow if row["n"] != 128]
    found = latency(systems, gemm(64, 64), tokens=1)
    other = Systems(systems.path.parent / "other")
    other.hardware(gpu=GPU)
    put(other, "gemm_perf", without)
    assert found == latency(other, gemm(64, 64), tokens=1)


def scale_rows(dtype, latency_ms):
    return [{"quant_dtype": dtype, "m": m, "k": k, "latency": latency_ms} for m in (1, 100) for k in (32, 64)]


def test_static_scales_price_fp8_rows_without_their_kernels(systems):
    put(systems, "gemm_perf", rows(GEMM, {"gemm_dtype": "fp8", "m": 1, "latency": 5.0}))
    # Rows of another dtype do not widen the rectangle.
    put(systems, "computescale_perf", scale_rows("fp8", 0.25) + scale_rows("bfloat16", 9.0))
    put(systems, "scale_matrix_perf", scale_rows("fp8", 0.5))
    assert ask(systems, gemm(quant_mode="fp8_static"), tokens=1)[1::2][:2] == (4.75, "estimated")
    assert latency(systems, gemm(quant_mode="fp8_static", low_precision_input=True), tokens=1) == 4.25


# --- attention ---


def prefill_op(**fields):
    defaults = {"n": 4, "n_kv": 2, "head_size": 8, "kv_cache_dtype": "bfloat16", "fmha_quant_mode": "bfloat16"}
    plain = {"lane_order": ("fa3",), "apply_rope": False}
    return ops.ContextAttention(name="context_attention", scale_factor=1.0, **(defaults | plain | fields))


def decode_op(**fields):
    defaults = {"n": 4, "n_kv": 2, "head_size": 8, "kv_cache_dtype": "bfloat16", "lane_order": ("fa3",)}
    return ops.GenerationAttention(name="generation_attention", scale_factor=1.0, **(defaults | fields))


PREFILL = ATTENTION | {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "latency": 3.0}
# 5 positions around 16, all alike, far above the speed of light.
DECODE = [PREFILL | {"step": step, "isl": 0, "latency": 3.0} for step in (1, 100)]


@pytest.mark.parametrize(
    ("fields", "extra_ms"),
    [
        # Queries of 32, keys of 16 elements: 1.1 x 2 M(16 x 2), plus with rope 1.1 x 2 M(64 + 32), plus with norm
        # 1.1 x 2 x 2 (M(64) + M(32)).
        ({}, 2.2 * 0.001064),
        ({"apply_rope": True}, 2.2 * (0.001064 + 0.001192)),
        ({"use_qk_norm": True}, 2.2 * 0.001064 + 4.4 * (0.001128 + 0.001064)),
    ],
)
def test_prefill_attention_adds_the_kernels_around_it(systems, fields, extra_ms):
    put(systems, "context_attention_perf", [PREFILL])
    assert latency(systems, prefill_op(**fields), 1, 16) == pytest.approx(3.0 + extra_ms)


def test_what_fp8_attention_writes_is_half_as_large(systems):
    put(systems, "context_attention_perf", rows(PREFILL, {"attn_dtype": "fp8", "kv_cache_dtype": "fp8"}))
    found = latency(systems, prefill_op(fmha_quant_mode="fp8", kv_cache_dtype="fp8"), 1, 16)
    assert found == pytest.approx(3.0 + 2.2 * 0.001032)


def test_decode_attention_adds_its_norm_once(systems):
    put(systems, "generation_attention_perf", DECODE)
    assert latency(systems, decode_op(), 1, 16) == pytest.approx(3.0)
    assert latency(systems, decode_op(use_qk_norm=True), 1, 16) == pytest.approx(3.0 + 4.4 * (0.001128 + 0.001064))


def test_equal_numbers_of_heads_are_one_key_whatever_the_number(systems):
    put(systems, "context_attention_perf", rows(PREFILL, *({"num_heads": n, "num_key_value_heads": n} for n in (4, 8))))
    assert latency(systems, prefill_op(n_kv=4), 1, 16) == pytest.approx(3.0, rel=0.01)
    assert latency(systems, prefill_op(n=6, n_kv=6), 1, 16) == pytest.approx(3.0, rel=0.01)
    assert ask(systems, prefill_op(n_kv=2), 1, 16)[0] == MISS


@pytest.mark.parametrize("fields", [{"window_size": 128}, {"head_size": 16}, {"kv_cache_dtype": "fp8"}])
def test_every_part_of_the_key_must_have_been_measured(systems, fields):
    put(systems, "context_attention_perf", [PREFILL])
    assert ask(systems, prefill_op(**fields), 1, 16)[0] == MISS


LANES = {"zeta": 10.0, "alpha": 20.0, "mid": 30.0}


def lanes(*names, **changes):
    return [PREFILL | {"kernel_source": name, "latency": LANES[name]} | changes for name in names]


@pytest.mark.parametrize(
    ("order", "content", "expected"),
    [
        pytest.param(("mid", "alpha"), lanes("zeta", "alpha", "mid"), 30.0, id="the first of the order"),
        pytest.param(("none", "alpha"), lanes("zeta", "alpha", "mid"), 20.0, id="the first that was measured"),
        pytest.param(
            ("mid", "alpha"), lanes("mid", head_dim=16) + lanes("alpha"), 20.0, id="the first with the whole key"
        ),
        pytest.param(("none",), lanes("zeta", "alpha", "mid"), 10.0, id="any other as first seen, not by name"),
        pytest.param(
            ("none",), lanes("mid", head_dim=16) + lanes("alpha", "mid"), 30.0, id="first seen whatever the key"
        ),
    ],
)
def test_lanes(systems, order, content, expected):
    put(systems, "context_attention_perf", content)
    assert latency(systems, prefill_op(lane_order=order), 1, 16) == pytest.approx(expected, rel=0.01)


def test_lanes_of_older_versions_come_after_those_of_newer_ones(systems):
    put(systems, "context_attention_perf", lanes("zeta", head_dim=16))
    systems.table("attention/vllm/0.23.0", "context_attention_perf", lanes("alpha", "zeta"))
    assert latency(systems, prefill_op(lane_order=("none",)), 1, 16) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(("sm_version", "math_ms"), [(90, 1.92e-3), (80, 3.84e-3)])
def test_a_cache_of_fp8_is_multiplied_at_its_own_rate_from_sm_89_on(systems, sm_version, math_ms):
    # 4 x 4 x 8 x 30 FLOP at 2e9 or 1e9 a second.
    systems.hardware(gpu=GPU | {"sm_version": sm_version})
    put(systems, "generation_attention_perf", [row | {"kv_cache_dtype": "fp8"} for row in DECODE])
    assert ask(systems, decode_op(kv_cache_dtype="fp8"), 1, 31)[4][1] == pytest.approx(math_ms)


def test_decode_rows_faster_than_light_are_taken_as_the_speed_of_light(systems):
    put(systems, "generation_attention_perf", [row | {"latency": 1e-9} for row in DECODE])
    *_, limits = ask(systems, decode_op(), 1, 100)
    assert latency(systems, decode_op(), 1, 100) == pytest.approx(limits[0], rel=0.05)


# --- collectives ---


def all_reduces(*gpus, **changes):
    # Twice the size costs twice as much; every group has its own rate.
    return [
        {"num_gpus": g, "message_size": size, "latency": 1e-3 * g * size, "kernel_source": "x", "backend": "x"}
        | changes
        for g in gpus
        for size in (1, 1000)
    ]


def libraries(*gpus, **changes):
    return [
        {"nccl_dtype": "half", "op_name": name, "num_gpus": g, "message_size": size, "latency": rate * g * size}
        | changes
        for name, rate in (("all_gather", 1e-5), ("reduce_scatter", 1e-7), ("all_reduce", 1e-9))
        for g in gpus
        for size in (1, 1000)
    ]


def all_reduce(tp, **fields):
    return ops.CustomAllReduce(name="ar", scale_factor=1.0, hidden_size=10, tp_size=tp, **fields)


def nccl(gpus, operation="all_gather", dtype="half"):
    return ops.Nccl(name="nccl", scale_factor=1.0, hidden_size=10.0, num_gpus=gpus, dtype=dtype, operation=operation)


def test_an_all_reduce_inside_a_node_is_its_own_measurement(systems):
    put(systems, "custom_allreduce_perf", all_reduces(2, 4, 8))
    assert [latency(systems, all_reduce(tp), tokens=1) for tp in (1, 2, 8)] == pytest.approx([0.0, 0.02, 0.08])
    assert latency(systems, all_reduce(2, seq_split=2), tokens=5) == pytest.approx(0.06)
    assert ask(systems, all_reduce(3), tokens=1)[0] == MISS


def test_an_all_reduce_beyond_the_node_is_scaled_by_ring_steps_and_bandwidth(systems):
    # From 8: (15 / 16) x (8 / 7) x (4.5e11 / 5e10).
    put(systems, "custom_allreduce_perf", all_reduces(2, 4, 8))
    assert latency(systems, all_reduce(16), tokens=1) == pytest.approx(0.08 * 15 / 16 * 8 / 7 * 9)


@pytest.mark.parametrize(
    ("per_node", "groups", "tp", "base"),
    [
        # Inside a node: the group itself, a larger one than all from the largest, and a gap is a miss.
        (8, (2, 4, 16), 8, None),
        (8, (4, 8), 2, None),
        (8, (2, 4), 8, 4),
        (8, (2,), 4, 2),
        # Beyond it: the group itself where it was measured, else the largest smaller one.
        (8, (2, 4, 16), 16, 16),
        (8, (2, 4), 16, 4),
        (4, (2, 4, 16), 8, 4),
        (4, (2, 4, 8, 32), 16, 8),
        (4, (2, 8), 8, 8),
        (4, (2, 8), 16, 8),
        (4, (32,), 16, None),
    ],
)
def test_the_measured_group_that_stands_for_an_all_reduce(systems, per_node, groups, tp, base):
    systems.hardware(gpu=GPU, node={"num_gpus_per_node": per_node})
    put(systems, "custom_allreduce_perf", all_reduces(*groups))
    if base is None:
        assert ask(systems, all_reduce(tp), tokens=1)[0] == MISS
        return
    slower = 9 if base <= per_node < tp else 1
    expected = 0.01 * base * (tp - 1) / tp * base / (base - 1) * slower
    assert latency(systems, all_reduce(tp), tokens=1) == pytest.approx(expected)


def test_the_speed_of_light_of_an_all_reduce(systems):
    # 2 x 10 elements x 2 bytes / 4 x 3 at 4.5e11/s.
    put(systems, "custom_allreduce_perf", all_reduces(4))
    assert ask(systems, all_reduce(4), tokens=1)[4] == pytest.approx((30 / 4.5e11 * 1000, 0.0, 0.0))


def test_nodes_of_72_leave_large_groups_to_the_library(systems):
    systems.hardware(gpu=GPU, node={"num_gpus_per_node": 72})
    put(systems, "custom_allreduce_perf", all_reduces(4, 8))
    put(systems, "nccl_perf", libraries(8))
    assert latency(systems, all_reduce(4), tokens=1) == pytest.approx(0.04)
    assert latency(systems, all_reduce(8), tokens=1) == pytest.approx(8e-8)


def test_a_library_collective_beyond_its_largest_group_is_scaled_from_that(systems):
    # From 4: (7 / 8) x (4 / 3), at one bandwidth inside the node; for 16 also x 9.
    put(systems, "nccl_perf", libraries(2, 4))
    assert latency(systems, nccl(1), tokens=1) == 0.0
    assert latency(systems, nccl(4), tokens=1) == pytest.approx(4e-4)
    assert latency(systems, nccl(8), tokens=1) == pytest.approx(4e-4 * 7 / 8 * 4 / 3)
    assert latency(systems, nccl(16), tokens=1) == pytest.approx(4e-4 * 15 / 16 * 4 / 3 * 9)
    assert ask(systems, nccl(3), tokens=1)[0] == MISS
    assert ask(systems, nccl(4, dtype="int8"), tokens=1)[0] == MISS
    assert ask(systems, nccl(4, operation="alltoall"), tokens=1)[0] == MISS


def test_the_other_library_serves_the_groups_that_the_first_lacks(systems):
    systems.hardware(gpu=GPU, misc={"oneccl_version": "2.26.2"})
    put(systems, "nccl_perf", libraries(2))
    put(systems, "oneccl_perf", libraries(2, 4, latency=0.5))
    assert latency(systems, nccl(2), tokens=1) == pytest.approx(2e-4)
    assert latency(systems, nccl(4), tokens=1) == 0.5


@pytest.mark.parametrize(
    ("operation", "passes", "dtype", "num_bytes"),
    [
        ("all_gather", 1, "half", 2),
        ("reduce_scatter", 1, "half", 2),
        ("all_reduce", 2, "half", 2),
        ("all_gather", 1, "int8", 1),
    ],
)
def test_the_speed_of_light_of_a_library_collective(systems, operation, passes, dtype, num_bytes):
    put(systems, "nccl_perf", [row | {"nccl_dtype": dtype} for row in libraries(4)])
    *_, limits = ask(systems, nccl(4, operation, dtype), tokens=1)
    least_ms = passes * num_bytes * 10 * 3 / 4 / 4.5e11 * 1000
    assert limits == pytest.approx((least_ms, 0.0, least_ms))


# --- expert dispatch (section 3.6) ---


def dispatch(backend, dp, group, *, pre, **fields):
    return ops.MoeDispatch(
        **{"name": "dispatch", "scale_factor": 1.0, "hidden_size": 10, "topk": 2, "num_experts": 8}
        | {"moe_tp_size": 1, "moe_ep_size": group, "attention_dp_size": dp, "pre_dispatch": pre}
        | {"backend": backend, "flavor": "", "moe_quant": "bfloat16"}
        | fields
    )


def reduce(gpus, elements):
    return 1e-3 * gpus * elements


def gather(gpus, elements):
    return 1e-5 * gpus * elements


def scatter(gpus, elements):
    return 1e-7 * gpus * elements


@pytest.mark.parametrize(
    ("backend", "dp", "group", "fields", "before", "after"),
    [
        ("vllm", 1, 1, {}, 0.0, 0.0),
        ("vllm", 1, 4, {}, reduce(4, 10), reduce(4, 10)),
        ("vllm", 1, 4, {"attn_ar_modeled": True}, 0.0, reduce(4, 10)),
        ("vllm", 4, 4, {}, gather(4, 40), scatter(4, 40)),
        ("vllm", 2, 4, {}, reduce(4, 10) + gather(4, 20), reduce(4, 10) + scatter(4, 20)),
        ("vllm", 2, 4, {"attn_ar_modeled": True}, gather(4, 20), reduce(4, 10) + scatter(4, 20)),
        ("vllm", 1, 4, {"moe_tp_size": 2, "moe_ep_size": 2}, reduce(4, 10), reduce(4, 10)),
        ("sglang", 1, 1, {}, 0.0, 0.0),
        ("sglang", 2, 4, {}, scatter(2, 10) + gather(4, 20), scatter(4, 20) + gather(2, 10)),
        ("sglang", 1, 4, {"attn_cp_size": 4}, gather(4, 10), scatter(4, 10)),
        ("sglang", 1, 4, {"attn_cp_size": 4, "is_context": False}, 0.0, reduce(4, 10)),
        ("sglang", 1, 4, {}, reduce(4, 10), reduce(4, 10)),
        ("sglang", 4, 4, {}, gather(4, 40), scatter(4, 40)),
        ("trtllm", 1, 1, {}, 0.0, 0.0),
        ("trtllm", 1, 4, {}, reduce(4, 10), reduce(4, 10)),
        ("trtllm", 2, 4, {}, reduce(4, 10), reduce(4, 10)),
        ("trtllm", 4, 4, {}, gather(4, 40), scatter(4, 40)),
    ],
)
def test_expert_dispatch(systems, backend, dp, group, fields, before, after):
    put(systems, "custom_allreduce_perf", all_reduces(2, 4, 8))
    put(systems, "nccl_perf", libraries(2, 4, 8))
    found = [latency(systems, dispatch(backend, dp, group, pre=pre, **fields), tokens=3) for pre in (True, False)]
    assert found == pytest.approx([3 * before, 3 * after])


@pytest.mark.parametrize(
    ("dp", "quant", "before", "after"),
    [
        (2, "bfloat16", gather(4, 20), scatter(4, 20)),
        (2, "fp8", gather(4, 10), scatter(4, 20)),
        (2, "fp8_block", gather(4, 10), scatter(4, 20)),
        (2, "nvfp4", gather(4, 20 * (1 / 4 + 1 / 32)), scatter(4, 20)),
        (1, "nvfp4", reduce(4, 10), reduce(4, 10)),
    ],
)
def test_expert_dispatch_on_blackwell_gathers_quantised_activations(systems, dp, quant, before, after):
    systems.hardware(gpu=GPU | {"sm_version": 100})
    put(systems, "custom_allreduce_perf", all_reduces(2, 4, 8))
    put(systems, "nccl_perf", libraries(2, 4, 8))
    found = [latency(systems, dispatch("trtllm", dp, 4, pre=pre, moe_quant=quant), tokens=1) for pre in (True, False)]
    assert found == pytest.approx([before, after])


def test_the_all_to_all_of_racks_has_no_table_and_no_stand_in(systems):
    systems.hardware(gpu=GPU | {"sm_version": 100}, node={"num_gpus_per_node": 72})
    put(systems, "nccl_perf", libraries(2, 4, 8))
    found = compiler(systems).compile(dispatch("trtllm", 4, 4, pre=True)).missing(1, 1, 0, 1)
    assert (found[0].name, found[1]) == ("dispatch alltoall", MISS)
    assert ask(systems, dispatch("trtllm", 4, 4, pre=True, moe_tp_size=4, moe_ep_size=1))[0] == 0


# --- experts ---


def moe(**fields):
    defaults = {"hidden_size": 2048, "inter_size": 768, "topk": 8, "num_experts": 128, "moe_tp_size": 1}
    defaults |= {
        "moe_ep_size": 4,
        "attention_dp_size": 1,
        "quant_mode": "bfloat16",
        "workload_distribution": "balanced",
    }
    return ops.Moe(name="moe", scale_factor=1.0, **(defaults | fields))


def test_experts_without_their_distribution_take_the_uniform_one(systems):
    put(systems, "moe_perf", rows(MOE, {"latency": 5.0}, {"distribution": "uniform", "latency": 7.0}))
    assert latency(systems, moe(), tokens=16) == 5.0
    assert latency(systems, moe(workload_distribution="power_law_1.2"), tokens=16) == 7.0


@pytest.mark.parametrize(
    "fields",
    [
        {"workload_distribution": "power_law_1.2"},
        {"topk": 4},
        {"num_experts": 64},
        {"hidden_size": 1024},
        {"inter_size": 1024},
        {"moe_tp_size": 2},
        {"moe_ep_size": 2},
        {"quant_mode": "fp8"},
    ],
)
def test_experts_of_another_shape_are_a_miss(systems, fields):
    put(systems, "moe_perf", [MOE])
    assert ask(systems, moe(**fields), tokens=16)[0] == MISS


KERNELS = rows(
    MOE,
    {"kernel_source": "chosen", "latency": 5.0, "default_eligible": True},
    {"kernel_source": "other", "latency": 7.0, "default_eligible": False},
)


@pytest.mark.parametrize(("kernel", "expected"), [(None, 5.0), ("chosen", 5.0), ("other", 7.0), ("none", None)])
def test_a_kernel_asked_for_by_name_is_the_only_one_that_serves(systems, kernel, expected):
    put(systems, "moe_perf", KERNELS)
    assert latency(systems, moe(moe_kernel_source=kernel), tokens=16) == expected


LOW = "moe_torch_flow_min_latency"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 7.0),
        ({"is_gated": False}, 5.0),
        ({"attention_dp_size": 9}, 5.0),
        ({"moe_kernel_source": "usual"}, 5.0),
        ({"moe_kernel_source": LOW}, 7.0),
        ({"moe_kernel_source": LOW, "attention_dp_size": 9}, None),
        ({"workload_distribution": "uniform"}, 5.0),
    ],
)
def test_the_low_latency_kernel_is_for_few_tokens_of_gated_nvfp4(systems, fields, expected):
    systems.hardware(gpu=GPU | {"fp4_tc_flops": 4e9})
    usual = rows(MOE | {"moe_dtype": "nvfp4", "kernel_source": "usual", "latency": 5.0}, {}, {"num_tokens": 144})
    usual += [row | {"distribution": "uniform"} for row in usual]
    put(systems, "moe_perf", [*usual, MOE | {"moe_dtype": "nvfp4", "kernel_source": LOW, "latency": 7.0}])
    found = latency(systems, moe(quant_mode="nvfp4", **fields), tokens=16)
    assert found == expected


# --- latent attention ---


def mla_block(module, **fields):
    defaults = {"name": "block", "scale_factor": 1.0, "num_heads": 16, "kv_cache_dtype": "fp8"}
    defaults |= {"fmha_quant_mode": "bfloat16", "gemm_quant_mode": "fp8_block", "native_num_heads": 128}
    return module(**(defaults | fields))


def test_modules_are_looked_up_by_precision(systems):
    put(systems, "mla_context_module_perf", [MLA | {"latency": 5.0}])
    put(systems, "mla_generation_module_perf", [MLA | {"latency": 7.0}])
    assert latency(systems, mla_block(ops.MlaModuleContext), 1, 16) == 5.0
    assert latency(systems, mla_block(ops.MlaModuleGeneration), 1, 17) == 7.0
    for module in (ops.MlaModuleContext, ops.MlaModuleGeneration):
        assert ask(systems, mla_block(module, gemm_quant_mode="bfloat16"), 1, 16)[0] == MISS


@pytest.mark.parametrize(
    ("models", "native", "expected"),
    [
        pytest.param(("deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K3"), 128, 1.0, id="its own heads"),
        pytest.param(("deepseek-ai/DeepSeek-V3",), 64, 1.0, id="the only ones"),
        pytest.param(("deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K3"), 100, 2.0, id="the nearest below"),
        pytest.param(("deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K3"), 64, 2.0, id="the fewest when none is below"),
    ],
)
def test_modules_of_models_with_other_heads(systems, models, native, expected):
    content = [MLA | {"model": model, "latency": float(i + 1)} for i, model in enumerate(models)]
    put(systems, "mla_context_module_perf", content)
    assert latency(systems, mla_block(ops.MlaModuleContext, native_num_heads=native), 1, 16) == expected


def bmm_rows(*heads, dtype="bfloat16"):
    return [
        {"bmm_dtype": dtype, "op_name": name, "num_heads": n, "num_tokens": tokens, "latency": rate * n}
        for n in heads
        for name, rate in (("mla_gen_pre", 1.0), ("mla_gen_post", 2.0))
        for tokens in (1, 64)
    ]


def bmm(heads, quant_mode="bfloat16", *, is_pre=True):
    return ops.MlaBmm(name="bmm", scale_factor=1.0, num_heads=heads, quant_mode=quant_mode, is_pre=is_pre)


def test_batched_products_of_heads_that_were_not_measured_come_from_the_next_power_of_two(systems):
    put(systems, "mla_bmm_perf", bmm_rows(16, 32, 48))
    assert latency(systems, bmm(16), 4) == 16.0
    assert latency(systems, bmm(16, is_pre=False), 4) == 32.0
    assert latency(systems, bmm(48), 4) == 48.0
    assert latency(systems, bmm(24), 4) == 24.0
    assert ask(systems, bmm(64), 4)[0] == MISS


def test_batched_products_of_a_dtype_without_rows_take_those_of_bfloat16(systems):
    put(systems, "mla_bmm_perf", bmm_rows(16))
    status, latency_ms, _, _, limits = ask(systems, bmm(16, "fp8"), 4)
    assert (status, latency_ms) == (0, 16.0)
    # Its speed of light stays its own: 2 x 4 x 16 x 65536 FLOP at 2e9/s.
    assert limits[1] == pytest.approx(4.194304)


# --- composites ---


def test_composites_compile_what_they_hold(systems):
    put(systems, "mla_context_module_perf", [MLA | {"latency": 5.0}])
    norm = ops.Elementwise(name="norm", scale_factor=2.0, bytes_per_token=500.0)
    block = ops.Fallback(name="block", primary=mla_block(ops.MlaModuleContext), fallback=(norm, norm))
    assert latency(systems, block, 1, 16) == 5.0
    missing = ops.Fallback(
        name="block", primary=mla_block(ops.MlaModuleContext, gemm_quant_mode="fp8"), fallback=(norm,)
    )
    assert latency(systems, missing, tokens=1) == pytest.approx(0.004)
    overlap = ops.Overlap(name="overlap", group_a=(norm,), group_b=(norm, norm))
    assert latency(systems, overlap, tokens=1) == pytest.approx(0.008)
    transfer = ops.P2P(name="p2p", scale_factor=1.0, pp_size=2, hidden_size=50)
    assert latency(systems, transfer, tokens=1) == pytest.approx(100 / 5e10 * 1000)
    lookup = ops.Embedding(name="embedding", scale_factor=1.0, vocab_size=1000, hidden_size=250)
    assert latency(systems, lookup, tokens=1) == pytest.approx(0.002)
