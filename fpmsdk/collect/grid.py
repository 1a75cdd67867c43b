"""The points that the engine's benchmark measures: axes, feasibility and order, as its scheduler generates them.

Source: collector.md sections 1.4 and 5.2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fpmsdk.errors import OnboardError

# A short tail beyond the largest captured graph is kept whole when an axis is thinned.
_TAIL_SHARE = 0.2


def balanced(total: int, count: int, *, unit: int = 1, minimum: int = 0) -> list[int]:
    """Split a total over requests as evenly as whole units allow; the first ones get one unit more.

    Raises
    ------
    OnboardError: a request would get less than `minimum`.

    Example
    -------
    >>> balanced(80, 3, unit=16, minimum=1)
    [32, 32, 16]
    """
    share, more = divmod(total // unit, count)
    parts = [(share + (place < more)) * unit for place in range(count)]
    # What is left below one unit stays with the first request.
    parts[0] += total % unit
    _at_least(parts, minimum, total)
    return parts


def imbalanced(
    total: int, count: int, *, high_count: int, fraction: float, unit: int = 1, minimum: int = 0
) -> list[int]:
    """Split a total so that the first `high_count` requests have `1 + fraction` times the mean.

    Raises
    ------
    OnboardError: a request would get less than `minimum`.

    Example
    -------
    >>> imbalanced(256, 4, high_count=1, fraction=0.5, minimum=1)
    [96, 54, 53, 53]
    """
    high = round(total / unit / count * (1 + fraction)) * unit
    parts = [high] * high_count + balanced(total - high * high_count, count - high_count, unit=unit)
    _at_least(parts, minimum, total)
    return parts


def _at_least(parts: list[int], minimum: int, total: int) -> None:
    if min(parts) < minimum:
        raise OnboardError(f"{total} tokens over {len(parts)} requests leave {min(parts)}, less than {minimum}")


def capture_axis(captures: Sequence[int], limit: int) -> list[int]:
    """Sizes at which the latency of a pass can change: every captured size, the one after it, then doublings.

    Parameters
    ----------
    captures: sizes of captured graphs, in tokens; powers of two stand in for none.
    limit: the largest size.

    Example
    -------
    >>> capture_axis([1, 2, 4, 8], 40)
    [1, 2, 3, 4, 5, 8, 9, 16, 32, 40]
    """
    sizes = sorted({size for size in captures if size >= 1})
    axis = {limit}
    if not sizes:
        axis |= set(_doublings(1, limit))
    for size in sizes:
        axis |= {value for value in (size, size + 1) if value <= limit and size <= limit}
    if sizes and sizes[-1] <= limit:
        axis |= set(_doublings(2 * sizes[-1], limit - 1))
    return sorted(axis)


def _doublings(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def thin(values: Sequence[int], samples: int) -> list[int]:
    """At most `samples` values at even distances, the first and the last among them.

    >>> thin(range(10), 4)
    [0, 3, 6, 9]
    """
    values = list(values)
    if len(values) <= samples:
        return values
    if samples == 1:
        return values[-1:]
    last, steps = len(values) - 1, samples - 1
    return [values[(step * last + steps // 2) // steps] for step in range(samples)]


def thin_axis(values: Sequence[int], captures: Sequence[int], samples: int) -> list[int]:
    """`thin`, but a tail beyond the largest captured graph stays whole where it is at most a fifth of the axis.

    >>> thin_axis(range(1, 21), [16], 8)
    [1, 6, 11, 16, 17, 18, 19, 20]
    """
    values = list(values)
    if len(values) <= samples:
        return values
    inside = bisect_left(values, max(captures, default=0) + 1)
    tail = values[inside:]
    if captures and tail and len(tail) <= _TAIL_SHARE * len(values) and samples - len(tail) >= 1:
        return thin(values[:inside], samples - len(tail)) + tail
    return thin(values, samples)


def steady_tokens(batch_size: int, total_kv_tokens: int) -> int:
    """KV tokens that the second step of a decode benchmark reads, when the first was asked for `total_kv_tokens`.

    >>> steady_tokens(4, 16), steady_tokens(3, 5)
    (16, 6)
    """
    # Closed form of the sum of max(1, context - 1) + 1 over balanced contexts.
    return max(total_kv_tokens, 2 * batch_size)


@dataclass(frozen=True)
class EngineLimits:
    """What the running engine allows.

    Parameters
    ----------
    max_model_len: tokens of one sequence.
    max_num_batched_tokens: tokens of one pass.
    max_num_seqs: sequences of one pass.
    block_size: tokens of one cache block.
    usable_blocks: cache blocks of one rank that requests may fill.
    captures: token counts of captured graphs of prefill.
    decode_captures: batch sizes of captured graphs of decode.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    usable_blocks: int
    captures: tuple[int, ...] = ()
    decode_captures: tuple[int, ...] = ()


@dataclass(frozen=True)
class Samples:
    """How many values of each axis are measured at most."""

    prefill_new_tokens: int = 64
    prefill_kv_tokens: int = 16
    prefix_batches: int = 3
    decode_kv_tokens: int = 128
    decode_batches: int = 128


