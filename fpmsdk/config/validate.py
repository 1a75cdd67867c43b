"""Rules of the canonical configuration that go beyond types: ranges, pairs, exclusions.

Faults are reported one at a time in the order of fpm-model.md section 3. Nothing here opens a file; systems
paths are only checked for existence.
"""

import math
import re
from pathlib import Path
from typing import Any

from fpmsdk.config.estimator import DEFAULT_AXES, SELECTOR
from fpmsdk.errors import ConfigError

TRANSFER_KINDS = ("xshape", "xquant", "xprofile", "xop")
MOE_BACKENDS = ("default", "deepep_moe", "megamoe")
FPM_FMHA_MODES = ("bfloat16", "fp8", "fp8_block")
UNPINNED_VERSIONS = ("current", "previous", "next")
SPECULATION_KINDS = ("dflash", "draft_model", "dspark", "eagle3", "mtp", "ngram", "none")
MAX_NEXTN = 5
MAX_CELLS = 2**63 - 1


def validate(config: dict[str, Any]) -> None:
    """Check every rule of a parsed configuration.

    Parameters: `config`, the stored form of `fields.CONFIG`, every field present.
    Raises: `ConfigError` for the first rule that does not hold.
    Source: fpm-model.md sections 3.1 and 3.2.
    """
    estimator = config["estimator_config"]
    _execution_profile(config, estimator)
    _selector(config, estimator)
    _learned_gates(config, estimator)
    _state_snapshot(config, estimator["state_snapshot"])
    _coverage(config, estimator["fpm_interpolation"])
    _identity(config)
    _topology(config, estimator["fpm_interpolation"])
    _moe(config)
    _interpolation_exclusions(config)
    _speculation(config)
    _precision(config)
    _data_sources(config)
    validate_estimator(estimator)
    _speculation_scheme(config)
    _profile(config, estimator["fpm_interpolation"])


def validate_estimator(estimator: dict[str, Any]) -> None:
    """Check the rules inside `estimator_config`, which hold for every estimation mode.

    Parameters: `estimator`, the stored form of `estimator.ESTIMATOR_CONFIG`.
    Raises: `ConfigError` for the first rule that does not hold.
    """
    _learned_controls(estimator["fpm_learned"])
    _selector_ranges(estimator["selector"])
    _regression(estimator["fpm_regression"])
    _require(
        estimator["fpm_interpolation"]["fpm_parquet_path"] != "",
        "must not be empty",
        "estimator_config.fpm_interpolation.fpm_parquet_path",
    )
    _ridge(estimator["fpm_regression"])
    _correction(estimator["correction"])
    _observation_counts(estimator["fpm_regression"], "estimator_config.fpm_regression")


def _require(holds: bool, reason: str, path: str = "") -> None:
    if holds:
        return
    where = path or "forward-pass model"
    raise ConfigError(f"invalid engine config: {where}: {reason}", path)


def _selector(config: dict[str, Any], estimator: dict[str, Any]) -> None:
    _require(
        estimator["selector"] == SELECTOR.read({})
        or (
            config["estimation_mode"] == "fpm_learned"
            and estimator["fpm_learned"]["adaptation"] == "causal_selector"
        ),
        "needs a model of estimation_mode fpm_learned with adaptation causal_selector",
        "estimator_config.selector",
    )


def _selector_ranges(selector: dict[str, Any]) -> None:
    path = "estimator_config.selector"
    _require(0 < selector["alpha"] <= 1, "alpha must be in (0, 1]", path)
    _require(0 <= selector["margin"] < 1, "margin must be in [0, 1)", path)
    for name in ("warmup", "persistence"):
        _require(selector[name] >= 1, f"{name} must be positive", path)


