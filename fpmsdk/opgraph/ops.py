"""The operators of a graph: immutable records with exactly the fields that pricing needs.

No latency is computed here. Field names and their order are those of the engine record, names included that carry
meaning (`context_attention`, `generation_attention`, `*logits_gemm`). Source: op-level.md sections 3 and 4.5.
"""

from typing import Any

import msgspec

from fpmsdk.opgraph.quantization import MODES


class Op(msgspec.Struct, frozen=True):
    """One operator."""

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


class Scaled(Op, frozen=True, kw_only=True):
    """An operator that is repeated; `scale_factor` multiplies its latency, usually by the number of layers."""

    scale_factor: float


class Embedding(Scaled, frozen=True, kw_only=True):
    """Embedding lookup; bounded by memory."""

    vocab_size: int
    hidden_size: int
    quant_mode: str = "bfloat16"
    seq_split: int = 1

    @property
    def weight_bytes(self) -> float:
        """The embedding table."""
        return self.vocab_size * self.hidden_size * MODES[self.quant_mode].bytes_per_element * self.scale_factor


class Elementwise(Scaled, frozen=True, kw_only=True):
    """Normalisation, activation and other passes over the activations; bounded by memory."""

    bytes_per_token: float
    scale_num_tokens: int = 1
    seq_split: int = 1


class Gemm(Scaled, frozen=True, kw_only=True):
    """A linear layer: tokens x `k` times `k` x `n`."""

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


class ContextAttention(Scaled, frozen=True, kw_only=True):
    """Attention of new tokens over themselves and their prefix; heads are those of one rank."""

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


class GenerationAttention(Scaled, frozen=True, kw_only=True):
    """Attention of one new token per request over its cache; heads are those of one rank."""

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


class CustomAllReduce(Scaled, frozen=True, kw_only=True):
    """The engine's own all-reduce inside the tensor-parallel group."""

    hidden_size: int
    tp_size: int
    quant: str = "half"
    seq_split: int = 1


class Nccl(Scaled, frozen=True, kw_only=True):
    """A library collective over `num_gpus` ranks; `hidden_size` counts elements per token."""

    hidden_size: float
    num_gpus: int
    dtype: str
    operation: str
    seq_split: int = 1


class P2P(Scaled, frozen=True, kw_only=True):
    """Activations sent from one pipeline stage to the next."""

    pp_size: int
    hidden_size: int
    seq_split: int = 1


class Moe(Scaled, frozen=True, kw_only=True):
    """Expert computation of one MoE layer."""

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


class MoeDispatch(Scaled, frozen=True, kw_only=True):
    """Communication before (`pre_dispatch`) or after the experts of one MoE layer."""

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


class ContextMla(Scaled, frozen=True, kw_only=True):
    """Latent attention of new tokens, without the projections around it."""

    num_heads: int
    kv_cache_dtype: str
    fmha_quant_mode: str
    cp_size: int = 1
    dcp_size: int = 1


class GenerationMla(Scaled, frozen=True, kw_only=True):
    """Latent attention of one new token per request, without the projections around it."""

    num_heads: int
    kv_cache_dtype: str
    dcp_size: int = 1


class MlaModule(Scaled, frozen=True, kw_only=True):
    """A whole latent-attention module, projections included."""

    num_heads: int
    kv_cache_dtype: str
    fmha_quant_mode: str
    gemm_quant_mode: str
    native_num_heads: int
    dcp_size: int = 1


class MlaModuleContext(MlaModule, frozen=True, kw_only=True):
    """The module on new tokens."""


class MlaModuleGeneration(MlaModule, frozen=True, kw_only=True):
    """The module on one new token per request."""


class MlaBmm(Scaled, frozen=True, kw_only=True):
    """Absorbed up-projection before (`is_pre`) or after latent attention in decode."""

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
