"""How launches of one engine agree, from their raw results: the formal one, and the repetitions of it.

The product's own gate asks for evidence that the engine of this journey does not give (a measurement protocol). These
are the same figures without it: scatter of a point over the repetitions, and their median beside the formal launch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Point = tuple[str, int, int, int]


def wall_times(path: Path) -> dict[Point, float]:
    """Seconds of every point of a result file."""
    found = {}
    for group in json.loads(path.read_text())["iteration_groups"]:
        point = group["point"]
        coordinates = (point["batch_size"], point["total_prefill_tokens"], point["total_kv_read_tokens"])
        found[(point["point_type"], *coordinates)] = group["wall_time"]
    return found


def repeatability(folder: Path) -> dict[str, Any]:
    """By phase, over the points: quantiles of their scatter (n - 1) and of their distance from the formal launch.

    Parameters
    ----------
    folder: with `collection` and `quality` of a journey, or their result files alone.
    """
    formal: dict[Point, float] = {}
    for path in sorted((folder / "collection").rglob("benchmark.json")):
        if "cells" in path.parts and "smoke" not in path.parts:
            formal |= wall_times(path)
    repeated: dict[Point, list[float]] = {}
    for path in sorted((folder / "quality").rglob("benchmark.json")):
        if "cells" in path.parts:
            for point, seconds in wall_times(path).items():
                repeated.setdefault(point, []).append(seconds)
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
