"""Migration of flat records and options: each field's destination, each refusal."""

import json

import pytest

from fpmsdk.config import ForwardPassPerfModelConfig, ForwardPassPerfOptions
from fpmsdk.config.legacy import migrate_legacy_config
from fpmsdk.errors import ConfigError

RECORD = {
    "schema_version": 1,
    "model_name": "m",
    "system_name": "s",
    "backend": "vllm",
    "tp_size": 1,
    "pp_size": 1,
}
PLAIN = migrate_legacy_config(RECORD, "decode")


def difference(record=None, options=None):
    migrated = migrate_legacy_config(RECORD | (record or {}), "decode", options)
    return {key: value for key, value in migrated.items() if value != PLAIN[key]}


def fault(record=None, options=None, worker_type="decode"):
    with pytest.raises(ConfigError) as caught:
        migrate_legacy_config(RECORD | (record or {}), worker_type, options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("record", "canonical"),
    [
        ({"schema_version": 2**32 - 1}, {}),
        ({"tp_size": 4, "pp_size": 2}, {"tp": 4, "pp": 2}),
        ({"attention_dp_size": 2}, {"attention_dp": 2}),
        ({"attention_dp_size": None}, {}),
        ({"moe_tp_size": 1, "moe_ep_size": 1}, {"moe_tp_size": 1, "moe_ep_size": 1}),
        ({"backend_version": "1"}, {"backend_version": "1"}),
        ({"nextn": 3}, {"nextn": 3}),
        *(({"nextn": value}, {}) for value in (-1, "x", 2.0, True, None, 2**32)),
        ({"kv_block_size": 16, "decoder_replay": True}, {"kv_block_size": 16, "decoder_replay": True}),
        ({"database_mode": "HYBRID"}, {"database_mode": "HYBRID"}),
        ({"transfer_policy": ["xop"]}, {"transfer_policy": ["xop"]}),
        ({"systems_path": "/"}, {"systems_paths": ["/"]}),
        ({"moe_kernel_source": "k"}, {"moe_kernel_source": "k"}),
        (
            {"enable_shared_layer": True, "strict_provenance": True},
            {"enable_shared_layer": True, "strict_provenance": True},
        ),
        (
            {
                "weight_dtype": "fp8",
                "moe_dtype": "nvfp4",
                "activation_dtype": "bfloat16",
                "kv_cache_dtype": "fp8",
            },
            {
                "gemm_quant_mode": "fp8",
                "moe_quant_mode": "nvfp4",
                "fmha_quant_mode": "bfloat16",
                "kvcache_quant_mode": "fp8",
            },
        ),
        ({"forward_model": None}, {}),
        ({"forward_model": "op_level"}, {}),
        ({"forward_model": "fpm"}, {"estimation_mode": "fpm_interpolation"}),
        ({"extra": {"a": "b"}, "bogus": 5, "estimator_config": {"x": 1}, "worker_type": "x"}, {}),
    ],
)
def test_record_fields_go_to_their_canonical_place(record, canonical):
    assert difference(record) == canonical


def test_context_parallelism_is_kept():
    assert migrate_legacy_config(RECORD | {"cp_size": 2}, "decode")["cp_size"] == 2


def test_a_parquet_path_needs_the_fpm_model():
    migrated = difference({"forward_model": "fpm", "fpm_parquet_path": "x"})["estimator_config"]
    assert migrated["fpm_interpolation"] == {"method": "auto", "fpm_parquet_path": "x"}
    assert "forward_model" in fault({"fpm_parquet_path": "x"})
    assert "fpm_parquet_path" in fault({"forward_model": "fpm", "fpm_parquet_path": ""})


def test_the_policy_allows_regression_only_on_request():
    assert PLAIN["fallback_policy"] == "deny"
    assert migrate_legacy_config(RECORD, "decode", allow_regression=True)["fallback_policy"] == "regression"


def test_the_method_stays_unresolved():
    assert PLAIN["estimator_config"]["fpm_interpolation"]["method"] == "auto"


@pytest.mark.parametrize("name", list(RECORD))
def test_required_record_fields(name):
    record = {key: value for key, value in RECORD.items() if key != name}
    with pytest.raises(ConfigError) as caught:
        migrate_legacy_config(record, "decode")
    assert str(caught.value) == f"missing field `{name}`"


@pytest.mark.parametrize(
    "record",
    [
        {"schema_version": -1},
        {"schema_version": None},
        {"tp_size": 2.0},
        {"tp_size": None},
        {"model_name": 5},
        {"backend": "x"},
        {"weight_dtype": "zz"},
        {"weight_dtype": 5},
        {"database_mode": None},
        {"decoder_replay": None},
        {"strict_provenance": None},
        {"transfer_policy": "xop"},
        {"systems_path": 5},
        {"extra": None},
        {"extra": {"a": 1}},
        {"forward_model": 5},
    ],
)
def test_ill_typed_record_fields_are_refused_without_a_prefix(record):
    assert not fault(record).startswith("invalid forward-pass config")


@pytest.mark.parametrize(
    ("record", "mention"),
    [
        ({"forward_model": "auto"}, "forward_model"),
        ({"tp_size": 0}, "tp"),
        ({"model_name": " "}, "model"),
        ({"systems_path": "/no/such/directory"}, "systems_paths"),
        ({"nextn": 6}, "nextn"),
        ({"forward_model": "fpm", "nextn": 1}, "nextn"),
    ],
)
def test_the_canonical_rules_hold_for_migrated_records(record, mention):
    assert mention in fault(record)


