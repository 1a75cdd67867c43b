"""Flat legacy engine records and flat tuning options, and the canonical configuration that they stand for.

Source: fpm-model.md section 2.4.
"""

import math
from collections.abc import Mapping
from typing import Any, TypedDict

from fpmsdk.config.estimator import ESTIMATOR_CONFIG, U32, USIZE
from fpmsdk.config.fields import BACKEND, CONFIG, DATABASE_MODE, OPTIONAL_TEXT, OPTIONAL_U32, WORKER_TYPE
from fpmsdk.config.learned_source import FROM_LEARNED
from fpmsdk.config.parse import parse_document
from fpmsdk.config.request import name_weights
from fpmsdk.config.schema import (
    Anything,
    Choice,
    Field,
    Flag,
    FreeObject,
    ListOf,
    Nullable,
    Number,
    Record,
    SchemaFault,
    Text,
    Weight,
)
from fpmsdk.config.validate import validate
from fpmsdk.config.validate_estimator import validate_estimator
from fpmsdk.errors import ConfigError


class ForwardPassPerfOptions(TypedDict, total=False):
    """Flat tuning options of older releases; only the fields given travel.

    Source: fpm-model.md section 2.4.

    >>> ForwardPassPerfOptions(max_observations=128)
    {'max_observations': 128}
    """

    correction_mode: str
    max_observations: int
    min_observations: int
    min_faster_correction_factor: float | None
    max_slower_correction_factor: float | None
    bucket_count: int
    bucket_shape: tuple[int, int] | None
    regression_ridge_scale: float
    max_num_tokens: int
    max_batch_size: int
    max_kv_tokens: int
    regression_attention_kv_weight: float | str
    regression_prefill_attention_pair_weight: float | str
    regression_ffn_token_weight: float | str


