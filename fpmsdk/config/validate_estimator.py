"""Rules inside `estimator_config`: ranges and pairs that hold whatever kind of model is asked for.

Source: fpm-model.md section 3.2.
"""

import math
import re
from typing import Any

from fpmsdk.config.estimator import AUTOMATIC, DEFAULT_AXES, FIT_KINDS, FPM_REGRESSION
from fpmsdk.errors import ConfigError

MAX_CELLS = 2**63 - 1

_DEFAULTS = FPM_REGRESSION.read({})


def validate_estimator(estimator: dict[str, Any]) -> None:
    """Check the rules inside `estimator_config`, which hold for every estimation mode.

    Parameters: `estimator`, the stored form of `estimator.ESTIMATOR_CONFIG`.
    Raises: `ConfigError` for the first rule that does not hold.
    """
    _learned_controls(estimator["fpm_learned"])
    _selector_ranges(estimator["selector"])
    _regression(estimator["fpm_regression"])
    require(
        estimator["fpm_interpolation"]["fpm_parquet_path"] != "",
        "must not be empty",
        "estimator_config.fpm_interpolation.fpm_parquet_path",
    )
    _ridge(estimator["fpm_regression"])
    _correction(estimator["correction"])
    _observation_counts(
        estimator["fpm_regression"],
        "estimator_config.fpm_regression",
        retains=estimator["fpm_regression"]["fit"]["kind"] != "recursive",
    )


def require(holds: bool, reason: str, path: str = "") -> None:
    """Raise `ConfigError` at `path`, or for the whole configuration, unless the rule holds."""
    if holds:
        return
    where = path or "forward-pass model"
    raise ConfigError(f"invalid engine config: {where}: {reason}", path)


def _learned_controls(learned: dict[str, Any]) -> None:
    path = "estimator_config.fpm_learned"
    weight, step, digest = learned["history_weight"], learned["update_step"], learned["source_sha256"]

    def positive(*names: str) -> None:
        for name in names:
            require(learned[name] != 0, f"{name} must be positive", path)

    require(weight is None or 0 <= weight <= 1, "history_weight must be null or in [0, 1]", path)
    require(
        weight is not None or learned["history_weight_ramp_observations"] == 0,
        "history_weight null needs history_weight_ramp_observations 0",
        path,
    )
    positive("mutable_tree_tail", "recent_max_age_observations")
    require(0 < step <= 1, "update_step must be in (0, 1]", path)
    require(
        step == 1 or learned["update_mode"] == "leaf_only",
        "update_step below 1 needs update_mode leaf_only",
        path,
    )
    positive("recent_window", "update_every", "eager_refresh_interval")
    require(0 < learned["split_sampling_rate"] <= 1, "split_sampling_rate must be in (0, 1]", path)
    require(0 <= learned["split_rank_tolerance"] <= 1, "split_rank_tolerance must be in [0, 1]", path)
    require(
        digest is None or re.fullmatch("[0-9a-fA-F]{64}", digest) is not None,
        "source_sha256 must be 64 hexadecimal digits",
        path,
    )
    for name in ("artifact_path", "checkpoint_path"):
        require(learned[name] != "", f"{name} must not be empty", path)


def _selector_ranges(selector: dict[str, Any]) -> None:
    path = "estimator_config.selector"
    require(0 < selector["alpha"] <= 1, "alpha must be in (0, 1]", path)
    require(0 <= selector["margin"] < 1, "margin must be in [0, 1)", path)
    for name in ("warmup", "persistence"):
        require(selector[name] >= 1, f"{name} must be positive", path)


def _regression(regression: dict[str, Any]) -> None:
    path = "estimator_config.fpm_regression"
    sampling, fit = regression["sampling"], regression["fit"]
    axes, bins = sampling["axes"], sampling["bins_per_axis"]
    _axes(axes, f"{path}.sampling.axes")
    require(
        len(bins) == len(axes) and min(bins) > 0 and math.prod(bins) <= MAX_CELLS,
        f"must be one positive count for each of the {len(axes)} axes, with a product of at most {MAX_CELLS}",
        f"{path}.sampling.bins_per_axis",
    )
    require(sampling["max_observations"] >= 1, "must be positive", f"{path}.sampling.max_observations")
    require(fit["rebuild_interval"] != 0, "must be positive or null", f"{path}.fit.rebuild_interval")
    kinds = fitted_kinds(fit)
    for block in ("linear", "spline", "recursive", "automatic"):
        kind = "standardized_nnls" if block == "linear" else block
        accepted = f"needs fit.kind {kind}" + ("" if block == "automatic" else ", or automatic with that candidate")
        require(fit[block] is None or kind in (*kinds, fit["kind"]), accepted, f"{path}.fit.{block}")
        if block == "linear" and fit["linear"] is not None:
            _linear(fit["linear"], f"{path}.fit.linear")
    if fit["kind"] == "automatic":
        _automatic(fit, f"{path}.fit")
    if fit["kind"] in ("spline", "automatic"):
        require(axes == DEFAULT_AXES, f"{fit['kind']} needs the axes attention, moe", f"{path}.sampling.axes")
    if "spline" in kinds:
        require(
            sampling["max_observations"] >= 32,
            "must be at least 32 for spline",
            f"{path}.sampling.max_observations",
        )
        _spline(fit["spline"], f"{path}.fit.spline")
    if "recursive" in kinds:
        _recursive(fit["recursive"], f"{path}.fit.recursive")
    if fit["kind"] == "recursive":
        require(sampling == _DEFAULTS["sampling"], "must be left out: recursive keeps no samples", f"{path}.sampling")
        for name in ("rebuild_interval", "singular_ridge_scale"):
            default = _DEFAULTS["fit"][name]
            require(fit[name] == default, "must be left out: recursive keeps no rows", f"{path}.fit.{name}")


