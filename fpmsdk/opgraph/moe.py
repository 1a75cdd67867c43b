"""Graph of models with routed experts and grouped-query attention (Mixtral, gpt-oss, Qwen MoE, MiniMax-M2).

The dispatches around the experts carry the reductions that dense models do after each layer.
Source: op-level.md section 4.4, MOE family.
"""

from fpmsdk.opgraph.ops import Op
from fpmsdk.opgraph.phase import Phase

WORKLOAD = "power_law_1.2"


def moe_ops(phase: Phase) -> tuple[Op, ...]:
    """Operators of one phase, in order."""
    model, tp = phase.model, phase.deployment.tp
    window = model.attention_window
    # Models with a window have it in every second layer.
    scale = phase.scale / 2 if window else phase.scale
    return (
        *((phase.grouped_attention(scale, window=window),) if window else ()),
        phase.embedding(model.vocab_size // tp),
        *phase.attention_block(phase.grouped_attention(scale)),
        *phase.routed_experts(WORKLOAD, is_context=True, cp_size=phase.seq_split, moe_quant=phase.precision.moe),
        *(() if phase.is_context else (phase.logits(),)),
        phase.all_reduce("embedding_ar", phase.once),
        phase.p2p(),
    )
