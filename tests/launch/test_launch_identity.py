"""What a launch and its forward-pass configuration must agree on, reported all together or one at a time."""

import inspect
import json

import pytest

import fpmsdk
from fpmsdk import EngineLaunchConfig, ForwardPassPerfModelConfig, config_engine_launch_mismatches
from fpmsdk.errors import ConfigError, LaunchConfigError

CONFIG = {
    "model": "m",
    "system": "s",
    "backend": "vllm",
    "worker_type": "aggregated",
    "estimation_mode": "fpm_regression",
}
NGRAM = {"kind": "ngram", "params": {"num_speculative_tokens": 2}}

RULES = [
    ({"pp": 2}, {}, "engine launch supports only pp=1; got pp=2"),
    ({"tp": 2}, {"tensor_parallel_size": 4}, "tensor_parallel_size conflicts with canonical tp"),
    ({"attention_dp": 2}, {"dp_size": 4}, "dp_size conflicts with canonical attention_dp"),
    ({"worker_type": "decode"}, {}, "AIS worker_type must match engine role"),
    ({"speculation": NGRAM}, {}, "engine launch does not implement ngram draft scheduling"),
    ({"nextn": 1}, {"engine": {"aic_nextn": 2}}, "canonical nextn conflicts with scheduler aic_nextn"),
    ({}, {"engine": {"aic_nextn": 2}}, "canonical nextn conflicts with scheduler aic_nextn"),
]


def mismatches(config=None, launch=None):
    return config_engine_launch_mismatches({"engine": {}} | (launch or {}), CONFIG | (config or {}))


@pytest.mark.parametrize(("config", "launch", "text"), RULES)
def test_each_rule_has_its_text(config, launch, text):
    assert mismatches(config, launch) == [text]


@pytest.mark.parametrize(("config", "launch", "text"), RULES)
def test_a_launch_with_the_configuration_raises_the_same_text(config, launch, text):
    timing = {"type": "external", "provider": "ais", "config": CONFIG | config}
    written = {"engine": {}} | launch
    written["engine"] = written["engine"] | {"timing_model": timing}
    with pytest.raises(LaunchConfigError) as caught:
        EngineLaunchConfig.from_mapping(written)
    assert str(caught.value) == text


def test_all_conflicts_are_listed_in_rule_order():
    config = {"pp": 2, "tp": 2, "attention_dp": 2, "worker_type": "decode", "speculation": NGRAM}
    launch = {"tensor_parallel_size": 1, "dp_size": 1, "engine": {"aic_nextn": 1}}
    assert mismatches(config, launch) == [
        "engine launch supports only pp=1; got pp=2",
        "tensor_parallel_size conflicts with canonical tp",
        "dp_size conflicts with canonical attention_dp",
        "AIS worker_type must match engine role",
        "engine launch does not implement ngram draft scheduling",
        "canonical nextn conflicts with scheduler aic_nextn",
    ]


def test_what_the_launch_omits_follows_the_configuration():
    assert mismatches({"tp": 4, "attention_dp": 2, "nextn": 3}) == []
    assert mismatches({"tp": 4}, {"tensor_parallel_size": 4}) == []


def test_block_size_backend_and_version_are_not_compared():
    assert mismatches({"kv_block_size": 16, "backend": "sglang", "backend_version": "9"}) == []


def test_speculation_of_kind_none_is_no_conflict():
    assert mismatches({"speculation": {"kind": "none"}}) == []


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        ({"dp_size": 0}, "dp_size must be positive"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be positive"),
        ({"gpu_memory_utilization": 2.0}, "gpu_memory_utilization must be finite and in [0, 1]"),
        ({"startup_time": -1}, "startup_time must be finite and non-negative"),
        ({"engine": {"num_gpu_blocks": 0}}, "num_gpu_blocks must be positive"),
        ({"engine": {"bogus": 1}}, "engine.bogus"),
        ({"engine": None}, "engine"),
    ],
)
def test_invalid_launch_inputs_are_raised_not_listed(launch, text):
    with pytest.raises(LaunchConfigError) as caught:
        mismatches({"pp": 2}, launch)
    assert text in str(caught.value)


def test_the_configuration_is_validated_first():
    with pytest.raises(ConfigError, match="tp, pp and attention_dp"):
        mismatches({"tp": 0}, {"dp_size": 0})


@pytest.mark.parametrize(
    "launch",
    [
        {"max_num_seqs": 8, "is_decode": True},
        '{"engine": {"worker_type": "decode"}}',
        EngineLaunchConfig.from_mapping({"engine": {"worker_type": "decode"}}),
        {"engine": {"worker_type": "decode", "timing_model": {"type": "polynomial"}}},
    ],
)
def test_launch_arguments_come_in_every_form(launch):
    assert config_engine_launch_mismatches(launch, CONFIG) == ["AIS worker_type must match engine role"]


def test_the_configuration_comes_as_class_or_text():
    made = ForwardPassPerfModelConfig(**CONFIG)
    assert config_engine_launch_mismatches({"engine": {}}, made) == []
    assert config_engine_launch_mismatches({"engine": {}}, json.dumps(CONFIG)) == []


def test_the_signature_is_part_of_the_contract():
    parameters = inspect.signature(fpmsdk.config_engine_launch_mismatches).parameters
    assert list(parameters) == ["launch_args", "config", "state_snapshot"]
    assert parameters["config"].default is None
    assert parameters["state_snapshot"].default is None
    assert parameters["state_snapshot"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("sources", [{}, {"config": CONFIG, "state_snapshot": "/s"}])
def test_exactly_one_source_is_given(sources):
    with pytest.raises(ConfigError, match="exactly one"):
        config_engine_launch_mismatches({"engine": {}}, **sources)


@pytest.mark.parametrize("config", [None, 5, "{}", {}, {"model": "m"}, CONFIG | {"bogus": 1}])
def test_the_configuration_of_a_native_timing_model_is_checked(config):
    timing = {"type": "external", "provider": "aic", "config": config}
    with pytest.raises(ConfigError, match="forward-pass config"):
        EngineLaunchConfig.from_mapping({"engine": {"timing_model": timing}})
