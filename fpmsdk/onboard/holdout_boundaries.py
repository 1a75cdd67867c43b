"""Points where the launch mode of a measured grid changes: neighbours of different modes are both kept in a holdout.

Modes are those that the engine expected of its points, checked against its resolved graph configuration; nothing is
inferred from latencies. Source: onboarding.md section 8.3, step 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fpmsdk.documents.evidence import verify_evidence
from fpmsdk.errors import EvidenceError
from fpmsdk.onboard.holdout_select import AXES, Point
from fpmsdk.perfdb.forward_schema import FAKE_KV

Row = Mapping[str, Any]
Place = tuple[str, Point]  # phase and point
RUN_COLUMNS = ("source_plan_sha256", "collector_attempt_id", "runtime_run_id", "runtime_grid_digest")

# The modes that points of a phase can have under each configured mode.
_POINT_MODES = {
    "NONE": {"prefill": {"NONE"}, "decode": {"NONE"}},
    "FULL": {"prefill": {"NONE", "FULL"}, "decode": {"NONE", "FULL"}},
    "PIECEWISE": {"prefill": {"NONE", "PIECEWISE"}, "decode": {"NONE", "PIECEWISE"}},
    "FULL_AND_PIECEWISE": {"prefill": {"NONE", "PIECEWISE"}, "decode": {"NONE", "FULL"}},
    "FULL_DECODE_ONLY": {"prefill": {"NONE"}, "decode": {"NONE", "FULL"}},
}
_KNOWN_MODES = ("NONE", "FULL", "PIECEWISE")


class CellEvidence(NamedTuple):
    """What the raw artifacts of one formal cell say of its points.

    `identity` holds the four run columns; `native_graph_config` a `{dp_rank, config, source}` for every rank, `source`
    an evidence reference; `points` the three coordinates, `workload_kind`, `expected_cudagraph_mode` and
    `expected_capture_size` of every published point.
    """

    cell_id: str
    identity: Mapping[str, str]
    native_graph_config: Sequence[Mapping[str, Any]]
    points: Sequence[Row]


class Boundaries(NamedTuple):
    """Points to keep, and the document that says why."""

    anchors: frozenset[Place]
    report: dict[str, Any]


def place_of(row: Row) -> Place:
    """Phase and point of a row of the formal table, or of a native point."""
    return row["workload_kind"], (row[AXES[0]], row[AXES[1]], row[AXES[2]])


def point_document(place: Place) -> dict[str, Any]:
    """A point as reports write it.

    >>> point_document(("decode", (1, 0, 16)))
    {'phase': 'decode', 'batch_size': 1, 'total_prefill_tokens': 0, 'total_kv_read_tokens': 16}
    """
    phase, point = place
    return {"phase": phase, **dict(zip(AXES, point, strict=True))}


def mode_boundaries(
    rows: Sequence[Row], evidence: Sequence[CellEvidence] | None, envelope: Iterable[Place]
) -> Boundaries:
    """Find the neighbours with different modes along each axis, the other two fixed.

    Parameters
    ----------
    rows: the rows of the deployment in the formal table.
    evidence: one item for each cell of those rows; None when nothing but the table is known.
    envelope: points that are kept anyway.

    Returns
    -------
    Boundaries: status `assessed`, `incomplete` when modes or configurations are missing or unknown, `not_assessed`
        without evidence.

    Raises
    ------
    EvidenceError: the evidence is of other cells, runs or points, its files changed, its ranks disagree, or a point
        contradicts its configuration; names the cell.
    """
    report: dict[str, Any] = {
        "status": "not_assessed",
        "basis": "native_expected_point_modes_and_resolved_graph_configuration",
        "per_point_observed_dispatch": "unreported",
        "cells": [],
        "transitions": [],
        "retained_anchors": [],
        "additional_to_envelope": [],
        "issues": [],
    }
    if evidence is None:
        report["issues"].append("coordinates of a formal table alone do not tell where the launch mode changes")
        return Boundaries(frozenset(), report)
    by_cell: dict[str, list[Row]] = {}
    for row in rows:
        by_cell.setdefault(row["cell_id"], []).append(row)
    known_cells = sorted(cell.cell_id for cell in evidence)
    if known_cells != sorted(by_cell):
        raise EvidenceError(
            f"execution evidence is of the cells {', '.join(known_cells) or 'none'}, the formal table has "
            f"{', '.join(sorted(by_cell))} of this deployment; give exactly one item for each of them"
        )
    modes: dict[Place, str] = {}
    for cell in sorted(evidence):
        modes |= _cell_modes(cell, by_cell[cell.cell_id], report)
    transitions = list(_transitions([row for row in rows if is_eligible(row)], modes))
    anchors = frozenset(itertools.chain.from_iterable(pair for _, pair in transitions))
    report |= {
        "status": "incomplete" if report["issues"] else "assessed",
        "transitions": [
            {
                "axis": axis,
                "lower": point_document(lower) | {"mode": modes[lower]},
                "upper": point_document(upper) | {"mode": modes[upper]},
            }
            for axis, (lower, upper) in transitions
        ],
        "retained_anchors": [point_document(place) for place in sorted(anchors)],
        "additional_to_envelope": [point_document(place) for place in sorted(anchors - set(envelope))],
    }
    return Boundaries(anchors, report)


def is_eligible(row: Row) -> bool:
    """Whether direct queries may use a row: a decode measured over stand-in KV contents is no evidence."""
    return row.get("kv_seed_regime") != FAKE_KV


def _cell_modes(cell: CellEvidence, rows: Sequence[Row], report: dict[str, Any]) -> dict[Place, str]:
    _check_identity(cell, rows)
    graphs = sorted(cell.native_graph_config, key=lambda graph: graph["dp_rank"])
    points = {place_of(point): point for point in cell.points}
    config = _shared_config(cell.cell_id, graphs, rows[0]["dp"])
    accepted = _accepted(cell.cell_id, rows[0]["workload_kind"], config)
    if accepted is None:
        report["issues"].append(f"{cell.cell_id}: the resolved graph configuration is missing or unknown")
    eligible = [place_of(row) for row in rows if is_eligible(row)]
    modes = {}
    for place in eligible if accepted else []:
        mode, capture = points[place]["expected_cudagraph_mode"], points[place]["expected_capture_size"]
        if mode not in _KNOWN_MODES or (mode != "NONE" and capture is None):
            continue
        _check_point(cell.cell_id, place, mode, capture, *(accepted or ()))
        modes[place] = mode
    if len(modes) < len(eligible):
        report["issues"].append(
            f"{cell.cell_id}: {len(eligible) - len(modes)} of {len(eligible)} eligible points have no usable mode"
        )
    report["cells"].append(
        {
            "cell_id": cell.cell_id,
            "identity": dict(cell.identity),
            "native_graph_config": [dict(graph) for graph in graphs],
            "eligible_point_count": len(eligible),
            "known_mode_point_count": len(modes),
        }
    )
    return modes


def _check_identity(cell: CellEvidence, rows: Sequence[Row]) -> None:
    for name in RUN_COLUMNS:
        value = cell.identity.get(name)
        others = {row.get(name) for row in rows} - {value}
        if not value or others:
            raise EvidenceError(
                f"{cell.cell_id}: execution evidence says {name} {value!r}, the formal rows say "
                f"{', '.join(map(repr, others)) or 'the same'}; give the evidence of the run that was published"
            )
    found = sorted(place_of(point) for point in cell.points)
    expected = sorted(place_of(row) for row in rows)
    if found != expected:
        raise EvidenceError(
            f"{cell.cell_id}: execution evidence has {len(found)} points, {len(set(found) & set(expected))} of them "
            f"among the {len(expected)} formal ones; both must be the same"
        )


def _shared_config(cell_id: str, graphs: Sequence[Mapping[str, Any]], num_ranks: int) -> dict[str, Any]:
    # The configuration of every rank; empty when a rank has none.
    ranks = [graph["dp_rank"] for graph in graphs]
    if ranks != list(range(num_ranks)):
        raise EvidenceError(f"{cell_id}: graph evidence must be of the ranks 0 to {num_ranks - 1}, found {ranks}")
    for graph in graphs:
        verify_evidence(graph["source"])
    present = [graph["config"] for graph in graphs if isinstance(graph["config"], dict)]
    if any(config != present[0] for config in present):
        raise EvidenceError(f"{cell_id}: ranks report different graph configurations; collect the cell again")
    return present[0] if len(present) == num_ranks else {}


def _accepted(cell_id: str, phase: str, config: Mapping[str, Any]) -> tuple[set[str], list[int]] | None:
    # Modes and capture sizes that points may have; None when the configuration does not tell.
    sizes = config.get(f"{phase}_capture_sizes", config.get("capture_sizes"))
    mode = config.get(f"{phase}_mode", config.get("mode"))
    if not isinstance(mode, str) or mode not in _POINT_MODES or not isinstance(sizes, list):
        return None
    if any(type(size) is not int or size < 1 for size in sizes):
        return None
    largest = config.get("max_capture_size")
    if largest is not None and (type(largest) is not int or largest < max(sizes, default=0)):
        raise EvidenceError(f"{cell_id}: capture sizes up to {max(sizes)} exceed max_capture_size {largest!r}")
    return _POINT_MODES[mode][phase], sizes


def _check_point(cell_id: str, place: Place, mode: str, capture: Any, modes: set[str], sizes: list[int]) -> None:
    phase, (batch, tokens, _) = place
    scheduled = tokens if phase == "prefill" else batch
    captured = type(capture) is int and capture >= scheduled and capture in sizes
    if mode not in modes or (capture is not None if mode == "NONE" else not captured):
        raise EvidenceError(
            f"{cell_id}: {point_document(place)} has mode {mode} and capture size {capture!r}; its configuration "
            f"allows {', '.join(sorted(modes))} with sizes {sizes}"
        )


def _transitions(rows: Sequence[Row], modes: Mapping[Place, str]) -> Iterable[tuple[str, tuple[Place, Place]]]:
    for axis, name in enumerate(AXES):
        curves: dict[Any, list[Place]] = {}
        for row in rows:
            phase, point = place_of(row)
            curves.setdefault((phase, point[:axis] + point[axis + 1 :]), []).append((phase, point))
        for _, curve in sorted(curves.items()):
            for lower, upper in itertools.pairwise(sorted(curve)):
                if lower in modes and upper in modes and modes[lower] != modes[upper]:
                    yield name, (lower, upper)
