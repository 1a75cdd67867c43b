"""How well a measured table predicts its own points: each is left out in turn and asked of the others.

Strict lookups only, so that a report says what the measurements alone support. Source: fpm-interpolation.md section 4.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fpmsdk._ext.wholeforward import DirectEngine
from fpmsdk.perfdb.forward_cells import ForwardCell, Points
from fpmsdk.perfmodel.wholeforward_tables import strict_curves

# Points whose errors stand for that of a query near them.
_NEIGHBOURS = 12

_NO_INTEGERS = np.empty(0, np.int64)
_NOTHING = Points(_NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, np.empty(0), np.empty(0, np.bool_))

Coordinates = tuple[float, float | None, float]
Knees = Mapping[str, tuple[int, ...]]


class HeldOut(NamedTuple):
    """One point asked of the others; `predicted_ms` is None when they do not support it on both sides."""

    phase: str
    coordinates: Coordinates
    measured_ms: float
    predicted_ms: float | None
    resolution: str | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, None without one."""
        return None if self.predicted_ms is None else self.predicted_ms / self.measured_ms - 1.0


class LeaveOneOut:
    """The report of one cell."""

    def __init__(self, points: Sequence[HeldOut]) -> None:
        self.points = tuple(points)
        self._answered = {
            phase: [point for point in points if point.phase == phase and point.error is not None]
            for phase in ("prefill", "decode")
        }

    def expected_error(self, phase: str, coordinates: Coordinates) -> float | None:
        """Relative error to expect of a lookup: root mean square over the nearest points that were predicted.

        None when no point of the phase could be.
        """
        answered = self._answered[phase]
        if not answered:
            return None
        nearest = sorted(answered, key=lambda point: log_distance(point.coordinates, coordinates))[:_NEIGHBOURS]
        return math.sqrt(sum((point.error or 0.0) ** 2 for point in nearest) / len(nearest))

    def summary(self) -> dict[str, Any]:
        """Points, predicted points and percentiles of the absolute relative error, by phase."""
        document = {}
        for phase, answered in self._answered.items():
            errors = sorted(abs(point.error or 0.0) for point in answered)
            document[phase] = {
                "points": sum(point.phase == phase for point in self.points),
                "predicted": len(errors),
                "median_error": _quantile(errors, 0.5),
                "p90_error": _quantile(errors, 0.9),
                "max_error": errors[-1] if errors else None,
            }
        return document


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def log_distance(one: Coordinates, other: Coordinates) -> float:
    """Distance of two points in doublings per axis, where zero tokens count as one.

    >>> log_distance((1, 127, 0), (2, 127, 0))
    1.0
    """
    total = 0.0
    for axis, (a, b) in enumerate(zip(one, other, strict=True)):
        offset = 0 if axis == 0 else 1  # a batch is never zero
        difference = math.log2(offset + (a or 0)) - math.log2(offset + (b or 0))
        total += difference * difference
    return math.sqrt(total)


def leave_one_out(cell: ForwardCell, knees: Knees | None = None) -> LeaveOneOut:
    """Ask every genuine point of a cell of the others, never across one of the `knees` of its table.

    >>> import fpmsdk.sample
    >>> from fpmsdk.perfdb.forward_cells import open_forward_table
    >>> table = open_forward_table(fpmsdk.sample.forward_pair(), "cpu-2-cores", "vllm", "0.31.0")
    >>> report = leave_one_out(table.cells[0], table.knees)
    >>> report.summary()["decode"]["points"], round(report.expected_error("decode", (2, None, 300)), 2)
    (55, 0.07)
    """
    prefill, decode = cell.prefill.only_genuine(), cell.decode.only_genuine()
    return LeaveOneOut([*_prefill(prefill, knees), *_decode(decode, knees)])


def _prefill(points: Points, knees: Knees | None) -> list[HeldOut]:
    # Prefill lookups never leave their batch.
    found = []
    for batch in np.unique(points.batch):
        own = _taken(points, points.batch == batch)
        for i in range(len(own)):
            others = _taken(own, np.arange(len(own)) != i)
            at = (float(own.batch[i]), float(own.tokens[i]), float(own.kv[i]))
            _, predicted, resolution, _ = strict_engine(others, _NOTHING, knees).prefill_query(*at)
            found.append(HeldOut("prefill", at, float(own.latency_ms[i]), predicted, resolution))
    return found


def _decode(points: Points, knees: Knees | None) -> list[HeldOut]:
    found = []
    for i in range(len(points)):
        others = _taken(points, np.arange(len(points)) != i)
        batch, kv = float(points.batch[i]), float(points.kv[i])
        _, predicted, resolution, _ = strict_engine(_NOTHING, others, knees).decode_query(batch, kv)
        found.append(HeldOut("decode", (batch, None, kv), float(points.latency_ms[i]), predicted, resolution))
    return found


def _taken(points: Points, keep: Any) -> Points:
    return Points(
        points.batch[keep], points.tokens[keep], points.kv[keep], points.latency_ms[keep], points.genuine[keep]
    )


def strict_engine(prefill: Points, decode: Points, knees: Knees | None = None) -> DirectEngine:
    """Strict lookups over points, for queries that report their status."""
    return DirectEngine(*strict_curves(prefill, decode, knees), _unexplained)


def _unexplained(*lookup: Any) -> Exception:
    return AssertionError(f"a strict lookup reports its status: {lookup}")
