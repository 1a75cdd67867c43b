"""Whatever a config.json holds, reading it and building from it gives a graph or one of our own errors."""

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.errors import FpmSdkError
from fpmsdk.opgraph.naive_memory import geometry
from tests.opgraph.checkpoints import BLOCK_FP8, DEEPSEEK_V3, GPT_OSS_120B, QWEN3_30B, graph
from tests.opgraph.test_layer_groups import GEMMA4, LLAMA4, MIMO, MUSE, NAS, STEP

QUANTISED = QWEN3_30B | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"type": "float", "num_bits": 8},
    }
}
CONFIGURATIONS = [
    QWEN3_30B,
    QUANTISED,
    QWEN3_30B
    | {"quantization_config": BLOCK_FP8 | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "fp8"}}},
    GPT_OSS_120B,
    DEEPSEEK_V3,
    LLAMA4,
    MIMO,
    STEP | {"attention_other_setting": {"head_dim": 64}, "moe_layers_enum": "1,2"},
    GEMMA4,
    MUSE,
    NAS,
]
# Sizes stay small, so that lists of layers do.
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value, path=()):
    """Paths of everything inside a document, two levels into its lists at most."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda config: config["architectures"][0])
@given(data=st.data())
def test_a_corrupted_configuration_gives_a_graph_or_a_typed_error(config, data):
    corrupted = copy.deepcopy(config)
    for place in data.draw(st.lists(st.sampled_from(list(places(config))), min_size=1, max_size=2, unique=True)):
        value = data.draw(VALUES)
        inside = corrupted
        for key in place[:-1]:
            inside = inside[key] if isinstance(inside, dict | list) and has(inside, key) else None
        if isinstance(inside, dict | list) and has(inside, place[-1]):
            inside[place[-1]] = value
    for attempt in (graph, lambda document: geometry(document, "model")):
        with contextlib.suppress(FpmSdkError):
            attempt(corrupted)


def has(container, key):
    return key in container if isinstance(container, dict) else isinstance(key, int) and key < len(container)
