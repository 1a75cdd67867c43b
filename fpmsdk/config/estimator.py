"""Field table of `estimator_config`: names, types, defaults and what the output omits.

Rules that relate fields to each other are in `validate.py`. Source: fpm-model.md section 3.2.
"""

from typing import Any

from fpmsdk.config.schema import (
    U32_MAX,
    Choice,
    Count,
    Field,
    Flag,
    ListOf,
    Nullable,
    Number,
    Record,
    Tagged,
    Text,
    Weight,
)

U32 = Count(U32_MAX)
USIZE = Count()

DEFAULT_AXES = ["attention", "moe"]
AXIS = Choice(
    (
        *DEFAULT_AXES,
        *("n", "E", "P", "maxE", "maxP", "minP", "P2", "F", "nE", "logF"),
        *("meanE", "meanP", "cvE2", "cvP2", "logN", "n2", "logP"),
    )
)

FEATURES = Record(
    Field("attention_kv_weight", Weight(), 1.0),
    Field("prefill_attention_pair_weight", Weight(), 1.0),
    Field("ffn_token_weight", Weight(), 1.0),
)

OP_LEVEL = Record(
    Field(
        "execution_profile",
        Nullable(Record(Field("path", Text()), Field("sha256", Text()))),
        None,
        omit_default=True,
    ),
)

FPM_INTERPOLATION = Record(
    Field("method", Choice(("auto", "sol", "direct")), "auto"),
    Field("text_only", Flag(), False, omit_default=True),
    Field("fpm_parquet_path", Nullable(Text()), None, omit_default=True),
    Field("collect_coverage", Flag(), False, omit_default=True),
    Field("unrecorded_quant_modes", ListOf(Choice(("fmha", "comm"))), [], omit_default=True),
    Field("ragged_edges", Choice(("nearest", "continuous")), "nearest", omit_default=True),
)

UPDATE_POLICY = Tagged(
    "kind",
    {
        "always": Record(),
        "error_threshold": Record(
            Field("relative_tolerance", Number()),
            Field("absolute_tolerance_ms", Number()),
            Field("window", USIZE),
            Field("trigger", USIZE),
            Field("cooldown", USIZE),
            Field("startup_observations", USIZE, 10),
        ),
    },
)

LINEAR = Record(
    Field("feature_axes", ListOf(AXIS), DEFAULT_AXES),
    Field("non_negative", Flag(), True),
    Field("update_policy", UPDATE_POLICY, {"kind": "always"}),
)

SPLINE = Record(
    Field("knots_per_axis", USIZE, 2),
    Field(
        "search",
        Tagged(
            "kind",
            {
                "adaptive": Record(
                    Field("window", USIZE, 16),
                    Field("trigger", USIZE, 8),
                    Field("tolerance", Number(), 0.05),
                    Field("absolute_tolerance_ms", Number(), 1.0),
                    Field("cooldown", USIZE, 64),
                ),
                "periodic": Record(Field("step", USIZE, 64)),
            },
        ),
        {"kind": "adaptive"},
    ),
)

# Not of the public system: a recursive estimator, and a choice among all of them.
RECURSIVE = Record(
    Field("forgetting", Number(), 0.999),
    Field("outlier_bound", Number(), 0.15),
    Field("level_gain", Number(), 0.5),
)

FIT_KINDS = ("standardized_nnls", "spline", "recursive")

AUTOMATIC = Record(
    # The first serves until another has proved better.
    Field(
        "candidates",
        ListOf(Choice(FIT_KINDS, {"linear": "standardized_nnls"})),
        ["recursive", "standardized_nnls", "spline"],
    ),
    Field("error_forgetting", Number(), 0.98),
    Field("margin", Number(), 0.05),
    Field("warmup", USIZE, 10),
)

