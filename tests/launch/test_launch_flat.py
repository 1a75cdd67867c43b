"""The flat legacy form: spellings it takes, what it derives, how it names faults."""

import pytest

from fpmsdk.errors import ConfigError, LaunchConfigError
from fpmsdk.launch.config import EngineLaunchConfig

CONFIG = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated"}


def fault(flat):
    with pytest.raises(ConfigError) as caught:
        EngineLaunchConfig.from_mapping(flat)
    return caught.value


def native(provider="ais", **config):
    return {"timing_model": {"type": "external", "provider": provider, "config": CONFIG | config}}


@pytest.mark.parametrize(
    ("flat", "engine"),
    [
        ({"engine_type": "sglang"}, {"backend": "sglang"}),
        ({"engine_type": "vllm", "backend": "vllm"}, {"backend": "vllm"}),
        ({"ais_nextn": 2}, {"aic_nextn": 2}),
        (
            {"ais_nextn": 1, "ais_nextn_accept_rates": "0.5"},
            {"aic_nextn": 1, "aic_nextn_accept_rates": "0.5"},
        ),
        ({"ais_mtp_seed": 7}, {"aic_mtp_seed": 7}),
        ({"kv_bytes_per_token": 5}, {"kv_transfer_bytes_per_token": 5}),
        ({"backend": "sglang", "sglang": {"page_size": 16}}, {"backend": "sglang", "block_size": 16}),
        ({"backend": "VLLM", "worker_type": "Decode"}, {"backend": "vllm", "worker_type": "decode"}),
        ({"preemption_mode": "FIFO"}, {"preemption_mode": "fifo"}),
        (
            {"kv_transfer_timing_mode": "Destination_Missing"},
            {"kv_transfer_timing_mode": "destination_missing"},
        ),
        ({"is_prefill": True}, {"worker_type": "prefill"}),
        ({"is_decode": True, "is_prefill": False}, {"worker_type": "decode"}),
        ({"is_decode": True, "worker_type": "prefill"}, {"worker_type": "prefill"}),
        ({"sglang": None, "trtllm": None, "timing_model": None}, {}),
        ({"sglang": {"max_prefill_tokens": None, "schedule_policy": "fcfs"}}, {}),
        ({"sglang": {"schedule_policy": "lpm"}}, {"sglang": {"schedule_policy": "lpm"}}),
        ({"timing_model": {"type": "default"}}, {"timing_model": {"type": "polynomial"}}),
        (
            {"timing_model": {"type": "fixed", "prefill_ms": 2, "decode_ms": 1}},
            {"timing_model": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0}},
        ),
        ({"num_gpu_blocks": None}, {}),
        ({"block_size": 0}, {}),
        ({"max_num_seqs": None}, {"max_num_seqs": None}),
    ],
)
def test_a_flat_launch_means_a_canonical_one(flat, engine):
    assert EngineLaunchConfig.from_mapping(flat) == EngineLaunchConfig.from_mapping({"engine": engine})


def test_launch_keys_are_pulled_out():
    made = EngineLaunchConfig.from_mapping({"dp_size": 2, "startup_time": 1, "num_gpu_blocks": 64})
    assert (made.dp_size, made.startup_time, made.engine.num_gpu_blocks) == (2, 1.0, 64)
    assert made.num_gpu_blocks_is_explicit


def test_null_blocks_are_not_explicit():
    assert not EngineLaunchConfig.from_mapping({"num_gpu_blocks": None}).num_gpu_blocks_is_explicit


@pytest.mark.parametrize(
    ("flat", "name"),
    [
        ({"engine_type": "vllm", "backend": "sglang"}, "backend"),
        ({"ais_nextn": 1, "aic_nextn": 2}, "aic_nextn"),
        ({"kv_bytes_per_token": 1, "kv_transfer_bytes_per_token": 2}, "kv_transfer_bytes_per_token"),
        ({"block_size": 2, "sglang": {"page_size": 4}}, "block_size"),
        ({"ais_perf_config": CONFIG, "timing_model": {"type": "polynomial"}}, "timing_model"),
    ],
)
def test_two_spellings_must_agree(flat, name):
    assert str(fault(flat)) == f"conflicting values for {name}"


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({"is_prefill": True, "is_decode": True}, "is_prefill and is_decode cannot both be true"),
        ({"is_prefill": 1}, "is_prefill must be a boolean"),
    ],
)
def test_role_flags(flat, text):
    assert str(fault(flat)) == text


@pytest.mark.parametrize(
    ("flat", "path"),
    [
        ({"bogus": 1}, "bogus"),
        ({"sglang": {"bogus": 1}}, "sglang.bogus"),
        ({"dp_size": 5.0}, "dp_size"),
        ({"max_num_seqs": "x"}, "max_num_seqs"),
    ],
)
def test_faults_are_named_as_written(flat, path):
    caught = fault(flat)
    assert caught.path == path
    assert str(caught).startswith(f"invalid engine launch config: {path}: ")


@pytest.mark.parametrize("provider", ["ais", "aic"])
def test_omitted_sizes_and_draft_count_follow_a_native_timing_model(provider):
    made = EngineLaunchConfig.from_mapping(native(provider, tp=4, attention_dp=2, nextn=3))
    assert (made.tensor_parallel_size, made.dp_size, made.engine.aic_nextn) == (4, 2, 3)


def test_a_null_tensor_parallel_size_is_derived():
    made = EngineLaunchConfig.from_mapping(native(tp=4) | {"tensor_parallel_size": None})
    assert made.tensor_parallel_size == 4


def test_without_drafts_nothing_is_derived():
    assert EngineLaunchConfig.from_mapping(native()).engine.aic_nextn is None


def test_the_canonical_form_derives_nothing():
    with pytest.raises(LaunchConfigError, match="tensor_parallel_size conflicts with canonical tp"):
        EngineLaunchConfig.from_mapping({"engine": native(tp=4)})


def test_a_foreign_provider_derives_nothing():
    assert EngineLaunchConfig.from_mapping(native("other", tp=4)).tensor_parallel_size == 1


def test_explicit_values_are_not_overridden():
    assert "dp_size" in str(fault(native(attention_dp=2) | {"dp_size": 3}))


@pytest.mark.parametrize("timing", [{}, native(), native("aic")])
def test_a_performance_configuration_becomes_the_timing_model(timing):
    made = EngineLaunchConfig.from_mapping({"ais_perf_config": CONFIG} | timing)
    assert made.engine.timing_model == {"type": "external", "provider": "ais", "config": CONFIG}


def test_a_null_performance_configuration_is_none():
    flat = {"ais_perf_config": None}
    assert EngineLaunchConfig.from_mapping(flat) == EngineLaunchConfig()


def test_the_input_is_not_changed():
    flat = {
        "sglang": {"page_size": 2, "schedule_policy": "fcfs", "max_prefill_tokens": None},
        "is_decode": True,
    }
    before = repr(flat)
    EngineLaunchConfig.from_mapping(flat)
    assert repr(flat) == before
