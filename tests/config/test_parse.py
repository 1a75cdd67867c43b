"""Types, names, aliases, defaults and the place a fault is reported at."""

import pytest

from fpmsdk.config import normalize_config
from fpmsdk.config.estimator import AXIS
from fpmsdk.config.fields import CONFIG
from fpmsdk.errors import ConfigError

BASE = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated"}
AT = "invalid forward-pass config at "


def fault(config):
    with pytest.raises(ConfigError) as caught:
        normalize_config(config)
    return caught.value


def estimator(**sections):
    return BASE | {"estimator_config": sections}


def fit(**controls):
    return estimator(fpm_regression={"fit": controls})


ALIASES = [
    ("tp", "tp_size", 2),
    ("pp", "pp_size", 2),
    ("attention_dp", "attention_dp_size", 2),
    ("gemm_quant_mode", "gemm_dtype", "fp8"),
    ("moe_quant_mode", "moe_dtype", "fp8"),
    ("fmha_quant_mode", "fmha_dtype", "fp8"),
    ("kvcache_quant_mode", "kv_cache_dtype", "fp8"),
    ("comm_quant_mode", "comm_dtype", "half"),
    ("estimation_mode", "forward_model", "fpm_regression"),
]


@pytest.mark.parametrize(("name", "alias", "value"), ALIASES)
def test_an_alias_means_its_field(name, alias, value):
    assert normalize_config(BASE | {alias: value})[name] == value


@pytest.mark.parametrize(("name", "alias", "value"), ALIASES)
@pytest.mark.parametrize("alias_first", [True, False])
def test_a_field_and_its_alias_together_are_a_duplicate_of_the_canonical_name(name, alias, value, alias_first):
    pair = {alias: value, name: value} if alias_first else {name: value, alias: value}
    caught = fault(BASE | pair)
    assert str(caught) == f"{AT}duplicate field `{name}`"
    assert caught.path == ""


def test_the_alias_of_the_attention_precision_names_its_own_field():
    caught = fault(BASE | {"fpm_fmha_dtype": 5})
    assert caught.path == "fpm_fmha_dtype"


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ({"estimation_mode": "fpm"}, {"estimation_mode": "fpm_interpolation"}),
        ({"fallback_policy": "error"}, {"fallback_policy": "deny"}),
    ],
)
def test_older_names_become_the_canonical_ones(written, canonical):
    assert normalize_config(BASE | written).items() >= canonical.items()


@pytest.mark.parametrize("name", ["model", "system", "backend", "worker_type"])
def test_a_missing_field_names_the_document_by_no_path(name):
    caught = fault({key: value for key, value in BASE.items() if key != name})
    assert str(caught) == f"{AT}missing field `{name}`"
    assert caught.path == ""


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (BASE | {"bogus": 1}, "bogus"),
        (BASE | {"estimator_config": {"bogus": 1}}, "estimator_config.bogus"),
        (estimator(features={"bogus": 1}), "estimator_config.features.bogus"),
        (
            estimator(op_level={"prefill_graph_profile": "x"}),
            "estimator_config.op_level.prefill_graph_profile",
        ),
        (estimator(fpm_interpolation={"bogus": 1}), "estimator_config.fpm_interpolation.bogus"),
        (
            estimator(fpm_regression={"sampling": {"bogus": 1}}),
            "estimator_config.fpm_regression.sampling.bogus",
        ),
        (fit(linear={"bogus": 1}), "estimator_config.fpm_regression.fit.linear.bogus"),
        (fit(spline={"bogus": 1}), "estimator_config.fpm_regression.fit.spline.bogus"),
        (estimator(fpm_learned={"bogus": 1}), "estimator_config.fpm_learned.bogus"),
        (estimator(selector={"bogus": 1}), "estimator_config.selector.bogus"),
        (
            estimator(correction={"factor_bounds": {"bogus": 1}}),
            "estimator_config.correction.factor_bounds.bogus",
        ),
        (
            estimator(state_snapshot={"path": "/s", "bogus": 1}),
            "estimator_config.state_snapshot.bogus",
        ),
        (BASE | {"speculation": {"kind": "ngram", "bogus": 1}}, "speculation.bogus"),
    ],
)
def test_unknown_fields_are_refused_at_every_level(config, path):
    caught = fault(config)
    assert caught.path == path
    assert str(caught).startswith(f"{AT}{path}: unknown field `{path.split('.')[-1]}`, expected one of ")


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (BASE | {"tp": "x", "estimator_config": {"bogus": 1}}, "estimator_config.bogus"),
        (BASE | {"gemm_dtype": 1, "gemm_quant_mode": 1}, "gemm_dtype"),
        (BASE | {"zzz": 1, "aaa": 1}, "aaa"),
        (BASE | {"Zzz": 1, "aaa": 1}, "Zzz"),
        (BASE | {"fpm_profile": 5, "estimator_config": {"selector": 5}}, "estimator_config.selector"),
    ],
)
def test_objects_are_walked_in_byte_order_of_their_keys(config, path):
    assert fault(config).path == path


