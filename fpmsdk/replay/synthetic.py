"""Synthetic workloads: so many requests of such lengths, with arrivals, sessions and shared prefixes.

Equal arguments give the same trace everywhere; only the standard library's generator is drawn from.
Source: engine-and-replay.md section 5.3.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fpmsdk.errors import TraceError
from fpmsdk.replay.arrivals import arrival_portions_ms, checked_integer, checked_number, checked_ratio
from fpmsdk.replay.portions import Portion
from fpmsdk.replay.trace import MAX_TOKENS, Trace

Int64 = NDArray[np.int64]


class Recipe(Struct, frozen=True):
    """A checked workload; see `Trace.synthetic`. `num_requests` counts turns; `longest_prefix` are prompt blocks."""

    sessions: int
    turns: int
    input_tokens: int
    output_tokens: int
    ratio: float
    seed: int
    inter_turn_delay_ms: float
    arrivals: Mapping[str, Any]
    cached_prefix_tokens: int
    shared_prefix_ratio: float
    num_groups: int
    block_tokens: int

    @property
    def num_requests(self) -> int:
        """All turns of all sessions."""
        return self.sessions * self.turns

    @property
    def has_blocks(self) -> bool:
        """Whether prompts share something."""
        return bool(self.cached_prefix_tokens or self.num_groups)

    @classmethod
    def of(
        cls,
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
    ) -> Recipe:
        """Check the arguments of `Trace.synthetic`; raises TraceError."""
        sessions = checked_integer("request_count", request_count, 1, MAX_TOKENS)
        turns = checked_integer("turns_per_session", turns_per_session, 1, MAX_TOKENS)
        checked_integer("input_tokens", input_tokens, 1, MAX_TOKENS)
        checked_integer("output_tokens", output_tokens, 0, MAX_TOKENS)
        delay_ms = checked_number("inter_turn_delay_ms", inter_turn_delay_ms)
        if delay_ms and turns == 1:
            raise _no_effect("inter_turn_delay_ms", "with turns_per_session 1")
        ratio = checked_ratio("random_range_ratio", random_range_ratio)
        for name, longest in (("input_tokens", input_tokens), ("output_tokens", output_tokens)):
            if longest > 0 and int(longest * ratio) == 0:
                raise TraceError(
                    f"random_range_ratio {ratio} of {name} {longest} allows no tokens; give a larger ratio",
                    field="random_range_ratio",
                )
        if random_seed is not None and ratio == 1 and num_prefix_groups < 2:
            raise _no_effect("random_seed", "on fixed lengths without prefix groups")
        recipe = cls(
            sessions,
            turns,
            input_tokens,
            output_tokens,
            ratio,
            0 if random_seed is None else checked_integer("random_seed", random_seed, 0),
            delay_ms,
            {"request_rate": request_rate, "arrival_interval_ms": arrival_interval_ms, "arrival_seed": arrival_seed},
            checked_integer("cached_prefix_tokens", cached_prefix_tokens, 0, input_tokens),
            checked_ratio("shared_prefix_ratio", shared_prefix_ratio),
            checked_integer("num_prefix_groups", num_prefix_groups, 0, MAX_TOKENS),
            _block_tokens(cached_prefix_tokens, shared_prefix_ratio, num_prefix_groups, block_tokens),
        )
        if cached_prefix_tokens and ratio < 1:
            shortest = min(recipe.draws().inputs(recipe.num_requests))
            checked_integer("cached_prefix_tokens", cached_prefix_tokens, 0, shortest)
        for _ in arrival_portions_ms(1, **recipe.arrivals):  # its checks
            pass
        return recipe

    def draws(self) -> _Draws:
        """The random numbers of the workload, from the first on."""
        return _Draws(self)


class _Draws:
    """Lengths and groups, each from a place of its own in one random stream.

    All inputs are drawn before all outputs, and those before the groups.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._inputs = random.Random(recipe.seed)
        self._outputs, self._groups = random.Random(), random.Random()
        self._outputs.setstate(self._inputs.getstate())
        self._draw(self._outputs, recipe.input_tokens, recipe.num_requests)
        self._groups.setstate(self._outputs.getstate())
        self._draw(self._groups, recipe.output_tokens, recipe.num_requests)

    def inputs(self, count: int) -> list[int]:
        """The next prompt lengths."""
        return list(self._lengths(self._inputs, self._recipe.input_tokens, count))

    def outputs(self, count: int) -> list[int]:
        """The next output lengths."""
        return list(self._lengths(self._outputs, self._recipe.output_tokens, count))

    def groups(self, sessions: int) -> list[int]:
        """The prefix groups of the next sessions."""
        return [self._groups.randrange(self._recipe.num_groups) for _ in range(sessions)]

    def _draw(self, generator: random.Random, longest: int, count: int) -> None:
        for _ in self._lengths(generator, longest, count if self._recipe.ratio < 1 else 0):
            pass

    def _lengths(self, generator: random.Random, longest: int, count: int) -> Iterator[int]:
        if self._recipe.ratio == 1 or longest == 0:
            return repeat(longest, count)
        shortest = int(longest * self._recipe.ratio)
        return (generator.randint(shortest, longest) for _ in range(count))