FPM_REGRESSION = Record(
    Field(
        "sampling",
        Record(
            Field("axes", ListOf(AXIS), DEFAULT_AXES, omit_default=True),
            Field("bins_per_axis", ListOf(USIZE), [4, 4]),
            Field("max_observations", USIZE, 64),
        ),
        {},
    ),
    Field("min_observations", USIZE, 5),
    Field(
        "fit",
        Record(
            Field(
                "kind",
                Choice((*FIT_KINDS, "automatic"), {"linear": "standardized_nnls"}),
                "standardized_nnls",
            ),
            Field("singular_ridge_scale", Number(), 1e-9),
            Field("rebuild_interval", Nullable(USIZE), None),
            Field("linear", Nullable(LINEAR), None, omit_default=True),
            Field("spline", Nullable(SPLINE), None, omit_default=True),
            Field("recursive", Nullable(RECURSIVE), None, omit_default=True),
            Field("automatic", Nullable(AUTOMATIC), None, omit_default=True),
        ),
        {},
    ),
)

FPM_LEARNED = Record(
    Field("artifact_path", Nullable(Text()), None),
    Field("checkpoint_path", Nullable(Text()), None),
    Field("source_sha256", Nullable(Text()), None),
    Field("adaptation", Choice(("frozen", "online", "causal_selector")), "online"),
    Field("update_mode", Choice(("leaf_only", "structural")), "structural"),
    Field("recent_window", USIZE, 64),
    Field("history_weight", Nullable(Number()), 0.1),
    Field("history_weight_ramp_observations", USIZE, 32),
    Field("history_bin_grouping", Flag(), True),
    Field("mutable_tree_tail", Nullable(USIZE), None),
    Field("update_step", Number(), 1.0),
    Field("recent_max_age_observations", Nullable(USIZE), None),
    Field("update_every", USIZE, 1),
    Field("derivative_refresh", Choice(("eager", "lazy")), "lazy"),
    Field("split_sampling_rate", Number(), 0.5),
    Field("split_rank_tolerance", Number(), 0.01),
    Field("eager_refresh_interval", USIZE, 32),
    Field("seed", USIZE, 0),
)

SELECTOR = Record(
    Field("alpha", Number(), 0.4),
    Field("margin", Number(), 0.05),
    Field("warmup", USIZE, 5),
    Field("persistence", USIZE, 1),
)

CORRECTION = Record(
    Field("enabled", Flag(), True),
    Field("mode", Choice(("auto", "fixed", "dynamic_local", "hybrid")), "auto", omit_default=True),
    Field("feature_space", Choice(("legacy_workload",)), "legacy_workload"),
    Field(
        "sampling",
        Record(Field("bins_per_axis", ListOf(USIZE, length=2), [4, 4]), Field("max_observations", USIZE, 64)),
        {},
    ),
    Field("min_observations", USIZE, 5),
    Field(
        "factor_bounds",
        Record(Field("min", Nullable(Number()), 0.5), Field("max", Nullable(Number()), 2.0)),
        {},
    ),
    Field("max_num_tokens", U32, 8192),
    Field("max_batch_size", U32, 512),
    Field("max_kv_tokens", U32, 2_000_000),
)

STATE_SNAPSHOT = Record(
    Field("path", Text()),
    Field("sha256", Nullable(Text()), None),
    Field("on_tune", Choice(("reject", "continue")), "reject"),
)

ESTIMATOR_CONFIG = Record(
    Field("features", FEATURES, {}),
    Field("op_level", OP_LEVEL, {}),
    Field("fpm_interpolation", FPM_INTERPOLATION, {}),
    Field("fpm_regression", FPM_REGRESSION, {}),
    Field("fpm_learned", FPM_LEARNED, {}, omit_default=True),
    Field("selector", SELECTOR, {}, omit_default=True),
    Field("correction", CORRECTION, {}),
    Field("state_snapshot", STATE_SNAPSHOT, None, omit_default=True),
)


def contextual_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `estimator_config` defaults that hold only for the learned kind `config` asks for.

    They are JSON values to be laid under what was written. Source: regression-and-learned.md section 4.1.
    """
    if config["estimation_mode"] != "fpm_learned":
        return {}
    written = config["estimator_config"]["fpm_learned"]
    controls: dict[str, Any] = {}
    if written["adaptation"] == "causal_selector":
        controls = {
            "recent_window": 8,
            "history_weight": 0.25,
            "history_weight_ramp_observations": 8,
            "update_every": 4,
        }
    if written["history_weight"] is None:
        controls["history_weight_ramp_observations"] = 0
    return {"fpm_learned": controls, "correction": {"enabled": written["adaptation"] != "online"}}