def fitted_kinds(fit: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of fit that each store keeps: the configured one, or the candidates of an automatic choice.

    >>> fitted_kinds({"kind": "spline", "automatic": None})
    ('spline',)
    >>> fitted_kinds({"kind": "automatic", "automatic": None})
    ('recursive', 'standardized_nnls', 'spline')
    """
    if fit["kind"] != "automatic":
        return (fit["kind"],)
    return tuple((fit["automatic"] or AUTOMATIC.read({}))["candidates"])


def _axes(axes: list[str], path: str) -> None:
    require(1 <= len(axes) <= 6 and len(set(axes)) == len(axes), "must be 1 to 6 distinct axes", path)


def _linear(linear: dict[str, Any], path: str) -> None:
    _axes(linear["feature_axes"], f"{path}.feature_axes")
    policy = linear["update_policy"]
    if policy["kind"] == "always":
        return
    path = f"{path}.update_policy"
    for name in ("relative_tolerance", "absolute_tolerance_ms"):
        require(policy[name] >= 0, "must not be negative", f"{path}.{name}")
    for name in ("window", "trigger", "cooldown", "startup_observations"):
        require(policy[name] >= 1, "must be positive", f"{path}.{name}")
    require(policy["trigger"] <= policy["window"], "must not exceed window", f"{path}.trigger")


def _spline(spline: dict[str, Any] | None, path: str) -> None:
    if spline is None:
        return
    require(spline["knots_per_axis"] in (2, 3), "must be 2 or 3", f"{path}.knots_per_axis")
    search = spline["search"]
    path = f"{path}.search"
    if search["kind"] == "periodic":
        require(search["step"] >= 1, "must be positive", f"{path}.step")
        return
    require(search["window"] >= 1, "must be positive", f"{path}.window")
    require(1 <= search["trigger"] <= search["window"], "must be in 1..=window", f"{path}.trigger")
    require(search["tolerance"] > 0, "must be positive", f"{path}.tolerance")
    require(search["absolute_tolerance_ms"] >= 0, "must not be negative", f"{path}.absolute_tolerance_ms")
    require(search["cooldown"] >= 1, "must be positive", f"{path}.cooldown")


def _recursive(recursive: dict[str, Any] | None, path: str) -> None:
    if recursive is None:
        return
    require(0 < recursive["forgetting"] < 1, "must be above 0 and below 1", f"{path}.forgetting")
    require(0 < recursive["outlier_bound"] < 1, "must be above 0 and below 1", f"{path}.outlier_bound")
    require(0 <= recursive["level_gain"] <= 1, "must be in [0, 1]", f"{path}.level_gain")


def _automatic(fit: dict[str, Any], path: str) -> None:
    if fit["linear"] is not None:
        axes = fit["linear"]["feature_axes"]
        require(axes == DEFAULT_AXES, "automatic needs attention, moe", f"{path}.linear.feature_axes")
    automatic, path = fit["automatic"], f"{path}.automatic"
    if automatic is None:
        return
    candidates = automatic["candidates"]
    require(
        len(candidates) >= 2 and len(set(candidates)) == len(candidates),
        f"must be two or more of {', '.join(FIT_KINDS)}",
        f"{path}.candidates",
    )
    require(0 < automatic["error_forgetting"] < 1, "must be above 0 and below 1", f"{path}.error_forgetting")
    require(0 <= automatic["margin"] < 1, "must be in [0, 1)", f"{path}.margin")
    require(automatic["warmup"] >= 1, "must be positive", f"{path}.warmup")


def _ridge(regression: dict[str, Any]) -> None:
    require(
        regression["fit"]["singular_ridge_scale"] >= 0,
        "must not be negative",
        "estimator_config.fpm_regression.fit.singular_ridge_scale",
    )


def _correction(correction: dict[str, Any]) -> None:
    path = "estimator_config.correction"
    sampling, bounds = correction["sampling"], correction["factor_bounds"]
    low, high = bounds["min"], bounds["max"]
    require(sampling["max_observations"] >= 1, "sampling.max_observations must be positive", path)
    require(correction["min_observations"] >= 1, "min_observations must be positive", path)
    require(low is None or 0 < low <= 1, "factor_bounds.min must be null or in (0, 1]", path)
    require(high is None or high >= 1, "factor_bounds.max must be null or at least 1", path)
    for name in ("max_num_tokens", "max_batch_size", "max_kv_tokens"):
        require(correction[name] >= 1, f"{name} must be positive", path)
    _observation_counts(correction, path)
    require(
        min(sampling["bins_per_axis"]) > 0 and math.prod(sampling["bins_per_axis"]) <= MAX_CELLS,
        f"sampling.bins_per_axis must be positive, with a product of at most {MAX_CELLS}",
        path,
    )


def _observation_counts(section: dict[str, Any], path: str, *, retains: bool = True) -> None:
    require(section["min_observations"] >= 1, "min_observations must be positive", path)
    require(
        not retains or section["min_observations"] <= section["sampling"]["max_observations"],
        "min_observations must not exceed max_observations",
        path,
    )
