"""KV-cache size of a model on one rank: bytes per token, growth with the sequence, and the inverse.

Pipeline stages do not divide it. Source: op-level.md section 6.
"""

from typing import NamedTuple

from fpmsdk.opgraph.architectures import DEEPSEEK
from fpmsdk.opgraph.model_config import ModelConfig
from fpmsdk.opgraph.precision import Precision
from fpmsdk.opgraph.quantization import CACHE_BYTES

_KV_LORA_RANK = 512
_ROPE_HEAD_DIM = 64


class KvLayers(NamedTuple):
    """Layers of one kind on one rank; `window_tokens` is what they keep of a sequence, 0 for all of it.

    `kind` is ``attention`` (keys and values), ``latent`` (their compressed form, not divided by tensor parallelism) or
    ``convolution`` (the inputs that a short convolution looks back at).
    """

    kind: str
    num_layers: int
    bytes_per_layer_token: float
    window_tokens: int

    def bytes_of(self, tokens: int) -> float:
        """Bytes of one sequence.

        >>> layers = KvLayers("attention", 2, 100, 8)
        >>> layers.bytes_of(5), layers.bytes_of(50)
        (1000, 1600)
        """
        held = min(tokens, self.window_tokens) if self.window_tokens else tokens
        return self.num_layers * self.bytes_per_layer_token * held


def kv_bytes_per_layer_token(model: ModelConfig, precision: Precision, tp: int) -> float:
    """Bytes of one token in one layer on one rank; latent caches are not divided by tensor parallelism."""
    if model.family == DEEPSEEK:
        elements = (model.kv_lora_rank or _KV_LORA_RANK) + (model.qk_rope_head_dim or _ROPE_HEAD_DIM)
    else:
        elements = 2 * -(-model.num_kv_heads // tp) * model.head_size
    return elements * CACHE_BYTES[precision.kv_cache]


def kv_bytes_per_sequence(model: ModelConfig, precision: Precision, tp: int, tokens: int) -> float:
    """Bytes of one sequence on one rank; layers with a window stop growing there."""
    return sum(part.bytes_of(tokens) for part in kv_breakdown(model, precision, tp))


def kv_tokens(model: ModelConfig, precision: Precision, tp: int, budget_bytes: float) -> int:
    """The longest sequence whose cache fits into a budget; the model's longest when the cache stops growing."""
    if budget_bytes <= 0:
        return 0
    windows = [part.window_tokens for part in kv_breakdown(model, precision, tp)]
    if all(windows) and kv_bytes_per_sequence(model, precision, tp, max(windows)) <= budget_bytes:
        return model.context_length
    if not any(windows):
        return int(budget_bytes // kv_bytes_per_sequence(model, precision, tp, 1))
    return _longest_fitting(model, precision, tp, budget_bytes)


def kv_breakdown(model: ModelConfig, precision: Precision, tp: int) -> tuple[KvLayers, ...]:
    """The caches of one rank by layers that are alike; they add up to `kv_bytes_per_sequence`."""
    if model.groups:
        return tuple(
            KvLayers(
                "attention",
                group.count,
                -(-group.kv_heads // tp) * (group.head_size + group.value_size) * CACHE_BYTES[precision.kv_cache],
                group.window if group.evicts else 0,
            )
            for group in model.groups
            if group.heads
        )
    layer = kv_bytes_per_layer_token(model, precision, tp)
    windowed, full = model.windowed_layers, model.num_layers - model.windowed_layers
    kind = "latent" if model.family == DEEPSEEK else "attention"
    parts = (KvLayers(kind, windowed, layer, model.attention_window), KvLayers(kind, full, layer, 0))
    return tuple(part for part in parts if part.num_layers)


def _longest_fitting(model: ModelConfig, precision: Precision, tp: int, budget_bytes: float) -> int:
    """Bisection of the growing curve."""
    beyond = 1
    while kv_bytes_per_sequence(model, precision, tp, beyond) <= budget_bytes:
        beyond *= 2
    fits = beyond // 2
    while fits + 1 < beyond:
        middle = (fits + beyond) // 2
        if kv_bytes_per_sequence(model, precision, tp, middle) <= budget_bytes:
            fits = middle
        else:
            beyond = middle
    return fits
