"""Signs in a `config.json` of a cache that the file cannot describe: recurrent state and unknown kinds of layers.

Intake leaves such a cache to the runtime probe, and the collector offers no attention template for it; both look here.
Source: onboarding.md section 3.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
_SPARSE = "deepseek_sparse_attention"
_SPARSE_ARCHITECTURES = frozenset({"GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"})
# In `attn_type_list`, the number of a layer with full attention.
_FULL_NUMBER = 1
_RECURRENT_FIELDS = (
    "ssm_cfg",
    "mamba_d_state",
    "linear_conv_kernel_dim",
    "linear_attn_config",
    "ssm_state_size",
    "mamba_num_heads",
)
_RECURRENT_NAMES = ("mamba", "jamba", "rwkv")


def known_layer_types(architecture: str | None) -> frozenset[str]:
    """The `layer_types` whose cache a configuration of this architecture describes.

    >>> sorted(known_layer_types("LlamaForCausalLM"))
    ['full_attention', 'sliding_attention']
    """
    return frozenset({FULL, SLIDING, _SPARSE} if architecture in _SPARSE_ARCHITECTURES else {FULL, SLIDING})


def cache_markers(config: Mapping[str, Any], architecture: str | None) -> tuple[str, ...]:
    """Every sign of a cache that the configuration cannot describe, sorted; empty when there is none.

    Each sign counts on its own, so that what is known hides nothing. Lists that are malformed are no signs; whoever
    reads them refuses them.

    Parameters
    ----------
    config: the text decoder's part of a `config.json`.
    architecture: the decoder's architecture, None when it names none.

    Source: onboarding.md section 3.1.

    >>> cache_markers({"layer_types": ["full_attention", "linear_attention"], "ssm_state_size": 16}, "XForCausalLM")
    ('layer_types linear_attention x1', 'recurrent-state field ssm_state_size')
    """
    found = []
    known = known_layer_types(architecture)
    kinds = config.get("layer_types")
    names = [kind for kind in kinds if isinstance(kind, str) and kind.strip()] if isinstance(kinds, list) else []
    found += [f"layer_types {name} x{count}" for name, count in Counter(names).items() if name not in known]
    numbers = config.get("attn_type_list")
    numbers = [number for number in numbers if type(number) is int] if isinstance(numbers, list) else []
    found += [
        f"attn_type_list {number} x{count}" for number, count in Counter(numbers).items() if number != _FULL_NUMBER
    ]
    found += [f"recurrent-state field {name}" for name in _RECURRENT_FIELDS if config.get(name) is not None]
    if any(name in (architecture or "").lower() for name in _RECURRENT_NAMES):
        found.append(f"recurrent architecture {architecture}")
    return tuple(sorted(found))
