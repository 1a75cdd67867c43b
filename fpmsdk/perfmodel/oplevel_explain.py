"""Op-level estimates with the measurements behind them: per operator its anchors, their distance, the error to expect.

Reads the compiled tables; it changes no answer. Source: op-level.md sections 2 and 3.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fpmsdk._ext.grid import RESOLUTIONS, GridTable
from fpmsdk._ext.operators import Operator
from fpmsdk._ext.sites import GemmSite, GemmTable

# Measurements whose errors stand for that of a query near them.
_NEIGHBOURS = 8
# Of every operator without a table: a formula, or the speed of light.
FORMULA, SPEED_OF_LIGHT = "formula", "speed_of_light"
_MEASURED = RESOLUTIONS[:2]

Query = tuple[int, int, int, int]
Anchor = tuple[dict[str, float], float, float]  # coordinates, latency ms, weight


class _Answer(NamedTuple):
    resolution: str
    anchors: list[Anchor]
    error: float | None


class OperatorExplainer:
    """Explains operators of one model; errors of left-out measurements are computed once."""

    def __init__(self) -> None:
        self._left_out: dict[tuple[Any, ...], tuple[Any, float | None]] = {}

    def lookups(
        self, operator: Operator, query: Query, *, at_sol: bool, scale: float = 1.0, hidden: bool = False
    ) -> list[dict[str, Any]]:
        """One record per table lookup or formula behind an operator's query.

        Parameters
        ----------
        query: batch size, new tokens or KV position per request, prefix per request, tokens.
        at_sol: the model prices from the roofline alone.
        scale, hidden: repetitions of the operator that this one is a part of, and whether that hides behind others.
        """
        parts = () if at_sol else operator.parts(*query)
        if parts:
            inner = scale * operator.scale_factor
            return [
                record
                for part, hides in parts
                for record in self.lookups(part, query, at_sol=False, scale=inner, hidden=hidden or hides)
            ]
        _, latency_ms, _, source, _ = operator.ask(*query, at_sol)
        record = {"operator": operator.name, "latency_ms": latency_ms * scale, "source": source, "overlapped": hidden}
        asked = [] if at_sol or source == "sol" else operator.lookups(*query)
        if not asked:
            resolution = SPEED_OF_LIGHT if source == "sol" else FORMULA
            return [record | _told(resolution, {}, [], None)]
        answers = [self._answer(operator, table, at) for table, at in asked]
        middle = len(asked) // 2
        return [
            record
            | _told(
                max((answer.resolution for answer in answers), key=RESOLUTIONS.index),
                dict(asked[middle][1]),
                _merged(answers),
                answers[middle].error,
            )
        ]

    def _answer(self, operator: Operator, table: GridTable | GemmSite, at: Mapping[str, float]) -> _Answer:
        if isinstance(table, GemmSite):
            return self._product(table, at["m"])
        coordinates = tuple(at.values())
        found = table.support(coordinates, operator.table_sol_ms)
        assert found is not None  # the operator has answered
        resolution, weights = found
        axes, latency_ms = table.columns()
        anchors = [
            (
                {name: float(column[row]) for name, column in zip(at, axes, strict=True)},
                float(latency_ms[row]),
                weight,
            )
            for row, weight in weights.items()
        ]
        return _Answer(resolution, anchors, self._grid_error(operator, table, coordinates, resolution))

    def _grid_error(
        self, operator: Operator, table: GridTable, coordinates: tuple[float, ...], resolution: str
    ) -> float | None:
        # Along each axis that the query lies off: nearby measurements, each asked of the table without those that
        # share its place up to that axis. A query on a measurement stands for the last axis.
        axes, latency_ms = table.columns()
        off = [axis for axis, column in enumerate(axes) if coordinates[axis] not in column]
        nearest = _nearest(axes, coordinates)
        total, known = 0.0, False
        for axis in off or [len(axes) - 1]:
            errors = []
            for row in nearest:
                key = (id(table), int(row), axis)
                if key not in self._left_out:
                    at = tuple(float(column[row]) for column in axes)
                    others = table.without(int(row), axis)
                    predicted = others.support(at, operator.table_sol_ms)
                    answer = others.query(at, operator.table_sol_ms)
                    how = None if predicted is None else predicted[0]
                    # The table is kept with its key, so that its id stays its own.
                    self._left_out[key] = (table, how), _relative(answer, float(latency_ms[row]))
                (_, how), error = self._left_out[key]
                if error is not None:
                    errors.append((how, error))
            found = _typical(errors, resolution)
            if found is not None:
                total, known = total + found * found, True
        return math.sqrt(total) if known else None

    def _product(self, site: GemmSite, m: float) -> _Answer:
        found = site.support(m)
        assert found is not None
        resolution, weights = found
        anchors = []
        shapes = set()
        for entry, weight in weights.items():
            (at_m, n, k), latency_ms = site.table.point(entry)
            anchors.append(({"m": at_m, "n": n, "k": k}, latency_ms, weight))
            shapes.add((n, k))
        own_curve = len(shapes) == 1 and resolution != RESOLUTIONS[3]
        entries = site.neighbours(m, _NEIGHBOURS) if own_curve else list(weights)
        errors = []
        for entry in entries:
            how, error = self._product_error(site.table, int(entry), whole_site=not own_curve)
            if error is not None:
                errors.append((how, error))
        return _Answer(resolution, anchors, _typical(errors, resolution))

    def _product_error(self, table: GemmTable, entry: int, *, whole_site: bool) -> tuple[Any, float | None]:
        key = (id(table), entry, whole_site)
        if key not in self._left_out:
            (m, n, k), latency_ms = table.point(entry)
            others = GemmSite(table.without(entry, whole_site), n, k)
            predicted = others.support(m)
            how = None if predicted is None else predicted[0]
            self._left_out[key] = (table, how), _relative(others.ask(m), latency_ms)
        (_, how), error = self._left_out[key]
        return how, error


def summarised(lookups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Domain, expected error and measured share of the latency of a rank.

    The error is that of the measured operators, as if those errors had one sign; operators that hide behind others and
    those of formulas do not count.
    """
    counted = [lookup for lookup in lookups if not lookup["overlapped"]]
    measured = [lookup for lookup in counted if lookup["expected_error"] is not None]
    latency_ms = sum(lookup["latency_ms"] for lookup in counted)
    measured_ms = sum(lookup["latency_ms"] for lookup in measured)
    error_ms = sum(lookup["expected_error"] * lookup["latency_ms"] for lookup in measured)
    return {
        "in_domain": all(lookup["in_domain"] for lookup in counted),
        "expected_error": error_ms / measured_ms if measured_ms > 0.0 else None,
        "measured_share": measured_ms / latency_ms if latency_ms > 0.0 else 0.0,
    }


