"""Graph records to compiled operators: every lookup that does not depend on a query is made here, once.

One method per operator kind of op-level.md section 3.
"""

from collections.abc import Callable
from typing import Any

from fpmsdk._ext import operators as compiled
from fpmsdk._ext.sites import GemmSite
from fpmsdk.opgraph import ops
from fpmsdk.opgraph.quantization import CACHE_BYTES, COMM_BYTES, MODES
from fpmsdk.perfdb import LOW_LATENCY_KERNEL, SystemSpec
from fpmsdk.perfmodel.oplevel_tables import OpTables

# FMHA modes: bytes per element of what attention writes.
_FMHA_BYTES = {"bfloat16": 2, "fp8": 1, "fp8_block": 1}
_COMPUTE = {"bfloat16": "bf16"}
_LOW_LATENCY_TOKENS = 128
# GPUs of a node from which on expert dispatch of trtllm on Blackwell is one all-to-all kernel.
_ALL_TO_ALL_NODE = 72


def mode_flops_per_s(system: SystemSpec, mode: str) -> float:
    """FLOP/s of a quantisation mode's products; 0.0 where the system does not run them.

    An operator of such a mode fails when it is priced, whatever was measured.
    """
    compute = MODES[mode].compute
    return system.tc_flops.get(_COMPUTE.get(compute, compute), 0.0)


