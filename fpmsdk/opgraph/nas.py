"""Graph of models whose blocks an architecture search chose one by one (Llama Nemotron): each may lack a part.

Runs of equal blocks come with the model's configuration.
"""

from fpmsdk.opgraph.layer_groups import LayerGroup
from fpmsdk.opgraph.ops import Op
from fpmsdk.opgraph.phase import Phase


def nas_ops(phase: Phase) -> tuple[Op, ...]:
    """Operators of one phase, in order."""
    return (
        phase.embedding(phase.model.vocab_size),
        *(op for group in phase.model.groups for op in _blocks(phase.of(group.count, ""), group)),
        phase.p2p(),
        phase.logits(),
    )


def _blocks(blocks: Phase, group: LayerGroup) -> tuple[Op, ...]:
    return (
        *(_attention(blocks, group) if group.heads else ()),
        *(_ffn(blocks, group.inter_size) if group.inter_size else ()),
    )


def _attention(blocks: Phase, group: LayerGroup) -> tuple[Op, ...]:
    model, tp, mode = blocks.model, blocks.deployment.tp, blocks.precision.gemm
    width = group.heads * model.head_size // tp
    kv_heads = -(-group.kv_heads // tp)
    return (
        blocks.norm("add_norm_1"),
        blocks.gemm("qkv_gemm", width + kv_heads * group.kv_width, model.hidden_size, mode),
        blocks.attention(blocks.scale, kv_heads, group.head_size),
        blocks.gemm("proj_gemm", model.hidden_size, width, mode),
        blocks.all_reduce("ar_1", blocks.scale),
    )


def _ffn(blocks: Phase, inter_size: int) -> tuple[Op, ...]:
    model, tp, mode = blocks.model, blocks.deployment.tp, blocks.precision.gemm
    gate_up, inter = 2 * inter_size // tp, inter_size // tp
    return (
        blocks.norm("add_norm_2"),
        blocks.gemm("gate_ffn1_gemm", gate_up, model.hidden_size, mode),
        blocks.elementwise("act_gate", gate_up, inter),
        blocks.gemm("ffn2_gemm", model.hidden_size, inter, mode),
        blocks.all_reduce("ar_2", blocks.scale),
    )