def _learned_gates(config: dict[str, Any], estimator: dict[str, Any]) -> None:
    learned = estimator["fpm_learned"]
    correction = estimator["correction"]
    sources = [name for name in ("artifact_path", "checkpoint_path") if learned[name] is not None]
    if config["estimation_mode"] != "fpm_learned":
        _require(not sources, "artifact_path and checkpoint_path need estimation_mode fpm_learned")
        return
    _require(config["fallback_policy"] == "deny", "estimation_mode fpm_learned needs fallback_policy deny")
    _require(len(sources) == 1, "fpm_learned needs exactly one of artifact_path and checkpoint_path")
    adaptation = learned["adaptation"]
    _require(
        adaptation == "frozen" or learned["checkpoint_path"] is not None,
        f"fpm_learned adaptation {adaptation} needs checkpoint_path, the training checkpoint",
    )
    _require(
        adaptation != "online" or not correction["enabled"],
        "fpm_learned adaptation online needs estimator_config.correction.enabled false",
    )
    _require(
        adaptation != "causal_selector"
        or (correction["enabled"] and correction["mode"] in ("auto", "hybrid")),
        "fpm_learned adaptation causal_selector needs correction enabled, in mode auto or hybrid",
    )
    _require(
        config["nextn"] == 0 and not _speculates(config),
        "estimation_mode fpm_learned takes neither nextn nor speculation",
    )


def _state_snapshot(config: dict[str, Any], snapshot: dict[str, Any] | None) -> None:
    if snapshot is None:
        return
    path = "estimator_config.state_snapshot"
    _require(config["estimation_mode"] != "auto", "needs an explicit estimation_mode, not auto", path)
    _require(config["fallback_policy"] == "deny", "needs fallback_policy deny", path)
    _require(snapshot["path"] != "", "must not be empty", f"{path}.path")
    _require(
        snapshot["sha256"] is None or _is_sha256(snapshot["sha256"]),
        "must be 64 lower-case hexadecimal digits",
        f"{path}.sha256",
    )


def _coverage(config: dict[str, Any], interpolation: dict[str, Any]) -> None:
    if not interpolation["collect_coverage"]:
        return
    _require(
        config["estimation_mode"] == "fpm_interpolation"
        and config["fallback_policy"] == "deny"
        and interpolation["method"] == "direct",
        "collect_coverage needs estimation_mode fpm_interpolation, fallback_policy deny "
        "and the written method direct",
    )


def _identity(config: dict[str, Any]) -> None:
    for name in ("model", "system", "backend_version", "moe_kernel_source"):
        _require(config[name] is None or config[name].strip() != "", f"{name} must not be blank")


def _topology(config: dict[str, Any], interpolation: dict[str, Any]) -> None:
    tp, cp_size, dcp = config["tp"], config["cp_size"], config["dcp"]
    attention_dp = config["attention_dp"]
    _require(min(tp, config["pp"], attention_dp) > 0, "tp, pp and attention_dp must be positive")
    _require(cp_size != 0, "cp_size must be positive")
    _require(dcp is None or (dcp > 0 and tp % dcp == 0), "dcp must be positive and divide tp")
    for unrecorded in interpolation["unrecorded_quant_modes"]:
        overrides = (
            ("fmha_quant_mode", "fpm_fmha_quant_mode") if unrecorded == "fmha" else ("comm_quant_mode",)
        )
        for name in overrides:
            _require(
                config[name] is None, f"{name} contradicts unrecorded_quant_modes, which lists {unrecorded}"
            )
    moe_tp, moe_ep = config["moe_tp_size"], config["moe_ep_size"]
    _require(
        (moe_tp is None) == (moe_ep is None), "moe_tp_size and moe_ep_size are given together or not at all"
    )
    if moe_tp is None:
        return
    _require(min(moe_tp, moe_ep) > 0, "moe_tp_size and moe_ep_size must be positive")
    if config["fpm_profile"] is None:
        _require(
            tp * attention_dp * (cp_size or 1) == moe_tp * moe_ep,
            "topology: tp * attention_dp * cp_size must equal moe_tp_size * moe_ep_size",
        )


