"""Groups of equal layers in models whose layers differ: window or not, experts or not, other heads.

Reads the layout that a checkpoint declares; the operators of a group are built in `hybrid.py` and `nas.py`.
"""

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from fpmsdk.opgraph.config_fields import Fields

# Multiples of the hidden size.
_WIDEST_FFN = 1024

_WINDOWED, _FULL = "sliding_attention", "full_attention"


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that cost the same; `heads` 0 means no attention, `inter_size` 0 no dense FFN.

    `name` is what their operators are called after. `value_size` differs from `head_size` where values are
    narrower than keys; `kv_width` counts the projected columns of one key-value head. `evicts` says whether the
    cache drops what has left the window.
    """

    name: str
    count: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    kv_width: int
    window: int = 0
    evicts: bool = True
    has_experts: bool = False
    inter_size: int = 0


def read_layer_groups(architecture: str, fields: Fields, shape: dict[str, int]) -> tuple[LayerGroup, ...]:
    """The groups of a model, in the order of its operators; `shape` holds the sizes read so far.

    Faults are recorded in `fields`.
    """
    return _READERS[architecture](fields, shape)


class _Attention(NamedTuple):
    """Sizes of the attention of a group."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    kv_width: int
    window: int = 0


def _attention(
    shape: dict[str, int],
    fields: Fields,
    *,
    heads: str = "",
    kv_heads: str = "",
    head_size: str = "",
    value_size: str = "",
    window: int = 0,
) -> _Attention:
    """Sizes read from the named fields; those without a field or a value are the model's."""

    def size(field: str, default: int) -> int:
        return (fields.count(field, required=False) if field else 0) or default

    keys = size(head_size, shape["head_size"])
    values = size(value_size, shape["head_size"])
    return _Attention(
        size(heads, shape["num_heads"]), size(kv_heads, shape["num_kv_heads"]), keys, values, keys + values, window
    )


def _by_attention_and_experts(
    full: list[bool], experts: list[bool], inter_size: int, sizes: dict[bool, _Attention], evicts: bool = True
) -> tuple[LayerGroup, ...]:
    """Groups of a layout by layer; `sizes` holds the attention of full (True) and windowed layers."""
    counts = Counter(zip(full, experts, strict=True))
    order = ((True, True, "global"), (False, True, "swa"), (False, False, "swa_dense"), (True, False, "global_dense"))
    return tuple(
        LayerGroup(
            name=name,
            count=count,
            evicts=evicts,
            has_experts=has_experts,
            inter_size=0 if has_experts else inter_size,
            **sizes[is_full]._asdict(),
        )
        for is_full, has_experts, name in order
        if (count := counts[is_full, has_experts])
    )


def _llama4(fields: Fields, shape: dict[str, int]) -> tuple[LayerGroup, ...]:
    step = fields.count("interleave_moe_layer_step", required=False) or 1
    inter_size = fields.count("intermediate_size_mlp", required=False) or shape["inter_size"]
    window = fields.count("attention_chunk_size", required=False)
    layers = range(shape["num_layers"])
    return _by_attention_and_experts(
        [layer % 2 == 1 for layer in layers],
        [(layer + 1) % step == 0 for layer in layers],
        inter_size,
        {True: _attention(shape, fields), False: _attention(shape, fields, window=window)},
        # Engines keep the whole sequence of layers that attend to chunks.
        evicts=False,
    )


def _mimo_v2(fields: Fields, shape: dict[str, int]) -> tuple[LayerGroup, ...]:
    # The checkpoint marks layers with a window.
    windowed = fields.layers("hybrid_layer_pattern", (0, 1), shape["num_layers"])
    experts = fields.layers("moe_layer_freq", (0, 1), shape["num_layers"])
    if not windowed or not experts:
        return ()
    window = fields.count("sliding_window_size", "sliding_window")
    sizes = {
        True: _attention(shape, fields, value_size="v_head_dim"),
        False: _attention(
            shape,
            fields,
            kv_heads="swa_num_key_value_heads",
            head_size="swa_head_dim",
            value_size="swa_v_head_dim",
            window=window,
        ),
    }
    full = [not marked for marked in windowed]
    return _by_attention_and_experts(full, [bool(flag) for flag in experts], shape["inter_size"], sizes)


def _step3(fields: Fields, shape: dict[str, int]) -> tuple[LayerGroup, ...]:
    layers = shape["num_layers"]
    # Published checkpoints list the prediction layers behind the decoder's.
    predicting = fields.count("num_nextn_predict_layers", required=False, least=0)
    listed = fields.values.get("layer_types")
    length = len(listed) if isinstance(listed, list) and len(listed) == layers + predicting else layers
    kinds = fields.layers("layer_types", (_WINDOWED, _FULL), length)[:layers]
    if not kinds:
        return ()
    window = fields.count("sliding_window", "sliding_window_size")
    other = Fields(fields.mapping("attention_other_setting"), f"{fields.prefix}attention_other_setting.", fields.faults)
    sizes = {
        True: _attention(shape, fields),
        False: _attention(shape, other, heads="num_attention_heads", head_size="head_dim", window=window),
    }
    return _by_attention_and_experts(
        [kind == _FULL for kind in kinds], _step3_experts(fields, layers), shape["inter_size"], sizes
    )


