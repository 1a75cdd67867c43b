"""The operators of a graph: immutable records with exactly the fields that pricing needs.

No latency is computed here. Field names and their order are those of the engine record, names included that carry
meaning (`context_attention`, `generation_attention`, `*logits_gemm`). Source: op-level.md sections 3 and 4.5.
"""

from typing import Any

import msgspec

from fpmsdk.opgraph.quantization import MODES


class Op(msgspec.Struct, frozen=True):
    """One operator; `scale_factor` multiplies its latency, usually by the number of layers."""

    name: str

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that one GPU holds for this operator, all its layers together."""
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        """The operator as one object keyed by its kind.

        >>> P2P(name="context_p2p", scale_factor=0.0, pp_size=1, hidden_size=64).to_dict()
        {'P2P': {'name': 'context_p2p', 'scale_factor': 0.0, 'pp_size': 1, 'hidden_size': 64, 'seq_split': 1}}
        """
        return {type(self).__name__: {field: _plain(getattr(self, field)) for field in self.__struct_fields__}}


def _plain(value: Any) -> Any:
    if isinstance(value, Op):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


class Embedding(Op, frozen=True, kw_only=True):
    """Embedding lookup; bounded by memory."""

    scale_factor: float
    vocab_size: int
    hidden_size: int
    quant_mode: str = "bfloat16"
    seq_split: int = 1

    @property
    def weight_bytes(self) -> float:
        """The embedding table."""
        return self.vocab_size * self.hidden_size * MODES[self.quant_mode].bytes_per_element * self.scale_factor


class Elementwise(Op, frozen=True, kw_only=True):
    """Normalisation, activation and other passes over the activations; bounded by memory."""

    scale_factor: float
    bytes_per_token: float
    scale_num_tokens: int = 1
    seq_split: int = 1


class Gemm(Op, frozen=True, kw_only=True):
    """A linear layer: tokens x `k` times `k` x `n`."""

    scale_factor: float
    n: int
    k: int
    quant_mode: str
    scale_num_tokens: int = 1
    low_precision_input: bool = False
    seq_split: int = 1
    below_grid_sol: bool = False

    @property
    def weight_bytes(self) -> float:
        """The weight matrices."""
        return self.n * self.k * MODES[self.quant_mode].bytes_per_element * self.scale_factor


class ContextAttention(Op, frozen=True, kw_only=True):
    """Attention of new tokens over themselves and their prefix; heads are those of one rank."""

    scale_factor: float
    n: int
    n_kv: int
    head_size: int
    window_size: int = 0
    kv_cache_dtype: str
    fmha_quant_mode: str
    use_qk_norm: bool = False
    cp_size: int = 1
    lane_order: tuple[str, ...]
    apply_rope: bool = True
    dcp_size: int = 1


class GenerationAttention(Op, frozen=True, kw_only=True):
    """Attention of one new token per request over its cache; heads are those of one rank."""

    scale_factor: float
    n: int
    n_kv: int
    head_size: int
    window_size: int = 0
    kv_cache_dtype: str
    lane_order: tuple[str, ...]
    use_qk_norm: bool = False
    scale_num_tokens: int = 1
    verify_query_tokens: int = 0
    dcp_size: int = 1


class CustomAllReduce(Op, frozen=True, kw_only=True):
    """The engine's own all-reduce inside the tensor-parallel group."""

    scale_factor: float
    hidden_size: int
    tp_size: int
    quant: str = "half"
    seq_split: int = 1


class Nccl(Op, frozen=True, kw_only=True):
    """A library collective over `num_gpus` ranks; `hidden_size` counts elements per token."""

    scale_factor: float
    hidden_size: float
    num_gpus: int
    dtype: str
    operation: str
    seq_split: int = 1


class P2P(Op, frozen=True, kw_only=True):
    """Activations sent from one pipeline stage to the next."""

    scale_factor: float
    pp_size: int
    hidden_size: int
    seq_split: int = 1


class Moe(Op, frozen=True, kw_only=True):
    """Expert computation of one MoE layer."""

    scale_factor: float
    hidden_size: int
    inter_size: int
    topk: int
    num_experts: int
    moe_tp_size: int
    moe_ep_size: int
    attention_dp_size: int
    quant_mode: str
    workload_distribution: str
    is_gated: bool = True
    moe_backend: str | None = None
    moe_kernel_source: str | None = None
    enable_eplb: bool = False
    is_context: bool = True

    @property
    def weight_bytes(self) -> float:
        """The experts of one rank."""
        matrices = 3 if self.is_gated else 2
        elements = self.hidden_size * self.inter_size * self.num_experts * matrices
        stored = elements * MODES[self.quant_mode].bytes_per_element // self.moe_ep_size // self.moe_tp_size
        return stored * self.scale_factor


class MoeDispatch(Op, frozen=True, kw_only=True):
    """Communication before (`pre_dispatch`) or after the experts of one MoE layer."""

    scale_factor: float
    hidden_size: int
    topk: int
    num_experts: int
    moe_tp_size: int
    moe_ep_size: int
    attention_dp_size: int
    pre_dispatch: bool
    attn_ar_modeled: bool = False
    backend: str
    flavor: str
    comm_quant: str = "half"
    moe_quant: str
    attn_cp_size: int = 1
    is_context: bool = True
    sms: int = 12
    scale_num_tokens: int = 1


class ContextMla(Op, frozen=True, kw_only=True):
    """Latent attention of new tokens, without the projections around it."""

    scale_factor: float
    num_heads: int
    kv_cache_dtype: str
    fmha_quant_mode: str
    cp_size: int = 1
    dcp_size: int = 1


class GenerationMla(Op, frozen=True, kw_only=True):
    """Latent attention of one new token per request, without the projections around it."""

    scale_factor: float
    num_heads: int
    kv_cache_dtype: str
    dcp_size: int = 1


class MlaModuleContext(Op, frozen=True, kw_only=True):
    """A whole latent-attention module on new tokens, projections included."""

    scale_factor: float
    num_heads: int
    kv_cache_dtype: str
    fmha_quant_mode: str
    gemm_quant_mode: str
    native_num_heads: int
    dcp_size: int = 1


class MlaModuleGeneration(Op, frozen=True, kw_only=True):
    """A whole latent-attention module on one new token per request."""

    scale_factor: float
    num_heads: int
    kv_cache_dtype: str
    fmha_quant_mode: str
    gemm_quant_mode: str
    native_num_heads: int
    dcp_size: int = 1


class MlaBmm(Op, frozen=True, kw_only=True):
    """Absorbed up-projection before (`is_pre`) or after latent attention in decode."""

    scale_factor: float
    num_heads: int
    quant_mode: str
    is_pre: bool


class Overlap(Op, frozen=True, kw_only=True):
    """Two groups on parallel streams: the slower one counts."""

    group_a: tuple[Op, ...]
    group_b: tuple[Op, ...]

    @property
    def weight_bytes(self) -> float:
        """Both groups."""
        return sum(op.weight_bytes for op in (*self.group_a, *self.group_b))


class Fallback(Op, frozen=True, kw_only=True):
    """`primary` where its table has data, otherwise the sum of `fallback`."""

    primary: Op
    fallback: tuple[Op, ...]

    @property
    def weight_bytes(self) -> float:
        """Those of the primary, or of the list when the primary does not know its own."""
        return self.primary.weight_bytes or sum(op.weight_bytes for op in self.fallback)
