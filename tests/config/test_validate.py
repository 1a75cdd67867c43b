"""Every rule between fields: what it refuses, where, in which words, and in which order."""

import pytest

from fpmsdk.config import normalize_config
from fpmsdk.errors import ConfigError

BASE = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated"}
LEARNED = "estimator_config.fpm_learned"
REGRESSION = "estimator_config.fpm_regression"
CORRECTION = "estimator_config.correction"
SELECTOR = "estimator_config.selector"
PROFILE = "estimator_config.op_level.execution_profile"
SNAPSHOT = "estimator_config.state_snapshot"
POLICY = f"{REGRESSION}.fit.linear.update_policy"
SEARCH = f"{REGRESSION}.fit.spline.search"


def estimator(**sections):
    return {"estimator_config": sections}


def learned(**controls):
    return estimator(fpm_learned=controls)


def sampling(**controls):
    return estimator(fpm_regression={"sampling": controls})


def fit(**controls):
    return estimator(fpm_regression={"fit": controls})


def policy(**changes):
    threshold = {"relative_tolerance": 0.1, "absolute_tolerance_ms": 1, "window": 8, "trigger": 4}
    return fit(linear={"update_policy": {"kind": "error_threshold", **threshold, "cooldown": 9, **changes}})


def search(kind="adaptive", **controls):
    return fit(kind="spline", spline={"search": {"kind": kind, **controls}})


def ngram(**params):
    return {"speculation": {"kind": "ngram", "params": params}}


def learned_mode(correction=None, selector=None, **controls):
    sections = {"fpm_learned": controls, "correction": correction or {}, "selector": selector or {}}
    return {"estimation_mode": "fpm_learned", "estimator_config": sections}


def causal(**sections):
    return learned_mode(adaptation="causal_selector", checkpoint_path="/x", **sections)


SHA = "0123456789abcdef" * 4
EXECUTION = {
    "estimation_mode": "op_level",
    "worker_type": "decode",
    "enable_shared_layer": False,
    "backend_version": "1",
    "estimator_config": {
        "op_level": {"execution_profile": {"path": "/x", "sha256": SHA}},
        "correction": {"enabled": False},
    },
}
INTERPOLATION = {"estimation_mode": "fpm_interpolation"}
WITH_PROFILE = {"fpm_profile": {}, "backend_version": "1"}


def snapshot(**fields):
    return {
        "estimation_mode": "fpm_regression",
        **estimator(state_snapshot={"path": "/s", "sha256": SHA, **fields}),
    }


def execution(**changes):
    return EXECUTION | changes


def execution_file(**changes):
    sections = EXECUTION["estimator_config"]
    return EXECUTION | estimator(
        **sections | {"op_level": {"execution_profile": {"path": "/x", "sha256": SHA, **changes}}}
    )