def synthetic_portions(recipe: Recipe, rows_per_portion: int) -> Iterator[Portion]:
    """Make a workload portion by portion."""
    draws = recipe.draws()
    per_portion = max(1, rows_per_portion // recipe.turns)
    first = 0
    # Blocks of a group come before those of single requests.
    fresh = recipe.num_groups * -(-recipe.input_tokens // recipe.block_tokens) + 1
    for arrivals in arrival_portions_ms(recipe.sessions, per_portion, **recipe.arrivals):
        sessions = len(arrivals)
        count = sessions * recipe.turns
        turn = np.arange(count) % recipe.turns
        prompts = np.array(draws.inputs(count), np.int64)
        outputs = np.array(draws.outputs(count), np.int64)
        offsets, hash_ids = np.zeros(count + 1, np.int64), np.empty(0, np.int64)
        if recipe.has_blocks:
            offsets, hash_ids, fresh = _blocks(recipe, prompts, draws, sessions, fresh)
        names = np.array([f"synthetic-{index}" for index in range(first, first + count)], object)
        session_ids = np.full(count, None, object)
        if recipe.turns > 1:
            session_ids[:] = [f"session-{index // recipe.turns}" for index in range(first, first + count)]
        yield Portion(
            request_ids=names,
            session_ids=session_ids,
            arrival_ms=np.where(turn == 0, np.repeat(arrivals, recipe.turns), np.nan),
            turn_index=turn,
            prompt_tokens=prompts,
            output_tokens=outputs,
            priority=np.zeros(count, np.int64),
            dp_rank=np.full(count, -1),
            prefill_dp_rank=np.full(count, -1),
            delay_ms=np.where(turn > 0, recipe.inter_turn_delay_ms, 0.0),
            hash_offsets=offsets,
            hash_ids=hash_ids,
        )
        first += count


def _block_tokens(cached_prefix_tokens: int, shared_prefix_ratio: float, num_groups: int, given: int | None) -> int:
    """The tokens of a block that prompts share."""
    if cached_prefix_tokens:
        if shared_prefix_ratio or num_groups:
            raise TraceError(
                "cached_prefix_tokens shares one prefix with all, shared_prefix_ratio one with a group; give one",
                field="cached_prefix_tokens",
            )
        if given is not None:
            raise _no_effect("block_tokens", "with cached_prefix_tokens, which is the block that is shared")
        # One block as long as the prefix: an engine with blocks of any size finds all of it that is whole.
        return cached_prefix_tokens
    if bool(shared_prefix_ratio) != bool(num_groups):
        raise TraceError(
            f"shared_prefix_ratio is {shared_prefix_ratio} with num_prefix_groups {num_groups}; give both or none",
            field="num_prefix_groups" if shared_prefix_ratio else "shared_prefix_ratio",
        )
    if not num_groups and given is not None:
        raise _no_effect("block_tokens", "where no prompts share blocks")
    return 512 if given is None else checked_integer("block_tokens", given, 1, MAX_TOKENS)


def _blocks(recipe: Recipe, prompts: Int64, draws: _Draws, sessions: int, fresh: int) -> tuple[Int64, Int64, int]:
    """Block identities of some requests as offsets and values, and the next fresh one."""
    num_blocks = -(-prompts // recipe.block_tokens)
    if recipe.cached_prefix_tokens:
        shared, groups = np.ones(len(prompts), np.int64), np.zeros(len(prompts), np.int64)
    else:
        # Halves away from zero, as the ratio of a whole number of blocks is rounded upstream.
        shared = np.floor(num_blocks * recipe.shared_prefix_ratio + 0.5).astype(np.int64)
        groups = np.repeat(np.array(draws.groups(sessions), np.int64), recipe.turns)
    widest = -(-recipe.input_tokens // recipe.block_tokens)
    offsets = np.zeros(len(prompts) + 1, np.int64)
    np.cumsum(num_blocks, out=offsets[1:])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], num_blocks)
    is_shared = place < np.repeat(shared, num_blocks)
    hash_ids = np.repeat(groups * widest, num_blocks) + place
    num_fresh = int(np.count_nonzero(~is_shared))
    hash_ids[~is_shared] = np.arange(fresh, fresh + num_fresh)
    return offsets, hash_ids, fresh + num_fresh


def synthetic_trace(request_count: int, input_tokens: int, output_tokens: int, **options: Any) -> Trace:
    """Make a trace; see `Trace.synthetic`."""
    recipe = Recipe.of(request_count, input_tokens, output_tokens, **options)
    portions = list(synthetic_portions(recipe, recipe.num_requests))

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(portion, name) for portion in portions])

    names = column("request_ids").tolist()
    turns = np.arange(recipe.num_requests) % recipe.turns
    return Trace.ordered(
        request_ids=names,
        session_ids=names if recipe.turns == 1 else column("session_ids")[turns == 0].tolist(),
        session_arrival_ms=column("arrival_ms")[turns == 0],
        session=np.arange(recipe.num_requests) // recipe.turns,
        turn=turns,
        delay_ms=column("delay_ms"),
        prompt_tokens=column("prompt_tokens"),
        output_tokens=column("output_tokens"),
        priority=column("priority"),
        dp_rank=column("dp_rank"),
        prefill_dp_rank=column("prefill_dp_rank"),
        hash_offsets=np.append(0, np.cumsum(np.concatenate([np.diff(portion.hash_offsets) for portion in portions]))),
        hash_ids=column("hash_ids").astype(np.uint64),
        block_tokens=recipe.block_tokens,
        awaits_offsets=np.zeros(recipe.num_requests + 1, np.int64),
        awaits=np.empty(0, np.int64),
    )


def _no_effect(option: str, where: str) -> TraceError:
    return TraceError(f"{option} has no effect {where}; leave it out", field=option)