def test_missing_fields_are_reported_after_all_given_ones():
    assert fault({"zzz": 1}).path == "zzz"
    profile = {"path": "/x", "zzz": 1}
    assert fault(estimator(op_level={"execution_profile": profile})).path.endswith(".zzz")


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (BASE | {"transfer_policy": ["xop", 1]}, "transfer_policy[1]"),
        (
            estimator(fpm_regression={"sampling": {"axes": ["n", "x"]}}),
            "estimator_config.fpm_regression.sampling.axes[1]",
        ),
        (
            estimator(fpm_regression={"sampling": {"bins_per_axis": [1, -1]}}),
            "estimator_config.fpm_regression.sampling.bins_per_axis[1]",
        ),
        (
            estimator(correction={"sampling": {"bins_per_axis": [1]}}),
            "estimator_config.correction.sampling.bins_per_axis",
        ),
        (
            estimator(correction={"sampling": {"bins_per_axis": [1, 2, 3]}}),
            "estimator_config.correction.sampling.bins_per_axis",
        ),
    ],
)
def test_items_are_named_by_index_and_a_wrong_fixed_length_by_the_list(config, path):
    assert fault(config).path == path


UPDATE = "estimator_config.fpm_regression.fit.linear.update_policy"
SEARCH = "estimator_config.fpm_regression.fit.spline.search"
THRESHOLD = {
    "kind": "error_threshold",
    "relative_tolerance": 0.1,
    "absolute_tolerance_ms": 1,
    "window": 8,
    "trigger": 4,
    "cooldown": 16,
}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({}, UPDATE),
        ({"kind": "x"}, f"{UPDATE}.kind"),
        ({"kind": 5}, f"{UPDATE}.kind"),
        ({"kind": "always", "bogus": 1}, UPDATE),
        ({"kind": "error_threshold"}, UPDATE),
        (THRESHOLD | {"window": "x"}, UPDATE),
        (THRESHOLD | {"bogus": 1}, UPDATE),
        (5, UPDATE),
    ],
)
def test_a_fault_of_a_chosen_record_names_its_object_and_one_of_the_kind_the_kind(value, path):
    assert fault(fit(linear={"update_policy": value})).path == path


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"kind": "x"}, f"{SEARCH}.kind"),
        ({"kind": "periodic", "window": 5}, SEARCH),
        ({"kind": "adaptive", "step": 5}, SEARCH),
        ({"kind": "periodic", "step": None}, SEARCH),
    ],
)
def test_the_knot_search_is_chosen_by_kind_too(value, path):
    assert fault(fit(kind="spline", spline={"search": value})).path == path


NULLABLE = [
    *("backend_version", "fpm_profile", "dcp", "moe_tp_size", "moe_ep_size", "cp_size", "gemm_quant_mode"),
    *("moe_quant_mode", "fmha_quant_mode", "fpm_fmha_quant_mode", "kvcache_quant_mode", "comm_quant_mode"),
    *("speculation", "kv_block_size", "transfer_policy", "attention_backend", "moe_kernel_source"),
    *("moe_backend", "wideep_num_slots", "enable_shared_layer", "encoder_parallel"),
]


@pytest.mark.parametrize("name", [known.name for known in CONFIG.fields])
def test_null_is_taken_exactly_for_the_optional_fields(name):
    config = BASE | {name: None}
    if name in NULLABLE:
        assert normalize_config(config) == normalize_config(BASE)
    else:
        assert fault(config).path == name


