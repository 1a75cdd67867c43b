"""Operators of one phase (prefill or decode) with the names, scales and token splits that the phase implies.

What the families share; the order and shapes of a family's graph are in its own file. Source: op-level.md section 4.4.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

from fpmsdk.opgraph.deployment import Deployment
from fpmsdk.opgraph.kv_layout import kv_bytes_per_layer_token
from fpmsdk.opgraph.model_config import ModelConfig
from fpmsdk.opgraph.ops import (
    P2P,
    ContextAttention,
    CustomAllReduce,
    Elementwise,
    Embedding,
    Gemm,
    GenerationAttention,
    Moe,
    MoeDispatch,
    Nccl,
    Op,
)
from fpmsdk.opgraph.parallelism import mtp_scale
from fpmsdk.opgraph.precision import BF16, Precision
from fpmsdk.opgraph.quantization import COMM_BYTES

# (operator kind, performance table) -> attention kernels in the order in which their rows are preferred.
LaneOrder = Callable[[str, str], tuple[str, ...]]


class Phase:
    """Builds operators for one phase of one deployment.

    `scale` counts the layers (with multi-token prediction in decode), `once` the passes through what exists once.
    """

    def __init__(
        self,
        name: Literal["context", "generation"],
        model: ModelConfig,
        deployment: Deployment,
        precision: Precision,
        lanes: LaneOrder,
    ) -> None:
        self.name = name
        self.model = model
        self.deployment = deployment
        self.precision = precision
        self.is_context = name == "context"
        self.once = 1.0 if self.is_context else mtp_scale(deployment.nextn, model.num_layers)
        self.scale = model.num_layers * self.once
        # Only prefill divides its tokens among context-parallel ranks.
        self.seq_split = deployment.cp if self.is_context else 1
        self._lanes = lanes
        self._group = ""

    def of(self, layers: int, group: str) -> "Phase":
        """The same phase for a number of layers, whose operators are named after their group."""
        phase = copy.copy(self)
        phase.scale = layers * self.once
        phase._group = group
        return phase

    def embedding(self, vocab_size: int) -> Embedding:
        """Embedding lookup in a table of `vocab_size` rows a rank."""
        return Embedding(
            name=f"{self.name}_embedding",
            scale_factor=self.once,
            vocab_size=vocab_size,
            hidden_size=self.model.hidden_size,
            seq_split=self.seq_split,
        )

    def elementwise(self, name: str, dim_in: int, dim_out: int) -> Elementwise:
        """A pass that reads `dim_in` and writes `dim_out` elements of two bytes a token."""
        return Elementwise(
            name=f"{self.name}_{self._group}{name}",
            scale_factor=self.scale,
            bytes_per_token=float(2 * dim_in + 2 * dim_out),
            seq_split=self.seq_split,
        )

    def norm(self, name: str) -> Elementwise:
        """Residual addition and normalisation."""
        return self.elementwise(name, 2 * self.model.hidden_size, 2 * self.model.hidden_size)

    def gemm(self, name: str, n: int, k: int, quant_mode: str, *, low_precision_input: bool = False) -> Gemm:
        """A linear layer of every transformer layer."""
        return Gemm(
            name=f"{self.name}_{self._group}{name}",
            scale_factor=self.scale,
            n=n,
            k=k,
            quant_mode=quant_mode,
            low_precision_input=low_precision_input,
            seq_split=self.seq_split,
        )

    def logits(self) -> Gemm:
        """Projection to the vocabulary."""
        return Gemm(
            name=f"{self.name}_logits_gemm",
            scale_factor=self.once,
            n=self.model.vocab_size // self.deployment.tp,
            k=self.model.hidden_size,
            quant_mode=BF16,
            seq_split=self.seq_split,
        )

    def all_reduce(self, name: str, scale: float) -> CustomAllReduce:
        """All-reduce of the hidden state over the tensor-parallel ranks."""
        return CustomAllReduce(
            name=f"{self.name}_{name}",
            scale_factor=scale,
            hidden_size=self.model.hidden_size,
            tp_size=self.deployment.tp,
            seq_split=self.seq_split,
        )

    def p2p(self, *, split: bool = True) -> P2P:
        """Transfers between pipeline stages; `split` says whether they are divided like the tokens."""
        return P2P(
            name=f"{self.name}_p2p",
            scale_factor=(self.deployment.pp - 1) * self.once,
            pp_size=self.deployment.pp,
            hidden_size=self.model.hidden_size,
            seq_split=self.seq_split if split else 1,
        )

    def attention(
        self,
        scale: float,
        n_kv: int,
        head_size: int,
        *,
        heads: int | None = None,
        use_qk_norm: bool = False,
        apply_rope: bool = True,
        window: int = 0,
        cp_size: int = 1,
    ) -> ContextAttention | GenerationAttention:
        """Attention with `n_kv` key-value heads on this rank; `heads` defaults to the model's."""
        n = self.model.num_heads // self.deployment.tp if heads is None else heads
        shared: dict[str, Any] = {
            "name": f"{self.name}_attention",
            "scale_factor": scale,
            "n": n,
            "n_kv": n_kv,
            "head_size": head_size,
            "window_size": window,
            "kv_cache_dtype": self.precision.kv_cache,
            "use_qk_norm": use_qk_norm,
        }
        if self.is_context:
            return ContextAttention(
                **shared,
                fmha_quant_mode=self.precision.fmha,
                cp_size=cp_size,
                lane_order=self._lanes("ContextAttention", "context_attention_perf"),
                apply_rope=apply_rope,
            )
        return GenerationAttention(**shared, lane_order=self._lanes("GenerationAttention", "generation_attention_perf"))

    def grouped_attention(self, scale: float, *, window: int = 0) -> ContextAttention | GenerationAttention:
        """Grouped-query attention as the model declares it, in `scale` layers."""
        return self.attention(
            scale,
            -(-self.model.num_kv_heads // self.deployment.tp),
            self.model.head_size,
            use_qk_norm=self.model.use_qk_norm,
            window=window,
            cp_size=self.seq_split,
        )

    def attention_block(self, attention: Op) -> tuple[Op, ...]:
        """Grouped-query attention with its projections and the norms around it."""
        model, tp = self.model, self.deployment.tp
        width = model.num_heads * model.head_size // tp
        kv_heads = -(-model.num_kv_heads // tp)
        return (
            self.norm("add_norm_1"),
            self.gemm("qkv_gemm", width + 2 * model.head_size * kv_heads, model.hidden_size, self.precision.gemm),
            attention,
            *self.gather_kv(),
            self.gemm("proj_gemm", model.hidden_size, width, self.precision.gemm, low_precision_input=True),
            self.norm("add_norm_2"),
        )

    def gather_kv(self) -> tuple[Nccl, ...]:
        """Collection of the keys and values of the other context-parallel ranks."""
        if self.seq_split == 1:
            return ()
        size = kv_bytes_per_layer_token(self.model, self.precision, self.deployment.tp)
        return (
            Nccl(
                name=f"{self.name}_cp_all_gather",
                scale_factor=self.scale,
                hidden_size=size / COMM_BYTES[self.precision.comm],
                num_gpus=self.deployment.cp,
                dtype=self.precision.comm,
                operation="all_gather",
            ),
        )

    def routed_experts(
        self, workload_distribution: str, *, is_context: bool, cp_size: int, moe_quant: str
    ) -> tuple[Op, ...]:
        """Router, dispatch, routed experts and the dispatch back."""
        model, deployment = self.model, self.deployment
        name = f"{self.name}_{self._group}moe"
        before, after = (
            MoeDispatch(
                name=f"{name}_{side}_dispatch",
                scale_factor=self.scale,
                hidden_size=model.hidden_size,
                topk=model.topk,
                num_experts=model.num_experts,
                moe_tp_size=deployment.moe_tp,
                moe_ep_size=deployment.moe_ep,
                attention_dp_size=deployment.attention_dp,
                pre_dispatch=side == "pre",
                backend=deployment.backend,
                flavor="TrtllmAlltoall" if deployment.backend == "trtllm" else "CustomAllReduce",
                moe_quant=moe_quant,
                attn_cp_size=cp_size,
                is_context=is_context,
            )
            for side in ("pre", "post")
        )
        experts = Moe(
            name=name,
            scale_factor=self.scale,
            hidden_size=model.hidden_size,
            inter_size=model.moe_inter_size,
            topk=model.topk,
            num_experts=model.num_experts,
            moe_tp_size=deployment.moe_tp,
            moe_ep_size=deployment.moe_ep,
            attention_dp_size=deployment.attention_dp,
            quant_mode=self.precision.experts,
            workload_distribution=workload_distribution,
            moe_kernel_source=deployment.moe_kernel_source,
        )
        return (self.gemm("router_gemm", model.num_experts, model.hidden_size, BF16), before, experts, after)