def _moe(config: dict[str, Any]) -> None:
    moe_backend = config["moe_backend"]
    _require(config["wideep_num_slots"] != 0, "wideep_num_slots must be positive")
    _require(
        moe_backend is None or moe_backend in MOE_BACKENDS,
        f"moe_backend {moe_backend!r} is unknown, expected one of {', '.join(MOE_BACKENDS)}",
    )
    _require(
        moe_backend in (None, "default") or config["backend"] == "sglang",
        f"moe_backend {moe_backend!r} needs backend sglang",
    )


def _interpolation_exclusions(config: dict[str, Any]) -> None:
    if config["estimation_mode"] != "fpm_interpolation" and config["fpm_profile"] is None:
        return
    _require(
        not config["enable_eplb"]
        and config["wideep_num_slots"] is None
        and config["moe_backend"] in (None, "default")
        and config["moe_kernel_source"] is None,
        "fpm_interpolation takes no enable_eplb, wideep_num_slots, moe_backend or moe_kernel_source override",
    )


def _speculation(config: dict[str, Any]) -> None:
    nextn, speculation = config["nextn"], config["speculation"]
    _require(nextn <= MAX_NEXTN, f"nextn must be in 0..={MAX_NEXTN}")
    _require(nextn == 0 or speculation is None, "speculation cannot be combined with nextn")
    _require(
        nextn == 0 or config["estimation_mode"] != "fpm_interpolation",
        "estimation_mode fpm_interpolation takes no nextn",
    )
    if speculation is None:
        return
    params = speculation["params"]
    _require(speculation["kind"].strip() != "", "speculation kind must not be blank")
    if speculation["kind"] == "none":
        _require(not params, "speculation of kind none takes no params")
    if speculation["kind"] == "ngram":
        _require(
            set(params) == {"num_speculative_tokens"}, "ngram params must be exactly num_speculative_tokens"
        )
        tokens = params["num_speculative_tokens"]
        _require(
            isinstance(tokens, int) and not isinstance(tokens, bool) and 1 <= tokens <= MAX_NEXTN,
            f"ngram num_speculative_tokens must be an integer in 1..={MAX_NEXTN}",
        )
        _require(config["backend"] == "vllm", "speculation of kind ngram needs backend vllm")


def _speculates(config: dict[str, Any]) -> bool:
    return config["speculation"] is not None and config["speculation"]["kind"] != "none"


def _speculation_scheme(config: dict[str, Any]) -> None:
    if config["speculation"] is None:
        return
    kind = config["speculation"]["kind"]
    _require(
        kind in SPECULATION_KINDS,
        f"speculation kind {kind!r} is unknown, expected one of {', '.join(SPECULATION_KINDS)}",
    )
    _require(
        kind in ("ngram", "none"),
        f"speculation kind {kind!r} needs draft data that this configuration cannot carry; use nextn for MTP",
    )


def _precision(config: dict[str, Any]) -> None:
    mode = config["fpm_fmha_quant_mode"]
    if mode is None:
        return
    _require(
        config["estimation_mode"] == "fpm_interpolation",
        "fpm_fmha_quant_mode needs estimation_mode fpm_interpolation",
    )
    _require(mode in FPM_FMHA_MODES, f"fpm_fmha_quant_mode must be one of {', '.join(FPM_FMHA_MODES)}")


def _data_sources(config: dict[str, Any]) -> None:
    for kind in config["transfer_policy"] or ():
        _require(
            kind in TRANSFER_KINDS,
            f"transfer_policy has the unknown kind {kind!r}, expected one of {', '.join(TRANSFER_KINDS)}",
        )
    for entry in config["systems_paths"]:
        _require(
            Path(entry).is_dir() and entry != "",
            f"systems_paths entry is not an existing directory: {entry!r}",
        )