ESTIMATOR_NULLS = [
    (("op_level", "execution_profile"), True),
    (("fpm_interpolation", "fpm_parquet_path"), True),
    (("fpm_interpolation", "unrecorded_quant_modes"), False),
    (("fpm_regression", "sampling", "axes"), False),
    (("fpm_regression", "fit", "linear"), True),
    (("fpm_regression", "fit", "spline"), True),
    (("fpm_regression", "fit", "rebuild_interval"), True),
    (("fpm_regression", "fit", "kind"), False),
    (("correction", "factor_bounds", "min"), True),
    (("correction", "factor_bounds", "max"), True),
    (("correction", "max_num_tokens"), False),
    (("fpm_learned", "artifact_path"), True),
    (("fpm_learned", "checkpoint_path"), True),
    (("fpm_learned", "source_sha256"), True),
    (("fpm_learned", "mutable_tree_tail"), True),
    (("fpm_learned", "recent_max_age_observations"), True),
    (("fpm_learned", "recent_window"), False),
    *(((section,), False) for section in ("fpm_learned", "selector", "correction", "features", "op_level")),
    (("state_snapshot",), False),
]


@pytest.mark.parametrize(("keys", "accepted"), ESTIMATOR_NULLS, ids=str)
def test_null_inside_estimator_config(keys, accepted):
    value = None
    for key in reversed(keys):
        value = {key: value}
    if accepted:
        normalize_config(estimator(**value))
    else:
        assert fault(estimator(**value)).path == ".".join(("estimator_config", *keys))


@pytest.mark.parametrize("value", [5.0, True, "5", -1, 2**32, 2**64, [], {}])
@pytest.mark.parametrize("name", ["tp", "nextn", "kv_block_size", "wideep_num_slots"])
def test_counts_of_the_top_level_are_u32(name, value):
    assert fault(BASE | {name: value}).path == name


def test_the_largest_u32_is_a_count():
    assert normalize_config(BASE | {"kv_block_size": 2**32 - 1})["kv_block_size"] == 2**32 - 1


@pytest.mark.parametrize(("value", "accepted"), [(2**64 - 1, True), (2**64, False), (True, False)])
def test_counts_of_the_estimators_are_u64(value, accepted):
    config = estimator(fpm_learned={"seed": value})
    if accepted:
        assert normalize_config(config)["estimator_config"]["fpm_learned"]["seed"] == value
    else:
        assert fault(config).path == "estimator_config.fpm_learned.seed"


@pytest.mark.parametrize("name", ["max_num_tokens", "max_batch_size", "max_kv_tokens"])
def test_correction_limits_are_u32(name):
    assert fault(estimator(correction={name: 2**32})).path == f"estimator_config.correction.{name}"


def test_numbers_take_integers_and_are_stored_as_floats():
    bounds = normalize_config(estimator(correction={"factor_bounds": {"min": 1, "max": 3}}))
    stored = bounds["estimator_config"]["correction"]["factor_bounds"]
    assert (repr(stored["min"]), repr(stored["max"])) == ("1.0", "3.0")


@pytest.mark.parametrize("value", [True, "1", None, [], {}, float("inf"), float("nan"), 10**400])
def test_numbers_take_only_finite_numbers(value):
    path = "estimator_config.fpm_regression.fit.singular_ridge_scale"
    assert fault(fit(singular_ridge_scale=value)).path == path


@pytest.mark.parametrize("value", [1, 0, "True", None])
def test_booleans_take_neither_integers_nor_text(value):
    assert fault(BASE | {"decoder_replay": value}).path == "decoder_replay"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_feature_weights_keep_nonfinite_numbers_as_text(text):
    weights = normalize_config(estimator(features={"ffn_token_weight": text}))["estimator_config"]["features"]
    assert weights["ffn_token_weight"] == text


@pytest.mark.parametrize("value", ["nan", "1", True, None, [], "inf"])
def test_feature_weights_refuse_other_text_and_types(value):
    path = "estimator_config.features.ffn_token_weight"
    assert fault(estimator(features={"ffn_token_weight": value})).path == path


@pytest.mark.parametrize("weight", [0, -1, 1e308])
def test_feature_weights_are_not_checked_for_sign(weight):
    weights = normalize_config(estimator(features={"ffn_token_weight": weight}))["estimator_config"]["features"]
    assert weights["ffn_token_weight"] == float(weight)


