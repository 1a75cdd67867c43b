"""Graphs of models that mix windowed with full attention, or dense with expert layers.

Llama 4, MiMo-V2 and Step 3 share one layout; Gemma 4 runs a dense FFN beside its experts; Muse Glimmer is dense with a
gated attention output. The groups of equal layers come with the model's configuration.
"""

from fpmsdk.opgraph.layer_groups import LayerGroup
from fpmsdk.opgraph.ops import Nccl, Op
from fpmsdk.opgraph.phase import Phase
from fpmsdk.opgraph.precision import BF16
from fpmsdk.opgraph.quantization import CACHE_BYTES, COMM_BYTES

WORKLOAD = "power_law_1.01"

# Smaller routers of Gemma 4 are left out.
_SMALLEST_GEMMA4_ROUTER = 128


def hybrid_moe_ops(phase: Phase) -> tuple[Op, ...]:
    """Operators of one phase of Llama 4, MiMo-V2 or Step 3, in order."""
    model = phase.model
    moe_layers = sum(group.count for group in model.groups if group.has_experts)
    shared = phase.of(moe_layers, "shared_expert_dense_")
    return (
        phase.embedding(model.vocab_size),
        *(op for group in model.groups for op in _hybrid_layer(phase.of(group.count, f"{group.name}_"), group)),
        phase.logits(),
        phase.p2p(),
        *_gather_kv(phase, "global", "swa"),
        *(_mlp(shared, "", model.shared_inter_size, phase.precision.gemm) if model.shared_inter_size else ()),
    )


def gemma4_ops(phase: Phase) -> tuple[Op, ...]:
    """Operators of one phase of Gemma 4, in order."""
    model = phase.model
    return (
        phase.embedding(model.vocab_size),
        *(op for group in model.groups for op in _gemma4_layer(phase.of(group.count, f"{group.name}_"), group)),
        phase.logits(),
        phase.p2p(),
        *_gather_kv(phase, "swa", "global"),
    )


def muse_ops(phase: Phase) -> tuple[Op, ...]:
    """Operators of one phase of Muse Glimmer, in order."""
    model = phase.model
    return (
        phase.embedding(model.vocab_size // phase.deployment.tp),
        phase.all_reduce("embedding_ar", phase.once),
        *(op for group in model.groups for op in _muse_layer(phase.of(group.count, f"{group.name}_"), group)),
        phase.all_reduce("ar_1", phase.scale),
        phase.all_reduce("ar_2", phase.scale),
        phase.logits(),
        phase.p2p(),
        *phase.gather_kv(),
    )


def _hybrid_layer(layers: Phase, group: LayerGroup) -> tuple[Op, ...]:
    model, mode = layers.model, layers.precision.gemm
    heads, width = group.heads // layers.deployment.tp, _output_width(layers, group)
    gate: tuple[Op, ...] = ()
    if model.gates_heads:
        gate = (
            layers.gemm("attn_gate_gemm", heads, model.hidden_size, mode),
            layers.elementwise("attn_gate", width + heads, width),
        )
    attention = _attention(layers, group, mode, *gate, use_qk_norm=model.use_qk_norm)
    if group.has_experts:
        return (*attention, layers.norm("moe_norm"), *_experts(layers, moe_quant=BF16))
    return (*attention, layers.norm("ffn_norm"), *_mlp(layers, "", group.inter_size, mode))


def _gemma4_layer(layers: Phase, group: LayerGroup) -> tuple[Op, ...]:
    precision = layers.precision
    projections = BF16 if precision.attention_bf16 else precision.gemm
    routed: tuple[Op, ...] = ()
    if group.has_experts:
        routed = _experts(layers, moe_quant=precision.experts)
        if layers.model.num_experts < _SMALLEST_GEMMA4_ROUTER:
            routed = routed[1:]
    return (
        *_attention(layers, group, projections),
        layers.norm("ffn_norm"),
        *_mlp(layers, "shared_mlp_", group.inter_size, precision.shared_experts),
        *routed,
    )


def _muse_layer(layers: Phase, group: LayerGroup) -> tuple[Op, ...]:
    mode, width = layers.precision.gemm, _output_width(layers, group)
    gate = (
        layers.gemm("gate_gemm", width, layers.model.hidden_size, mode),
        layers.elementwise("gate_mul", 2 * width, width),
    )
    return (
        # Only layers with a window rotate their keys.
        *_attention(layers, group, mode, *gate, use_qk_norm=True, apply_rope=group.window > 0),
        layers.norm("ffn_norm"),
        *_mlp(layers, "mlp_", group.inter_size, mode),
    )


def _output_width(layers: Phase, group: LayerGroup) -> int:
    return group.heads * group.value_size // layers.deployment.tp


def _attention(
    layers: Phase, group: LayerGroup, mode: str, *gate: Op, use_qk_norm: bool = False, apply_rope: bool = True
) -> tuple[Op, ...]:
    """Attention of a group with its projections; `gate` acts on its output."""
    hidden, tp = layers.model.hidden_size, layers.deployment.tp
    kv_heads = -(-group.kv_heads // tp)
    return (
        layers.norm("attn_norm"),
        layers.gemm("qkv_gemm", group.heads * group.head_size // tp + kv_heads * group.kv_width, hidden, mode),
        layers.attention(
            layers.scale,
            kv_heads,
            group.head_size,
            heads=group.heads // tp,
            window=group.window,
            use_qk_norm=use_qk_norm,
            apply_rope=apply_rope,
            cp_size=layers.seq_split,
        ),
        *gate,
        layers.gemm("proj_gemm", hidden, _output_width(layers, group), mode, low_precision_input=True),
    )


def _mlp(layers: Phase, name: str, inter_size: int, mode: str) -> tuple[Op, ...]:
    """A gated dense FFN."""
    hidden, inter = layers.model.hidden_size, inter_size // layers.deployment.tp
    return (
        layers.gemm(f"{name}gate_up_gemm", 2 * inter, hidden, mode),
        layers.elementwise(f"{name}act", 2 * inter, inter),
        layers.gemm(f"{name}down_gemm", hidden, inter, mode, low_precision_input=True),
    )


def _experts(layers: Phase, moe_quant: str) -> tuple[Op, ...]:
    """Routed experts; decode does not divide tokens among context-parallel ranks."""
    cp = layers.deployment.cp
    return layers.routed_experts(WORKLOAD, is_context=layers.is_context or cp == 1, cp_size=cp, moe_quant=moe_quant)


def _gather_kv(phase: Phase, *kinds: str) -> tuple[Nccl, ...]:
    """Collection of the keys and values of the other context-parallel ranks, for each kind of attention."""
    if phase.seq_split == 1:
        return ()
    precision, deployment = phase.precision, phase.deployment
    gathers = []
    for kind in kinds:
        groups = [group for group in phase.model.groups if group.name.split("_")[0] == kind]
        if not groups:
            continue
        elements = -(-groups[0].kv_heads // deployment.tp) * (groups[0].head_size + groups[0].value_size)
        gathers.append(
            Nccl(
                name=f"{phase.name}_cp_all_gather_{kind}",
                scale_factor=float(sum(group.count for group in groups)),
                hidden_size=elements * CACHE_BYTES[precision.kv_cache] / COMM_BYTES[precision.comm],
                num_gpus=deployment.cp,
                dtype=precision.comm,
                operation="all_gather",
            )
        )
    return tuple(gathers)