def _told(
    resolution: str, coordinates: dict[str, float], anchors: list[dict[str, Any]], error: float | None
) -> dict[str, Any]:
    told = [anchor | {"distance": _distance(coordinates, anchor["coordinates"])} for anchor in anchors]
    distance = min((anchor["distance"] for anchor in told), default=None)
    if error is not None and distance is not None and resolution not in _MEASURED:
        # A left-out measurement stands for a transfer over about one doubling; further away errors grow.
        error *= max(1.0, distance)
    return {
        "coordinates": coordinates,
        "resolution": resolution,
        "in_domain": resolution in (*_MEASURED, FORMULA, SPEED_OF_LIGHT),
        "distance": distance,
        "expected_error": error,
        "anchors": told,
    }


def _merged(answers: list[_Answer]) -> list[dict[str, Any]]:
    # Lookups that are averaged or added stand for equal parts of an operator.
    shares: dict[tuple[float, ...], dict[str, Any]] = {}
    for answer in answers:
        for coordinates, latency_ms, weight in answer.anchors:
            anchor = shares.setdefault(
                tuple(coordinates.values()), {"coordinates": coordinates, "latency_ms": latency_ms, "weight": 0.0}
            )
            anchor["weight"] += weight / len(answers)
    return list(shares.values())


def _distance(asked: Mapping[str, float], anchor: Mapping[str, float]) -> float:
    # In doublings per axis, where zero counts as one.
    differences = [math.log2(max(asked[name], 1.0)) - math.log2(max(anchor[name], 1.0)) for name in asked]
    return math.sqrt(sum(difference * difference for difference in differences))


def _nearest(axes: tuple[Any, ...], coordinates: tuple[float, ...]) -> Any:
    squared = np.zeros(len(axes[0]))
    for column, at in zip(axes, coordinates, strict=True):
        squared += (np.log2(np.maximum(column, 1.0)) - math.log2(max(at, 1.0))) ** 2
    count = min(_NEIGHBOURS, len(squared))
    return np.argsort(squared, kind="stable")[:count]


def _relative(answer: tuple[float, float] | None, measured_ms: float) -> float | None:
    return answer[0] / measured_ms - 1.0 if answer is not None and measured_ms > 0.0 else None


def _typical(errors: list[tuple[Any, float]], resolution: str) -> float | None:
    # Measurements that were predicted as the query is answered, if there are any.
    inside = resolution in _MEASURED
    alike = [error for how, error in errors if (how in _MEASURED) == inside] or [error for _, error in errors]
    return math.sqrt(sum(error * error for error in alike) / len(alike)) if alike else None
