"""What prices the passes of a role: the canonical configuration of an estimator, or a formula.

Source: predict-recommend.md sections 2.5 and 4 (step 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.prediction.config import DefaultTiming, PredictConfig
from fpmsdk.prediction.config.engine import MODEL_CONTROLS
from fpmsdk.prediction.config.timing import POLICY_FIELDS, QUANTISATION_FIELDS


def timing_of(config: PredictConfig, role: str) -> dict[str, Any]:
    """The estimator's configuration of a role, or `{type: fixed | polynomial, ...}`."""
    timing = config.roles[role].timing
    return timing_config(config, role) if isinstance(timing, DefaultTiming) else timing.model_dump()


def timing_config(config: PredictConfig, role: str = "aggregated") -> dict[str, Any]:
    """The canonical configuration that describes a role to an estimator.

    Fields that are left out have the defaults of `ForwardPassPerfModelConfig`.
    """
    engine, worker = config.engine, config.roles[role]
    sizes, timing = worker.parallelism, worker.timing
    has_experts = sizes.moe_tensor * sizes.moe_expert > 1
    given: dict[str, Any] = {
        "model": engine.model,
        "system": worker.hardware or engine.hardware,
        "backend": engine.backend,
        "backend_version": engine.backend_version,
        "worker_type": role,
        "tp": sizes.tensor,
        "pp": sizes.pipeline,
        "attention_dp": sizes.attention_data,
        "dcp": sizes.decode_context,
        "cp_size": sizes.prefill_context,
        "moe_tp_size": sizes.moe_tensor if has_experts else None,
        "moe_ep_size": sizes.moe_expert if has_experts else None,
        "fpm_profile": engine.fpm_profile,
        "nextn": engine.nextn or None,
        "decoder_replay": engine.decoder_replay or None,
        **{name: getattr(engine, name) for name in MODEL_CONTROLS},
        **{name: getattr(engine, name) for name in POLICY_FIELDS},
    }
    if isinstance(timing, DefaultTiming):
        given |= timing.given_policy()
        given |= {name: value for name in QUANTISATION_FIELDS if (value := getattr(timing, name)) is not None}
        if timing.fpm_parquet_path is not None:
            given["estimator_config"] = _with_table(given["estimator_config"] or {}, timing.fpm_parquet_path)
    given["estimator_config"] = _counting(given)
    if given["systems_paths"] == "default":
        given["systems_paths"] = ["default"]
    if isinstance(given["transfer_policy"], str):
        given["transfer_policy"] = [given["transfer_policy"]]
    return {name: value for name, value in given.items() if value is not None}


def canonical_timing(timing: Mapping[str, Any]) -> dict[str, Any]:
    """The canonical form of an estimator's configuration. Raises `ConfigError` as a model does."""
    from fpmsdk.perfmodel.model import ForwardPassPerfModel  # estimators load where one is needed

    return ForwardPassPerfModel.normalize_config(timing)


def _with_table(estimators: dict[str, Any], path: str) -> dict[str, Any]:
    interpolation = estimators.get("fpm_interpolation") or {}
    return estimators | {"fpm_interpolation": interpolation | {"fpm_parquet_path": path}}


def _counting(given: dict[str, Any]) -> dict[str, Any] | None:
    """Estimator settings under which a measured table counts what it is asked, unless they say that it does not."""
    estimators: dict[str, Any] | None = given["estimator_config"]
    interpolation = (estimators or {}).get("fpm_interpolation") or {}
    is_strict = given["estimation_mode"] == "fpm_interpolation" and given["fallback_policy"] in (None, "deny")
    if estimators is None or not is_strict or interpolation.get("method") != "direct" or "state_snapshot" in estimators:
        return estimators
    return estimators | {"fpm_interpolation": {"collect_coverage": True} | interpolation}