def _learned_controls(learned: dict[str, Any]) -> None:
    path = "estimator_config.fpm_learned"
    weight, step, digest = learned["history_weight"], learned["update_step"], learned["source_sha256"]

    def positive(*names: str) -> None:
        for name in names:
            _require(learned[name] != 0, f"{name} must be positive", path)

    _require(weight is None or 0 <= weight <= 1, "history_weight must be null or in [0, 1]", path)
    _require(
        weight is not None or learned["history_weight_ramp_observations"] == 0,
        "history_weight null needs history_weight_ramp_observations 0",
        path,
    )
    positive("mutable_tree_tail", "recent_max_age_observations")
    _require(0 < step <= 1, "update_step must be in (0, 1]", path)
    _require(
        step == 1 or learned["update_mode"] == "leaf_only",
        "update_step below 1 needs update_mode leaf_only",
        path,
    )
    positive("recent_window", "update_every", "eager_refresh_interval")
    _require(0 < learned["split_sampling_rate"] <= 1, "split_sampling_rate must be in (0, 1]", path)
    _require(0 <= learned["split_rank_tolerance"] <= 1, "split_rank_tolerance must be in [0, 1]", path)
    _require(
        digest is None or re.fullmatch("[0-9a-fA-F]{64}", digest) is not None,
        "source_sha256 must be 64 hexadecimal digits",
        path,
    )
    for name in ("artifact_path", "checkpoint_path"):
        _require(learned[name] != "", f"{name} must not be empty", path)


def _regression(regression: dict[str, Any]) -> None:
    path = "estimator_config.fpm_regression"
    sampling, fit = regression["sampling"], regression["fit"]
    axes, bins = sampling["axes"], sampling["bins_per_axis"]
    _axes(axes, f"{path}.sampling.axes")
    _require(
        len(bins) == len(axes) and min(bins) > 0 and math.prod(bins) <= MAX_CELLS,
        f"must be one positive count for each of the {len(axes)} axes, with a product of at most {MAX_CELLS}",
        f"{path}.sampling.bins_per_axis",
    )
    _require(sampling["max_observations"] >= 1, "must be positive", f"{path}.sampling.max_observations")
    _require(fit["rebuild_interval"] != 0, "must be positive or null", f"{path}.fit.rebuild_interval")
    if fit["linear"] is not None:
        _require(fit["kind"] == "standardized_nnls", "needs fit.kind standardized_nnls", f"{path}.fit.linear")
        _linear(fit["linear"], f"{path}.fit.linear")
    if fit["spline"] is not None:
        _require(fit["kind"] == "spline", "needs fit.kind spline", f"{path}.fit.spline")
    if fit["kind"] == "spline":
        _require(axes == DEFAULT_AXES, "spline needs the axes attention, moe", f"{path}.sampling.axes")
        _require(
            sampling["max_observations"] >= 32,
            "must be at least 32 for spline",
            f"{path}.sampling.max_observations",
        )
        _spline(fit["spline"], f"{path}.fit.spline")


def _axes(axes: list[str], path: str) -> None:
    _require(1 <= len(axes) <= 6 and len(set(axes)) == len(axes), "must be 1 to 6 distinct axes", path)


def _linear(linear: dict[str, Any], path: str) -> None:
    _axes(linear["feature_axes"], f"{path}.feature_axes")
    policy = linear["update_policy"]
    if policy["kind"] == "always":
        return
    path = f"{path}.update_policy"
    for name in ("relative_tolerance", "absolute_tolerance_ms"):
        _require(policy[name] >= 0, "must not be negative", f"{path}.{name}")
    for name in ("window", "trigger", "cooldown", "startup_observations"):
        _require(policy[name] >= 1, "must be positive", f"{path}.{name}")
    _require(policy["trigger"] <= policy["window"], "must not exceed window", f"{path}.trigger")


def _spline(spline: dict[str, Any] | None, path: str) -> None:
    if spline is None:
        return
    _require(spline["knots_per_axis"] in (2, 3), "must be 2 or 3", f"{path}.knots_per_axis")
    search = spline["search"]
    path = f"{path}.search"
    if search["kind"] == "periodic":
        _require(search["step"] >= 1, "must be positive", f"{path}.step")
        return
    _require(search["window"] >= 1, "must be positive", f"{path}.window")
    _require(1 <= search["trigger"] <= search["window"], "must be in 1..=window", f"{path}.trigger")
    _require(search["tolerance"] > 0, "must be positive", f"{path}.tolerance")
    _require(search["absolute_tolerance_ms"] >= 0, "must not be negative", f"{path}.absolute_tolerance_ms")
    _require(search["cooldown"] >= 1, "must be positive", f"{path}.cooldown")


