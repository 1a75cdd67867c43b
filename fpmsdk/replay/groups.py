"""KV caches of an engine whose layers need different ones, made from the `kv_cache_groups` of its launch.

A launch describes groups as the peer does: one block across all layers of a group, under a budget of bytes. Real vLLM
cuts the layers into groups of equal size that share the blocks of one pool.
Source: engine-and-replay.md section 3, vllm-facts.md 2.4 and 2.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.budget import ByteBudgetCache
from fpmsdk._ext.hybrid import HybridCache
from fpmsdk._ext.pages import KvCache
from fpmsdk.errors import ConfigError, MissingCapabilityError
from fpmsdk.launch.config import EngineConfig, KvCacheGroup

UNLIMITED = 2**62


def grouped_cache(engine: EngineConfig, prompt_tokens: NDArray[np.int64], scheduler_rules: str) -> KvCache:
    """Return the cache of one rank.

    Raises MissingCapabilityError for groups that vLLM could not put into one pool by the rules that were recorded,
    ConfigError when the budget cannot hold one request of `max_model_len`.
    """
    capacity = engine.kv_cache_capacity_bytes or 0
    if scheduler_rules == "simulator":
        groups = [
            (group.block_size_tokens, group.page_size_bytes, group.sliding_window) for group in engine.kv_cache_groups
        ]
        return ByteBudgetCache(len(prompt_tokens), capacity, groups, engine.block_size)
    model_len = engine.max_model_len or UNLIMITED
    pool_groups, block_bytes = pool_layout(engine.kv_cache_groups, model_len)
    # One block of the pool is reserved.
    cache = HybridCache(
        prompt_tokens,
        max(0, capacity // block_bytes - 1),
        pool_groups,
        None,
        max_num_batched_tokens=engine.max_num_batched_tokens or UNLIMITED,
        max_model_len=model_len,
    )
    if engine.max_model_len is not None and not cache.can_hold(engine.max_model_len):
        raise ConfigError(
            f"engine.kv_cache_capacity_bytes is {capacity}, {max(0, capacity // block_bytes - 1)} usable blocks of "
            f"{block_bytes} bytes: too few for one request of max_model_len = {engine.max_model_len} tokens; "
            "increase the first or reduce the second",
            "engine.kv_cache_capacity_bytes",
        )
    return cache


def pool_layout(groups: Sequence[KvCacheGroup], model_len: int) -> tuple[list[tuple[int, int | None]], int]:
    """Return vLLM's groups as (block size, sliding window) and the bytes of one block of their pool.

    Layers of one kind form groups of the size of the smallest kind, or of the largest if that is less than 1.5 times
    as large; a last group that is short is padded. A state of a convolution is kept once per sequence.

    >>> window = KvCacheGroup("window", "attention", 5, 32, 5 * 8192, 96)
    >>> full = KvCacheGroup("full", "attention", 1, 32, 8192, None)
    >>> pool_layout([window, full], 900)
    ([(32, 96), (32, 96), (32, 96), (32, 96), (32, 96), (32, None)], 8192)
    """
    pages = [group.page_size_bytes // group.num_layers for group in groups]
    attention = [page for group, page in zip(groups, pages, strict=True) if group.kind == "attention"]
    page = max(pages)
    smallest, largest = min(group.num_layers for group in groups), max(group.num_layers for group in groups)
    group_size = largest if largest < 1.5 * smallest else smallest
    layout: list[tuple[int, int | None]] = []
    for group, layer_page in zip(groups, pages, strict=True):
        if group.page_size_bytes % group.num_layers or (
            group.kind == "attention" and (page % layer_page or page != max(attention))
        ):
            raise MissingCapabilityError(
                f"kv_cache_groups {group.name!r}: a page of {layer_page} bytes a layer cannot share blocks with one of "
                f"{page} bytes; scheduler_rules 'simulator' keep a budget of bytes instead"
            )
        kind: tuple[int, int | None] = (group.block_size_tokens * (page // layer_page), group.sliding_window)
        if group.kind == "convolution":
            kind = (model_len, None)
        layout += [kind] * -(-group.num_layers // group_size)
    return layout, group_size * page
