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
        extras = 0.0
        if op.use_qk_norm:
            extras += 2.0 * (self._memory_ms(2.0 * (2.0 * query)) + self._memory_ms(2.0 * (2.0 * cached)))
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
        return self._collective(op.tp_size, 2.0, op.hidden_size * 2.0, op.seq_split)

    def _nccl(self, op: ops.Nccl) -> Record:
        passes = 2.0 if op.operation == "all_reduce" else 1.0
        return self._collective(op.num_gpus, passes, COMM_BYTES[op.dtype] * op.hidden_size, op.seq_split)

    def _p2p(self, op: ops.P2P) -> Record:
        bandwidth = self._system.inter_node_bw_bytes_per_s
        passes = 1.0 if op.pp_size > 1 else 0.0
        return {
            "kind": "collective",
            "seq_split": op.seq_split,
            "factors": (op.hidden_size * 2.0, bandwidth, passes, 1.0, 1.0),
        }

    def _collective(self, members: int, passes: float, bytes_per_token: float, seq_split: int) -> Record:
        bandwidth = self._system.p2p_bandwidth(members)
        factors = (bytes_per_token, bandwidth, passes, members - 1, members)
        return {"kind": "collective", "seq_split": seq_split, "factors": factors}

    def _overlap(self, op: ops.Overlap) -> Record:
        return {"kind": "overlap", "groups": (self.of(op.group_a), self.of(op.group_b))}

    def _fallback(self, op: ops.Fallback) -> Record:
        primary = self._record(op.primary)
        if primary["kind"] != "none":
            return primary
        return {"kind": "overlap", "groups": (self.of(op.fallback), [])}