class OperatorCompiler:
    """Compiles the operators of one deployment against its tables and hardware."""

    def __init__(self, system: SystemSpec, tables: OpTables) -> None:
        self._system = system
        self._tables = tables
        self._hardware = {
            "mem_bw_bytes_per_s": system.mem_bw_bytes_per_s,
            "mem_bw_scaling_factor": system.mem_bw_scaling_factor,
            "mem_latency_s": system.mem_constant_latency_s,
            "inter_node_bw_bytes_per_s": system.inter_node_bw_bytes_per_s,
            "p2p_latency_s": system.p2p_latency_s,
        }

    def compile(self, op: ops.Op) -> compiled.Operator:
        """The compiled form of a graph record."""
        make: Callable[[Any], compiled.Operator] = getattr(self, f"_{type(op).__name__.lower()}")
        return make(op)

    def _all(self, records: tuple[ops.Op, ...]) -> list[compiled.Operator]:
        return [self.compile(op) for op in records]

    def _flops(self, mode: str) -> float:
        return mode_flops_per_s(self._system, mode)

    def _decode_flops(self, kv_cache_dtype: str) -> float:
        fp8 = kv_cache_dtype == "fp8" and (self._system.sm_version or 0) >= 89
        return self._flops("fp8" if fp8 else "bfloat16")

    # --- memory, GEMM ---

    def _embedding(self, op: ops.Embedding) -> compiled.Operator:
        bytes_per_token = op.hidden_size * MODES[op.quant_mode].bytes_per_element
        return compiled.MemoryOp(op.name, op.scale_factor, self._hardware, bytes_per_token, 1, op.seq_split)

    def _elementwise(self, op: ops.Elementwise) -> compiled.Operator:
        return compiled.MemoryOp(
            op.name, op.scale_factor, self._hardware, op.bytes_per_token, op.scale_num_tokens, op.seq_split
        )

    def _gemm(self, op: ops.Gemm) -> compiled.Operator:
        mode, flops = MODES[op.quant_mode], self._flops(op.quant_mode)
        static = op.quant_mode == "fp8_static"
        table = self._tables.gemm("fp8" if static else op.quant_mode, flops, mode.bytes_per_element) if flops else None
        compute_scale = self._tables.scale("computescale_perf", "fp8", 2.0, scale_beyond=False) if static else None
        scale_matrix = (
            self._tables.scale("scale_matrix_perf", "fp8", 3.0, scale_beyond=True)
            if static and op.low_precision_input
            else None
        )
        return compiled.Gemm(
            op.name,
            op.scale_factor,
            self._hardware,
            None if table is None else GemmSite(table, op.n, op.k),
            op.n,
            op.k,
            flops,
            mode.bytes_per_element,
            op.scale_num_tokens,
            op.seq_split,
            op.below_grid_sol,
            static,
            compute_scale,
            scale_matrix,
        )

    # --- attention ---

    def _contextattention(self, op: ops.ContextAttention) -> compiled.Operator:
        kv_heads = 0 if op.n_kv == op.n else op.n_kv
        key = (op.fmha_quant_mode, op.kv_cache_dtype, kv_heads, op.head_size, op.window_size)
        lane = self._tables.lane("context_attention_perf", op.lane_order, key)
        table = None if lane is None else self._tables.grid("context_attention_perf", (lane, *key))
        query, cached = op.n * op.head_size, op.n_kv * op.head_size
        extras: list[tuple[float, float]] = [(1.1 * 2, cached * _FMHA_BYTES[op.fmha_quant_mode])]
        if op.apply_rope:
            extras.append((1.1 * 2, 2 * query + 2 * cached))
        if op.use_qk_norm:
            extras += self._qk_norm(query, cached)
        shape = (
            kv_heads,
            op.head_size,
            op.window_size,
            CACHE_BYTES[op.kv_cache_dtype],
            self._flops(op.fmha_quant_mode),
        )
        return compiled.ContextAttention(
            op.name, op.scale_factor, self._hardware, table, op.n, shape, op.cp_size, extras
        )

    def _generationattention(self, op: ops.GenerationAttention) -> compiled.Operator:
        kv_heads = 0 if op.n_kv == op.n else op.n_kv
        key = (op.kv_cache_dtype, kv_heads, op.head_size, op.window_size)
        lane = self._tables.lane("generation_attention_perf", op.lane_order, key)
        shape = (
            kv_heads,
            op.head_size,
            op.window_size,
            CACHE_BYTES[op.kv_cache_dtype],
            self._decode_flops(op.kv_cache_dtype),
        )
        table = self._tables.generation_attention(lane, key, shape)
        extras = self._qk_norm(op.n * op.head_size, op.n_kv * op.head_size) if op.use_qk_norm else []
        return compiled.GenerationAttention(
            op.name,
            op.scale_factor,
            self._hardware,
            table,
            op.n,
            shape,
            op.scale_num_tokens,
            op.verify_query_tokens,
            extras,
        )

    @staticmethod
    def _qk_norm(query: int, cached: int) -> list[tuple[float, float]]:
        return [(1.1 * 4, 2 * query), (1.1 * 4, 2 * cached)]

    # --- latent attention ---

    def _contextmla(self, op: ops.ContextMla) -> compiled.Operator:
        table = self._tables.grid("context_mla_perf", (op.fmha_quant_mode, op.kv_cache_dtype))
        shape = (CACHE_BYTES[op.kv_cache_dtype], self._flops(op.fmha_quant_mode), 0.0, 0.0)
        return compiled.ContextMla(op.name, op.scale_factor, self._hardware, table, op.num_heads, shape, op.cp_size)

    def _generationmla(self, op: ops.GenerationMla) -> compiled.Operator:
        table = self._tables.grid("generation_mla_perf", (op.kv_cache_dtype,))
        shape = (CACHE_BYTES[op.kv_cache_dtype], self._decode_flops(op.kv_cache_dtype), 0.0, 0.0)
        return compiled.GenerationMla(op.name, op.scale_factor, self._hardware, table, op.num_heads, shape)

    def _mlamodulecontext(self, op: ops.MlaModuleContext) -> compiled.Operator:
        key = (op.fmha_quant_mode, op.kv_cache_dtype, op.gemm_quant_mode)
        table = self._module("mla_context_module_perf", key, op.native_num_heads)
        shape = (CACHE_BYTES[op.kv_cache_dtype], self._flops(op.fmha_quant_mode), 0.0, 0.0)
        return compiled.ContextMla(op.name, op.scale_factor, self._hardware, table, op.num_heads, shape, 1)

    def _mlamodulegeneration(self, op: ops.MlaModuleGeneration) -> compiled.Operator:
        key = (op.kv_cache_dtype, op.gemm_quant_mode)
        table = self._module("mla_generation_module_perf", key, op.native_num_heads)
        gemm = MODES[op.gemm_quant_mode]
        shape = (
            CACHE_BYTES[op.kv_cache_dtype],
            self._decode_flops(op.kv_cache_dtype),
            self._flops(op.gemm_quant_mode),
            gemm.bytes_per_element,
        )
        return compiled.GenerationMla(op.name, op.scale_factor, self._hardware, table, op.num_heads, shape)

    def _module(self, table: str, key: tuple[str, ...], native_heads: int) -> Any:
        # Modules are measured per unsharded model: its own heads, else the only ones, else the nearest below.
        buckets = sorted(found[-1] for found in self._tables.slices(table) if found[:-1] == key)
        if not buckets:
            return None
        below = [heads for heads in buckets if heads <= native_heads]
        heads = buckets[0] if len(buckets) == 1 or not below else below[-1]
        return self._tables.grid(table, (*key, heads))

    def _mlabmm(self, op: ops.MlaBmm) -> compiled.Operator:
        operation = "mla_gen_pre" if op.is_pre else "mla_gen_post"
        measured = self._tables.slices("mla_bmm_perf")
        dtype = op.quant_mode if any(key[0] == op.quant_mode for key in measured) else "bfloat16"
        heads = op.num_heads
        if (dtype, operation, heads) not in measured:
            heads = 1 << (heads - 1).bit_length()
        table = self._tables.grid("mla_bmm_perf", (dtype, operation, heads))
        mode = MODES[op.quant_mode]
        return compiled.MlaBmm(
            op.name,
            op.scale_factor,
            self._hardware,
            table,
            op.num_heads,
            self._flops(op.quant_mode),
            mode.bytes_per_element,
            op.num_heads / heads,
        )

    # --- collectives ---

    def _customallreduce(self, op: ops.CustomAllReduce) -> compiled.Operator:
        return self._all_reduce(op.name, op.scale_factor, op.tp_size, op.hidden_size, op.seq_split)

    def _nccl(self, op: ops.Nccl) -> compiled.Operator:
        return self._library(
            op.name, op.scale_factor, op.num_gpus, op.hidden_size, op.operation, op.dtype, op.seq_split
        )

    def _all_reduce(
        self, name: str, scale_factor: float, gpus: int, elements: float, seq_split: int = 1
    ) -> compiled.Operator:
        per_node = self._system.gpus_per_node
        if per_node == 72 and gpus > 4:
            return self._library(name, scale_factor, gpus, elements, "all_reduce", "half", seq_split)
        measured = self._measured_group(gpus, per_node)
        table = None if gpus <= 1 else self._tables.grid("custom_allreduce_perf", (measured,))
        bandwidth = self._system.p2p_bandwidth(gpus)
        sol_ms = 2.0 * 2.0 / gpus * (gpus - 1) / bandwidth * 1000.0
        return self._collective(name, scale_factor, table, gpus, measured, elements, seq_split, sol_ms)

    def _measured_group(self, gpus: int, per_node: int) -> int:
        # The measured group that stands for one of `gpus`: beyond a node the largest that is not larger; inside, where
        # a gap between measured groups is a miss, the group itself or else the largest of all.
        groups = [group for (group,) in self._tables.slices("custom_allreduce_perf")]
        if gpus > per_node:
            return max((group for group in groups if group <= gpus), default=gpus)
        return min(gpus, max(groups, default=gpus))

    def _library(
        self, name: str, scale_factor: float, gpus: int, elements: float, operation: str, dtype: str, seq_split: int = 1
    ) -> compiled.Operator:
        groups = {
            key[2]: source
            for source in ("oneccl_perf", "nccl_perf")
            for key in self._tables.slices(source)
            if key[:2] == (dtype, operation)
        }
        measured = min(gpus, max(groups, default=gpus))
        table = self._tables.grid(groups[measured], (dtype, operation, measured)) if measured in groups else None
        passes = 2.0 if operation == "all_reduce" else 1.0
        sol_ms = passes * COMM_BYTES[dtype] * (gpus - 1) / gpus / self._system.p2p_bandwidth(gpus) * 1000.0
        return self._collective(name, scale_factor, table, gpus, measured, elements, seq_split, sol_ms, is_library=True)

    def _collective(
        self,
        name: str,
        scale_factor: float,
        table: Any,
        gpus: int,
        measured: int,
        elements: float,
        seq_split: int,
        sol_ms_per_element: float,
        *,
        is_library: bool = False,
    ) -> compiled.Operator:
        beyond = 1.0
        if gpus > measured:
            bandwidth = self._system.p2p_bandwidth
            beyond = (gpus - 1) / gpus * measured / max(measured - 1, 1) * bandwidth(measured) / bandwidth(gpus)
        return compiled.Collective(
            name,
            scale_factor,
            self._hardware,
            table,
            elements,
            seq_split,
            beyond,
            sol_ms_per_element,
            gpus <= 1,
            is_library,
        )

    def _p2p(self, op: ops.P2P) -> compiled.Operator:
        return compiled.PipelineTransfer(
            op.name, op.scale_factor, self._hardware, op.pp_size, op.hidden_size, op.seq_split
        )

    # --- experts ---

    def _moe(self, op: ops.Moe) -> compiled.Operator:
        mode = MODES[op.quant_mode]
        sizes = (op.topk, op.num_experts, op.hidden_size, op.inter_size, op.moe_tp_size, op.moe_ep_size)
        shape = {
            "topk": op.topk,
            "num_experts": op.num_experts,
            "hidden_size": op.hidden_size,
            "inter_size": op.inter_size,
            "tp_size": op.moe_tp_size,
            "ep_size": op.moe_ep_size,
            "projections": 3 if op.is_gated else 2,
            "flops_per_s": self._flops(op.quant_mode),
            "bytes_per_element": mode.bytes_per_element,
        }
        kernel = op.moe_kernel_source
        table = low_latency = None
        if op.quant_mode == "nvfp4" and op.is_gated and kernel in (None, LOW_LATENCY_KERNEL):
            low_latency = self._experts("moe_perf_low_latency", (op.quant_mode,), op, sizes)
        if kernel is None:
            table = self._experts("moe_perf", (op.quant_mode,), op, sizes)
        elif kernel != LOW_LATENCY_KERNEL:
            table = self._experts("moe_perf_by_kernel", (kernel, op.quant_mode), op, sizes)
        return compiled.Moe(
            op.name,
            op.scale_factor,
            self._hardware,
            table,
            low_latency,
            _LOW_LATENCY_TOKENS,
            shape,
            op.attention_dp_size,
        )

    def _experts(self, table: str, part: tuple[str, ...], op: ops.Moe, sizes: tuple[int, ...]) -> Any:
        # `part` begins the keys of the part of the table that the distribution is looked for in.
        at = len(part)
        distributions = {key[at] for key in self._tables.slices(table) if key[:at] == part}
        requested = op.workload_distribution
        distribution = requested if requested in distributions else "uniform"
        return self._tables.grid(table, (*part, distribution, *sizes))

    def _moedispatch(self, op: ops.MoeDispatch) -> compiled.Operator:
        terms = {"vllm": self._vllm_dispatch, "sglang": self._sglang_dispatch, "trtllm": self._trtllm_dispatch}
        return compiled.Sum(op.name, op.scale_factor, self._hardware, terms[op.backend](op))

    def _exchange(self, op: ops.MoeDispatch, gpus: int, elements: float, *, gather: bool) -> compiled.Operator:
        operation = "all_gather" if gather else "reduce_scatter"
        return self._library(f"{op.name} {operation}", 1.0, gpus, elements, operation, op.comm_quant)

    def _vllm_dispatch(self, op: ops.MoeDispatch) -> list[compiled.Operator]:
        group, dp = op.moe_tp_size * op.moe_ep_size, op.attention_dp_size
        terms = []
        if max(group // dp, 1) > 1 and not (op.pre_dispatch and op.attn_ar_modeled):
            terms.append(self._all_reduce(f"{op.name} all_reduce", 1.0, group, op.hidden_size))
        if dp > 1:
            terms.append(self._exchange(op, group, op.hidden_size * dp, gather=op.pre_dispatch))
        return terms

    def _sglang_dispatch(self, op: ops.MoeDispatch) -> list[compiled.Operator]:
        group, dp, hidden = op.moe_tp_size * op.moe_ep_size, op.attention_dp_size, op.hidden_size
        attention_tp = max(group // dp, 1)
        if attention_tp > 1 and dp > 1:
            inside = self._exchange(op, attention_tp, hidden, gather=not op.pre_dispatch)
            across = self._exchange(op, group, hidden * dp, gather=op.pre_dispatch)
            return [inside, across] if op.pre_dispatch else [across, inside]
        if op.attn_cp_size > 1:
            if op.is_context:
                return [self._exchange(op, group, hidden, gather=op.pre_dispatch)]
            return [] if op.pre_dispatch else [self._all_reduce(f"{op.name} all_reduce", 1.0, group, hidden)]
        if attention_tp > 1:
            return [self._all_reduce(f"{op.name} all_reduce", 1.0, group, hidden)]
        return [self._exchange(op, group, hidden * dp, gather=op.pre_dispatch)] if dp > 1 else []

    def _trtllm_dispatch(self, op: ops.MoeDispatch) -> list[compiled.Operator]:
        group, dp, hidden = op.moe_tp_size * op.moe_ep_size, op.attention_dp_size, op.hidden_size
        attention_tp = max(group // dp, 1)
        if self._system.sm_version != 100:
            if attention_tp > 1:
                return [self._all_reduce(f"{op.name} all_reduce", 1.0, group, hidden)]
            return [self._exchange(op, group, hidden * dp, gather=op.pre_dispatch)] if dp > 1 else []
        if dp > 1 and op.moe_tp_size == 1 and self._system.gpus_per_node >= _ALL_TO_ALL_NODE:
            # A kernel of its own for which there is no public table.
            return [self._collective(f"{op.name} alltoall", 1.0, None, group, group, hidden * dp, 1, 0.0)]
        if dp > 1:
            # Blackwell gathers quantised activations.
            gathered = {"nvfp4": hidden * (1 / 4 + 1 / 32), "fp8": hidden / 2, "fp8_block": hidden / 2}
            elements = gathered.get(op.moe_quant, hidden) if op.pre_dispatch else hidden
            return [self._exchange(op, group, elements * dp, gather=op.pre_dispatch)]
        return [self._all_reduce(f"{op.name} all_reduce", 1.0, group, hidden)] if attention_tp > 1 else []

    # --- composites ---

    def _overlap(self, op: ops.Overlap) -> compiled.Operator:
        return compiled.Overlap(op.name, 1.0, self._hardware, self._all(op.group_a), self._all(op.group_b))

    def _fallback(self, op: ops.Fallback) -> compiled.Operator:
        return compiled.Fallback(op.name, 1.0, self._hardware, self.compile(op.primary), self._all(op.fallback))
