"""Rounds until the holdout is predicted well enough, or the time is used up.

Source: beyond the specification; see `fpmsdk.onboard.budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, structs

from fpmsdk.collect.run import run_collector
from fpmsdk.documents.canonical import write_document
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.budget.choose import Float64, choose, expected_errors
from fpmsdk.onboard.budget.grid import Grid, Grids, engine_limits, whole_grid
from fpmsdk.onboard.budget.holdout import (
    Prediction,
    Split,
    coordinates,
    figures,
    measured_of,
    phase_points,
    predictions,
    split,
    without,
)
from fpmsdk.onboard.budget.rounds import Journal, run_round, table_of
from fpmsdk.onboard.budget.traffic import even_weights, read_traffic, traffic_weights
from fpmsdk.onboard.collect import CollectionCall, Selected, collector_words
from fpmsdk.onboard.collect_execute import CampaignRunner
from fpmsdk.onboard.collector_command import checkpoint_folder
from fpmsdk.onboard.collector_run import collector_plan
from fpmsdk.onboard.holdout_select import Point
from fpmsdk.onboard.imported_profile import require_accepted
from fpmsdk.onboard.plan import plan_lock
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.perfmodel.leave_one_out import LeaveOneOut, leave_one_out

FOLDER, REPORT_FILE = "budget", "budget-report.json"
MET, OUT_OF_TIME, COMPLETE = "met", "out_of_time", "complete"
_HOLDOUT_POINTS, _SEED = 16, 42
# A round adds four tenths of what is measured: few starts of the engine, and few points that turn out not to be needed.
_GROWTH, _LEAST_NEW = 0.4, 8
_NEXT = 10

Notice = Callable[[str], None]


class Budget(Struct, frozen=True):
    """What is asked for.

    Parameters
    ----------
    minutes: that all rounds together may take; the first one always runs.
    holdout_error: mean relative error over the holdout of each phase, weighted by the traffic, at which it is enough.
    traffic: file with a `traffic` section; None weighs all points of the grid the same.

    Raises
    ------
    OnboardError: a number is out of range.
    """

    minutes: float
    holdout_error: float = 0.1
    traffic: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise OnboardError(f"--budget: expected more than 0 minutes, found {self.minutes:g}", "--budget")
        if not 0 < self.holdout_error < 1:
            raise OnboardError(
                f"--holdout-error: expected a fraction between 0 and 1, such as 0.1, found {self.holdout_error:g}",
                "--holdout-error",
            )


class State(Struct):
    """What is known after a round: the table without the holdout, its errors, and what may be added."""

    parts: Mapping[str, Split]
    left_out: LeaveOneOut
    table: Grids
    predictions: list[Prediction]
    weights: Mapping[tuple[str, Point], float]

    def candidates(self) -> list[tuple[str, Grid, Float64, Float64]]:
        """By phase, the points that are not measured, their expected errors and weights."""
        found = []
        for phase, parts in self.parts.items():
            measured = set(map(tuple, self.table[phase].tolist()))
            keep = np.array([tuple(row) not in measured for row in parts.candidates.tolist()], bool)
            rows = parts.candidates[keep]
            own = [point for point in self.left_out.points if point.phase == phase]
            weights = np.array([self.weights[phase, (row[0], row[1], row[2])] for row in rows.tolist()])
            found.append((phase, rows, expected_errors(rows, own), weights))
        return found

    def excess(self, holdout_error: float) -> dict[str, float]:
        """By phase whose holdout is not predicted well enough, by how much its error is too large."""
        told = figures(self.predictions)
        return {
            phase: own["weighted"] - holdout_error for phase, own in told.items() if own["weighted"] > holdout_error
        }


def collect_on_budget(
    selected: Selected, call: CollectionCall, budget: Budget, *, notice: Notice, run: CampaignRunner = run_collector
) -> dict[str, Any]:
    """Collect on a budget and write the report.

    Parameters
    ----------
    selected, call: as of a collection; a smoke run of the same plan has to be there.
    notice: told what happens.
    run: the collector, unless a test stands for it.

    Returns
    -------
    `status` (`met`, `out_of_time` or `complete`: nothing is left to measure that might help), `rounds`, `holdout` by
    phase, `table`, `measured_points`, `grid_points`, and `next_points` with what is expected of each; also in
    `budget-report.json`.

    Raises
    ------
    OnboardError: settings are out of range, or the plan is not intact or not accepted.
    EvidenceError: a collection with other settings began in the folder.
    CollectionError: there is no smoke run, or a round failed; `--resume` goes on.
    """
    request, folder = selected.request, selected.folder
    check_plan(request, folder)
    require_accepted(request)
    words = collector_words(selected, call)
    with plan_lock(folder):
        _, plan = collector_plan(words)
        smoke = checkpoint_folder(folder, call.checkpoint_dir)
        grids = whole_grid(plan, smoke)
        limits = engine_limits(plan, plan.cells[-1], smoke)
        traffic = None if budget.traffic is None else read_traffic(budget.traffic, folder, limits)
        parts = {phase: split(phase, grid, most=_HOLDOUT_POINTS, seed=_SEED) for phase, grid in grids.items()}
        wanted = None if traffic is None else traffic.traffic.model_dump(mode="json")
        settings = {"plan_sha256": plan.sha256, "traffic": wanted}
        journal = Journal(folder / FOLDER, settings, resume=call.resume)
        if not journal.rounds:
            journal.begin({phase: np.concatenate([each.envelope, each.holdout]) for phase, each in parts.items()})
        while True:
            if journal.rounds[-1].seconds is None:
                run_round(journal, words, run, notice)
            state = _state(journal, parts, grids, traffic)
            status = _status(journal, state, budget)
            _tell(journal, state, notice)
            if status is not None:
                break
            journal.begin(_next_round(state, budget.holdout_error))
        report = _report(journal, state, grids, status)
        write_document(folder / FOLDER / REPORT_FILE, report)
    return report


def _state(journal: Journal, parts: Mapping[str, Split], grids: Grids, traffic: Any) -> State:
    apart = {phase: each.holdout for phase, each in parts.items()}
    measured_ms = measured_of(table_of(journal.folder_of(0))[1], apart)
    table, cell, _ = table_of(journal.folder_of(len(journal.rounds) - 1))
    cell = without(cell, apart)
    by_phase = even_weights(grids) if traffic is None else traffic_weights(traffic, cell, grids)
    weights = {
        (phase, (row[0], row[1], row[2])): weight
        for phase, grid in grids.items()
        for row, weight in zip(grid.tolist(), by_phase[phase].tolist(), strict=True)
    }
    return State(
        parts,
        leave_one_out(cell, table.knees),
        {phase: coordinates(phase_points(cell, phase)) for phase in parts},
        predictions(cell, table.knees, measured_ms, weights),
        weights,
    )


def _new_points(state: State) -> int:
    measured = sum(map(len, state.table.values()))
    return max(_LEAST_NEW, int(_GROWTH * measured))


def _next_round(state: State, holdout_error: float) -> Grids:
    """What is in the table, and the best of what is not, most for the phase that is furthest from being good enough."""
    found = state.candidates()
    excess = state.excess(holdout_error)
    wanting = {phase: excess.get(phase, 0.0) if len(rows) else 0.0 for phase, rows, *_ in found}
    grids: Grids = {}
    for phase, rows, expected, weights in found:
        count = round(_new_points(state) * wanting[phase] / sum(wanting.values()))
        best = choose(rows, expected, weights, state.table[phase], count)
        grids[phase] = np.unique(np.concatenate([state.table[phase], rows[best]]), axis=0)
    return grids


def _status(journal: Journal, state: State, budget: Budget) -> str | None:
    excess = state.excess(budget.holdout_error)
    if not excess:
        return MET
    if not any(len(rows) for phase, rows, *_ in state.candidates() if phase in excess):
        return COMPLETE
    taken = [each.seconds or 0.0 for each in journal.rounds]
    # The start of an engine is most of a round; another one is expected to take as long as the longest, and no less.
    return OUT_OF_TIME if sum(taken) + max(taken) > 60 * budget.minutes else None


def _tell(journal: Journal, state: State, notice: Notice) -> None:
    told = ", ".join(f"{phase} {each['weighted']:.1%} off" for phase, each in figures(state.predictions).items())
    points = sum(map(len, state.table.values()))
    notice(f"round {len(journal.rounds) - 1}: {journal.rounds[-1].seconds:.0f} s, {points} points in the table; {told}")


def _round_report(journal: Journal, number: int, state: State) -> dict[str, Any]:
    """Points in the table of a round, its time, and what it says of the holdout."""
    apart = {phase: each.holdout for phase, each in state.parts.items()}
    table, cell, _ = table_of(journal.folder_of(number))
    cell = without(cell, apart)
    measured_ms = {(each.phase, each.point): each.measured_ms for each in state.predictions}
    return {
        "points": sum(len(phase_points(cell, phase)) for phase in apart),
        "seconds": journal.rounds[number].seconds,
        "holdout": figures(predictions(cell, table.knees, measured_ms, state.weights)),
    }


def _report(journal: Journal, state: State, grids: Grids, status: str) -> dict[str, Any]:
    last = len(journal.rounds) - 1
    left = [
        {
            "phase": phase,
            "point": rows[at].tolist(),
            "expected_error": float(expected[at]),
            "weight": float(weights[at]),
        }
        for phase, rows, expected, weights in state.candidates()
        for at in choose(rows, expected, weights, state.table[phase], _NEXT)
    ]
    left.sort(key=lambda each: -each["expected_error"] * each["weight"])
    return {
        "schema_name": "fpmsdk_budget_report",
        "schema_version": 1,
        "status": status,
        "rounds": [_round_report(journal, number, state) for number in range(len(journal.rounds))],
        "holdout": figures(state.predictions),
        "predictions": [structs.asdict(each) for each in state.predictions],
        "table": str(table_of(journal.folder_of(last))[2]),
        "systems_path": str(journal.folder_of(last) / "systems"),
        "measured_points": sum(map(len, state.table.values())),
        "grid_points": sum(map(len, grids.values())),
        "next_points": left[:_NEXT],
    }
