"""Which points of a measured sweep are repeated, and the names under which launches are compared.

Source: collector.md section 7.4 (freeze, bounded selection).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fpmsdk.collect.artifact import NativeCollection
from fpmsdk.collect.measurement_records import coordinates_of
from fpmsdk.collect.selection import selected_rows
from fpmsdk.documents.canonical import digest
from fpmsdk.errors import CollectionError, OnboardError

FULL_SWEEP = "full_native_sweep"


@dataclass(frozen=True)
class RepeatedPoint:
    """One point as a sweep published it.

    Attributes
    ----------
    key: digest of its coordinates.
    point: what the engine said of it.
    regime: what its KV was seeded with.
    rank_wall_s: seconds of every rank, by rank.
    """

    key: str
    point: Mapping[str, Any]
    regime: str | None
    rank_wall_s: tuple[float, ...]

    @property
    def wall_s(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.rank_wall_s)

    @property
    def execution_regime(self) -> tuple[Any, ...]:
        """Seed, launch mode, captured size and padding: what must not change between launches."""
        named = (
            self.point.get(name) for name in ("expected_cudagraph_mode", "expected_capture_size", "padding_tokens")
        )
        return (self.regime, *named)

    @property
    def scheduled_tokens(self) -> int:
        """Tokens that are captured: those of a prefill, the requests of a decode."""
        return int(self.point["total_prefill_tokens"] or self.point["batch_size"])

    def rank_walls_document(self) -> list[list[float | int]]:
        """`[rank, seconds]` of every rank."""
        return [[rank, seconds] for rank, seconds in enumerate(self.rank_wall_s)]


def published_points(collection: NativeCollection, where: str) -> tuple[RepeatedPoint, ...]:
    """The points that a sweep publishes, by batch size, prefill tokens, KV tokens and key.

    Raises
    ------
    CollectionError: two of them have the same coordinates; names `where`.
    """
    points = []
    for row in selected_rows(collection, where):
        point = collection.points[row]
        walls = tuple(collection.rank_wall_s[row].tolist())
        points.append(RepeatedPoint(digest(coordinates_of(point)), point, collection.regimes[row], walls))
    if len({point.key for point in points}) != len(points):
        raise CollectionError(f"{where}: two published points have the same coordinates; they cannot be told apart")
    return tuple(sorted(points, key=_order))


def _order(point: RepeatedPoint) -> tuple[int, int, int, str]:
    named = point.point
    return named["batch_size"], named["total_prefill_tokens"], named["total_kv_read_tokens"], point.key


def captured_sizes(points: Sequence[RepeatedPoint]) -> list[int]:
    """The captured sizes that points ran at, ascending."""
    found = (point.point.get("expected_capture_size") for point in points)
    return sorted({size for size in found if size is not None})


def bounding_sizes(points: Sequence[RepeatedPoint]) -> list[int]:
    """The smallest and the largest captured size."""
    sizes = captured_sizes(points)
    return sorted({*sizes[:1], *sizes[-1:]})


def bounded_selection(points: Sequence[RepeatedPoint], limit: int) -> list[tuple[RepeatedPoint, list[str]]]:
    """A few points that stand for a sweep: its extremes, every regime, and both sides of the outer captured sizes.

    Strata are covered greedily, what covers most first; what is left of the limit is spread evenly over the sweep.

    Parameters
    ----------
    points: in the order of `published_points`.
    limit: the most to choose.

    Returns
    -------
    Chosen points in the same order, each with the strata it stands for.

    Raises
    ------
    OnboardError: the limit cannot cover every stratum; names those that are left.
    """
    strata = _strata(points)
    uncovered = set().union(*strata)
    chosen: set[int] = set()
    while uncovered:
        if len(chosen) == limit:
            raise OnboardError(
                f"max_points_per_cell: {limit} points cannot stand for {', '.join(sorted(uncovered))}; allow more",
                "max_points_per_cell",
            )
        best = max(range(len(points)), key=lambda index: (len(strata[index] & uncovered), -index))
        chosen.add(best)
        uncovered -= strata[best]
    count = min(limit, len(points))
    evenly = [round(step * (len(points) - 1) / max(1, count - 1)) for step in range(count)]
    for index in (*evenly, *range(len(points))):
        if len(chosen) < count:
            chosen.add(index)
    return [(points[index], sorted(strata[index])) for index in sorted(chosen)]


def _strata(points: Sequence[RepeatedPoint]) -> list[set[str]]:
    strata: list[set[str]] = [
        {f"regime:{point.regime or 'unreported'}:{point.point.get('expected_cudagraph_mode')}"} for point in points
    ]
    axes = {
        "batch": [point.point["batch_size"] for point in points],
        "kv_per_request": [point.point["total_kv_read_tokens"] / point.point["batch_size"] for point in points],
        "new_tokens": [point.point["total_prefill_tokens"] for point in points],
    }
    for name, values in axes.items():
        _mark(strata, values, min(values), f"{name}_minimum")
        _mark(strata, values, max(values), f"{name}_maximum")
    tokens = [point.scheduled_tokens for point in points]
    for size in bounding_sizes(points):
        _mark(strata, tokens, max((value for value in tokens if value < size), default=None), f"capture_{size}_below")
        _mark(strata, tokens, size, f"capture_{size}_at")
        _mark(strata, tokens, min((value for value in tokens if value > size), default=None), f"capture_{size}_above")
    return strata


def _mark(strata: list[set[str]], values: Sequence[float], edge: float | None, stratum: str) -> None:
    for tags, value in zip(strata, values, strict=True):
        if value == edge:
            tags.add(stratum)
