"""What an engine says to requests that it can never serve.

The decision is compiled (`ext/scheduler.pyx`); here it gets its words. Source: engine-and-replay.md 2.2 and 2.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.scheduler import Refusal
from fpmsdk.launch.config import EngineConfig


def rejection_reasons(engine: EngineConfig, scheduler_rules: str) -> NDArray[np.object_]:
    """The words of each `Refusal` of an engine, None for an accepted request.

    >>> from fpmsdk import EngineLaunchConfig
    >>> engine = EngineLaunchConfig.from_mapping({"engine": {"max_model_len": 2048}}).engine
    >>> str(rejection_reasons(engine, "vllm")[Refusal.MODEL_LENGTH])
    'its prompt leaves no room below max_model_len = 2048'
    """
    usable_blocks = engine.num_gpu_blocks - (scheduler_rules == "vllm")
    cache = f"the {usable_blocks} usable KV blocks of {engine.block_size} tokens"
    reasons: NDArray[Any] = np.full(len(Refusal), None, object)
    reasons[Refusal.MODEL_LENGTH] = f"its prompt leaves no room below max_model_len = {engine.max_model_len}"
    reasons[Refusal.KV_CAPACITY] = f"its prompt needs more than {cache}"
    reasons[Refusal.KV_GROWTH] = f"its prompt and output together need more than {cache}"
    reasons[Refusal.UNCHUNKED_PROMPT] = (
        f"its prompt exceeds max_num_batched_tokens = {engine.max_num_batched_tokens} without chunked prefill"
    )
    return reasons
