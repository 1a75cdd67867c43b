"""How launches of one engine agree, from their raw results: the formal one, and the repetitions of it.

The product's own gate asks for evidence that the engine of this journey does not give (a measurement protocol). These
are the same figures without it: scatter of a point over the repetitions, and their median beside the formal launch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fpmsdk.perfdb.forward_cells import ForwardCell, Points

Point = tuple[str, int, int, int]


def wall_times(path: Path) -> dict[Point, float]:
    """Seconds of every point of a result file."""
    found = {}
    for group in json.loads(path.read_text())["iteration_groups"]:
        point = group["point"]
        coordinates = (point["batch_size"], point["total_prefill_tokens"], point["total_kv_read_tokens"])
        found[(point["point_type"], *coordinates)] = group["wall_time"]
    return found


def formal_times(folder: Path) -> dict[Point, float]:
    """Seconds of every point in the formal launches of a journey."""
    found: dict[Point, float] = {}
    for path in sorted((folder / "collection").rglob("benchmark.json")):
        if "cells" in path.parts and not {"smoke", "budget"} & set(path.parts):
            found |= wall_times(path)
    return found


def repeated_times(folder: Path) -> dict[Point, list[float]]:
    """Seconds of every point in the repetitions of a journey, one a launch."""
    found: dict[Point, list[float]] = {}
    for path in sorted((folder / "quality").rglob("benchmark.json")):
        if "cells" in path.parts:
            for point, seconds in wall_times(path).items():
                found.setdefault(point, []).append(seconds)
    return found


def medians(cell: ForwardCell, folder: Path) -> ForwardCell:
    """The published cell with, for every point, the median of all launches of a journey."""
    formal, repeated = formal_times(folder), repeated_times(folder)

    def of(phase: str, points: Points) -> Points:
        rows = zip(points.batch.tolist(), points.tokens.tolist(), points.kv.tolist(), strict=True)
        seconds = [np.median([formal[(phase, *row)], *repeated[(phase, *row)]]) for row in rows]
        return Points(points.batch, points.tokens, points.kv, 1e3 * np.array(seconds), points.genuine)

    return cell._replace(prefill=of("prefill", cell.prefill), decode=of("decode", cell.decode))


def repeatability(folder: Path) -> dict[str, Any]:
    """By phase, over the points: quantiles of their scatter (n - 1) and of their distance from the formal launch.

    Parameters
    ----------
    folder: of a journey.
    """
    formal, repeated = formal_times(folder), repeated_times(folder)
    told = {}
    for phase in ("prefill", "decode"):
        points = sorted(point for point in formal if point[0] == phase and point in repeated)
        taken = np.array([repeated[point] for point in points])
        scatter = taken.std(axis=1, ddof=1) / taken.mean(axis=1)
        away = np.median(taken, axis=1) / np.array([formal[point] for point in points]) - 1
        told[phase] = {
            "points": len(points),
            "launches": taken.shape[1],
            "cv": _quantiles(scatter),
            "formal_difference": _quantiles(np.abs(away)),
            "formal_bias": float(away.mean()),
        }
    return told


def _quantiles(values: Any) -> dict[str, float]:
    return {"p50": float(np.quantile(values, 0.5)), "p95": float(np.quantile(values, 0.95))}