@dataclass(frozen=True)
class Point:
    """One pass to measure; `reasons` say why, in the engine's words."""

    point_type: str
    batch_size: int
    total_prefill_tokens: int
    total_kv_read_tokens: int
    reasons: tuple[str, ...] = ()
    partition: dict[str, Any] | None = None
    rows: tuple[tuple[int, int], ...] | None = None
    is_replica: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the pass: new tokens of prefill, sequences of decode."""
        return self.total_prefill_tokens if self.point_type == "prefill" else self.batch_size


def capture_of(tokens: int, captures: Sequence[int]) -> int | None:
    """The captured graph that a pass of `tokens` runs in: the smallest that holds it; None for none.

    >>> capture_of(5, (4, 8)), capture_of(9, (4, 8))
    (8, None)
    """
    place = bisect_left(captures, tokens)
    return captures[place] if place < len(captures) else None


def prefill_points(limits: EngineLimits, samples: Samples, *, prefix_caching: bool) -> list[Point]:
    """Points of prefill, the largest first.

    Parameters
    ----------
    prefix_caching: whether cached prefixes are measured.
    """
    tokens_axis = thin_axis(
        capture_axis(limits.captures, limits.max_num_batched_tokens), limits.captures, samples.prefill_new_tokens
    )
    points = []
    for tokens in tokens_axis:
        reasons = _reasons(tokens, limits.captures, limits.max_num_batched_tokens)
        largest = min(tokens, limits.max_num_seqs)
        batches = [
            batch for batch in sorted({*_doublings(1, largest), largest}) if _prefill_fits(limits, batch, tokens, 0)
        ]
        for batch in batches[: samples.prefix_batches]:
            axis = _prefix_axis(limits, batch, tokens, samples.prefill_kv_tokens) if prefix_caching else [0]
            points += [Point("prefill", batch, tokens, kv_tokens, reasons) for kv_tokens in axis]
    return points[::-1]


def _prefix_axis(limits: EngineLimits, batch: int, tokens: int, samples: int) -> list[int]:
    block = limits.block_size
    # Prefixes are whole blocks: each request reads at most what leaves room for its new tokens.
    per_request = (limits.max_model_len - -(-tokens // batch) - 1) // block
    most = min(per_request * batch, limits.usable_blocks - batch * -(-(-(-tokens // batch) + 1) // block))
    if most < batch:
        return [0]
    blocks = [0, batch, *(value for value in _doublings(1, most) if value >= batch), most]
    axis = thin(sorted({value * block for value in blocks}), samples)
    return [value for value in axis if _prefill_fits(limits, batch, tokens, value)]


def _prefill_fits(limits: EngineLimits, batch: int, tokens: int, kv_tokens: int) -> bool:
    if tokens < batch or tokens > limits.max_num_batched_tokens:
        return False
    context = -(-tokens // batch) + -(-kv_tokens // batch // limits.block_size) * limits.block_size
    blocks = batch * -(-(context + 1) // limits.block_size)
    return context + 1 <= limits.max_model_len and blocks <= limits.usable_blocks


def decode_points(limits: EngineLimits, samples: Samples, *, warm_kv: bool = False) -> list[Point]:
    """Points of decode: batches of the captured sizes, contexts in doublings.

    Parameters
    ----------
    warm_kv: whether the cache holds real contents, which are filled once and read by ever smaller points.
    """
    feasible = next((batch for batch in range(limits.max_num_seqs, 0, -1) if decode_fits(limits, batch, batch)), 0)
    if not feasible:
        raise OnboardError("the cache cannot hold a single decode request; give the engine more blocks", "num_blocks")
    captures = limits.decode_captures
    batches = thin_axis(capture_axis(captures, feasible), captures, samples.decode_batches)
    points = [
        Point("decode", batch, 0, kv_tokens, _reasons(batch, captures, feasible))
        for batch in batches
        for kv_tokens in thin(decode_ladder(limits, batch), samples.decode_kv_tokens)
    ]
    if warm_kv:
        points.sort(key=lambda point: (-point.batch_size, -point.total_kv_read_tokens))
    return points


def decode_ladder(limits: EngineLimits, batch: int) -> list[int]:
    """KV tokens that are read by a decode pass of `batch` requests, from the fewest to the most that fit."""
    low, high = batch, batch * limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if decode_fits(limits, batch, middle):
            low = middle
        else:
            high = middle - 1
    return kv_ladder(batch, low)


def kv_ladder(batch: int, most: int) -> list[int]:
    """Doublings of KV tokens from one a request up to `most`, as the second step reads them.

    >>> kv_ladder(3, 100)
    [6, 8, 16, 32, 64, 100]
    """
    values = {batch, most, *(value for value in _doublings(1, most) if value >= batch)}
    return sorted({steady_tokens(batch, value) for value in values})


def decode_fits(limits: EngineLimits, batch: int, kv_tokens: int) -> bool:
    """Whether a decode pass of `batch` requests over `kv_tokens` fits into sequence length and cache.

    The context of a request grows by two tokens, and its last block must exist.
    """
    short, longer = divmod(kv_tokens, batch)
    longest = max(short + (longer > 0), 2)
    if longest + 2 > limits.max_model_len:
        return False
    blocks = longer * -(-(longest + 1) // limits.block_size)
    blocks += (batch - longer) * -(-(max(short, 2) + 1) // limits.block_size)
    return blocks <= limits.usable_blocks


def with_replicas(points: Sequence[Point], captures: Sequence[int]) -> list[Point]:
    """One discarded replica before the points, for every shape that no captured graph holds.

    The first eager execution of a shape compiles kernels; its time belongs to nothing that is served.
    """
    eager = {(point.point_type, point.tokens): point for point in points if capture_of(point.tokens, captures) is None}
    replicas = [replace(point, reasons=("eager_warmup",), is_replica=True) for point in eager.values()]
    return [*replicas, *points]


def _reasons(tokens: int, captures: Sequence[int], limit: int) -> tuple[str, ...]:
    if tokens in captures:
        return ("capture",)
    if tokens - 1 in captures:
        return ("post_capture",)
    graph = () if captures else ("cudagraph_disabled",)
    if tokens == limit:
        return (*graph, "engine_limit")
    return (*graph, "eager_tail" if captures and tokens > captures[-1] else "geometric_axis")
