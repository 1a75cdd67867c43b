"""Graph of dense models with grouped-query attention (Llama, Mistral, Qwen, MiMo).

Source: op-level.md section 4.4, LLAMA family.
"""

from fpmsdk.opgraph.ops import Op
from fpmsdk.opgraph.phase import Phase


def llama_ops(phase: Phase) -> tuple[Op, ...]:
    """Operators of one phase, in order."""
    model, tp, gemm = phase.model, phase.deployment.tp, phase.precision.gemm
    inter = model.inter_size // tp
    gate_up = 2 * model.inter_size // tp
    return (
        phase.embedding(model.vocab_size // tp),
        *phase.attention_block(phase.grouped_attention(phase.scale, window=model.attention_window)),
        phase.gemm("gate_ffn1_gemm", gate_up, model.hidden_size, gemm),
        phase.elementwise("act_gate", gate_up, inter),
        phase.gemm("ffn2_gemm", model.hidden_size, inter, gemm, low_precision_input=True),
        phase.logits(),
        phase.all_reduce("embedding_ar", phase.once),
        phase.all_reduce("ar_1", phase.scale),
        phase.all_reduce("ar_2", phase.scale),
        phase.p2p(),
    )
