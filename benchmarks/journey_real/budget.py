"""Collection on a budget beside the whole grid: how well each predicts the holdout, and how many points it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fpmsdk.onboard.budget.holdout import figures, phase_points, predictions, without
from fpmsdk.onboard.budget.rounds import table_of

# As many points, and as much of the error of the whole grid, are allowed.
MOST_POINTS, MOST_ERROR = 1 / 3, 1.5


def compare_budget(report: dict[str, Any], whole: Path) -> dict[str, Any]:
    """Both tables asked of the holdout.

    Parameters
    ----------
    report: `budget-report.json`, whose holdout was measured once, in its first round.
    whole: folder of the collection of the whole grid.

    Returns
    -------
    The holdout as the whole grid without it predicts it, every round, and the last round that has at most a third of
    the points: its error over both phases beside that of the whole grid.
    """
    table, cell, _ = table_of(whole)
    measured_ms = {(each["phase"], tuple(each["point"])): each["measured_ms"] for each in report["predictions"]}
    weights = {(each["phase"], tuple(each["point"])): each["weight"] for each in report["predictions"]}
    apart = {phase: _rows([point for of, point in measured_ms if of == phase]) for phase in ("prefill", "decode")}
    rest = without(cell, apart)
    by_grid = figures(predictions(rest, table.knees, measured_ms, weights))
    allowed = [each for each in report["rounds"] if each["points"] <= MOST_POINTS * report["grid_points"]]
    best = allowed[-1]
    ratios = {phase: best["holdout"][phase]["weighted"] / by_grid[phase]["weighted"] for phase in by_grid}
    error, grid_error = (_mean(each) for each in (best["holdout"], by_grid))
    return {
        "grid": {"points": sum(len(phase_points(rest, phase)) for phase in apart), "holdout": by_grid},
        "rounds": report["rounds"],
        "chosen": best,
        "share_of_points": best["points"] / report["grid_points"],
        "ratio_by_phase": ratios,
        "ratio": error / grid_error,
        "holds": error <= MOST_ERROR * grid_error,
    }


def _mean(told: dict[str, Any]) -> float:
    points = sum(each["points"] for each in told.values())
    return sum(each["weighted"] * each["points"] for each in told.values()) / points


def _rows(points: list[Any]) -> Any:
    return np.array(points, np.int64).reshape(-1, 3)
