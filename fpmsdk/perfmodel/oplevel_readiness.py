"""Whether a database has the tables that a graph reads, asked before a model is built on it.

A table without a row fails here, so that another root or kind of model can be tried; a shape that its rows do not cover
fails when it is priced. Source: fpm-model.md section 4.
"""

from fpmsdk.errors import PerfDataNotAvailableError
from fpmsdk.opgraph import EngineSpec, ops
from fpmsdk.perfdb import LOW_LATENCY_KERNEL, SystemSpec
from fpmsdk.perfmodel.oplevel_operators import mode_flops_per_s
from fpmsdk.perfmodel.oplevel_tables import OpTables

_TABLE: dict[type[ops.Op], str] = {
    ops.Gemm: "gemm_perf",
    ops.ContextAttention: "context_attention_perf",
    ops.GenerationAttention: "generation_attention_perf",
    ops.ContextMla: "context_mla_perf",
    ops.GenerationMla: "generation_mla_perf",
    ops.MlaModuleContext: "mla_context_module_perf",
    ops.MlaModuleGeneration: "mla_generation_module_perf",
    ops.MlaBmm: "mla_bmm_perf",
    ops.Moe: "moe_perf",
}


def require_tables(spec: EngineSpec, tables: OpTables, worker_type: str, system: SystemSpec) -> None:
    """Raise `PerfDataNotAvailableError` for the first table that the phases of a worker read and that has no row."""
    records = () if worker_type == "decode" else spec.context_ops
    records += () if worker_type == "prefill" else spec.generation_ops
    for op in records:
        _require(op, tables, system)


def _require(op: ops.Op, tables: OpTables, system: SystemSpec) -> None:
    if isinstance(op, ops.Overlap):
        for part in (*op.group_a, *op.group_b):
            _require(part, tables, system)
    elif isinstance(op, ops.Fallback):
        try:
            _require(op.primary, tables, system)
        except PerfDataNotAvailableError:
            for part in op.fallback:
                _require(part, tables, system)
    else:
        for table in _tables(op, system):
            tables.require(table)
        if isinstance(op, ops.Moe) and op.moe_kernel_source is not None:
            _require_kernel(op.moe_kernel_source, tables)


def _tables(op: ops.Op, system: SystemSpec) -> tuple[str, ...]:
    if isinstance(op, ops.Gemm | ops.Moe) and not mode_flops_per_s(system, op.quant_mode):
        # Pricing names the dtype that the system lacks, which no table would bring.
        return ()
    if isinstance(op, ops.Moe) and op.moe_kernel_source is not None:
        return ("moe_perf_low_latency" if op.moe_kernel_source == LOW_LATENCY_KERNEL else "moe_perf_by_kernel",)
    if isinstance(op, ops.CustomAllReduce):
        # On larger nodes the library takes over.
        return ("custom_allreduce_perf",) if op.tp_size > 1 and system.gpus_per_node < 72 else ()
    if isinstance(op, ops.Gemm) and op.quant_mode == "fp8_static":
        scales = ("computescale_perf", "scale_matrix_perf") if op.low_precision_input else ("computescale_perf",)
        return ("gemm_perf", *scales)
    return (_TABLE[type(op)],) if type(op) in _TABLE else ()


def _require_kernel(kernel: str, tables: OpTables) -> None:
    measured = {key[0] for key in tables.slices("moe_perf_by_kernel")}
    if kernel not in measured:
        raise PerfDataNotAvailableError(
            f"perf database error: no experts were measured with moe_kernel_source {kernel!r}; "
            f"measured: {', '.join(sorted(measured))}"
        )