# (what is refused, its path in the error, texts it mentions), in the order in which faults are reported
REFUSED = [
    (execution(estimation_mode="auto"), PROFILE, ["estimation_mode", "op_level"]),
    (execution(database_mode="HYBRID"), PROFILE, ["database_mode"]),
    (execution(fallback_policy="allow"), PROFILE, ["fallback_policy"]),
    (execution(enable_shared_layer=None), PROFILE, ["enable_shared_layer"]),
    (execution(decoder_replay=True), PROFILE, ["decoder_replay"]),
    (execution(worker_type="aggregated"), PROFILE, ["worker_type"]),
    (execution(pp=2), PROFILE, ["pp"]),
    (execution(attention_dp=2), PROFILE, ["attention_dp"]),
    (execution(cp_size=2), PROFILE, ["cp_size"]),
    (execution(dcp=2, tp=2), PROFILE, ["dcp"]),
    (execution(nextn=1), PROFILE, ["nextn"]),
    (execution(speculation={"kind": "none"}), PROFILE, ["speculation"]),
    (execution(encoder_parallel="tp"), PROFILE, ["encoder_parallel"]),
    (execution(fpm_profile={}), PROFILE, ["fpm_profile"]),
    (
        execution(estimator_config=EXECUTION["estimator_config"] | {"correction": {}}),
        PROFILE,
        ["correction.enabled"],
    ),
    (execution(backend_version=None), PROFILE, ["backend_version"]),
    (execution(backend_version="next"), PROFILE, ["backend_version"]),
    (execution_file(path="x"), f"{PROFILE}.path", []),
    (execution_file(sha256=SHA.upper()), f"{PROFILE}.sha256", []),
    (execution_file(sha256="ab"), f"{PROFILE}.sha256", []),
    (estimator(selector={"alpha": 0.5}), SELECTOR, ["estimation_mode", "adaptation"]),
    (learned_mode(selector={"warmup": 6}), SELECTOR, ["causal_selector"]),
    (learned_mode() | {"fallback_policy": "allow"}, "", ["fallback_policy"]),
    (learned_mode(), "", ["artifact_path", "checkpoint_path"]),
    (learned_mode(artifact_path="/x", checkpoint_path="/x"), "", ["artifact_path", "checkpoint_path"]),
    (learned_mode(artifact_path="/x"), "", ["online", "checkpoint_path"]),
    (learned_mode(artifact_path="/x", adaptation="causal_selector"), "", ["checkpoint_path"]),
    (learned_mode(checkpoint_path="/x", correction={"enabled": True}), "", ["correction.enabled"]),
    (causal(correction={"enabled": False}), "", ["correction", "hybrid"]),
    (causal(correction={"mode": "fixed"}), "", ["correction", "hybrid"]),
    (learned_mode(checkpoint_path="/x") | {"nextn": 1}, "", ["nextn", "speculation"]),
    (learned_mode(checkpoint_path="/x") | ngram(num_speculative_tokens=1), "", ["nextn", "speculation"]),
    (learned(artifact_path="/x"), "", ["artifact_path", "estimation_mode"]),
    (learned(checkpoint_path="/x"), "", ["checkpoint_path", "estimation_mode"]),
    (snapshot() | {"estimation_mode": "auto"}, SNAPSHOT, ["estimation_mode"]),
    (snapshot() | {"fallback_policy": "allow"}, SNAPSHOT, ["fallback_policy"]),
    (snapshot(path=""), f"{SNAPSHOT}.path", []),
    (snapshot(sha256="x"), f"{SNAPSHOT}.sha256", []),
    (estimator(fpm_interpolation={"collect_coverage": True}), "", ["collect_coverage", "estimation_mode"]),
    (
        INTERPOLATION | estimator(fpm_interpolation={"collect_coverage": True}),
        "",
        ["collect_coverage", "method direct"],
    ),
    (
        INTERPOLATION
        | {"fallback_policy": "allow"}
        | estimator(fpm_interpolation={"collect_coverage": True, "method": "direct"}),
        "",
        ["collect_coverage", "fallback_policy"],
    ),
    ({"model": " \t"}, "", ["model must not be blank"]),
    ({"system": ""}, "", ["system must not be blank"]),
    ({"backend_version": " "}, "", ["backend_version must not be blank"]),
    ({"moe_kernel_source": ""}, "", ["moe_kernel_source must not be blank"]),
    ({"tp": 0}, "", ["tp, pp and attention_dp"]),
    ({"pp": 0}, "", ["tp, pp and attention_dp"]),
    ({"attention_dp": 0}, "", ["tp, pp and attention_dp"]),
    ({"cp_size": 0}, "", ["cp_size"]),
    ({"dcp": 0}, "", ["dcp", "tp"]),
    ({"tp": 4, "dcp": 3}, "", ["dcp", "tp"]),
    (
        {"fmha_quant_mode": "x"} | estimator(fpm_interpolation={"unrecorded_quant_modes": ["fmha"]}),
        "",
        ["unrecorded_quant_modes", "fmha_quant_mode"],
    ),
    (
        {"fpm_fmha_quant_mode": "fp8"} | estimator(fpm_interpolation={"unrecorded_quant_modes": ["fmha"]}),
        "",
        ["unrecorded_quant_modes", "fpm_fmha_quant_mode"],
    ),
    (
        {"comm_quant_mode": "x"} | estimator(fpm_interpolation={"unrecorded_quant_modes": ["comm"]}),
        "",
        ["unrecorded_quant_modes", "comm_quant_mode"],
    ),
    ({"moe_tp_size": 1}, "", ["moe_tp_size", "moe_ep_size"]),
    ({"moe_ep_size": 1}, "", ["moe_tp_size", "moe_ep_size"]),
    ({"moe_tp_size": 0, "moe_ep_size": 1}, "", ["moe_tp_size", "moe_ep_size"]),
    (
        {"moe_tp_size": 2, "moe_ep_size": 1},
        "",
        ["topology", "tp", "attention_dp", "cp_size", "moe_tp_size", "moe_ep_size"],
    ),
    ({"wideep_num_slots": 0}, "", ["wideep_num_slots"]),
    ({"moe_backend": "x"}, "", ["moe_backend"]),
    ({"moe_backend": "megamoe"}, "", ["moe_backend", "sglang"]),
    (INTERPOLATION | {"enable_eplb": True}, "", ["fpm_interpolation", "enable_eplb"]),
    (INTERPOLATION | {"wideep_num_slots": 1}, "", ["wideep_num_slots"]),
    (INTERPOLATION | {"moe_backend": "deepep_moe", "backend": "sglang"}, "", ["moe_backend"]),
    (INTERPOLATION | {"moe_kernel_source": "k"}, "", ["moe_kernel_source"]),
    (WITH_PROFILE | {"moe_kernel_source": "k"}, "", ["moe_kernel_source"]),
    ({"nextn": 6}, "", ["nextn"]),
    ({"nextn": 1} | ngram(num_speculative_tokens=1), "", ["nextn", "speculation"]),
    ({"nextn": 1, "speculation": {"kind": "none"}}, "", ["nextn", "speculation"]),
    (INTERPOLATION | {"nextn": 1}, "", ["fpm_interpolation", "nextn"]),
    ({"speculation": {"kind": " "}}, "", ["speculation"]),
    ({"speculation": {"kind": "none", "params": {"a": 1}}}, "", ["none", "params"]),
    (ngram(), "", ["num_speculative_tokens"]),
    (ngram(num_speculative_tokens=1, a=1), "", ["num_speculative_tokens"]),
    *((ngram(num_speculative_tokens=value), "", ["num_speculative_tokens"]) for value in (0, 6, True, 2.0, "2")),
    (ngram(num_speculative_tokens=1) | {"backend": "trtllm"}, "", ["ngram", "backend vllm"]),
    ({"fpm_fmha_quant_mode": "bfloat16"}, "", ["fpm_fmha_quant_mode", "estimation_mode"]),
    (INTERPOLATION | {"fpm_fmha_quant_mode": "half"}, "", ["fpm_fmha_quant_mode", "fp8_block"]),
    ({"transfer_policy": ["xop", "x"]}, "", ["transfer_policy", "'x'"]),
    ({"systems_paths": ["/no/such/directory"]}, "", ["systems_paths", "/no/such/directory"]),
    ({"systems_paths": [""]}, "", ["systems_paths"]),
    ({"systems_paths": ["default"]}, "", ["systems_paths"]),
    (learned(history_weight=1.5), LEARNED, ["history_weight"]),
    (learned(history_weight=-0.1), LEARNED, ["history_weight"]),
    (learned(history_weight=None), LEARNED, ["history_weight_ramp_observations"]),
    (learned(mutable_tree_tail=0), LEARNED, ["mutable_tree_tail"]),
    (learned(recent_max_age_observations=0), LEARNED, ["recent_max_age_observations"]),
    (learned(update_step=0), LEARNED, ["update_step"]),
    (learned(update_step=1.5, update_mode="leaf_only"), LEARNED, ["update_step"]),
    (learned(update_step=0.5), LEARNED, ["update_step", "leaf_only"]),
    (learned(recent_window=0), LEARNED, ["recent_window"]),
    (learned(update_every=0), LEARNED, ["update_every"]),
    (learned(eager_refresh_interval=0), LEARNED, ["eager_refresh_interval"]),
    (learned(split_sampling_rate=0), LEARNED, ["split_sampling_rate"]),
    (learned(split_rank_tolerance=1.5), LEARNED, ["split_rank_tolerance"]),
    (learned(source_sha256="x"), LEARNED, ["source_sha256"]),
    (learned_mode(checkpoint_path=""), LEARNED, ["checkpoint_path"]),
    (learned_mode(artifact_path="", adaptation="frozen"), LEARNED, ["artifact_path"]),
    *(
        (causal(selector={name: value}), SELECTOR, [name])
        for name, value in (
            *(
                ("alpha", 0),
                ("alpha", 1.5),
                ("margin", -0.1),
                ("margin", 1),
                ("warmup", 0),
                ("persistence", 0),
            ),
        )
    ),
    (sampling(axes=[]), f"{REGRESSION}.sampling.axes", []),
    (sampling(axes=["n", "n"]), f"{REGRESSION}.sampling.axes", []),
    (sampling(axes=["n", "E", "P", "F", "n2", "logN", "logP"]), f"{REGRESSION}.sampling.axes", []),
    (sampling(bins_per_axis=[4]), f"{REGRESSION}.sampling.bins_per_axis", []),
    (sampling(bins_per_axis=[]), f"{REGRESSION}.sampling.bins_per_axis", []),
    (sampling(bins_per_axis=[0, 4]), f"{REGRESSION}.sampling.bins_per_axis", []),
    (sampling(bins_per_axis=[2**63, 1]), f"{REGRESSION}.sampling.bins_per_axis", []),
    (sampling(axes=["n"], bins_per_axis=[4, 4]), f"{REGRESSION}.sampling.bins_per_axis", []),
    (sampling(max_observations=0), f"{REGRESSION}.sampling.max_observations", []),
    (fit(rebuild_interval=0), f"{REGRESSION}.fit.rebuild_interval", []),
    (fit(kind="spline", linear={}), f"{REGRESSION}.fit.linear", ["standardized_nnls"]),
    (fit(linear={"feature_axes": []}), f"{REGRESSION}.fit.linear.feature_axes", []),
    (fit(linear={"feature_axes": ["n", "n"]}), f"{REGRESSION}.fit.linear.feature_axes", []),
    (policy(relative_tolerance=-0.1), f"{POLICY}.relative_tolerance", []),
    (policy(absolute_tolerance_ms=-0.1), f"{POLICY}.absolute_tolerance_ms", []),
    *((policy(**{name: 0}), f"{POLICY}.{name}", []) for name in ("window", "trigger", "cooldown")),
    (policy(trigger=9), f"{POLICY}.trigger", ["window"]),
    (policy(startup_observations=0), f"{POLICY}.startup_observations", []),
    (fit(spline={}), f"{REGRESSION}.fit.spline", ["spline"]),
    (
        estimator(fpm_regression={"fit": {"kind": "spline"}, "sampling": {"axes": ["moe", "attention"]}}),
        f"{REGRESSION}.sampling.axes",
        ["attention", "moe"],
    ),
    (
        estimator(fpm_regression={"fit": {"kind": "spline"}, "sampling": {"max_observations": 31}}),
        f"{REGRESSION}.sampling.max_observations",
        ["32"],
    ),
    *(
        (fit(kind="spline", spline={"knots_per_axis": n}), f"{REGRESSION}.fit.spline.knots_per_axis", [])
        for n in (1, 4)
    ),
    (fit(recursive={}), f"{REGRESSION}.fit.recursive", ["recursive"]),
    (fit(automatic={}), f"{REGRESSION}.fit.automatic", ["automatic"]),
    (fit(kind="recursive", automatic={}), f"{REGRESSION}.fit.automatic", ["automatic"]),
    (fit(kind="recursive", linear={}), f"{REGRESSION}.fit.linear", ["standardized_nnls"]),
    (fit(kind="recursive", rebuild_interval=4), f"{REGRESSION}.fit.rebuild_interval", ["recursive"]),
    (fit(kind="recursive", singular_ridge_scale=0.1), f"{REGRESSION}.fit.singular_ridge_scale", ["recursive"]),
    *(
        (fit(kind="recursive", recursive={name: value}), f"{REGRESSION}.fit.recursive.{name}", [])
        for name, value in (
            *(("forgetting", 0), ("forgetting", 1), ("outlier_bound", 0), ("outlier_bound", 1)),
            *(("level_gain", -0.1), ("level_gain", 1.1)),
        )
    ),
    (
        estimator(fpm_regression={"fit": {"kind": "recursive"}, "sampling": {"max_observations": 65}}),
        f"{REGRESSION}.sampling",
        ["recursive"],
    ),
    (
        estimator(fpm_regression={"fit": {"kind": "recursive"}}, features={"ffn_token_weight": 2.0})
        | {"estimation_mode": "fpm_regression"},
        "estimator_config.features.ffn_token_weight",
        ["recursive"],
    ),
    *(
        (fit(kind="automatic", automatic={name: value}), f"{REGRESSION}.fit.automatic.{name}", [])
        for name, value in (
            *(("candidates", ["spline"]), ("candidates", ["spline", "spline"]), ("candidates", ["linear", "linear"])),
            *(("error_forgetting", 0), ("error_forgetting", 1), ("margin", -0.1), ("margin", 1), ("warmup", 0)),
        )
    ),
    (
        fit(kind="automatic", automatic={"candidates": ["linear", "recursive"]}, spline={}),
        f"{REGRESSION}.fit.spline",
        ["candidate"],
    ),
    (
        fit(kind="automatic", linear={"feature_axes": ["n"]}),
        f"{REGRESSION}.fit.linear.feature_axes",
        ["attention", "moe"],
    ),
    (
        estimator(fpm_regression={"fit": {"kind": "automatic"}, "sampling": {"axes": ["moe", "attention"]}}),
        f"{REGRESSION}.sampling.axes",
        ["automatic"],
    ),
    (
        estimator(fpm_regression={"fit": {"kind": "automatic"}, "sampling": {"max_observations": 31}}),
        f"{REGRESSION}.sampling.max_observations",
        ["32"],
    ),
    (search(window=0), f"{SEARCH}.window", []),
    (search(trigger=0), f"{SEARCH}.trigger", []),
    (search(trigger=17), f"{SEARCH}.trigger", []),
    (search(tolerance=0), f"{SEARCH}.tolerance", []),
    (search(absolute_tolerance_ms=-1), f"{SEARCH}.absolute_tolerance_ms", []),
    (search(cooldown=0), f"{SEARCH}.cooldown", []),
    (search("periodic", step=0), f"{SEARCH}.step", []),
    (
        estimator(fpm_interpolation={"fpm_parquet_path": ""}),
        "estimator_config.fpm_interpolation.fpm_parquet_path",
        [],
    ),
    (fit(singular_ridge_scale=-1e-9), f"{REGRESSION}.fit.singular_ridge_scale", []),
    (estimator(correction={"sampling": {"max_observations": 0}}), CORRECTION, ["max_observations"]),
    (estimator(correction={"min_observations": 0}), CORRECTION, ["min_observations"]),
    *(
        (estimator(correction={"factor_bounds": {"min": value}}), CORRECTION, ["factor_bounds.min"])
        for value in (0, -1, 1.5)
    ),
    (estimator(correction={"factor_bounds": {"max": 0.99}}), CORRECTION, ["factor_bounds.max"]),
    *(
        (estimator(correction={name: 0}), CORRECTION, [name])
        for name in ("max_num_tokens", "max_batch_size", "max_kv_tokens")
    ),
    (estimator(correction={"min_observations": 65}), CORRECTION, ["min_observations", "max_observations"]),
    (estimator(correction={"sampling": {"bins_per_axis": [4, 0]}}), CORRECTION, ["bins_per_axis"]),
    (estimator(correction={"sampling": {"bins_per_axis": [2**32, 2**31]}}), CORRECTION, ["bins_per_axis"]),
    (estimator(fpm_regression={"min_observations": 0}), REGRESSION, ["min_observations"]),
    (
        estimator(fpm_regression={"min_observations": 65}),
        REGRESSION,
        ["min_observations", "max_observations"],
    ),
    ({"speculation": {"kind": "x"}}, "", ["speculation", "'x'", "ngram"]),
    *(
        ({"speculation": {"kind": kind}}, "", ["speculation", kind])
        for kind in ("dflash", "draft_model", "dspark", "eagle3", "mtp")
    ),
    (
        WITH_PROFILE | estimator(fpm_interpolation={"text_only": True}),
        "",
        ["fpm_profile", "text_only"],
    ),
    (
        WITH_PROFILE | estimator(fpm_interpolation={"unrecorded_quant_modes": ["fmha"]}),
        "",
        ["fpm_profile", "unrecorded_quant_modes"],
    ),
    (WITH_PROFILE | {"dcp": 1}, "", ["fpm_profile", "dcp"]),
    ({"fpm_profile": {}}, "", ["fpm_profile", "backend_version"]),
    (WITH_PROFILE | {"nextn": 1}, "", ["fpm_profile", "nextn"]),
    (WITH_PROFILE | ngram(num_speculative_tokens=1), "", ["fpm_profile", "speculation"]),
    *(
        (WITH_PROFILE | {"backend_version": version}, "", ["fpm_profile", "backend_version"])
        for version in ("current", "previous", "next")
    ),
    (
        estimator(fpm_interpolation={"method": "direct"}),
        "estimator_config.fpm_interpolation.method",
        ["fpm_profile"],
    ),
]


