"""Which deployments are refused, and with which class: another estimator may follow only on some of them."""

import pytest

from fpmsdk.errors import ConfigError, MissingCapabilityError, UnsupportedModelError
from fpmsdk.opgraph.parallelism import mtp_scale
from tests.opgraph.checkpoints import BLOCK_FP8, DEEPSEEK_V3, QWEN3_30B, QWEN3_32B, graph


@pytest.mark.parametrize(
    ("config", "fields", "path"),
    [
        (QWEN3_32B, {"tp": 3}, "tp"),
        (QWEN3_30B, {"tp": 32, "attention_dp": 8, "moe_tp_size": 1, "moe_ep_size": 256}, "moe_ep_size"),
        (QWEN3_30B | {"quantization_config": BLOCK_FP8}, {"tp": 4, "moe_tp_size": 4, "moe_ep_size": 1}, "moe_tp_size"),
        (QWEN3_32B, {"cp_size": 2}, "cp_size"),
        (QWEN3_32B, {"cp_size": 2, "backend": "vllm"}, "cp_size"),
    ],
)
def test_a_model_that_cannot_be_divided_that_way_is_unsupported(config, fields, path):
    with pytest.raises(UnsupportedModelError) as caught:
        graph(config, **fields)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("config", "fields", "path"),
    [
        (QWEN3_30B, {"tp": 4, "moe_tp_size": 1, "moe_ep_size": 2}, "moe_ep_size"),
        (QWEN3_30B, {"tp": 4}, "moe_ep_size"),
        (DEEPSEEK_V3, {"attention_dp": 2, "moe_tp_size": 1, "moe_ep_size": 1}, "moe_ep_size"),
        (QWEN3_32B, {"backend": "sglang", "cp_size": 2, "tp": 2}, "cp_size"),
        (QWEN3_32B, {"backend": "sglang", "cp_size": 2, "attention_dp": 2}, "cp_size"),
        (QWEN3_32B, {"nextn": -1}, "nextn"),
        (QWEN3_32B, {"decoder_replay": True}, "decoder_replay"),
        (QWEN3_32B, {"enable_eplb": True}, "enable_eplb"),
        (QWEN3_32B, {"wideep_num_slots": 288}, "wideep_num_slots"),
        (QWEN3_32B, {"moe_backend": "deepep_moe"}, "moe_backend"),
        (QWEN3_32B, {"moe_kernel_source": "x"}, "moe_kernel_source"),
    ],
)
def test_a_contradictory_request_is_invalid(config, fields, path):
    with pytest.raises(ConfigError) as caught:
        graph(config, **fields)
    assert caught.value.path == path
    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize("fields", [{"tp": 4, "dcp": 2}, {"speculation": {"kind": "eagle3", "params": {}}}])
def test_what_has_no_operators_is_a_missing_capability(fields):
    with pytest.raises(MissingCapabilityError):
        graph(QWEN3_32B, **fields)


def test_sizes_that_are_fine():
    assert graph(QWEN3_32B, tp=16, pp=3, dcp=1, moe_backend="default")
    assert graph(QWEN3_30B | {"quantization_config": BLOCK_FP8}, tp=2, moe_tp_size=2, moe_ep_size=1)
    assert graph(QWEN3_30B, backend="sglang", cp_size=4, moe_tp_size=1, moe_ep_size=4)


def test_the_weight_block_size_of_the_checkpoint_counts():
    config = QWEN3_30B | {"quantization_config": BLOCK_FP8 | {"weight_block_size": [64, 64]}}
    assert graph(config, tp=4, moe_tp_size=4, moe_ep_size=1)


def test_multi_token_prediction_adds_layers():
    assert [mtp_scale(nextn, 64) for nextn in (0, 1, 2)] == [1.0, 65 / 64, 66 / 64]
