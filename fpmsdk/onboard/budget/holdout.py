"""Points that are kept apart: measured once, in the first round, and then predicted by the table of every round.

Source: onboarding.md section 8.3 (which points), fpm-interpolation.md (strict lookups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from fpmsdk._ext.wholeforward import DirectEngine
from fpmsdk.onboard.budget.choose import Float64
from fpmsdk.onboard.budget.grid import Grid, Grids
from fpmsdk.onboard.holdout_select import Point, envelope_anchors, select_points
from fpmsdk.perfdb.forward_cells import ForwardCell, Points
from fpmsdk.perfmodel.leave_one_out import Knees, strict_engine

_NO_INTEGERS: Grid = np.empty(0, np.int64)
_NOTHING = Points(_NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, np.empty(0), np.empty(0, np.bool_))


class Split(Struct, frozen=True):
    """The rows of a phase: the envelope, which is measured first, the holdout, and what may be chosen."""

    envelope: Grid
    holdout: Grid
    candidates: Grid


def split(phase: str, grid: Grid, *, most: int, seed: int) -> Split:
    """Keep points of a grid apart.

    Parameters
    ----------
    most: the most points of the holdout.
    seed: other seeds keep other points apart.

    >>> curve = np.array([[1, 0, kv] for kv in (4, 8, 16, 32, 64)])
    >>> parts = split("decode", curve, most=16, seed=42)
    >>> parts.envelope[:, 2].tolist(), len(parts.holdout), len(parts.candidates)
    ([4, 64], 1, 2)
    """
    anchors = envelope_anchors(phase, grid)
    chosen = select_points(phase, grid, anchors, limit=most, seed=seed)
    rows: list[Point] = [(batch, tokens, kv) for batch, tokens, kv in grid.tolist()]
    apart = _answered(phase, [row for row in rows if row not in chosen], chosen)

    def those(keep: Sequence[bool]) -> Grid:
        kept: Grid = grid[np.array(keep, bool)]
        return kept

    return Split(
        those([row in anchors for row in rows]),
        those([row in apart for row in rows]),
        those([row not in anchors and row not in apart for row in rows]),
    )


def _answered(phase: str, rows: Sequence[Point], chosen: Sequence[Point]) -> set[Point]:
    """Those of the chosen points that a table of all others answers; the rest would never be predicted."""
    engines = {"prefill": _NOTHING, "decode": _NOTHING, phase: _made_up(rows)}
    engine = strict_engine(engines["prefill"], engines["decode"])
    return {point for point in chosen if _lookup(engine, phase, point) is not None}


def _made_up(rows: Sequence[Point]) -> Points:
    batch, tokens, kv = np.array(rows, np.int64).reshape(-1, 3).T
    return Points(batch, tokens, kv, np.ones(len(rows)), np.full(len(rows), True))


def _lookup(engine: DirectEngine, phase: str, point: Point) -> float | None:
    batch, tokens, kv = map(float, point)
    found = engine.prefill_query(batch, tokens, kv) if phase == "prefill" else engine.decode_query(batch, kv)
    predicted: float | None = found[1]
    return predicted


class Prediction(Struct, frozen=True):
    """A point of the holdout: measured, predicted by a table without it (None: no answer), and what it counts."""

    phase: str
    point: tuple[int, int, int]
    measured_ms: float
    predicted_ms: float | None
    weight: float = 1.0

    @property
    def error(self) -> float:
        """Relative error; 1 without an answer, as nothing is known."""
        return 1.0 if self.predicted_ms is None else self.predicted_ms / self.measured_ms - 1.0


def phase_points(cell: ForwardCell, phase: str) -> Points:
    """The points of a phase that were measured with KV of their own."""
    return (cell.prefill if phase == "prefill" else cell.decode).only_genuine()


def coordinates(points: Points) -> Grid:
    """The points as rows of a grid."""
    return np.stack([points.batch, points.tokens, points.kv], axis=1)


def without(cell: ForwardCell, apart: Grids) -> ForwardCell:
    """A cell that lacks the points that are kept apart."""
    kept = {}
    for phase in ("prefill", "decode"):
        points = phase_points(cell, phase)
        rows = set(map(tuple, apart.get(phase, np.empty((0, 3), np.int64)).tolist()))
        keep = np.array([tuple(row) not in rows for row in coordinates(points).tolist()], bool)
        kept[phase] = Points(*(column[keep] for column in points))
    return cell._replace(prefill=kept["prefill"], decode=kept["decode"])


def predictions(
    cell: ForwardCell,
    knees: Knees | None,
    measured_ms: Mapping[tuple[str, Point], float],
    weights: Mapping[tuple[str, Point], float],
) -> list[Prediction]:
    """What a table says of the holdout.

    Parameters
    ----------
    measured_ms, weights: by phase and point.
    """
    engine = strict_engine(phase_points(cell, "prefill"), phase_points(cell, "decode"), knees)
    return [
        Prediction(phase, point, measured, _lookup(engine, phase, point), weights[phase, point])
        for (phase, point), measured in measured_ms.items()
    ]


def measured_of(cell: ForwardCell, apart: Grids) -> dict[tuple[str, Point], float]:
    """Latencies in ms of the points that are kept apart, by phase and point."""
    found: dict[tuple[str, Point], float] = {}
    for phase, grid in apart.items():
        points = phase_points(cell, phase)
        latency_ms = dict(zip(map(tuple, coordinates(points).tolist()), points.latency_ms.tolist(), strict=True))
        for batch, tokens, kv in grid.tolist():
            found[phase, (batch, tokens, kv)] = latency_ms[batch, tokens, kv]
    return found


def figures(found: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """By phase: points, those without an answer, quantiles of the absolute relative error, and its weighted mean.

    `bias` is the mean of the error itself. The weighted mean is what the traffic feels of it.
    """
    told = {}
    for phase in ("prefill", "decode"):
        own = [each for each in found if each.phase == phase]
        if not own:
            continue
        errors: Float64 = np.array([each.error for each in own])
        weights = [each.weight for each in own]
        told[phase] = {
            "points": len(own),
            "unanswered": sum(each.predicted_ms is None for each in own),
            "p50": float(np.quantile(np.abs(errors), 0.5)),
            "p95": float(np.quantile(np.abs(errors), 0.95)),
            "weighted": float(np.average(np.abs(errors), weights=weights)),
            "bias": float(errors.mean()),
        }
    return told
