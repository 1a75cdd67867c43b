"""Graph of models with latent attention, routed and shared experts (DeepSeek-V3/R1, Kimi-K2).

Every layer is modelled as a MoE layer with one shared expert. Source: op-level.md section 4.4, DEEPSEEK family.
"""

from fpmsdk.opgraph.ops import (
    ContextMla,
    Fallback,
    GenerationMla,
    MlaBmm,
    MlaModuleContext,
    MlaModuleGeneration,
    Op,
    Overlap,
)
from fpmsdk.opgraph.phase import Phase
from fpmsdk.opgraph.precision import BF16

WORKLOAD = "power_law_1.01"

# Ranks and head sizes of the latent projections, the same for every checkpoint of the family.
Q_LORA_RANK = 1536
KV_LORA_RANK = 512
ROPE_HEAD_DIM = 64
NOPE_HEAD_DIM = 128
VALUE_HEAD_DIM = 128
# The kernel tables of latent attention were measured with this many heads, whatever the model has.
TABLE_HEADS = 128


def deepseek_ops(phase: Phase) -> tuple[Op, ...]:
    """Operators of one phase, in order."""
    model, vllm = phase.model, phase.deployment.backend == "vllm"
    return (
        # Every rank keeps the whole vocabulary.
        phase.embedding(model.vocab_size),
        phase.norm("add_norm_1"),
        *_attention_block(phase),
        *phase.gather_kv(),
        phase.norm("add_norm_2"),
        *_ffn(phase),
        phase.logits(),
        *((phase.all_reduce("tp_allreduce", 2 * phase.scale),) if vllm else ()),
        phase.p2p(split=False),
    )


def _projection_mode(phase: Phase, group: str) -> str:
    return BF16 if group in phase.precision.attention_bf16 else phase.precision.gemm


def _attention_block(phase: Phase) -> tuple[Op, ...]:
    """The measured module where its projections share one precision, with the single kernels as its fallback."""
    kernels = _attention_kernels(phase)
    modes = {_projection_mode(phase, group) for group in ("q", "kv", "o")}
    if len(modes) > 1:
        return kernels
    module = MlaModuleContext if phase.is_context else MlaModuleGeneration
    primary = module(
        name=f"{phase.name}_mla_module",
        scale_factor=phase.scale / phase.seq_split,
        num_heads=phase.model.num_heads // phase.deployment.tp,
        kv_cache_dtype=phase.precision.kv_cache,
        fmha_quant_mode=phase.precision.fmha,
        gemm_quant_mode=modes.pop(),
        native_num_heads=phase.model.num_heads,
    )
    return (Fallback(name=f"{phase.name}_mla_block", primary=primary, fallback=kernels),)


def _attention_kernels(phase: Phase) -> tuple[Op, ...]:
    model, tp = phase.model, phase.deployment.tp
    hidden, heads = model.hidden_size, model.num_heads
    q, kv, o = (_projection_mode(phase, group) for group in ("q", "kv", "o"))
    downscale = BF16 if {"q", "kv"} <= phase.precision.attention_bf16 else phase.precision.gemm
    kv_b = phase.gemm("kv_b_proj_gemm", heads * (NOPE_HEAD_DIM + VALUE_HEAD_DIM) // tp, KV_LORA_RANK, kv)
    return (
        phase.gemm("downscale_gemm", Q_LORA_RANK + KV_LORA_RANK + ROPE_HEAD_DIM, hidden, downscale),
        phase.gemm("q_b_proj_gemm", heads * (NOPE_HEAD_DIM + ROPE_HEAD_DIM) // tp, Q_LORA_RANK, q),
        # Decode absorbs this projection into the attention.
        *((kv_b,) if phase.is_context else ()),
        *_attention(phase, absorbed=BF16 if BF16 in (kv, phase.precision.gemm) else "fp8"),
        phase.gemm("proj_gemm", hidden, heads * VALUE_HEAD_DIM // tp, o),
    )


def _attention(phase: Phase, absorbed: str) -> tuple[Op, ...]:
    model, tp, precision = phase.model, phase.deployment.tp, phase.precision
    if phase.deployment.backend == "vllm":
        return (phase.attention(phase.scale, model.num_kv_heads // tp, model.v_head_dim or model.head_size),)
    if phase.is_context:
        return (
            ContextMla(
                name="context_attention",
                scale_factor=phase.scale,
                num_heads=TABLE_HEADS // tp,
                kv_cache_dtype=precision.kv_cache,
                fmha_quant_mode=precision.fmha,
                cp_size=phase.seq_split,
            ),
        )
    before, after = (
        MlaBmm(
            name=f"generation_bmm_{side}",
            scale_factor=phase.scale,
            num_heads=model.num_heads // tp,
            quant_mode=absorbed,
            is_pre=side == "pre",
        )
        for side in ("pre", "post")
    )
    attention = GenerationMla(
        name="generation_attention",
        scale_factor=phase.scale,
        num_heads=TABLE_HEADS // tp,
        kv_cache_dtype=precision.kv_cache,
    )
    return (before, attention, after)


def _ffn(phase: Phase) -> tuple[Op, ...]:
    """Shared and routed experts: one after the other in prefill, on two streams in decode."""
    model, tp, mode = phase.model, phase.deployment.tp, phase.precision.shared_experts
    gate_up, inter = 2 * model.moe_inter_size // tp, model.moe_inter_size // tp
    shared = (
        phase.gemm("shared_gate_up_gemm", gate_up, model.hidden_size, mode),
        phase.elementwise("shared_act_gate", gate_up, inter),
        phase.gemm("shared_ffn2_gemm", model.hidden_size, inter, mode),
    )
    routed = phase.routed_experts(
        WORKLOAD, is_context=phase.is_context, cp_size=phase.deployment.cp, moe_quant=phase.precision.moe
    )
    if phase.is_context:
        return (*shared, *routed)
    return (Overlap(name="generation_moe_overlap", group_a=routed, group_b=shared),)
