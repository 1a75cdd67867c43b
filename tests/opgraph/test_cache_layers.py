"""Cache bytes by kinds of layers, straight from a checkpoint's document."""

import pytest

from fpmsdk.errors import ModelConfigError
from fpmsdk.opgraph.cache_layers import cache_layers
from fpmsdk.opgraph.kv_layout import kv_breakdown
from fpmsdk.opgraph.precision import Precision
from tests.opgraph.checkpoints import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, QWEN3_32B, model

SHORT_CONV = {
    "architectures": ["Lfm2ForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "intermediate_size": 128,
    "conv_L_cache": 3,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
ATTENTION_CONV = {
    **{name: SHORT_CONV[name] for name in ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")},
    "architectures": ["InklingForConditionalGeneration"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "use_sconv": True,
    "sconv_kernel_size": 4,
}


ALTERNATING = GPT_OSS_120B | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}


def told(config, tp=1):
    return [tuple(layers) for layers in cache_layers(config, tp, 2)]


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_32B, DEEPSEEK_V3, ALTERNATING], ids=lambda c: c["architectures"][0])
@pytest.mark.parametrize("tp", [1, 4, 16])
def test_a_model_with_a_graph_has_the_same_layers(config, tp):
    expected = kv_breakdown(model(config), Precision(), tp)
    assert sorted(told(config, tp)) == sorted(tuple(layers) for layers in expected)


@pytest.mark.parametrize(("tp", "channels"), [(1, 64), (2, 32), (4, 16)])
def test_a_short_convolution_keeps_its_last_inputs(tp, channels):
    convolution = told(SHORT_CONV, tp)[1]
    assert convolution == ("convolution", 3, 2 * channels, 2)
    layers = cache_layers(SHORT_CONV, tp, 2)[1]
    assert [layers.bytes_of(tokens) for tokens in (1, 2, 4096)] == [
        3 * 2 * channels,
        6 * 2 * channels,
        6 * 2 * channels,
    ]


def test_heads_are_replicated_beyond_one_a_rank():
    assert [told(SHORT_CONV, tp)[0] for tp in (1, 2, 4)] == [
        ("attention", 1, 128, 0),
        ("attention", 1, 64, 0),
        ("attention", 1, 64, 0),
    ]


def test_windows_and_a_convolution_beside_attention():
    # 2 * 32 + 2 * (64 / 4) = 96 slots, rounded up to 128.
    assert told(ATTENTION_CONV) == [
        ("attention", 2, 2 * 4 * 32 * 2, 128),
        ("attention", 1, 2 * 4 * 32 * 2, 0),
        ("convolution", 3, 4 * 2 * 128, 4),
    ]
    assert told(ATTENTION_CONV, 2)[2] == ("convolution", 3, 2 * 2 * 128, 4)


def test_the_bytes_of_a_sequence_are_the_sum_of_its_layers():
    # 2 layers of 512 bytes for 128 tokens, 1 for 1000, 3 convolutions of 1024 bytes for 4.
    layers = cache_layers(ATTENTION_CONV, 1, 2)
    assert sum(part.bytes_of(1000) for part in layers) == 2 * 512 * 128 + 512 * 1000 + 3 * 1024 * 4


@pytest.mark.parametrize(
    ("config", "tp", "words"),
    [
        (ATTENTION_CONV, 8, "4 key-value heads cannot be divided by tp 8"),
        (ATTENTION_CONV | {"sconv_kernel_size": 0}, 1, "sconv_kernel_size"),
        (SHORT_CONV | {"conv_L_cache": None}, 1, "conv_L_cache"),
        (SHORT_CONV | {"hidden_size": 0}, 1, "hidden"),
    ],
)
def test_what_cannot_be_told_is_an_error(config, tp, words):
    with pytest.raises(ModelConfigError, match=words):
        cache_layers(config, tp, 2)