def test_an_unknown_worker_type_is_refused():
    assert fault(worker_type="agg").startswith("invalid worker_type: ")


CORRECTION = PLAIN["estimator_config"]["correction"]
REGRESSION = PLAIN["estimator_config"]["fpm_regression"]


@pytest.mark.parametrize(
    ("options", "section", "path", "value"),
    [
        ({"max_observations": 128}, "correction", ("sampling", "max_observations"), 128),
        ({"max_observations": 128}, "fpm_regression", ("sampling", "max_observations"), 128),
        ({"min_observations": 2}, "correction", ("min_observations",), 2),
        ({"min_observations": 2}, "fpm_regression", ("min_observations",), 2),
        ({"min_faster_correction_factor": None}, "correction", ("factor_bounds", "min"), None),
        ({"min_faster_correction_factor": 1}, "correction", ("factor_bounds", "min"), 1.0),
        ({"max_slower_correction_factor": 3}, "correction", ("factor_bounds", "max"), 3.0),
        ({"max_slower_correction_factor": None}, "correction", ("factor_bounds", "max"), None),
        ({"bucket_count": 9}, "correction", ("sampling", "bins_per_axis"), [3, 3]),
        ({"bucket_count": 2**40}, "fpm_regression", ("sampling", "bins_per_axis"), [2**20, 2**20]),
        ({"bucket_shape": [2, 3]}, "correction", ("sampling", "bins_per_axis"), [2, 3]),
        (
            {"bucket_shape": (2, 3), "bucket_count": 8},
            "fpm_regression",
            ("sampling", "bins_per_axis"),
            [2, 3],
        ),
        ({"bucket_shape": None}, "correction", ("sampling", "bins_per_axis"), [4, 4]),
        ({"max_num_tokens": 5}, "correction", ("max_num_tokens",), 5),
        ({"max_batch_size": 5}, "correction", ("max_batch_size",), 5),
        ({"max_kv_tokens": 5}, "correction", ("max_kv_tokens",), 5),
        ({"correction_mode": "hybrid"}, "correction", ("mode",), "hybrid"),
        ({"regression_ridge_scale": 0}, "fpm_regression", ("fit", "singular_ridge_scale"), 0.0),
        ({"regression_attention_kv_weight": -1}, "features", ("attention_kv_weight",), -1.0),
        ({"regression_ffn_token_weight": "NaN"}, "features", ("ffn_token_weight",), "NaN"),
        ({"regression_ffn_token_weight": float("inf")}, "features", ("ffn_token_weight",), "Infinity"),
        (
            {"regression_prefill_attention_pair_weight": 2},
            "features",
            ("prefill_attention_pair_weight",),
            2.0,
        ),
    ],
)
def test_options_go_to_their_canonical_place(options, section, path, value):
    found = migrate_legacy_config(RECORD, "decode", options)["estimator_config"][section]
    for key in path:
        found = found[key]
    assert found == value


@pytest.mark.parametrize("options", [None, {}, ForwardPassPerfOptions()])
def test_absent_options_leave_the_defaults(options):
    assert json.dumps(migrate_legacy_config(RECORD, "decode", options)) == json.dumps(PLAIN)


@pytest.mark.parametrize(
    "options",
    [
        {"foo": 1},
        {"max_observations": None},
        {"max_observations": 2.0},
        {"max_num_tokens": 2**32},
        {"bucket_shape": [2]},
        {"bucket_count": "x", "bucket_shape": [1, 1]},
        {"correction_mode": "x"},
        {"min_faster_correction_factor": "x"},
        {"regression_ffn_token_weight": "x"},
        5,
        [],
    ],
)
def test_unknown_null_or_ill_typed_options_are_refused(options):
    assert fault(options=options).startswith("invalid engine config: invalid legacy options: ")


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"max_observations": 0}, "max_observations"),
        ({"min_observations": 0}, "min_observations"),
        ({"max_observations": 3}, "min_observations"),
        ({"min_faster_correction_factor": 1.5}, "factor_bounds.min"),
        ({"max_slower_correction_factor": 0.5}, "factor_bounds.max"),
        ({"bucket_count": 0}, "bucket_count"),
        ({"bucket_count": 8}, "bucket_count"),
        ({"bucket_shape": [0, 1]}, "bins_per_axis"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"regression_ridge_scale": -1}, "singular_ridge_scale"),
    ],
)
def test_options_out_of_range_are_refused(options, mention):
    assert mention in fault(options=options)


def test_the_class_method_carries_the_canonical_form():
    migrated = ForwardPassPerfModelConfig.from_legacy_engine_config(
        RECORD | {"systems_path": "/", "transfer_policy": ["xop"]}, "decode", {"bucket_count": 9}
    )
    assert (migrated.systems_paths, migrated.transfer_policy) == (("/",), ("xop",))
    assert migrated.estimator_config["correction"]["sampling"]["bins_per_axis"] == [3, 3]
    assert migrated.to_dict()["estimation_mode"] == "op_level"


@pytest.mark.parametrize("record", [None, 5, [], "x"])
def test_a_record_is_an_object(record):
    with pytest.raises(ConfigError, match="expected an object"):
        ForwardPassPerfModelConfig.from_legacy_engine_config(record, "decode")
