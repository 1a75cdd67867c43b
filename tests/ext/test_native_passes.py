"""A pass of an op-level engine is the sum of what its operators answer alone, however many of them are alike."""

import pytest

from fpmsdk._ext.native import OpLevelEngine
from fpmsdk._ext.operators import Gemm, MemoryOp
from fpmsdk._ext.sites import GemmSite, GemmTable

HARDWARE = {
    "mem_bw_bytes_per_s": 1e9,
    "mem_bw_scaling_factor": 0.5,
    "mem_latency_s": 1e-6,
    "inter_node_bw_bytes_per_s": 1e8,
    "p2p_latency_s": 2e-6,
}


def memory(name, bytes_per_token, repetitions=1.0):
    return MemoryOp(name, repetitions, HARDWARE, bytes_per_token, 1, 1)


def gemm(name, table, repetitions=1.0):
    site = GemmSite(table, 8.0, 4.0)
    return Gemm(name, repetitions, HARDWARE, site, 8.0, 4.0, 1e9, 2.0, 1, 1, False, False, None, None)


def curve():
    return GemmTable([8], [4], [0, 3], [1, 16, 64], [1.0, 2.0, 9.0], None, 1e9, 2.0, 1e9)


def alike_and_different():
    table = curve()
    # More kinds of repeated operators than a pass remembers answers of.
    norms = [memory(f"norm_{i}_{turn}", 100 + i, 1.0 + turn) for turn in range(3) for i in range(20)]
    return [*norms, gemm("gate_gemm", table, 2.0), gemm("logits_gemm", table), gemm("gate_gemm_2", table)]


def engine(operators, **options):
    return OpLevelEngine(operators, operators, lambda *miss: AssertionError(miss), **options)


@pytest.mark.parametrize("speed_of_light", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 7), (2, 16)])
def test_a_pass_is_the_sum_of_its_operators(batch, length, speed_of_light):
    operators = alike_and_different()
    tokens = {"logits_gemm": batch}
    alone = [op.ask(batch, length, 0, tokens.get(op.name, batch * length), speed_of_light)[1] for op in operators]
    priced = engine(operators, speed_of_light=speed_of_light)
    assert priced.context_latency(batch, length, 0) == pytest.approx(sum(alone), rel=1e-12)
    alone = [op.ask(batch, length, 0, batch, speed_of_light)[1] for op in operators]
    assert priced.generation_latency(batch, length) == pytest.approx(sum(alone), rel=1e-12)


def test_operators_answer_alike_by_all_but_their_name_and_repetitions():
    table = curve()
    one = memory("norm", 100)
    assert one.answers_as(memory("other", 100, 64.0))
    assert not one.answers_as(memory("norm", 101))
    assert not one.answers_as(gemm("norm", table))
    assert not one.answers_as(MemoryOp("norm", 1.0, HARDWARE | {"mem_latency_s": 2e-6}, 100, 1, 1))