DTYPE = Nullable(
    Choice(
        (
            *("bfloat16", "float16", "fp8", "fp8_static", "fp8_block", "nvfp4", "int8", "int4", "w4afp8"),
            *("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "w4a8_mxfp4_mxfp8_trtllm", "w4a16_mxfp4_cutlass"),
            *("w4a16_nvfp4", "w4a16_mxfp4_humming"),
        )
    )
)


class _TextMap(FreeObject):
    """An object of strings."""

    def read(self, value: Any, path: str) -> dict[str, str]:
        return {key: Text().read(item, f"{path}.{key}") for key, item in super().read(value, path).items()}


RECORD = Record(
    Field("schema_version", U32),
    Field("model_name", Text()),
    Field("system_name", Text()),
    Field("backend", BACKEND),
    Field("backend_version", OPTIONAL_TEXT, None),
    Field("tp_size", U32),
    Field("pp_size", U32),
    Field("attention_dp_size", OPTIONAL_U32, None),
    Field("moe_tp_size", OPTIONAL_U32, None),
    Field("moe_ep_size", OPTIONAL_U32, None),
    Field("cp_size", OPTIONAL_U32, None),
    Field("nextn", Anything(), None),
    Field("kv_block_size", OPTIONAL_U32, None),
    Field("decoder_replay", Flag(), False),
    Field("forward_model", OPTIONAL_TEXT, None),
    Field("fpm_parquet_path", OPTIONAL_TEXT, None),
    Field("database_mode", DATABASE_MODE, "SILICON"),
    Field("transfer_policy", Nullable(ListOf(Text())), None),
    Field("systems_path", OPTIONAL_TEXT, None),
    Field("weight_dtype", DTYPE, None),
    Field("moe_dtype", DTYPE, None),
    Field("activation_dtype", DTYPE, None),
    Field("kv_cache_dtype", DTYPE, None),
    Field("moe_kernel_source", OPTIONAL_TEXT, None),
    Field("enable_shared_layer", Nullable(Flag()), None),
    Field("strict_provenance", Flag(), False),
    Field("extra", _TextMap(), {}),
    open=True,
)

OPTIONS = Record(
    Field("correction_mode", Choice(("auto", "fixed", "dynamic_local", "hybrid")), "auto"),
    Field("max_observations", USIZE, 64),
    Field("min_observations", USIZE, 5),
    Field("min_faster_correction_factor", Nullable(Number()), 0.5),
    Field("max_slower_correction_factor", Nullable(Number()), 2.0),
    Field("bucket_count", USIZE, 16),
    Field("bucket_shape", Nullable(ListOf(USIZE, length=2)), None),
    Field("regression_ridge_scale", Number(), 1e-9),
    Field("max_num_tokens", U32, 8192),
    Field("max_batch_size", U32, 512),
    Field("max_kv_tokens", U32, 2_000_000),
    Field("regression_attention_kv_weight", Weight(), 1.0),
    Field("regression_prefill_attention_pair_weight", Weight(), 1.0),
    Field("regression_ffn_token_weight", Weight(), 1.0),
)


def migrate_legacy_config(
    record: Mapping[str, Any],
    worker_type: str,
    options: Mapping[str, Any] | None = None,
    *,
    allow_regression: bool = False,
) -> dict[str, Any]:
    """Return the canonical form of a legacy record: validated, but unresolved (the method stays `auto`).

    Parameters and errors as `ForwardPassPerfModelConfig.from_legacy_engine_config`.
    """
    engine = _read(RECORD, record, "")
    _check_parquet(engine)
    tuning = OPTIONS.read({}) if options is None else _read_options(options)
    estimator = _estimator_document(tuning, engine["fpm_parquet_path"])
    validate_estimator(ESTIMATOR_CONFIG.read(estimator))
    try:
        role = WORKER_TYPE.read(worker_type, "")
    except SchemaFault as fault:
        raise ConfigError(f"invalid worker_type: {fault}", "worker_type") from None
    document = {
        **_engine_document(engine),
        "worker_type": role,
        "estimation_mode": _estimation_mode(engine["forward_model"]),
        "fallback_policy": "regression" if allow_regression else "deny",
        "estimator_config": estimator,
    }
    canonical = parse_document(document)
    validate(canonical)
    return CONFIG.write(canonical)


def from_learned_config(
    worker_type: str, source_sha256: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the canonical form of the placeholder of a model that is built from an artifact alone.

    Parameters
    ----------
    worker_type, source_sha256: role in the artifact, and digest of its bytes.
    options: flat tuning options, as of `ForwardPassPerfOptions`.

    Raises
    ------
    ConfigError: an option is unknown, ill-typed or out of its range.

    Source: snapshot.md section 4.

    Example
    -------
    >>> config = from_learned_config("decode", "0" * 64, {"max_observations": 128})
    >>> config["model"], config["estimator_config"]["correction"]["mode"]
    ('from_learned', 'hybrid')
    """
    tuning = OPTIONS.read({}) if options is None else _read_options(options)
    estimator = _estimator_document(tuning, None)
    if tuning["correction_mode"] == "auto":
        estimator["correction"]["mode"] = "hybrid"
    estimator["fpm_interpolation"]["method"] = "sol"
    estimator["fpm_learned"] = {
        "artifact_path": FROM_LEARNED,
        "source_sha256": source_sha256,
        "adaptation": "frozen",
    }
    canonical = parse_document(
        {
            "model": FROM_LEARNED,
            "system": FROM_LEARNED,
            "backend": "vllm",
            "worker_type": worker_type,
            "estimation_mode": "fpm_learned",
            "fallback_policy": "deny",
            "estimator_config": estimator,
        }
    )
    validate(canonical)
    return CONFIG.write(canonical)


def _read(record: Record, value: Any, prefix: str) -> dict[str, Any]:
    try:
        return record.read(value)
    except SchemaFault as fault:
        raise ConfigError(f"{prefix}{fault.reason}", fault.path) from None


def _read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    written = name_weights(options) if isinstance(options, Mapping) else options
    return _read(OPTIONS, written, "invalid engine config: invalid legacy options: ")


def _check_parquet(engine: Mapping[str, Any]) -> None:
    parquet = engine["fpm_parquet_path"]
    if parquet == "":
        raise ConfigError("invalid engine config: fpm_parquet_path must not be empty", "fpm_parquet_path")
    if parquet is not None and engine["forward_model"] != "fpm":
        raise ConfigError("invalid engine config: fpm_parquet_path needs forward_model fpm", "fpm_parquet_path")


def _estimation_mode(forward_model: str | None) -> str:
    if forward_model not in (None, "op_level", "fpm"):
        raise ConfigError(f"unknown legacy forward_model {forward_model!r}, expected op_level or fpm", "forward_model")
    return "fpm_interpolation" if forward_model == "fpm" else "op_level"


def _engine_document(engine: Mapping[str, Any]) -> dict[str, Any]:
    nextn = engine["nextn"]
    kept = (
        *(
            "backend",
            "backend_version",
            "moe_tp_size",
            "moe_ep_size",
            "cp_size",
            "kv_block_size",
            "decoder_replay",
        ),
        *(
            "database_mode",
            "transfer_policy",
            "moe_kernel_source",
            "enable_shared_layer",
            "strict_provenance",
        ),
    )
    return {
        **{name: engine[name] for name in kept},
        "model": engine["model_name"],
        "system": engine["system_name"],
        "tp": engine["tp_size"],
        "pp": engine["pp_size"],
        "attention_dp": 1 if engine["attention_dp_size"] is None else engine["attention_dp_size"],
        "nextn": nextn if _fits(U32, nextn) else 0,
        "gemm_quant_mode": engine["weight_dtype"],
        "moe_quant_mode": engine["moe_dtype"],
        "fmha_quant_mode": engine["activation_dtype"],
        "kvcache_quant_mode": engine["kv_cache_dtype"],
        "systems_paths": [] if engine["systems_path"] is None else [engine["systems_path"]],
    }


def _fits(kind: Any, value: Any) -> bool:
    try:
        kind.read(value, "")
    except SchemaFault:
        return False
    return True


def _estimator_document(tuning: Mapping[str, Any], parquet: str | None) -> dict[str, Any]:
    sampling = {"bins_per_axis": _bins(tuning), "max_observations": tuning["max_observations"]}
    return {
        "features": {
            name: Weight().write(tuning[f"regression_{name}"])
            for name in ("attention_kv_weight", "prefill_attention_pair_weight", "ffn_token_weight")
        },
        "fpm_interpolation": {"fpm_parquet_path": parquet},
        "fpm_regression": {
            "sampling": sampling,
            "min_observations": tuning["min_observations"],
            "fit": {"singular_ridge_scale": tuning["regression_ridge_scale"]},
        },
        "correction": {
            "mode": tuning["correction_mode"],
            "sampling": sampling,
            "min_observations": tuning["min_observations"],
            "factor_bounds": {
                "min": tuning["min_faster_correction_factor"],
                "max": tuning["max_slower_correction_factor"],
            },
            **{name: tuning[name] for name in ("max_num_tokens", "max_batch_size", "max_kv_tokens")},
        },
    }


def _bins(tuning: Mapping[str, Any]) -> list[int]:
    if tuning["bucket_shape"] is not None:
        shape: list[int] = tuning["bucket_shape"]
        return shape
    count = tuning["bucket_count"]
    side = math.isqrt(count)
    if count < 1 or side * side != count:
        raise ConfigError(
            f"invalid engine config: bucket_count must be a positive perfect square, found {count}",
            "bucket_count",
        )
    return [side, side]