def _step3_experts(fields: Fields, layers: int) -> list[bool]:
    listed = fields.values.get("moe_layers_enum")
    if listed:
        indices = listed.split(",") if isinstance(listed, str) else listed
        if not isinstance(indices, list) or not all(str(index).strip().isdecimal() for index in indices):
            fields.fault("moe_layers_enum", f"must list layer numbers, found {listed!r}")
            return [False] * layers
        chosen = {int(index) for index in indices}
        return [layer in chosen for layer in range(layers)]
    dense = fields.count("first_k_dense_replace", required=False, least=0)
    return [layer >= dense for layer in range(layers)]


def _muse(fields: Fields, shape: dict[str, int]) -> tuple[LayerGroup, ...]:
    kinds = fields.layers("layer_types", (_WINDOWED, _FULL), shape["num_layers"])
    window = fields.count("sliding_window")
    windowed, full = _attention(shape, fields, window=window), _attention(shape, fields)
    return _two_kinds(kinds, shape["inter_size"], windowed, full)


def _gemma4(fields: Fields, shape: dict[str, int]) -> tuple[LayerGroup, ...]:
    kinds = fields.layers("layer_types", (_WINDOWED, _FULL), shape["num_layers"])
    window = fields.count("sliding_window", required=False, least=0)
    windowed = _attention(shape, fields, window=window)
    full = _attention(shape, fields, kv_heads="num_global_key_value_heads", head_size="global_head_dim")
    # Some checkpoints use the projected keys as values.
    projected = 1 if fields.values.get("attention_k_eq_v") else 2
    full = full._replace(value_size=full.head_size, kv_width=projected * full.head_size)
    return _two_kinds(kinds, shape["inter_size"], windowed, full, has_experts=shape.get("num_experts", 0) > 0)


def _two_kinds(
    kinds: list[str], inter_size: int, windowed: _Attention, full: _Attention, has_experts: bool = False
) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(name=name, count=count, inter_size=inter_size, has_experts=has_experts, **sizes._asdict())
        for name, kind, sizes in (("swa", _WINDOWED, windowed), ("global", _FULL, full))
        if (count := kinds.count(kind))
    )


def _nemotron_nas(fields: Fields, shape: dict[str, int]) -> tuple[LayerGroup, ...]:
    """Runs of equal blocks; a block may lack its attention or its FFN."""
    blocks = fields.values.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != shape["num_layers"]:
        fields.fault("block_configs", f"must list a block for each of the {shape['num_layers']} layers")
        return ()
    described = [_block(fields, f"block_configs[{index}]", block, shape) for index, block in enumerate(blocks)]
    return tuple(
        LayerGroup(
            name="",
            count=len(list(run)),
            heads=heads,
            kv_heads=kv_heads,
            head_size=shape["head_size"],
            value_size=shape["head_size"],
            kv_width=2 * shape["head_size"],
            inter_size=inter_size,
        )
        for (heads, kv_heads, inter_size), run in groupby(described)
    )


def _block(fields: Fields, place: str, block: Any, shape: dict[str, int]) -> tuple[int, int, int]:
    """Heads, key-value heads and FFN size of a block; zeros for a part that it lacks."""
    parts = Fields(block if isinstance(block, dict) else {}, f"{place}.", fields.faults)
    attention, ffn = parts.mapping("attention"), parts.mapping("ffn")
    multiplier = ffn.get("ffn_mult", 3.5)
    if isinstance(multiplier, bool) or not isinstance(multiplier, int | float) or not 0 < multiplier <= _WIDEST_FFN:
        parts.fault("ffn.ffn_mult", f"must be a positive number not beyond {_WIDEST_FFN}, found {multiplier!r}")
        multiplier = 0
    inter_size = 0 if ffn.get("no_op") else _rounded_inter_size(multiplier, shape["hidden_size"])
    if attention.get("no_op"):
        return 0, 0, inter_size
    in_group = Fields(attention, f"{place}.attention.", fields.faults).count("n_heads_in_group")
    return shape["num_heads"], shape["num_heads"] // max(in_group, 1), inter_size


def _rounded_inter_size(multiplier: float, hidden_size: int) -> int:
    """Two thirds of the multiple, rounded up to 256 as the published modelling code does."""
    size = int(2 * multiplier * hidden_size / 3)
    return -(-size // 256) * 256


_READERS: dict[str, Callable[[Fields, dict[str, int]], tuple[LayerGroup, ...]]] = {
    "Llama4ForConditionalGeneration": _llama4,
    "MiMoV2FlashForCausalLM": _mimo_v2,
    "Step3p7ForConditionalGeneration": _step3,
    "Step3p7FlashForCausalLM": _step3,
    "Step3p5ForCausalLM": _step3,
    "Step3p5FlashForCausalLM": _step3,
    "MuseGlimmerForConditionalGeneration": _muse,
    "Gemma4ForConditionalGeneration": _gemma4,
    "DeciLMForCausalLM": _nemotron_nas,
}
