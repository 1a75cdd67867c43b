"""Which cache a decoder has, as far as its `config.json` tells: one rate a token, groups of layers, or unknown.

A layout that the file does not establish is left to the runtime probe. Source: onboarding.md section 3.1, item 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.collect.cache_markers import SLIDING, cache_markers, known_layer_types
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.config_fields import dimension, dtype, flag, integer

DENSE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
FULL_ATTENTION = DENSE | {"MixtralForCausalLM", "Qwen3MoeForCausalLM", "MiniMaxM2ForCausalLM"}
# Their cache is asked for: neither head counts nor a probe's groups describe it.
LATENT = frozenset({"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
# The one architecture whose convolution state is accounted for, and that cannot do without.
INKLING = "InklingForConditionalGeneration"

_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "is_encoder_decoder", "use_sliding_window", "use_sconv")
_LATENT_SIGNS = ("kv_lora_rank", "q_lora_rank", "compress_ratios", "attention_k_eq_v")
_SCHEDULES = ("max_window_layers", "sliding_window_pattern", "hybrid_layer_pattern")
_GROUP_SIZES = (
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "swa_v_head_dim",
    "sconv_kernel_size",
    "conv_kernel_size",
)


class WindowFault(OnboardError):
    """A sliding-window declaration from which no groups follow; of an unknown architecture, a probe resolves it."""


def window_tokens(config: Mapping[str, Any]) -> int | None:
    """The attention window in tokens, None when no field states one; 0 is no window.

    >>> window_tokens({"sliding_window": 4096})
    4096
    """
    found = {
        key: integer(config[key], key, least=0)
        for key in ("sliding_window", "sliding_window_size")
        if config.get(key) is not None
    }
    if len(set(found.values())) > 1:
        raise OnboardError(f"the window is given under two names that disagree: {found}; keep one", "sliding_window")
    return next(iter(found.values()), None)


def convolution_width(config: Mapping[str, Any]) -> int:
    """Kernel width of the convolution state of a checked configuration, in tokens."""
    width: int = config.get("sconv_kernel_size") or config["conv_kernel_size"]
    return width


def sliding_layers(config: Mapping[str, Any], architecture: str | None, *, inkling: bool = False) -> tuple[int, ...]:
    """Indexes of the layers with a window.

    A window without a schedule is that of all layers.

    Raises
    ------
    WindowFault: the declarations contradict each other or leave out the schedule.
    OnboardError: something is malformed.

    >>> sliding_layers({"num_hidden_layers": 2, "sliding_window": 128}, "XForCausalLM")
    (0, 1)
    """
    window = window_tokens(config)
    switch = config.get("use_sliding_window")
    if switch is True and not window:
        raise WindowFault("use_sliding_window true needs a positive sliding_window", "sliding_window")
    layers = dimension(config, "num_hidden_layers")
    local = _local_layers(config, layers, inkling)
    if "layer_types" in config:
        kinds = _layer_types(config, layers)
        if unknown := sorted(set(kinds) - known_layer_types(architecture)):
            raise OnboardError(f"layer_types holds unknown kinds: {', '.join(unknown)}", "layer_types")
        typed = tuple(place for place, kind in enumerate(kinds) if kind == SLIDING)
        if local not in (None, typed):
            raise WindowFault("layer_types and local_layer_ids name different layers with a window", "layer_types")
        local = typed
    if switch is False:
        if local:
            raise WindowFault("use_sliding_window false contradicts layers with a window", "use_sliding_window")
        return ()
    if local is None and window:
        if schedule := [name for name in _SCHEDULES if config.get(name)]:
            raise WindowFault(
                f"{', '.join(schedule)} leaves open which layers have the window; provide layer_types", "layer_types"
            )
        local = tuple(range(layers or 0))
    if local and not window:
        raise WindowFault("layers with a window need a positive sliding_window", "sliding_window")
    return local or ()


def _local_layers(config: Mapping[str, Any], layers: int | None, inkling: bool) -> tuple[int, ...] | None:
    if "local_layer_ids" not in config or (inkling and config["local_layer_ids"] is None):
        # Of this architecture a window alone gives no layer one.
        return () if inkling else None
    local = config["local_layer_ids"]
    if not isinstance(local, list) or any(type(place) is not int or place < 0 for place in local):
        raise WindowFault(f"local_layer_ids must be a list of layer indexes, found {local!r}", "local_layer_ids")
    if len(local) != len(set(local)) or (layers is not None and any(place >= layers for place in local)):
        raise WindowFault(f"local_layer_ids must be distinct and below num_hidden_layers {layers}", "local_layer_ids")
    return tuple(sorted(local))


def _layer_types(config: Mapping[str, Any], layers: int | None) -> list[str]:
    kinds = _per_layer(config, "layer_types", layers)
    if any(not isinstance(kind, str) or not kind.strip() for kind in kinds):
        raise OnboardError("layer_types must hold text", "layer_types")
    return kinds


def _attention_numbers(config: Mapping[str, Any], layers: int | None) -> None:
    if any(type(number) is not int for number in _per_layer(config, "attn_type_list", layers)):
        raise OnboardError("attn_type_list must hold integers", "attn_type_list")


def _per_layer(config: Mapping[str, Any], name: str, layers: int | None) -> list[Any]:
    values = config[name]
    if not isinstance(values, list) or (layers is not None and len(values) != layers):
        found = len(values) if isinstance(values, list) else repr(values)
        raise OnboardError(f"{name} must have one entry for each of {layers} layers, found {found}", name)
    return values


def _declares_groups(config: Mapping[str, Any], architecture: str | None) -> bool:
    unscheduled = "layer_types" not in config and "local_layer_ids" not in config
    return bool(
        config.get("use_sconv")
        or sliding_layers(config, architecture)
        or (unscheduled and window_tokens(config) and config.get("use_sliding_window") is not False)
    )


def runtime_reasons(config: Mapping[str, Any], architecture: str | None, named: str | None) -> tuple[str, ...]:
    """Why the configuration does not establish the cache, sorted; empty when it does.

    Parameters
    ----------
    architecture: that of the decoder.
    named: the architecture by which the decoder is known, which is a wrapper's when the decoder names none.

    >>> runtime_reasons({}, None, "Qwen3VLForConditionalGeneration")
    ('unrecognized architecture Qwen3VLForConditionalGeneration',)
    """
    if found := cache_markers(config, architecture):
        return found
    if not named or named in FULL_ATTENTION or named in LATENT:
        return ()
    try:
        derivable = _declares_groups(config, architecture)
    except WindowFault:
        derivable = False
    return () if derivable else (f"unrecognized architecture {named}",)


def is_grouped(config: Mapping[str, Any], architecture: str | None) -> bool:
    """Whether the cache is one of groups that the configuration describes; of a layout that no probe has to resolve."""
    return not cache_markers(config, architecture) and _declares_groups(config, architecture)


def declares_window(config: Mapping[str, Any], architecture: str | None) -> bool:
    """Whether windowed or chunked attention is declared, understood or not."""
    if config.get("attention_chunk_size") is not None:
        return True
    try:
        return _declares_groups(config, architecture)
    except WindowFault:
        return True


def check_layout(
    config: Mapping[str, Any], architecture: str | None, named: str | None, *, inkling: bool = False
) -> tuple[str, ...]:
    """Check what is declared of the layers and return `runtime_reasons`.

    Raises
    ------
    OnboardError: malformed, contradictory, or a layout that no estimate stands for; names the field.
    """
    for name in _FLAGS:
        flag(config, name)
    if config.get("is_encoder_decoder"):
        raise OnboardError(
            "is_encoder_decoder: only decoders are onboarded; give a decoder's config or a profile",
            "is_encoder_decoder",
        )
    if inkling and config.get("use_sconv") is not True:
        raise OnboardError(
            f"use_sconv must be true: every decoder layer of {INKLING} keeps convolution state; check the config or "
            "give a profile",
            "use_sconv",
        )
    if reasons := runtime_reasons(config, architecture, named):
        _check_structure(config)
        return reasons
    sliding = sliding_layers(config, architecture, inkling=inkling)
    if "attn_type_list" in config:
        _attention_numbers(config, dimension(config, "num_hidden_layers"))
        if sliding:
            raise OnboardError("attn_type_list of full attention contradicts layers with a window", "attn_type_list")
    if architecture in FULL_ATTENTION and (signs := [name for name in _LATENT_SIGNS if config.get(name)]):
        raise OnboardError(f"{', '.join(signs)} contradict the full attention of {architecture}", signs[0])
    for name in _GROUP_SIZES:
        if config.get(name) is not None:
            integer(config[name], name)
    _check_convolution(config, inkling)
    return ()


def _check_structure(config: Mapping[str, Any]) -> None:
    window_tokens(config)
    layers = dimension(config, "num_hidden_layers")
    if "layer_types" in config:
        _layer_types(config, layers)
    if "attn_type_list" in config:
        _attention_numbers(config, layers)


def _check_convolution(config: Mapping[str, Any], inkling: bool) -> None:
    widths = {config.get(name) for name in ("sconv_kernel_size", "conv_kernel_size")} - {None}
    if len(widths) > 1:
        raise OnboardError("sconv_kernel_size and conv_kernel_size must be equal", "sconv_kernel_size")
    if not config.get("use_sconv"):
        return
    if not inkling:
        raise OnboardError(f"use_sconv: convolution state is known of {INKLING} only; give a profile", "use_sconv")
    if not widths:
        raise OnboardError("use_sconv needs sconv_kernel_size or conv_kernel_size", "sconv_kernel_size")
    if (found := dtype(config)) not in (None, "bfloat16"):
        raise OnboardError(f"dtype must be bfloat16: convolution state is kept in it, found {found}", "dtype")


def layout_notes(config: Mapping[str, Any], architecture: str | None, reasons: tuple[str, ...]) -> dict[str, str]:
    """What a reader should know of the cache, by note; `reasons` as from `runtime_reasons`."""
    if reasons:
        return {
            "cache_layout": f"pending the runtime probe ({', '.join(reasons)}): the file does not establish the "
            "geometry of the cache, `onboard probe-runtime` measures it"
        }
    if not is_grouped(config, architecture):
        return {}
    notes = {
        "cache_layout": "grouped: layers with full attention, with a window and convolution state are accounted for "
        "separately; cache dtype, block sizes and padding belong to the runtime"
    }
    if config.get("use_sconv"):
        notes["convolution_cache"] = "convolution state in bfloat16, keys, values and outputs packed per head"
    return notes
