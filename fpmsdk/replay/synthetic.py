"""Synthetic workloads: so many requests of such lengths, with arrivals, sessions and shared prefixes.

Equal arguments give the same trace everywhere; only the standard library's generator is drawn from.
Source: engine-and-replay.md section 5.3.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import TraceError
from fpmsdk.replay.arrivals import arrival_times_ms, checked_integer, checked_number, checked_ratio
from fpmsdk.replay.trace import MAX_TOKENS, Trace

Int64 = NDArray[np.int64]


def synthetic_trace(
    request_count: int,
    input_tokens: int,
    output_tokens: int,
    *,
    request_rate: float | None = None,
    arrival_interval_ms: float | None = None,
    arrival_seed: int | None = None,
    random_range_ratio: float = 1.0,
    random_seed: int | None = None,
    turns_per_session: int = 1,
    inter_turn_delay_ms: float = 0.0,
    cached_prefix_tokens: int = 0,
    shared_prefix_ratio: float = 0.0,
    num_prefix_groups: int = 0,
    block_tokens: int | None = None,
) -> Trace:
    """Make a trace; see `Trace.synthetic`."""
    sessions = checked_integer("request_count", request_count, 1, MAX_TOKENS)
    turns = checked_integer("turns_per_session", turns_per_session, 1, MAX_TOKENS)
    longest = checked_integer("input_tokens", input_tokens, 1, MAX_TOKENS)
    checked_integer("output_tokens", output_tokens, 0, MAX_TOKENS)
    delay_ms = checked_number("inter_turn_delay_ms", inter_turn_delay_ms)
    if delay_ms and turns == 1:
        raise _no_effect("inter_turn_delay_ms", "with turns_per_session 1")
    ratio = checked_ratio("random_range_ratio", random_range_ratio)
    if random_seed is not None and ratio == 1 and num_prefix_groups < 2:
        raise _no_effect("random_seed", "on fixed lengths without prefix groups")
    generator = random.Random(0 if random_seed is None else checked_integer("random_seed", random_seed, 0))
    count = sessions * turns
    # All inputs are drawn before all outputs, and those before the groups.
    prompts = _lengths("input_tokens", longest, ratio, count, generator)
    outputs = _lengths("output_tokens", output_tokens, ratio, count, generator)
    hash_ids, size = _shared_prefixes(
        prompts,
        turns,
        checked_integer("cached_prefix_tokens", cached_prefix_tokens, 0, int(prompts.min())),
        checked_ratio("shared_prefix_ratio", shared_prefix_ratio),
        checked_integer("num_prefix_groups", num_prefix_groups, 0, MAX_TOKENS),
        block_tokens,
        generator,
    )
    arrivals = arrival_times_ms(
        sessions, request_rate=request_rate, arrival_interval_ms=arrival_interval_ms, arrival_seed=arrival_seed
    )
    turn = np.arange(count) % turns
    names = [f"synthetic-{index}" for index in range(count)]
    return Trace.from_arrays(
        np.repeat(arrivals, turns),
        prompts,
        outputs,
        request_ids=names,
        session_ids=names if turns == 1 else [f"session-{index // turns}" for index in range(count)],
        delay_ms=np.where(turn > 0, delay_ms, 0.0),
        hash_ids=hash_ids,
        block_tokens=size,
    )


def _lengths(name: str, longest: int, ratio: float, count: int, generator: random.Random) -> Int64:
    if ratio == 1 or longest == 0:
        return np.full(count, longest, np.int64)
    shortest = int(longest * ratio)
    if shortest == 0:
        raise TraceError(
            f"random_range_ratio {ratio} of {name} {longest} allows no tokens; give a larger ratio",
            field="random_range_ratio",
        )
    return np.array([generator.randint(shortest, longest) for _ in range(count)], np.int64)


def _shared_prefixes(
    prompts: Int64,
    turns: int,
    cached_prefix_tokens: int,
    shared_prefix_ratio: float,
    num_groups: int,
    block_tokens: int | None,
    generator: random.Random,
) -> tuple[list[list[int]] | None, int]:
    """Block identities and the tokens of a block; no identities where nothing is shared."""
    if cached_prefix_tokens:
        if shared_prefix_ratio or num_groups:
            raise TraceError(
                "cached_prefix_tokens shares one prefix with all, shared_prefix_ratio one with a group; give one",
                field="cached_prefix_tokens",
            )
        if block_tokens is not None:
            raise _no_effect("block_tokens", "with cached_prefix_tokens, which is the block that is shared")
        # One block as long as the prefix: an engine with blocks of any size finds all of it that is whole.
        return _blocks(prompts, np.ones(len(prompts), np.int64), np.zeros(len(prompts), np.int64), cached_prefix_tokens)
    if bool(shared_prefix_ratio) != bool(num_groups):
        raise TraceError(
            f"shared_prefix_ratio is {shared_prefix_ratio} with num_prefix_groups {num_groups}; give both or none",
            field="num_prefix_groups" if shared_prefix_ratio else "shared_prefix_ratio",
        )
    if not num_groups:
        if block_tokens is not None:
            raise _no_effect("block_tokens", "where no prompts share blocks")
        return None, 512
    size = 512 if block_tokens is None else checked_integer("block_tokens", block_tokens, 1, MAX_TOKENS)
    groups = np.array([generator.randrange(num_groups) for _ in range(len(prompts) // turns)], np.int64)
    # Halves away from zero, as the ratio of a whole number of blocks is rounded upstream.
    shared = np.floor(-(-prompts // size) * shared_prefix_ratio + 0.5).astype(np.int64)
    return _blocks(prompts, shared, np.repeat(groups, turns), size)


def _blocks(prompts: Int64, shared: Int64, groups: Int64, size: int) -> tuple[list[list[int]], int]:
    num_blocks = -(-prompts // size)
    widest = int(shared.max())
    fresh = int(groups.max() + 1) * widest
    hash_ids = []
    for blocks, common, group in zip(num_blocks.tolist(), shared.tolist(), groups.tolist(), strict=True):
        first = group * widest
        hash_ids.append([*range(first, first + common), *range(fresh, fresh + blocks - common)])
        fresh += blocks - common
    return hash_ids, size


def _no_effect(option: str, where: str) -> TraceError:
    return TraceError(f"{option} has no effect {where}; leave it out", field=option)