CHOICES = {
    "backend": ("trtllm", "sglang", "vllm"),
    "worker_type": ("prefill", "decode", "aggregated"),
    "database_mode": ("SILICON", "HYBRID", "EMPIRICAL", "SOL", "SOL_FULL"),
    "fallback_policy": ("deny", "allow", "regression"),
    "encoder_parallel": ("tp", "dp"),
}


@pytest.mark.parametrize(("name", "accepted"), CHOICES.items())
def test_closed_names_are_taken_as_written(name, accepted):
    assert [normalize_config(BASE | {name: value})[name] for value in accepted] == list(accepted)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["agg", "silicon", "VLLM", "", 5, {"vllm": None}, ["vllm"]])
def test_other_names_and_types_are_refused(name, value):
    assert fault(BASE | {name: value}).path == name


def test_all_feature_axes_are_known():
    assert len(AXIS.names) == 19
    for first in range(0, 19, 6):
        axes = list(AXIS.names[first : first + 6])
        config = fit(linear={"feature_axes": axes})
        assert normalize_config(config)["estimator_config"]["fpm_regression"]["fit"]["linear"]["feature_axes"] == axes


@pytest.mark.parametrize("value", [[], [1], [{"a": 1}]])
@pytest.mark.parametrize("section", ["features", "op_level", "fpm_interpolation", "correction"])
def test_an_array_is_no_object(section, value):
    assert fault(estimator(**{section: value})).path == f"estimator_config.{section}"


@pytest.mark.parametrize("document", [5, None, [], "5", "null", '"x"', [("model", "m")]])
def test_the_document_is_an_object(document):
    caught = fault(document)
    assert str(caught).startswith(f"{AT}expected an object") or "malformed" in str(caught) or "JSON" in str(caught)


def test_field_names_are_strings():
    assert "field names" in str(fault(BASE | {5: 1}))


TEXT = '{"model":"m","system":"s","backend":"vllm","worker_type":"decode"'


@pytest.mark.parametrize(
    ("text", "path", "name"),
    [
        (',"tp":1,"tp":1}', "", "tp"),
        (
            ',"estimator_config":{"features":{"ffn_token_weight":1,"ffn_token_weight":1}}}',
            "estimator_config.features",
            "ffn_token_weight",
        ),
        (',"speculation":{"kind":"ngram","params":{"a":1,"a":1}}}', "speculation.params", "a"),
        (',"fpm_profile":{"deployments":[{"a":1,"a":2}]}}', "fpm_profile.deployments[0]", "a"),
        (
            ',"estimator_config":{"fpm_regression":{"fit":{"linear":{"update_policy":'
            '{"kind":"always","kind":"always"}}}}}}',
            UPDATE,
            "kind",
        ),
    ],
)
def test_a_json_key_given_twice_is_a_duplicate(text, path, name):
    caught = fault(TEXT + text)
    assert caught.path == path
    assert f"duplicate field `{name}`" in str(caught)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        TEXT,
        TEXT + "} x",
        TEXT + ',"tp":NaN}',
        TEXT + ',"tp":Infinity}',
        TEXT + ',"tp":1e400}',
        TEXT + f',"tp":{"9" * 5000}}}',
    ],
)
def test_malformed_text_is_refused(text):
    assert str(fault(text)).startswith("invalid forward-pass config")


def test_integers_longer_than_python_prints_are_refused():
    assert "9" * 99 not in str(fault(TEXT + ',"tp":' + "9" * 5000 + "}"))
    assert fault(BASE | {"tp": 10**5000}).path == "tp"


def test_text_nested_too_deeply_is_refused():
    assert "nested too deeply" in str(fault('{"model":' + "[" * 100_000))


@pytest.mark.parametrize("levels", [101, 500, 100_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_text_nested_beyond_a_hundred_levels_is_refused(levels, brackets):
    from fpmsdk.config.jsontext import JsonFault, read_json

    opening, closing = brackets if brackets == "[]" else ('{"a":', "}")
    text = opening * levels + "1" + closing * levels
    with pytest.raises(JsonFault, match="nested too deeply"):
        read_json(text)
    read_json(opening * 100 + "1" + closing * 100)