def fault(changes):
    with pytest.raises(ConfigError) as caught:
        normalize_config(BASE | changes)
    return caught.value


@pytest.mark.parametrize(("changes", "path", "mentions"), REFUSED, ids=range(len(REFUSED)))
def test_a_broken_rule_is_refused_at_its_place(changes, path, mentions):
    caught = fault(changes)
    assert caught.path == path
    assert str(caught).startswith(f"invalid engine config: {path or 'forward-pass model'}: ")
    assert [text for text in mentions if text not in str(caught)] == []


ACCEPTED = [
    EXECUTION,
    execution(cp_size=1, dcp=1, backend_version="current"),
    estimator(selector={"alpha": 0.4, "margin": 0.05, "warmup": 5, "persistence": 1}),
    snapshot(),
    {"dcp": 2, "tp": 4},
    {"fmha_quant_mode": "x"} | estimator(fpm_interpolation={"unrecorded_quant_modes": ["comm"]}),
    {"tp": 2, "attention_dp": 2, "cp_size": 2, "moe_tp_size": 4, "moe_ep_size": 2},
    {"moe_backend": "default"},
    {"moe_backend": "megamoe", "backend": "sglang"},
    {"enable_eplb": True, "wideep_num_slots": 1, "moe_kernel_source": "k"},
    INTERPOLATION | {"moe_backend": "default"},
    {"nextn": 5},
    ngram(num_speculative_tokens=5),
    *(INTERPOLATION | {"fpm_fmha_quant_mode": mode} for mode in ("bfloat16", "fp8", "fp8_block")),
    {"transfer_policy": ["xop", "xop", "xshape"]},
    {"systems_paths": ["/", "/"]},
    learned(history_weight=None, history_weight_ramp_observations=0),
    learned(update_step=0.5, update_mode="leaf_only"),
    learned(source_sha256=SHA.upper()),
    sampling(bins_per_axis=[2**63 - 1, 1]),
    sampling(axes=["n"], bins_per_axis=[4]),
    policy(trigger=8, relative_tolerance=0, absolute_tolerance_ms=0),
    search(window=1, trigger=1, absolute_tolerance_ms=0),
    estimator(fpm_regression={"fit": {"kind": "spline"}, "sampling": {"max_observations": 32}}),
    estimator(correction={"factor_bounds": {"min": 1, "max": 1}}),
    estimator(correction={"min_observations": 64}),
    estimator(correction={"sampling": {"bins_per_axis": [2**31, 2**31]}}),
]


