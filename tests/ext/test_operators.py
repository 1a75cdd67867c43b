"""Every operator of op-level.md section 3, worked by hand on round hardware and small tables.

Hardware: 1e9 bytes/s of memory at half efficiency and 1 us a kernel, so that M(500 bytes) = 1 us + 1 us = 0.002 ms,
and 1e9 FLOP/s, so that 1e6 FLOP take 1 ms.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk._ext.grid import GridTable
from fpmsdk._ext.operators import (
    MISSING_FLOPS,
    NOT_FINITE,
    UNEVEN_BATCH,
    Collective,
    ContextAttention,
    ContextMla,
    Fallback,
    Gemm,
    GenerationAttention,
    GenerationMla,
    MemoryOp,
    MlaBmm,
    Moe,
    Overlap,
    PipelineTransfer,
    ScaleTable,
    Sum,
    generation_attention_floor,
)
from fpmsdk._ext.sites import GemmSite, GemmTable

OK, MISS = 0, 1
FLOPS = BANDWIDTH = 1e9
HARDWARE = {
    "mem_bw_bytes_per_s": BANDWIDTH,
    "mem_bw_scaling_factor": 0.5,
    "mem_latency_s": 1e-6,
    "inter_node_bw_bytes_per_s": 1e8,
    "p2p_latency_s": 2e-6,
}


def table(measured, sqrt_axis=-1, power_w=None):
    """Table of {coordinates: latency in ms}; one coordinate may stand without its tuple."""
    rows = {key if isinstance(key, tuple) else (key,): ms for key, ms in sorted(measured.items())}
    axes = tuple(np.array(column, np.int64) for column in zip(*rows, strict=True))
    power = None if power_w is None else np.full(len(rows), float(power_w))
    return GridTable(axes, np.array(list(rows.values()), float), power, sqrt_axis)


def ask(operator, batch=1, seq_len=1, prefix=0, tokens=None, *, at_sol=False):
    return operator.ask(batch, seq_len, prefix, batch * seq_len if tokens is None else tokens, at_sol)


def latency(operator, *query, **options):
    status, latency_ms, *_ = ask(operator, *query, **options)
    assert status == OK
    return latency_ms


def sol(operator, *query, **options):
    """(latency, math, memory) of the speed of light; the mode that prices by it agrees."""
    status, _, _, _, limits = ask(operator, *query, **options)
    assert status == OK
    assert ask(operator, *query, **options, at_sol=True)[:4] == (OK, limits[0], 0.0, "sol")
    return limits


# --- memory operators: Embedding, Elementwise ---


def memory(bytes_per_token=500, scale=1.0, scale_num_tokens=1, seq_split=1):
    return MemoryOp("norm", scale, HARDWARE, bytes_per_token, scale_num_tokens, seq_split)


def test_a_memory_operator_moves_bytes_at_the_efficiency_of_its_memory():
    # 2000 bytes at 5e8/s plus 1 us; at the speed of light 2000 bytes at 1e9/s.
    assert ask(memory(), tokens=4)[:4] == (OK, pytest.approx(0.005), 0.0, "empirical")
    assert sol(memory(), tokens=4) == pytest.approx((0.002, 0.0, 0.002))


def test_repetitions_multiply_the_result():
    assert latency(memory(scale=3.0), tokens=4) == pytest.approx(0.015)
    assert sol(memory(scale=3.0), tokens=4)[0] == pytest.approx(0.006)


def test_tokens_are_divided_down_by_their_scale_and_up_by_the_split():
    # 7 // 2 = 3 tokens, a third of them on this rank.
    assert latency(memory(scale_num_tokens=2, seq_split=3), tokens=7) == pytest.approx(0.002)
    assert latency(memory(scale_num_tokens=2, seq_split=2), tokens=7) == pytest.approx(0.003)


# --- GEMM ---


def gemm_table(latency_ms=5.0, n=100, k=50, power_w=None):
    power = None if power_w is None else np.full(2, power_w)
    m = np.array([10, 20])
    return GemmTable(np.array([n]), np.array([k]), np.array([0, 2]), m, latency_ms * m / 10, power, FLOPS, 2, BANDWIDTH)


def gemm(site=(100, 50), name="qkv_gemm", scale=1.0, flops=FLOPS, measured=None, **options):
    names = ("scale_num_tokens", "seq_split", "below_grid_sol", "estimated", "compute_scale", "scale_matrix")
    defaults = dict(zip(names, (1, 1, False, False, None, None), strict=True)) | options
    found = GemmSite(measured or gemm_table(), *site) if site else None
    n, k = site or (100, 50)
    return Gemm(name, scale, HARDWARE, found, n, k, flops, 2, *defaults.values())


def test_a_gemm_is_its_measurement():
    assert ask(gemm(scale=2.0), tokens=10)[:4] == (OK, 10.0, 0.0, "silicon")
    assert latency(gemm(scale_num_tokens=2, seq_split=2), tokens=41) == 5.0


def test_the_speed_of_light_of_a_gemm():
    # 2 x 10 x 100 x 50 FLOP: 0.1 ms; 2 bytes x (1000 + 500 + 5000): 0.013 ms.
    assert sol(gemm(), tokens=10) == pytest.approx((0.1, 0.1, 0.013))


@pytest.mark.parametrize("site", [(100, 50), (9999, 9999), None])
def test_a_dtype_without_flops_is_named_before_a_missing_measurement(site):
    assert ask(gemm(site, flops=0.0), tokens=10)[0] == MISSING_FLOPS
    assert ask(gemm(site, flops=0.0), tokens=10, at_sol=True)[0] == MISSING_FLOPS


@pytest.mark.parametrize("site", [(9999, 9999), None])
def test_a_shape_beyond_the_measurements_is_a_miss(site):
    assert ask(gemm(site), tokens=10)[0] == MISS


def test_a_gemm_may_stand_below_the_grid_with_its_speed_of_light():
    far = gemm((100_000, 100_000), below_grid_sol=True)
    assert ask(far, tokens=1)[:4] == (OK, sol(far, tokens=1)[0], 0.0, "sol")
    assert ask(gemm(None, below_grid_sol=True), tokens=10)[0] == MISS  # of an unknown dtype


@pytest.mark.parametrize(("name", "expected"), [("context_logits_gemm", True), ("router_gemm", False)])
def test_logits_are_known_by_their_name(name, expected):
    assert gemm(name=name).is_logits is expected


def scales(factor, scale_beyond, latency_ms=0.001):
    grid = table({(m, k): latency_ms for m in (8, 16) for k in (40, 60)})
    return ScaleTable(grid, (8.0, 16.0, 40.0, 60.0), factor, BANDWIDTH, scale_beyond)


def test_static_scales_leave_out_the_quantisation_kernels():
    static = gemm(estimated=True, compute_scale=scales(2.0, False))
    assert ask(static, tokens=10)[:4] == (OK, pytest.approx(4.999), 0.0, "estimated")
    both = gemm(estimated=True, compute_scale=scales(2.0, False), scale_matrix=scales(3.0, True))
    assert latency(both, tokens=10) == pytest.approx(4.998)


def test_beyond_its_table_one_scale_kernel_is_held_and_the_other_grows_with_its_bytes():
    # m = 20 of at most 16. The GEMM takes 10 ms.
    assert latency(gemm(estimated=True, compute_scale=scales(2.0, False)), tokens=20) == pytest.approx(9.999)
    both = gemm(estimated=True, compute_scale=scales(2.0, False), scale_matrix=scales(3.0, True))
    assert latency(both, tokens=20) == pytest.approx(9.999 - 0.001 * 20 / 16)


def test_what_is_left_is_never_faster_than_light():
    greedy = gemm(estimated=True, compute_scale=scales(2.0, False, latency_ms=99.0))
    assert latency(greedy, tokens=10) == pytest.approx(0.1)


def test_static_scales_without_their_tables_are_a_miss():
    assert ask(gemm(estimated=True), tokens=10)[0] == MISS


# --- attention ---


def context_attention(measured, heads=2, kv_heads=0, head=4, window=0, kv_bytes=2, cp=1, extras=(), flops=FLOPS):
    grid = None if measured is None else table(measured, sqrt_axis=1)
    shape = (kv_heads, head, window, kv_bytes, flops)
    return ContextAttention("context_attention", 1.0, HARDWARE, grid, heads, shape, cp, list(extras))


def test_prefill_attention_is_the_part_of_the_triangle_that_a_prefix_leaves():
    # 4 new tokens after 4: (8^2 - 4^2) / 8^2 = 3/4 of the full square.
    assert ask(context_attention({(2, 8, 3): 6.0}), 3, 4, 4)[:4] == (OK, 4.5, 0.0, "silicon")
    assert latency(context_attention({(2, 8, 3): 6.0}), 3, 8, 0) == 6.0


def test_kernels_around_attention_cost_the_same_whatever_the_tokens():
    # 2.2 x M(500) + 4.4 x M(1500): 0.0044 + 0.0176 ms.
    extras = [(2.2, 500), (4.4, 1500)]
    measured = {(2, 8, 1): 6.0, (2, 8, 64): 7.0}
    assert ask(context_attention(measured, extras=extras), 1, 8)[:4] == (OK, pytest.approx(6.022), 0.0, "mixed")
    assert latency(context_attention(measured, extras=extras), 64, 8) == pytest.approx(7.022)


def test_context_parallel_ranks_take_a_chunk_from_each_end():
    # 10 tokens after 1 on 2 ranks: chunks of cdiv(10, 4) = 3 at prefixes 1 and 8.
    measured = {(2, 4, 1): 16.0, (2, 11, 1): 121.0}
    parts = 16.0 * (16 - 1) / 16 + 121.0 * (121 - 64) / 121
    assert latency(context_attention(measured, cp=2, extras=[(1.0, 500)]), 1, 10, 1) == pytest.approx(parts + 0.002)


def test_prefill_attention_is_a_miss_without_a_lane_or_without_tokens():
    assert ask(context_attention(None), 1, 8)[0] == MISS
    assert ask(context_attention({(2, 8, 1): 6.0}), 1, 0)[0] == MISS


def test_flops_of_attention_are_asked_for_first():
    assert ask(context_attention(None, flops=0.0), 1, 8)[0] == MISSING_FLOPS


@pytest.mark.parametrize(
    ("window", "math_ms"),
    [
        # 2 x b x full^2 x n x h x 2 / 2 = 2 x 3 x 64 x 8 FLOP of the full triangle, 3/4 of which are left.
        (0, 0.75 * 3072e-6),
        (8, 0.75 * 3072e-6),
        # A window of 2: 2 x b x full x 2 x n x h x 2 = 1536 FLOP, for half of the tokens.
        (2, 0.5 * 1536e-6),
    ],
)
def test_the_speed_of_light_of_prefill_attention(window, math_ms):
    # Queries and outputs of 4 new tokens: 2 x 3 x 2 x 2 x 4 x 4 = 384 bytes; the whole cache of 8: as many.
    attention = context_attention({(2, 8, 3): 6.0}, kv_heads=1, window=window)
    assert sol(attention, 3, 4, 4) == pytest.approx((max(math_ms, 768e-6), math_ms, 768e-6))


def test_the_speed_of_light_of_a_context_parallel_rank_is_that_of_its_chunks():
    # Chunks of 3 tokens at prefixes 1 and 8: 48 x (16 - 1) and 48 x (121 - 64) operations; 288 bytes of queries and
    # outputs each, 48 x 4 and 48 x 11 of the cache.
    attention = context_attention({(2, 8, 3): 6.0}, kv_heads=1, cp=2)
    assert sol(attention, 3, 10, 1) == pytest.approx((3456e-6, 3456e-6, 1296e-6))
    # 3 x 2 x 320 x (15 + 57) FLOP; 3 x 2 x 320 x (4 + 2 x 3) and (11 + 2 x 3) bytes.
    limits = (138_240e-6, 138_240e-6, 51_840e-6)
    assert sol(context_mla({(2, 8, 3): 6.0}, cp=2), 3, 10, 1) == pytest.approx(limits)


def test_the_speed_of_light_of_the_kernels_around_attention_is_their_bytes():
    plain = sol(context_attention({(2, 8, 1): 6.0}), 1, 8)
    assert sol(context_attention({(2, 8, 1): 6.0}, extras=[(2.0, 500)]), 1, 8)[0] == pytest.approx(plain[0] + 0.001)


def generation_attention(measured, kv_heads=0, window=0, uneven=1, verify=0, extras=(), flops=FLOPS, power_w=None):
    grid = None if measured is None else table(measured, power_w=power_w)
    shape = (kv_heads, 4, window, 2, flops)
    return GenerationAttention("generation_attention", 1.0, HARDWARE, grid, 2, shape, uneven, verify, list(extras))


LINEAR = {(2, batch, position): 0.1 * batch * position for batch in (1, 8) for position in (1, 1000)}


@pytest.mark.parametrize(
    ("position", "mean"),
    [
        (100, 10.0),  # 90, 95, 100, 105, 110
        (7, 0.62),  # 6, 6, 6, 6, 7
        (11, 1.02),  # 9, 9, 10, 11, 12
        (1, 0.1),
        (0, 0.1),
    ],
)
def test_decode_attention_is_the_mean_of_five_positions(position, mean):
    assert ask(generation_attention(LINEAR), 1, position)[:4] == (OK, pytest.approx(mean), 0.0, "silicon")


@st.composite
def decode_tables(draw):
    position = st.sampled_from([1, 2, 30, 31, 60, 64, 100, 128, 1000])
    rows = st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 16]), position),
        min_size=1,
        max_size=40,
        unique=True,
    )
    return {row: draw(st.floats(1.0, 100.0)) for row in draw(rows)}


@settings(max_examples=150, deadline=None)
@given(decode_tables(), st.integers(1, 40), st.integers(0, 2000))
def test_five_positions_asked_together_answer_as_five_queries(measured, batch, position):
    assert_asked_together_as_one_by_one(measured, batch, position)


@pytest.mark.parametrize(("batch", "position"), [(500, 1100), (17, 990), (40, 100_000), (16, 1250), (400, 30)])
def test_five_positions_near_more_measurements_than_a_search_remembers(batch, position):
    measured = {(2, held, at): 1.0 + (held * at) % 13 for held in (1, 16) for at in range(1000, 1300)}
    assert_asked_together_as_one_by_one(measured, batch, position)


def assert_asked_together_as_one_by_one(measured, batch, position):
    # kv_len x batch x heads of 2 x 4, in the formulas of the speed of light.
    def roofline(n, b, at):
        num_bytes = b * (2 * n * 4 + 2 * n * (at - 1) * 4 * 2 + 2 * n * 4)
        return max(4 * b * n * 4 * (at - 1), num_bytes) / 1e9 * 1000

    low = max(int(0.9 * position), 1)
    high = max(int(1.1 * position), low)
    answers = [table(measured).query((2, batch, low + (high - low) * i // 4), roofline) for i in range(5)]
    status, latency_ms, *_ = ask(generation_attention(measured), batch, position)
    if None in answers:
        assert status == MISS
    else:
        assert latency_ms == pytest.approx(sum(ms for ms, _ in answers) / 5, rel=1e-12)


def test_the_norm_of_queries_and_keys_is_added_to_the_mean():
    attention = generation_attention(LINEAR, extras=[(4.4, 500)])
    assert ask(attention, 1, 100)[:4] == (OK, pytest.approx(10.0088), 0.0, "mixed")
    assert ask(attention, 8, 100)[1] == pytest.approx(80.0088)


def test_a_token_scale_divides_the_batch_or_is_refused():
    assert latency(generation_attention(LINEAR, uneven=2), 2, 100) == pytest.approx(10.0)
    assert ask(generation_attention(LINEAR, uneven=2), 3, 100)[0] == UNEVEN_BATCH
    assert ask(generation_attention(LINEAR, uneven=2), 3, 100, at_sol=True)[0] == UNEVEN_BATCH


def test_verified_tokens_multiply_the_math_where_that_is_more():
    # 4 x b x n x h x (S - 1) = 4 x 1 x 2 x 4 x 100 FLOP: 3.2e-3 ms for each verified token.
    assert latency(generation_attention(LINEAR, verify=16), 1, 101) == pytest.approx(10.1, rel=0.01)
    assert latency(generation_attention(LINEAR, verify=10_000), 1, 101) == pytest.approx(32.0)


def test_decode_attention_is_a_miss_without_a_lane():
    assert ask(generation_attention(None), 1, 8)[0] == MISS
    assert ask(generation_attention(None, flops=0.0), 1, 8)[0] == MISSING_FLOPS


@pytest.mark.parametrize(
    ("window", "kv_heads", "limits"),
    [
        # 100 cached tokens, batch 3: 4 x 3 x 2 x 4 x 100 FLOP; 3 x (16 + 2 x heads x 100 x 4 x 2 + 16) bytes.
        (0, 0, (9696e-6, 9600e-6, 9696e-6)),
        (0, 1, (9600e-6, 9600e-6, 4896e-6)),
        (10, 1, (960e-6, 960e-6, 576e-6)),
        (200, 1, (9600e-6, 9600e-6, 4896e-6)),
    ],
)
def test_the_speed_of_light_of_decode_attention(window, kv_heads, limits):
    attention = generation_attention({(2, 3, 101): 9.0, (2, 3, 1): 1.0}, kv_heads=kv_heads, window=window)
    assert sol(attention, 3, 101) == pytest.approx(limits)
    floor = generation_attention_floor(
        [np.array([2]), np.array([3]), np.array([101])], (kv_heads, 4, window, 2, FLOPS), BANDWIDTH
    )
    assert floor.tolist() == pytest.approx(limits[:1])


# --- collectives ---


def collective(measured, elements=10.0, split=1, beyond=1.0, alone=False, power_w=None):
    grid = None if measured is None else table(measured, power_w=power_w)
    return Collective("ar", 1.0, HARDWARE, grid, elements, split, beyond, 1e-3, alone)


CURVE = {100: 1.0, 200: 3.0}


@pytest.mark.parametrize(
    ("tokens", "latency_ms"),
    [(10, 1.0), (15, 2.0), (5, 0.5), (40, 6.0)],
    ids=["exact", "between", "below in proportion", "above in proportion"],
)
def test_a_collective_is_linear_in_its_elements(tokens, latency_ms):
    assert ask(collective(CURVE), tokens=tokens)[:4] == (OK, latency_ms, 0.0, "silicon")


def test_a_collective_of_a_split_sequence_is_smaller():
    assert latency(collective(CURVE, split=4), tokens=37) == 1.0


def test_a_larger_group_is_scaled_from_the_measured_one():
    assert latency(collective(CURVE, beyond=1.75), tokens=10) == 1.75


def test_a_group_of_one_exchanges_nothing():
    assert ask(collective(None, alone=True), tokens=10)[:3] == (OK, 0.0, 0.0)
    assert sol(collective(None, alone=True), tokens=10) == (0.0, 0.0, 0.0)


def test_a_group_that_was_not_measured_is_a_miss():
    assert ask(collective(None), tokens=10)[0] == MISS


def test_the_speed_of_light_of_a_collective_is_its_elements():
    assert sol(collective(CURVE), tokens=7)[0] == pytest.approx(0.07)


def test_a_pipeline_transfer_crosses_nodes():
    # 10 tokens x 50 x 2 bytes at 1e8/s: 0.01 ms, and 2 us; two transfers.
    transfer = PipelineTransfer("p2p", 2.0, HARDWARE, 3, 50, 1)
    assert ask(transfer, tokens=10)[:4] == (OK, pytest.approx(0.024), 0.0, "empirical")
    assert sol(transfer, tokens=10) == pytest.approx((0.02, 0.0, 0.02))
    assert latency(PipelineTransfer("p2p", 2.0, HARDWARE, 3, 50, 3), tokens=10) == pytest.approx(0.012)
    assert ask(PipelineTransfer("p2p", 0.0, HARDWARE, 1, 50, 1), tokens=10)[:2] == (OK, 0.0)


# --- experts ---

SHAPE = {
    "topk": 3,
    "num_experts": 9,
    "hidden_size": 5,
    "inter_size": 7,
    "tp_size": 2,
    "ep_size": 4,
    "projections": 3,
    "flops_per_s": FLOPS,
    "bytes_per_element": 2,
}


def moe(measured, low_latency=None, attention_dp=1, **shape):
    tables = [None if rows is None else table(rows) for rows in (measured, low_latency)]
    return Moe("moe", 1.0, HARDWARE, *tables, 128, SHAPE | shape, attention_dp)


EXPERTS = {16: 2.0, 256: 32.0}


def test_experts_are_linear_in_the_tokens_of_all_attention_ranks():
    assert ask(moe(EXPERTS), tokens=136)[:4] == (OK, 17.0, 0.0, "silicon")
    assert latency(moe(EXPERTS, attention_dp=8), tokens=17) == 17.0


def test_the_speed_of_light_of_experts_counts_whole_tokens_and_elements():
    # 11 tokens x 3: 33 routed. FLOP: 33 x 5 x 7 x 3 x 2 = 6930 // 4 // 2 = 866. Elements, with 33 // 4 = 8 routed here:
    # 8 x 5 x 2 = 80, 8 x 7 x 3 // 2 = 84, 5 x 7 x 3 // 2 = 52 for each of min(9 // 4, 8) = 2 experts: 268; two bytes.
    assert sol(moe(EXPERTS), tokens=11) == pytest.approx((866e-6, 866e-6, 536e-6))
    # Without gate: 33 x 5 x 7 x 2 x 2 = 4620 // 4 // 2 = 577; 80 + 56 + 35 x 2 = 206 elements.
    assert sol(moe(EXPERTS, projections=2), tokens=11) == pytest.approx((577e-6, 577e-6, 412e-6))


def test_beyond_their_curve_experts_hold_its_utilisation():
    ends = {tokens: sol(moe(EXPERTS), tokens=tokens)[0] for tokens in (8, 16, 256, 1000)}
    assert latency(moe(EXPERTS), tokens=8) == pytest.approx(2.0 * ends[8] / ends[16])
    assert latency(moe(EXPERTS), tokens=1000) == pytest.approx(32.0 * ends[1000] / ends[256])


def test_one_point_says_nothing_of_smaller_batches():
    assert ask(moe({16: 2.0}), tokens=15)[0] == MISS
    assert latency(moe({16: 2.0}), tokens=16) == 2.0
    assert latency(moe({16: 2.0}), tokens=32) > 2.0


def test_the_low_latency_kernel_serves_small_batches():
    low = {1: 0.5, 1000: 0.5}
    assert [latency(moe(EXPERTS, low), tokens=tokens) for tokens in (64, 128, 136)] == [0.5, 0.5, 17.0]
    # The tokens of all attention ranks count.
    assert latency(moe(EXPERTS, low, attention_dp=8), tokens=17) == 17.0
    assert ask(moe(None, low), tokens=129)[0] == MISS
    # What it cannot answer, the other kernel can.
    assert latency(moe(EXPERTS, {64: 0.5}), tokens=16) == 2.0


def test_experts_without_measurements_are_a_miss():
    assert ask(moe(None), tokens=16)[0] == MISS
    assert ask(moe(None, flops_per_s=0.0), tokens=16)[0] == MISSING_FLOPS


# --- latent attention ---


def context_mla(measured, cp=1, flops=FLOPS):
    grid = None if measured is None else table(measured, sqrt_axis=1)
    return ContextMla("attention", 1.0, HARDWARE, grid, 2, (1, flops, 0.0, 0.0), cp)


def test_latent_prefill_attention_is_the_part_that_a_prefix_leaves():
    assert ask(context_mla({(2, 8, 3): 6.0}), 3, 4, 4)[:4] == (OK, 4.5, 0.0, "silicon")
    parts = 16.0 * (16 - 1) / 16 + 121.0 * (121 - 64) / 121
    assert latency(context_mla({(2, 4, 1): 16.0, (2, 11, 1): 121.0}, cp=2), 1, 10, 1) == pytest.approx(parts)
    assert ask(context_mla(None), 1, 8)[0] == MISS
    assert ask(context_mla(None, flops=0.0), 1, 8)[0] == MISSING_FLOPS


def test_the_speed_of_light_of_latent_prefill_attention():
    # 3 x 2 x 320 x (64 - 16) FLOP; 3 x 2 x (1 x 8 x 320 + 2 x 4 x 320) bytes.
    assert sol(context_mla({(2, 8, 3): 6.0}), 3, 4, 4) == pytest.approx((92_160e-6, 92_160e-6, 30_720e-6))


def generation_mla(measured, gemm_flops=0.0, gemm_bytes=0.0):
    grid = None if measured is None else table(measured)
    return GenerationMla("attention", 1.0, HARDWARE, grid, 2, (1, FLOPS, gemm_flops, gemm_bytes))


def test_latent_decode_attention_is_asked_at_one_position():
    # A mean of five positions would see the bend.
    measured = {(2, 3, 90): 0.0, (2, 3, 100): 1.0, (2, 3, 110): 9.0}
    assert latency(generation_mla(measured), 3, 100) == 1.0
    assert ask(generation_mla(None), 3, 100)[0] == MISS


def test_the_speed_of_light_of_latent_decode_attention():
    # 2 x 3 x 2 x 1088 x 100 FLOP; 3 x (2 x 1088 x 2 + 99 x 576) bytes.
    limits = (1_305_600e-6, 1_305_600e-6, 184_128e-6)
    assert sol(generation_mla({(2, 3, 100): 1.0}), 3, 100) == pytest.approx(limits)


def test_a_module_computes_its_projections_too():
    # 4 x 3 x 2 x 65536 FLOP at 1e10/s; 2 x 2 x (640 x 3 + 65536) elements of 2 bytes.
    module = generation_mla({(2, 3, 100): 1.0}, gemm_flops=1e10, gemm_bytes=2.0)
    math_ms, memory_ms = 1.3056 + 0.1572864, 0.184128 + 0.539648
    assert sol(module, 3, 100) == pytest.approx((math_ms, math_ms, memory_ms))


def test_products_around_latent_attention_count_requests_and_scale_with_heads():
    bmm = MlaBmm("bmm_pre", 1.0, HARDWARE, table({4: 2.0, 8: 3.0}), 24, FLOPS, 1, 0.75)
    assert ask(bmm, 6, 500, tokens=999)[:4] == (OK, 1.875, 0.0, "silicon")
    # 2 x 6 x 24 x 65536 FLOP; 24 x (640 x 6 + 65536) bytes: those of the heads that run.
    assert sol(bmm, 6) == pytest.approx((18.874368, 18.874368, 1.665024))
    assert ask(MlaBmm("bmm", 1.0, HARDWARE, None, 24, FLOPS, 1, 1.0), 6)[0] == MISS
    assert ask(MlaBmm("bmm", 1.0, HARDWARE, None, 24, 0.0, 1, 1.0), 6)[0] == MISSING_FLOPS


# --- composites ---


def constant(latency_ms, name="part", power_w=None):
    """An operator of one latency, whatever is asked."""
    return Collective(
        name, 1.0, HARDWARE, table({1: latency_ms, 2**40: latency_ms}, power_w=power_w), 1, 1, 1.0, 1e-3, False
    )


def missing(name):
    return Collective(name, 1.0, HARDWARE, None, 1, 1, 1.0, 1e-3, False)


def no_flops(name):
    return Gemm(name, 1.0, HARDWARE, None, 8, 8, 0.0, 2, 1, 1, False, False, None, None)


def test_a_sum_is_scaled_once():
    total = Sum("dispatch", 3.0, HARDWARE, [constant(1.0), constant(2.0)])
    assert ask(total)[:4] == (OK, 9.0, 0.0, "silicon")
    assert sol(total, tokens=5)[0] == pytest.approx(0.03)
    assert ask(Sum("dispatch", 3.0, HARDWARE, []))[:2] == (OK, 0.0)


def test_of_overlapping_groups_the_slower_one_counts_and_both_use_energy():
    first = [constant(1.0, power_w=100.0), constant(2.0, power_w=100.0)]
    both = Overlap("overlap", 1.0, HARDWARE, first, [constant(2.5, power_w=10.0)])
    assert ask(both)[:4] == (OK, 3.0, pytest.approx(325.0), "silicon")
    assert sol(both, tokens=5)[0] == pytest.approx(0.01)


def test_a_group_that_costs_nothing_does_not_colour_the_source():
    silicon, alone = constant(1.0), collective(None, alone=True)
    assert ask(Overlap("overlap", 1.0, HARDWARE, [silicon], [alone]))[3] == "silicon"
    assert ask(Overlap("overlap", 1.0, HARDWARE, [silicon], [memory()]))[3] == "mixed"


def test_a_fallback_sums_its_parts_where_the_module_has_no_measurement():
    parts = [constant(1.0), constant(2.0)]
    assert latency(Fallback("block", 1.0, HARDWARE, constant(5.0), parts)) == 5.0
    assert latency(Fallback("block", 1.0, HARDWARE, missing("module"), parts)) == 3.0


def test_a_fallback_does_not_cover_what_no_data_could_mend():
    block = Fallback("block", 1.0, HARDWARE, no_flops("module"), [constant(1.0)])
    assert ask(block)[0] == MISSING_FLOPS
    assert describe(block) == ("module", MISSING_FLOPS)


def test_the_speed_of_light_of_a_fallback_is_that_of_the_module():
    block = Fallback("block", 1.0, HARDWARE, missing("module"), [constant(1.0), constant(1.0)])
    assert sol(block, tokens=5)[0] == pytest.approx(0.005)


def describe(operator, *, at_sol=False):
    found = operator.missing(1, 1, 0, 1, at_sol)
    return None if found is None else (found[0].name, found[1])


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (missing("a"), ("a", MISS)),
        (Sum("sum", 1.0, HARDWARE, [constant(1.0), missing("b")]), ("b", MISS)),
        (Overlap("overlap", 1.0, HARDWARE, [constant(1.0)], [missing("c")]), ("c", MISS)),
        (Fallback("block", 1.0, HARDWARE, missing("d"), [constant(1.0), missing("e")]), ("e", MISS)),
        (Fallback("block", 1.0, HARDWARE, missing("d"), [constant(1.0)]), None),
        (constant(1.0), None),
    ],
)
def test_the_innermost_operator_that_cannot_answer_is_named(operator, expected):
    assert describe(operator) == expected
    assert (ask(operator)[0] == OK) is (expected is None)


def test_at_the_speed_of_light_only_flops_can_be_missing():
    block = Overlap("overlap", 1.0, HARDWARE, [missing("a")], [no_flops("b")])
    assert describe(block) == ("a", MISS)
    assert describe(block, at_sol=True) == ("b", MISSING_FLOPS)


# --- every operator ---


def test_energy_is_power_times_latency():
    assert ask(gemm(scale=2.0, measured=gemm_table(power_w=300.0)), tokens=10)[1:3] == (10.0, 3000.0)
    assert ask(generation_attention(LINEAR, power_w=200.0), 1, 100)[1:3] == (pytest.approx(10.0), pytest.approx(2000.0))
    assert ask(collective(CURVE, beyond=2.0, power_w=50.0), tokens=10)[1:3] == (2.0, 100.0)


def test_a_latency_beyond_the_range_of_numbers_is_refused():
    huge = MemoryOp("norm", 1.0, HARDWARE, 1e308, 1, 1)
    assert ask(huge, tokens=10**6)[0] == NOT_FINITE
    assert ask(huge, tokens=10**6, at_sol=True)[0] == NOT_FINITE
