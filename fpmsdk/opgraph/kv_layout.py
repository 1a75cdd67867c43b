"""KV-cache size of a model on one rank: bytes per token, growth with the sequence, and the inverse.

Pipeline stages do not divide it. Source: op-level.md section 6.
"""

from fpmsdk.opgraph.architectures import DEEPSEEK
from fpmsdk.opgraph.model_config import ModelConfig
from fpmsdk.opgraph.precision import Precision
from fpmsdk.opgraph.quantization import CACHE_BYTES

_KV_LORA_RANK = 512
_ROPE_HEAD_DIM = 64


def kv_bytes_per_layer_token(model: ModelConfig, precision: Precision, tp: int) -> float:
    """Bytes of one token in one layer on one rank; latent caches are not divided by tensor parallelism."""
    if model.family == DEEPSEEK:
        elements = (model.kv_lora_rank or _KV_LORA_RANK) + (model.qk_rope_head_dim or _ROPE_HEAD_DIM)
    else:
        elements = 2 * -(-model.num_kv_heads // tp) * model.head_size
    return elements * CACHE_BYTES[precision.kv_cache]


def kv_bytes_per_sequence(model: ModelConfig, precision: Precision, tp: int, tokens: int) -> float:
    """Bytes of one sequence on one rank; layers with a window stop growing there."""
    windowed = model.windowed_layers
    layer_tokens = (model.num_layers - windowed) * tokens + windowed * min(tokens, model.attention_window)
    return kv_bytes_per_layer_token(model, precision, tp) * layer_tokens


def kv_tokens(model: ModelConfig, precision: Precision, tp: int, budget_bytes: float) -> int:
    """The longest sequence whose cache fits into a budget; the model's longest when the cache stops growing."""
    if budget_bytes <= 0:
        return 0
    saturated = kv_bytes_per_sequence(model, precision, tp, model.attention_window)
    if model.windowed_layers == model.num_layers and saturated <= budget_bytes:
        return model.context_length
    if not model.windowed_layers:
        return int(budget_bytes // kv_bytes_per_sequence(model, precision, tp, 1))
    return _longest_fitting(model, precision, tp, budget_bytes)


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
