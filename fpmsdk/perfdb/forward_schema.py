"""Format of a whole-forward pair: columns of the table, required sidecar values, identity of a cell.

Names and values only; reading is in `forward_pair.py`, grouping in `forward_cells.py`.
Source: fpm-interpolation.md section 1.
"""

from typing import Any

TABLE_FILE = "fpm_forward_perf.parquet"
SIDECAR_SUFFIX = ".metadata.json"

SCHEMA_NAME = "aic_fpm_forward_perf"
SCHEMA_VERSIONS = (6, 7)
COORDINATE_SYSTEM = "iteration_totals_balanced_v1"
PARTITION_POLICY = "balanced_v1"
SINGLE_SAMPLE = "dynamo_native_single_sample_v1"
PER_ROW_SAMPLES = "per_row_single_sample_or_median_of_3"
# With per-row policies: samples behind the latency of a row of each policy.
REPEATS_OF_POLICY = {SINGLE_SAMPLE: 1, "kvwarm_median_of_3": 3}

PHASES = ("prefill", "decode")
REAL_KV, FAKE_KV = "real_kv", "fake_fallback"

NAME_COLUMNS = ("cell_id", "model_path", "system", "backend", "backend_version", "weight_quantization")
MODE_COLUMNS = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "kv_cache_dtype")
PARALLEL_COLUMNS = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp")
KNOB_COLUMNS = ("moe_backend", "attention_backend")
FLAG_COLUMNS = ("enable_wideep", "enable_eplb")
EXECUTION_COLUMNS = ("model_config_sha256", "execution_profile", "engram_residency", "input_modality")
COORDINATE_COLUMNS = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")

# What a table of schema 6, which has no execution columns, stands for.
LEGACY_EXECUTION = ("", "full", "none", "text")

IDENTITY_COLUMNS = (*MODE_COLUMNS, *PARALLEL_COLUMNS, *KNOB_COLUMNS, *FLAG_COLUMNS)
TEXT_COLUMNS = (*NAME_COLUMNS, *MODE_COLUMNS, *KNOB_COLUMNS, "workload_kind", "partition_policy")
UNRECORDED = {"fmha": "fmha_quant_mode", "comm": "comm_quant_mode"}


# Optional sidecar key: where latency changes its course, so that points on both sides must not be blended. Points up to
# a knee are on one side: the largest captured number of prefill tokens, the window of attention per request.
KNEE_AXES = ("total_prefill_tokens", "kv_tokens_per_request")


def required_columns(schema_version: int) -> tuple[str, ...]:
    """Columns that a table of this version must have, in file order.

    >>> len(required_columns(6)), len(required_columns(7))
    (27, 31)
    """
    execution = EXECUTION_COLUMNS if schema_version >= 7 else ()
    return (
        *NAME_COLUMNS,
        *IDENTITY_COLUMNS,
        *execution,
        "workload_kind",
        *COORDINATE_COLUMNS,
        "partition_policy",
        "latency_ms",
    )


def sidecar_path(table_path: str) -> str:
    """Path of the sidecar that lies beside a table.

    >>> sidecar_path("/data/fpm_forward_perf.parquet")
    '/data/fpm_forward_perf.metadata.json'
    """
    return table_path.removesuffix(".parquet") + SIDECAR_SUFFIX


def is_whole(value: Any) -> bool:
    """Whether a JSON number is an integer, also when written as 6.0."""
    return value.is_integer() if isinstance(value, float) else type(value) is int
