"""The tables of the performance database: which columns form the key and the grid axes, and which rows count.

A new table format is one entry of `SCHEMAS`. How rows become slices is in `slices`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import PerfDataNotAvailableError
from fpmsdk.perfdb.parquet import Integers, Rows, Text

# Attention heads of the unsharded model, by checkpoint of the fused MLA modules.
NATIVE_HEADS = {
    "deepseek-ai/DeepSeek-V3": 128,
    "deepseek-ai/DeepSeek-R1": 128,
    "nvidia/DeepSeek-V3.1-NVFP4": 128,
    "moonshotai/Kimi-K3": 96,
}
LOW_LATENCY_KERNEL = "moe_torch_flow_min_latency"
# Kernels that run a dtype in their own way are a dtype of their own.
KERNEL_DTYPES = {
    ("w4a8_mxfp4_mxfp8", "sglang_mxfp4_flashinfer_trtllm_moe"): "w4a8_mxfp4_mxfp8_trtllm",
    ("w4a16_mxfp4", "sglang_flashinfer_cutlass_moe"): "w4a16_mxfp4_cutlass",
}

Values = TypeVar("Values", Integers, Text)


class Column(NamedTuple, Generic[Values]):
    """One key or axis: the file columns it reads and how it follows from them."""

    required: tuple[str, ...]
    derive: Callable[[Rows], Values]
    optional: tuple[str, ...] = ()


Key = tuple[Column[Integers] | Column[Text], ...]


class TableSchema(NamedTuple):
    """One table: its file, its key, its axes from outer to inner, and the rows that count.

    `admit` returns a mask of usable rows; `reads` names the columns it needs beyond key and axes.
    """

    file: str
    key: Key
    axes: tuple[Column[Integers], ...]
    admit: Callable[[Rows, bool], NDArray[np.bool_]] | None = None
    reads: tuple[str, ...] = ()
    library: str | None = None
    allows_zero: bool = False

    def required(self) -> tuple[str, ...]:
        """Columns without which the file cannot be read."""
        columns = [name for column in (*self.key, *self.axes) for name in column.required]
        return tuple(dict.fromkeys([*columns, "latency"]))

    def optional(self) -> tuple[str, ...]:
        """Columns that are used when there."""
        columns = [name for column in (*self.key, *self.axes) for name in column.optional]
        return tuple(dict.fromkeys([*columns, *self.reads, "kernel_source", "power"]))


def _text(name: str) -> Column[Text]:
    return Column((name,), lambda rows: rows.text(name))


def _integer(name: str) -> Column[Integers]:
    return Column((name,), lambda rows: rows.integers(name))


def _integers(*names: str) -> tuple[Column[Integers], ...]:
    return tuple(map(_integer, names))


def _window(rows: Rows) -> Integers:
    return rows.integers("window_size") if "window_size" in rows else np.zeros(rows.count, np.int64)


def _kv_heads(rows: Rows) -> Integers:
    kv_heads = rows.integers("num_key_value_heads")
    return np.where(kv_heads == rows.integers("num_heads"), 0, kv_heads)


def _lane(rows: Rows) -> Text:
    if "kernel_source" not in rows:
        return Text(np.zeros(rows.count, np.int32), ("default",))
    lanes = rows.text("kernel_source")
    return Text(lanes.codes, tuple(name or "default" for name in lanes.values))


def _native_heads(rows: Rows) -> Integers:
    models = rows.text("model")
    unknown = [models.values[code] for code in np.unique(models.codes) if models.values[code] not in NATIVE_HEADS]
    if unknown:
        raise PerfDataNotAvailableError(
            f"perf database error: {rows.path}: unknown models {unknown}; known: {sorted(NATIVE_HEADS)}"
        )
    return np.array([NATIVE_HEADS.get(name, 0) for name in models.values], np.int64)[models.codes]


def _moe_dtype(rows: Rows) -> Text:
    dtypes = rows.text("moe_dtype")
    if "kernel_source" not in rows:
        return dtypes
    kernels = rows.text("kernel_source")
    codes, values = dtypes.codes, dtypes.values
    for (dtype, kernel), replacement in KERNEL_DTYPES.items():
        if dtype in dtypes.values and kernel in kernels.values:
            hit = (dtypes.codes == dtypes.values.index(dtype)) & (kernels.codes == kernels.values.index(kernel))
            codes = np.where(hit, len(values), codes).astype(np.int32)
            values = (*values, replacement)
    return Text(codes, values)


def _is(column: Text, holds: Callable[[str], bool]) -> NDArray[np.bool_]:
    return np.array([holds(value) for value in column.values], np.bool_)[column.codes]


def _served_gemm(rows: Rows, _eager: bool) -> NDArray[np.bool_]:
    return ~_is(rows.text("gemm_dtype"), lambda dtype: dtype in ("awq", "gptq"))


def _captured(rows: Rows, eager: bool) -> NDArray[np.bool_]:
    keep = np.ones(rows.count, np.bool_)
    if not eager:
        for name in ("kernel_source", "backend"):
            if name in rows:
                keep &= ~_is(rows.text(name), lambda value: value.endswith("_eager"))
    return keep


def _low_latency(rows: Rows, _eager: bool) -> NDArray[np.bool_]:
    if "kernel_source" not in rows:
        return np.zeros(rows.count, np.bool_)
    return _is(rows.text("kernel_source"), lambda kernel: kernel == LOW_LATENCY_KERNEL)


def _throughput(rows: Rows, eager: bool) -> NDArray[np.bool_]:
    keep = ~_low_latency(rows, eager)
    # Measured, but not what the framework would run by itself.
    return keep & rows.flags("default_eligible") if "default_eligible" in rows else keep


_LANE = Column((), _lane, ("kernel_source",))
_KV_HEADS = Column(("num_key_value_heads", "num_heads"), _kv_heads)
_WINDOW = Column((), _window, ("window_size",))
_NATIVE_HEADS = Column(("model",), _native_heads)
_KV_LENGTH = Column(("isl", "step"), lambda rows: np.add(rows.integers("isl"), rows.integers("step"), dtype=np.int64))
_PREFILL = _integers("num_heads", "isl", "batch_size")
_DECODE = (*_integers("num_heads", "batch_size"), _KV_LENGTH)
_MOE_KEY: Key = (
    Column(("moe_dtype",), _moe_dtype, ("kernel_source",)),
    _text("distribution"),
    *_integers("topk", "num_experts", "hidden_size", "inter_size", "moe_tp_size", "moe_ep_size"),
)
_COLLECTIVE_KEY: Key = (_text("nccl_dtype"), _text("op_name"), _integer("num_gpus"))

SCHEMAS: dict[str, TableSchema] = {
    "gemm_perf": TableSchema("gemm_perf.parquet", (_text("gemm_dtype"),), _integers("m", "n", "k"), admit=_served_gemm),
    # The difference of two timings: zero where quantizing the scale costs nothing measurable.
    "computescale_perf": TableSchema(
        "computescale_perf.parquet", (_text("quant_dtype"),), _integers("m", "k"), allows_zero=True
    ),
    "scale_matrix_perf": TableSchema("scale_matrix_perf.parquet", (_text("quant_dtype"),), _integers("m", "k")),
    "context_attention_perf": TableSchema(
        "context_attention_perf.parquet",
        (_LANE, _text("attn_dtype"), _text("kv_cache_dtype"), _KV_HEADS, _integer("head_dim"), _WINDOW),
        _PREFILL,
    ),
    "generation_attention_perf": TableSchema(
        "generation_attention_perf.parquet",
        (_LANE, _text("kv_cache_dtype"), _KV_HEADS, _integer("head_dim"), _WINDOW),
        _DECODE,
    ),
    "context_mla_perf": TableSchema(
        "context_mla_perf.parquet", (_text("mla_dtype"), _text("kv_cache_dtype")), _PREFILL
    ),
    "generation_mla_perf": TableSchema("generation_mla_perf.parquet", (_text("kv_cache_dtype"),), _DECODE),
    "mla_context_module_perf": TableSchema(
        "mla_context_module_perf.parquet",
        (_text("mla_dtype"), _text("kv_cache_dtype"), _text("gemm_type"), _NATIVE_HEADS),
        _PREFILL,
    ),
    "mla_generation_module_perf": TableSchema(
        "mla_generation_module_perf.parquet",
        (_text("kv_cache_dtype"), _text("gemm_type"), _NATIVE_HEADS),
        _DECODE,
    ),
    "mla_bmm_perf": TableSchema(
        "mla_bmm_perf.parquet",
        (_text("bmm_dtype"), _text("op_name"), _integer("num_heads")),
        _integers("num_tokens"),
    ),
    "moe_perf": TableSchema(
        "moe_perf.parquet", _MOE_KEY, _integers("num_tokens"), admit=_throughput, reads=("default_eligible",)
    ),
    # The same rows by the kernel they were measured with, those included that a framework would not choose by itself.
    "moe_perf_by_kernel": TableSchema("moe_perf.parquet", (_LANE, *_MOE_KEY), _integers("num_tokens")),
    "moe_perf_low_latency": TableSchema("moe_perf.parquet", _MOE_KEY, _integers("num_tokens"), admit=_low_latency),
    "custom_allreduce_perf": TableSchema(
        "custom_allreduce_perf.parquet",
        _integers("num_gpus"),
        _integers("message_size"),
        admit=_captured,
        reads=("backend",),
    ),
    "nccl_perf": TableSchema("nccl_perf.parquet", _COLLECTIVE_KEY, _integers("message_size"), library="nccl"),
    "oneccl_perf": TableSchema("oneccl_perf.parquet", _COLLECTIVE_KEY, _integers("message_size"), library="oneccl"),
}
