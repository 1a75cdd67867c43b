"""What normalisation fills in, writes out, leaves out, and may not touch."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.config import check_config, normalize_config, normalize_request
from fpmsdk.config.estimator import ESTIMATOR_CONFIG
from fpmsdk.config.fields import CONFIG
from fpmsdk.errors import ConfigError
from tests.perfmodel.deployments import checkpoint, direct_config

BASE = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated"}
SHA = "0123456789abcdef" * 4


def normalized(**changes):
    return normalize_config(BASE | changes)


def estimator(**sections):
    return normalized(estimator_config=sections)["estimator_config"]


def test_the_normal_form_of_a_minimal_configuration():
    assert estimator() == {
        "features": {
            "attention_kv_weight": 1.0,
            "prefill_attention_pair_weight": 1.0,
            "ffn_token_weight": 1.0,
        },
        "op_level": {},
        "fpm_interpolation": {"method": "sol"},
        "fpm_regression": {
            "sampling": {"bins_per_axis": [4, 4], "max_observations": 64},
            "min_observations": 5,
            "fit": {"kind": "standardized_nnls", "singular_ridge_scale": 1e-9, "rebuild_interval": None},
        },
        "correction": {
            "enabled": True,
            "feature_space": "legacy_workload",
            "sampling": {"bins_per_axis": [4, 4], "max_observations": 64},
            "min_observations": 5,
            "factor_bounds": {"min": 0.5, "max": 2.0},
            "max_num_tokens": 8192,
            "max_batch_size": 512,
            "max_kv_tokens": 2_000_000,
        },
    }


def test_fields_are_written_in_table_order_without_the_omitted_ones():
    written = list(normalized(cp_size=None, encoder_parallel=None))
    table = [known.name for known in CONFIG.fields]
    assert written == [name for name in table if name not in ("cp_size", "encoder_parallel")]
    assert list(normalized(cp_size=1, encoder_parallel="tp")) == table


@pytest.mark.parametrize(
    ("section", "default", "other"),
    [
        ("fpm_interpolation", {"text_only": False}, {"text_only": True}),
        ("fpm_interpolation", {"ragged_edges": "nearest"}, {"ragged_edges": "continuous"}),
        ("fpm_interpolation", {"fpm_parquet_path": None}, {"fpm_parquet_path": "x"}),
        ("fpm_interpolation", {"unrecorded_quant_modes": []}, {"unrecorded_quant_modes": ["comm"]}),
        ("correction", {"mode": "auto"}, {"mode": "fixed"}),
    ],
)
def test_some_fields_are_written_only_when_not_at_their_default(section, default, other):
    name = next(iter(default))
    assert name not in estimator(**{section: default})[section]
    assert estimator(**{section: other})[section][name] == other[name]


def test_sampling_axes_are_written_only_when_not_the_default_pair():
    assert (
        "axes"
        not in estimator(fpm_regression={"sampling": {"axes": ["attention", "moe"]}})["fpm_regression"]["sampling"]
    )
    swapped = estimator(fpm_regression={"sampling": {"axes": ["moe", "attention"]}})
    assert swapped["fpm_regression"]["sampling"]["axes"] == ["moe", "attention"]


def test_learned_controls_are_omitted_at_their_defaults_and_else_written_in_full():
    assert "fpm_learned" not in estimator(fpm_learned={"recent_window": 64})
    assert list(estimator(fpm_learned={"recent_window": 65})["fpm_learned"].items()) == [
        ("artifact_path", None),
        ("checkpoint_path", None),
        ("source_sha256", None),
        ("adaptation", "online"),
        ("update_mode", "structural"),
        ("recent_window", 65),
        ("history_weight", 0.1),
        ("history_weight_ramp_observations", 32),
        ("history_bin_grouping", True),
        ("mutable_tree_tail", None),
        ("update_step", 1.0),
        ("recent_max_age_observations", None),
        ("update_every", 1),
        ("derivative_refresh", "lazy"),
        ("split_sampling_rate", 0.5),
        ("split_rank_tolerance", 0.01),
        ("eager_refresh_interval", 32),
        ("seed", 0),
    ]


@pytest.mark.parametrize("spline", [{}, {"spline": None}, {"spline": {}}])
def test_the_spline_kind_expands(spline):
    fit = estimator(fpm_regression={"fit": {"kind": "spline", **spline}})["fpm_regression"]["fit"]
    assert fit["spline"] == {
        "knots_per_axis": 2,
        "search": {
            "kind": "adaptive",
            "window": 16,
            "trigger": 8,
            "tolerance": 0.05,
            "absolute_tolerance_ms": 1.0,
            "cooldown": 64,
        },
    }
    periodic = {"kind": "spline", "spline": {"search": {"kind": "periodic"}}}
    fit = estimator(fpm_regression={"fit": periodic})["fpm_regression"]["fit"]
    assert fit["spline"]["search"] == {"kind": "periodic", "step": 64}


def test_the_recursive_kind_expands():
    fit = estimator(fpm_regression={"fit": {"kind": "recursive"}})["fpm_regression"]["fit"]
    assert fit["recursive"] == {"forgetting": 0.999, "outlier_bound": 0.15, "level_gain": 0.5}
    assert not {"linear", "spline", "automatic"} & set(fit)


def test_the_automatic_kind_expands_with_its_candidates():
    fit = estimator(fpm_regression={"fit": {"kind": "automatic"}})["fpm_regression"]["fit"]
    candidates = ["recursive", "standardized_nnls", "spline"]
    assert fit["automatic"] == {"candidates": candidates, "error_forgetting": 0.98, "margin": 0.05, "warmup": 10}
    assert {"recursive", "spline"} < set(fit)
    two = {"kind": "automatic", "automatic": {"candidates": ["linear", "recursive"]}}
    fit = estimator(fpm_regression={"fit": two})["fpm_regression"]["fit"]
    assert fit["automatic"]["candidates"] == ["standardized_nnls", "recursive"]
    assert "spline" not in fit


def test_a_linear_block_expands_and_its_kind_has_an_alias():
    fit = estimator(fpm_regression={"fit": {"kind": "linear", "linear": {}}})["fpm_regression"]["fit"]
    assert fit["kind"] == "standardized_nnls"
    assert fit["linear"] == {
        "feature_axes": ["attention", "moe"],
        "non_negative": True,
        "update_policy": {"kind": "always"},
    }


def test_the_error_threshold_policy_starts_up_after_ten_observations():
    policy = {"kind": "error_threshold", "relative_tolerance": 0.1, "absolute_tolerance_ms": 1}
    policy |= {"window": 8, "trigger": 4, "cooldown": 16}
    fit = estimator(fpm_regression={"fit": {"linear": {"update_policy": policy}}})["fpm_regression"]["fit"]
    assert fit["linear"]["update_policy"] == policy | {"startup_observations": 10}


@pytest.mark.parametrize("mode", ["auto", "op_level", "fpm_interpolation", "fpm_regression"])
@pytest.mark.parametrize("method", ["auto", "sol"])
def test_without_a_profile_the_method_is_sol_in_every_mode(mode, method):
    config = BASE | {"estimation_mode": mode, "estimator_config": {"fpm_interpolation": {"method": method}}}
    assert normalize_config(config)["estimator_config"]["fpm_interpolation"]["method"] == "sol"


def test_speculation_of_kind_none_becomes_null():
    assert normalized(speculation={"kind": "none"})["speculation"] is None


def test_speculation_params_default_to_none_given():
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        normalized(speculation={"kind": "ngram"})


def test_a_state_snapshot_path_becomes_absolute_lexically(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    section = {"path": "a/../b/./c", "sha256": SHA}
    config = BASE | {"estimation_mode": "fpm_regression", "estimator_config": {"state_snapshot": section}}
    assert normalize_config(config)["estimator_config"]["state_snapshot"] == {
        "path": str(tmp_path / "b" / "c"),
        "sha256": SHA,
        "on_tune": "reject",
    }


LEARNED = {"estimation_mode": "fpm_learned"}


def test_learned_online_turns_correction_off_unless_written():
    config = BASE | LEARNED | {"estimator_config": {"fpm_learned": {"checkpoint_path": "/x"}}}
    assert check_config(config)["estimator_config"]["correction"]["enabled"] is False
    frozen = BASE | LEARNED | {"estimator_config": {"fpm_learned": {"artifact_path": "/x", "adaptation": "frozen"}}}
    assert check_config(frozen)["estimator_config"]["correction"]["enabled"] is True


def test_the_causal_selector_has_smaller_defaults_only_in_its_mode():
    controls = {"adaptation": "causal_selector", "update_every": 2}
    config = BASE | LEARNED | {"estimator_config": {"fpm_learned": controls | {"checkpoint_path": "/x"}}}
    learned = check_config(config)["estimator_config"]["fpm_learned"]
    assert (learned["recent_window"], learned["history_weight"]) == (8, 0.25)
    assert (learned["history_weight_ramp_observations"], learned["update_every"]) == (8, 2)
    elsewhere = estimator(fpm_learned=controls)["fpm_learned"]
    assert (elsewhere["recent_window"], elsewhere["history_weight"]) == (64, 0.1)


def test_a_null_history_weight_implies_no_ramp_in_the_learned_mode():
    controls = {"checkpoint_path": "/x", "history_weight": None}
    config = BASE | LEARNED | {"estimator_config": {"fpm_learned": controls}}
    assert check_config(config)["estimator_config"]["fpm_learned"]["history_weight_ramp_observations"] == 0
    with pytest.raises(ConfigError, match="history_weight_ramp_observations"):
        check_config(
            BASE | LEARNED | {"estimator_config": {"fpm_learned": controls | {"history_weight_ramp_observations": 8}}}
        )


def test_the_input_is_neither_changed_nor_shared():
    config = BASE | {"transfer_policy": ["xop"], "estimator_config": {"correction": {"enabled": False}}}
    before = json.dumps(config)
    result = normalize_config(config)
    result["transfer_policy"].append("xshape")
    result["estimator_config"]["correction"]["sampling"]["bins_per_axis"].append(7)
    assert json.dumps(config) == before
    assert normalize_config(config)["estimator_config"]["correction"]["sampling"]["bins_per_axis"] == [4, 4]


def test_the_request_layer_turns_python_infinities_into_text_and_the_strict_one_does_not():
    weights = {"features": {"ffn_token_weight": math.inf, "attention_kv_weight": math.nan}}
    config = BASE | {"estimation_mode": "fpm_regression", "estimator_config": weights}
    features = normalize_request(config)["estimator_config"]["features"]
    assert (features["ffn_token_weight"], features["attention_kv_weight"]) == ("Infinity", "NaN")
    with pytest.raises(ConfigError, match="attention_kv_weight"):
        normalize_config(config)


def test_the_request_layer_expands_transfer_presets_and_the_strict_one_does_not():
    config = BASE | {"estimation_mode": "fpm_regression", "transfer_policy": "balanced"}
    assert normalize_request(config)["transfer_policy"] == ["xquant", "xshape"]
    with pytest.raises(ConfigError, match="transfer_policy: expected an array"):
        normalize_config(config)


def test_the_request_layer_takes_text():
    text = json.dumps(BASE | {"estimation_mode": "fpm_regression", "systems_paths": ["/", "/."]})
    assert normalize_request(text)["systems_paths"] == ["/"]


def test_the_request_layer_leaves_ill_typed_documents_to_the_strict_one():
    for document in (5, BASE | {"systems_paths": 5}, BASE | {"estimator_config": 5}):
        with pytest.raises(ConfigError, match="invalid forward-pass config at"):
            normalize_request(document)


AXES = st.lists(st.sampled_from(["attention", "moe", "n", "logN"]), min_size=2, max_size=2, unique=True)
COUNT = st.integers(1, 2**31)
VALID = st.fixed_dictionaries(
    {name: st.just(value) for name, value in BASE.items()},
    optional={
        "tp": st.integers(1, 2**32 - 1),
        "nextn": st.integers(0, 5),
        "kv_block_size": st.none() | st.integers(0, 2**32 - 1),
        "cp_size": st.none() | st.integers(1, 8),
        "gemm_dtype": st.none() | st.sampled_from(["fp8", ""]),
        "decoder_replay": st.booleans(),
        "estimation_mode": st.sampled_from(["auto", "op_level", "fpm_regression"]),
        "fallback_policy": st.sampled_from(["deny", "error", "allow", "regression"]),
        "transfer_policy": st.none() | st.lists(st.sampled_from(["xop", "xshape"])),
        "encoder_parallel": st.none() | st.sampled_from(["tp", "dp"]),
        "estimator_config": st.fixed_dictionaries(
            {},
            optional={
                "features": st.fixed_dictionaries(
                    {}, optional={"ffn_token_weight": st.floats(allow_nan=False, allow_infinity=False)}
                ),
                "fpm_regression": st.fixed_dictionaries(
                    {},
                    optional={
                        "sampling": st.fixed_dictionaries(
                            {}, optional={"axes": AXES, "max_observations": st.integers(32, 2**31)}
                        ),
                        "min_observations": st.integers(1, 32),
                    },
                ),
                "fpm_learned": st.fixed_dictionaries(
                    {}, optional={"recent_window": COUNT, "seed": st.integers(0, 2**64 - 1)}
                ),
                "correction": st.fixed_dictionaries(
                    {},
                    optional={
                        "enabled": st.booleans(),
                        "mode": st.sampled_from(["auto", "fixed", "hybrid"]),
                        "factor_bounds": st.fixed_dictionaries(
                            {}, optional={"min": st.none() | st.floats(0.001, 1), "max": st.none()}
                        ),
                    },
                ),
            },
        ),
    },
)


@given(VALID)
def test_normalisation_is_idempotent_and_survives_json(config):
    once = normalize_config(config)
    assert json.dumps(normalize_config(once)) == json.dumps(once)
    assert json.dumps(normalize_config(json.dumps(once))) == json.dumps(once)


@given(VALID, st.randoms())
def test_the_order_of_the_keys_does_not_matter(config, random):
    keys = list(config)
    random.shuffle(keys)
    assert json.dumps(normalize_config({key: config[key] for key in keys})) == json.dumps(normalize_config(config))


def test_every_estimator_default_is_its_own_normal_form():
    stored = ESTIMATOR_CONFIG.read({})
    assert ESTIMATOR_CONFIG.read(ESTIMATOR_CONFIG.write(stored)) == stored


class TestRepeatedConfigurations:
    """One that was accepted is not read again; what lies outside of it is looked at every time."""

    @pytest.fixture
    def config(self, tmp_path):
        (tmp_path / "systems").mkdir()
        checkpoint(tmp_path / "model")
        return direct_config(tmp_path / "model", tmp_path / "systems", tmp_path / "pair.parquet")

    def test_its_canonical_form_belongs_to_the_caller(self, config):
        first = normalize_config(config)
        first["estimator_config"]["correction"]["enabled"] = "changed"
        second = normalize_config(config)
        assert second["estimator_config"]["correction"]["enabled"] is True
        assert normalize_config(config) == second

    def test_a_change_inside_is_seen(self, config):
        normalize_config(config)
        config["fpm_profile"]["context_length"] = 0
        with pytest.raises(ConfigError, match="context_length"):
            normalize_config(config)

    def test_a_systems_path_that_is_gone_is_seen(self, config, tmp_path):
        normalize_config(config)
        (tmp_path / "systems").rmdir()
        with pytest.raises(ConfigError, match="systems_paths"):
            normalize_config(config)

    def test_another_checkpoint_is_seen(self, config, tmp_path):
        normalize_config(config)
        checkpoint(tmp_path / "model", "OtherForCausalLM")
        with pytest.raises(ConfigError, match="OtherForCausalLM"):
            normalize_config(config)

    def test_another_registry_is_asked(self, config):
        config["estimator_config"]["fpm_interpolation"]["method"] = "auto"
        methods = [
            normalize_config(config, registry)["estimator_config"]["fpm_interpolation"]["method"]
            for registry in (lambda _name: False, lambda _name: True)
        ]
        assert methods == ["direct", "sol"]

    def test_the_path_of_a_snapshot_is_that_of_the_working_directory(self, monkeypatch, tmp_path):
        snapshot = {"path": "saved", "sha256": SHA}
        config = BASE | {"estimation_mode": "op_level", "estimator_config": {"state_snapshot": snapshot}}
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(tmp_path / folder)
            pinned = normalize_config(config)["estimator_config"]["state_snapshot"]
            assert pinned["path"] == str(tmp_path / folder / "saved")