def _ridge(regression: dict[str, Any]) -> None:
    _require(
        regression["fit"]["singular_ridge_scale"] >= 0,
        "must not be negative",
        "estimator_config.fpm_regression.fit.singular_ridge_scale",
    )


def _correction(correction: dict[str, Any]) -> None:
    path = "estimator_config.correction"
    sampling, bounds = correction["sampling"], correction["factor_bounds"]
    low, high = bounds["min"], bounds["max"]
    _require(sampling["max_observations"] >= 1, "sampling.max_observations must be positive", path)
    _require(correction["min_observations"] >= 1, "min_observations must be positive", path)
    _require(low is None or 0 < low <= 1, "factor_bounds.min must be null or in (0, 1]", path)
    _require(high is None or high >= 1, "factor_bounds.max must be null or at least 1", path)
    for name in ("max_num_tokens", "max_batch_size", "max_kv_tokens"):
        _require(correction[name] >= 1, f"{name} must be positive", path)
    _observation_counts(correction, path)
    _require(
        min(sampling["bins_per_axis"]) > 0 and math.prod(sampling["bins_per_axis"]) <= MAX_CELLS,
        f"sampling.bins_per_axis must be positive, with a product of at most {MAX_CELLS}",
        path,
    )


def _observation_counts(section: dict[str, Any], path: str) -> None:
    _require(section["min_observations"] >= 1, "min_observations must be positive", path)
    _require(
        section["min_observations"] <= section["sampling"]["max_observations"],
        "min_observations must not exceed max_observations",
        path,
    )


def _profile(config: dict[str, Any], interpolation: dict[str, Any]) -> None:
    if config["fpm_profile"] is None:
        return
    for name in ("text_only", "unrecorded_quant_modes"):
        _require(not interpolation[name], f"fpm_profile cannot be combined with {name}")
    _require(config["dcp"] is None, "fpm_profile cannot be combined with dcp")
    version = config["backend_version"]
    literal = f"fpm_profile needs a literal backend_version, found {version!r}"
    _require(version is not None, literal)
    _require(config["nextn"] == 0, "fpm_profile cannot be combined with nextn")
    _require(not _speculates(config), "fpm_profile cannot be combined with speculation")
    _require(version not in UNPINNED_VERSIONS, literal)


def _execution_profile(config: dict[str, Any], estimator: dict[str, Any]) -> None:
    profile = estimator["op_level"]["execution_profile"]
    if profile is None:
        return
    path = "estimator_config.op_level.execution_profile"
    accepted: dict[str, tuple[Any, ...]] = {
        "estimation_mode": ("op_level",),
        "database_mode": ("SILICON",),
        "fallback_policy": ("deny",),
        "enable_shared_layer": (False,),
        "decoder_replay": (False,),
        "worker_type": ("prefill", "decode"),
        "pp": (1,),
        "attention_dp": (1,),
        "cp_size": (1, None),
        "dcp": (1, None),
        "nextn": (0,),
        "speculation": (None,),
        "encoder_parallel": (None,),
        "fpm_profile": (None,),
    }
    for name, values in accepted.items():
        _require(
            config[name] in values,
            f"needs {name} {' or '.join(map(str, values))}, found {config[name]!r}",
            path,
        )
    _require(not estimator["correction"]["enabled"], "needs estimator_config.correction.enabled false", path)
    version = config["backend_version"]
    _require(
        version not in (None, "next", "latest"), f"needs a literal backend_version, found {version!r}", path
    )
    _require(Path(profile["path"]).is_absolute(), "must be absolute", f"{path}.path")
    _require(_is_sha256(profile["sha256"]), "must be 64 lower-case hexadecimal digits", f"{path}.sha256")


def _is_sha256(digest: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", digest) is not None
