"""Operator records as records of the roofline of a whole pass. Source: fpm-interpolation.md section 3.6.

Constants of an operator are settled here, the formulas are compiled code. An operator kind without a formula becomes
a record without one, and no latency can then be carried over.
"""

from collections.abc import Callable, Iterable
from typing import Any

from fpmsdk.opgraph import ops
from fpmsdk.opgraph.quantization import CACHE_BYTES, COMM_BYTES, MODES
from fpmsdk.perfdb import SystemSpec

_FMHA_BYTES = {"bfloat16": 2, "fp8": 1, "fp8_block": 1}
_COMPUTE = {"bfloat16": "bf16"}
_EXTRA_KERNELS = 1.1

Record = dict[str, Any]


class RooflineRecords:
    """Turns the operators of a graph into roofline records for one system."""

    def __init__(self, system: SystemSpec) -> None:
        self._system = system
        self._bandwidth = system.mem_bw_bytes_per_s

    def of(self, graph: Iterable[ops.Op]) -> list[Record]:
        """Records of a phase, in its order."""
        return [self._record(op) for op in graph]

    def _record(self, op: ops.Op) -> Record:
        make: Callable[[Any], Record] | None = getattr(self, f"_{type(op).__name__.lower()}", None)
        record = {"kind": "none"} if make is None else make(op)
        return {"name": op.name, "scale_factor": getattr(op, "scale_factor", 1.0)} | record

    def _flops(self, mode: str) -> float:
        compute = MODES[mode].compute
        return self._system.tc_flops.get(_COMPUTE.get(compute, compute), 0.0)

    def _memory_ms(self, num_bytes: float) -> float:
        return num_bytes / self._bandwidth * 1000.0

    def _embedding(self, op: ops.Embedding) -> Record:
        return {"kind": "memory", "seq_split": op.seq_split, "factors": (op.hidden_size * 2.0, self._bandwidth)}

    def _elementwise(self, op: ops.Elementwise) -> Record:
        return {
            "kind": "memory",
            "scale_num_tokens": op.scale_num_tokens,
            "seq_split": op.seq_split,
            "factors": (op.bytes_per_token, self._bandwidth),
        }

    def _gemm(self, op: ops.Gemm) -> Record:
        return {
            "kind": "gemm",
            "scale_num_tokens": op.scale_num_tokens,
            "seq_split": op.seq_split,
            "last_token_only": "logits_gemm" in op.name,
            "factors": (
                op.n,
                op.k,
                self._flops(op.quant_mode),
                MODES[op.quant_mode].bytes_per_element,
                self._bandwidth,
            ),
        }

    def _contextattention(self, op: ops.ContextAttention) -> Record:
        query, cached = op.n * op.head_size, op.n_kv * op.head_size
        extras = self._qk_norm_ms(op)
        if op.apply_rope:
            extras += 2.0 * self._memory_ms(2.0 * query + 2.0 * cached)
        extras += 2.0 * self._memory_ms(cached * _FMHA_BYTES[op.fmha_quant_mode])
        return {
            "kind": "context_attention",
            "factors": (
                op.n,
                op.n_kv,
                op.head_size,
                op.window_size,
                CACHE_BYTES[op.kv_cache_dtype],
                self._flops(op.fmha_quant_mode),
                self._bandwidth,
                _EXTRA_KERNELS * extras,
                op.cp_size,
            ),
        }

    def _qk_norm_ms(self, op: ops.ContextAttention | ops.GenerationAttention) -> float:
        if not op.use_qk_norm:
            return 0.0
        query, cached = 2.0 * (op.n * op.head_size), 2.0 * (op.n_kv * op.head_size)
        return 2.0 * (2.0 * self._memory_ms(query) + 2.0 * self._memory_ms(cached))

    def _generationattention(self, op: ops.GenerationAttention) -> Record:
        flops = self._flops("bfloat16") * (2.0 if op.kv_cache_dtype == "fp8" else 1.0)
        return {
            "kind": "generation_attention",
            "factors": (
                op.n,
                op.n_kv,
                op.head_size,
                op.window_size,
                CACHE_BYTES[op.kv_cache_dtype],
                flops,
                self._bandwidth,
                _EXTRA_KERNELS * self._qk_norm_ms(op),
            ),
        }

    def _moe(self, op: ops.Moe) -> Record:
        return {
            "kind": "moe",
            "factors": (
                op.attention_dp_size * op.topk,
                op.num_experts,
                op.hidden_size,
                op.inter_size,
                op.moe_tp_size,
                op.moe_ep_size,
                3.0 if op.is_gated else 2.0,
                self._flops(op.quant_mode),
                MODES[op.quant_mode].bytes_per_element,
                self._bandwidth,
            ),
        }

    def _customallreduce(self, op: ops.CustomAllReduce) -> Record:
        return self._all_reduce(op.tp_size, op.hidden_size, op.seq_split)

    def _nccl(self, op: ops.Nccl) -> Record:
        return self._library(op.operation, op.num_gpus, COMM_BYTES[op.dtype] * op.hidden_size, op.seq_split)

    def _p2p(self, op: ops.P2P) -> Record:
        bandwidth = self._system.inter_node_bw_bytes_per_s
        passes = 1.0 if op.pp_size > 1 else 0.0
        return {
            "kind": "collective",
            "seq_split": op.seq_split,
            "factors": (op.hidden_size * 2.0, bandwidth, passes, 1.0, 1.0),
        }

    def _all_reduce(self, members: int, hidden_size: float, seq_split: int = 1) -> Record:
        bandwidth = self._system.p2p_bandwidth(members)
        factors = (hidden_size * 2.0, bandwidth, 2.0, members - 1, members, 1.0)
        return {"kind": "collective", "seq_split": seq_split, "factors": factors}

    def _library(self, operation: str, members: int, bytes_per_token: float, seq_split: int = 1) -> Record:
        bandwidth = self._system.p2p_bandwidth(members)
        passes = 2.0 if operation == "all_reduce" else 1.0
        factors = (bytes_per_token, bandwidth, passes, members - 1, members)
        return {"kind": "collective", "seq_split": seq_split, "factors": factors}

    def _moedispatch(self, op: ops.MoeDispatch) -> Record:
        # One direction of the exchange around the experts, as vLLM does it.
        members, dp = op.moe_tp_size * op.moe_ep_size, op.attention_dp_size
        parts: list[Record] = []
        if members // dp > 1 and not (op.pre_dispatch and op.attn_ar_modeled):
            parts.append(self._all_reduce(members, op.hidden_size))
        if dp > 1:
            operation = "all_gather" if op.pre_dispatch else "reduce_scatter"
            parts.append(self._library(operation, members, COMM_BYTES[op.comm_quant] * (op.hidden_size * dp)))
        return {"kind": "overlap", "groups": ([{"name": op.name, **part} for part in parts], [])}

    def _overlap(self, op: ops.Overlap) -> Record:
        return {"kind": "overlap", "groups": (self.of(op.group_a), self.of(op.group_b))}

    def _fallback(self, op: ops.Fallback) -> Record:
        return self._record(op.primary)
