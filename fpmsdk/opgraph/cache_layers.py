"""Cache bytes of any checkpoint by kinds of layers, from its `config.json` alone; no operator graph is needed.

Attention, latent attention, windows and short convolutions; what a runtime pads is not in it. The layout of models
with a graph is in `kv_layout.py`. Source: onboarding.md sections 3.1 and 3.3; vllm-facts.md section 2.
"""

from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import ModelConfigError
from fpmsdk.opgraph.kv_layout import KvLayers
from fpmsdk.opgraph.model_config import language_config
from fpmsdk.opgraph.naive_memory import Geometry, geometry

_STATE_BYTES = 2  # convolution states are kept in 16 bits


def cache_layers(config: Mapping[str, Any], tp: int, element_bytes: int, name: str = "config.json") -> list[KvLayers]:
    """The caches of one rank by layers that are alike.

    Key-value heads are divided by `tp` and replicated beyond one a rank, latent caches are not divided, layers with a
    window or a convolution stop growing there. The bytes of a sequence are the sum of `bytes_of` over the layers.

    Parameters
    ----------
    config: the document.
    tp: tensor-parallel size.
    element_bytes: of the cached keys and values.
    name: what messages call the document.

    Raises
    ------
    ModelConfigError: a size is missing, or its convolution states cannot be divided by `tp`.

    Example
    -------
    >>> config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    ...           "vocab_size": 10, "intermediate_size": 128, "conv_L_cache": 3,
    ...           "layer_types": ["conv", "conv", "full_attention"]}
    >>> [tuple(layers) for layers in cache_layers(config, tp=1, element_bytes=2)]
    [('attention', 1, 128, 0), ('convolution', 2, 128, 2)]
    """
    document = language_config(dict(config))
    shape = geometry(document, name)
    if shape.latent:
        return [KvLayers("latent", shape.layers, shape.latent * element_bytes, 0)]
    per_layer = 2 * -(-shape.kv_heads // tp) * shape.head_size * element_bytes
    convolutions = _conv_layers(document)
    parts = [
        KvLayers("attention", shape.windowed_layers, per_layer, shape.window),
        KvLayers("attention", shape.layers - shape.windowed_layers - convolutions, per_layer, 0),
    ]
    if convolutions:
        length = _positive(document, "conv_L_cache", name)
        # The last inputs but one of the kernel, over the channels of the rank.
        parts.append(KvLayers("convolution", convolutions, -(-shape.hidden // tp) * _STATE_BYTES, length - 1))
    if document.get("use_sconv"):
        parts.append(_attention_convolution(document, shape, tp, name))
    return [part for part in parts if part.num_layers]


def _conv_layers(config: Mapping[str, Any]) -> int:
    kinds = config.get("layer_types")
    return kinds.count("conv") if isinstance(kinds, list) else 0


def _attention_convolution(config: Mapping[str, Any], shape: Geometry, tp: int, name: str) -> KvLayers:
    # A convolution over keys, values and outputs of every attention layer; its slots are powers of two.
    if tp > shape.kv_heads:
        raise ModelConfigError(
            name, [f"convolution states of {shape.kv_heads} key-value heads cannot be divided by tp {tp}"]
        )
    key = "sconv_kernel_size" if "sconv_kernel_size" in config else "conv_kernel_size"
    slots = 1 << (2 * shape.head_size + 2 * (shape.hidden // shape.kv_heads) - 1).bit_length()
    per_layer = -(-shape.kv_heads // tp) * _STATE_BYTES * slots
    return KvLayers("convolution", shape.layers, per_layer, _positive(config, key, name))


def _positive(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelConfigError(name, [f"no usable value for {key}"])
    return value