@pytest.mark.parametrize("changes", ACCEPTED, ids=range(len(ACCEPTED)))
def test_the_edge_of_a_rule_is_accepted(changes):
    normalize_config(BASE | changes)


def merged(first, second):
    """Both changes at once, or None when they write one field differently."""
    both = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(both.get(key), dict):
            both[key] = merged(both[key], value)
            if both[key] is None:
                return None
        elif both.setdefault(key, value) != value:
            return None
    return both


# one fault of each rule that stands on its own, in the specified order
ORDER = [
    estimator(selector={"alpha": 0.5}),
    learned(artifact_path="/x"),
    estimator(fpm_interpolation={"collect_coverage": True}),
    {"model": ""},
    {"system": ""},
    {"backend_version": ""},
    {"moe_kernel_source": ""},
    {"pp": 0},
    {"cp_size": 0},
    {"dcp": 3},
    {"comm_quant_mode": "x"} | estimator(fpm_interpolation={"unrecorded_quant_modes": ["comm"]}),
    {"moe_tp_size": 5, "moe_ep_size": 1},
    {"wideep_num_slots": 0},
    {"moe_backend": "x"},
    {"nextn": 6},
    {"speculation": {"kind": "ngram"}},
    {"fpm_fmha_quant_mode": "fp8"},
    {"transfer_policy": ["x"]},
    {"systems_paths": ["/no/such/directory"]},
    learned(history_weight=2),
    learned(mutable_tree_tail=0),
    learned(update_step=0),
    learned(recent_window=0),
    learned(split_sampling_rate=0),
    learned(source_sha256="x"),
    sampling(axes=["n", "n"]),
    sampling(bins_per_axis=[4]),
    sampling(max_observations=0),
    fit(rebuild_interval=0),
    fit(linear={"feature_axes": []}),
    fit(spline={}),
    estimator(fpm_interpolation={"fpm_parquet_path": ""}),
    fit(singular_ridge_scale=-1),
    estimator(correction={"sampling": {"max_observations": 0}}),
    estimator(correction={"min_observations": 0}),
    estimator(correction={"factor_bounds": {"min": 2}}),
    estimator(correction={"factor_bounds": {"max": 0.5}}),
    estimator(correction={"max_num_tokens": 0}),
    estimator(correction={"sampling": {"bins_per_axis": [0, 1]}}),
    estimator(fpm_regression={"min_observations": 0}),
    {"speculation": {"kind": "x"}},
    estimator(fpm_interpolation={"method": "direct"}),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_first_broken_rule_wins(first):
    alone = str(fault(ORDER[first]))
    for later in ORDER[first + 1 :]:
        both = merged(ORDER[first], later)
        if both is not None:
            assert str(fault(both)) == alone
