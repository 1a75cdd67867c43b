"""Receipts that an engine measured exactly the points that a plan names, written in every unit.

Source: collector.md section 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.executor import CellExecutor
from fpmsdk.collect.paths import PROVENANCE
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.points import RECEIPT_NAME
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError, OnboardError


def receipt(plan: CollectionPlan, cell: Cell, attempt_id: str, phase: str) -> dict[str, Any] | None:
    """What a unit states `before` or `after` its engine ran; None for a plan without explicit points."""
    points = plan.benchmark_points
    if points is None:
        return None
    return {
        "plan_sha256": plan.sha256,
        "cell_id": cell.cell_id,
        "attempt_id": attempt_id,
        "sha256": points["sha256"],
        "phase": phase,
    }


def write_receipts(
    resource: CellExecutor, units: Sequence[str], plan: CollectionPlan, cell: Cell, attempt_id: str, *, phase: str
) -> None:
    """Let every unit hash its staged points and write its receipt.

    Raises
    ------
    CollectionError: the staged file has other bytes.
    """
    document = receipt(plan, cell, attempt_id, phase)
    if document is not None:
        resource.record_points(units, document)


def check_receipts(plan: CollectionPlan, cell: Cell, raw: Path, attempt_id: str) -> None:
    """Require the receipt of the end of the run beside every provenance.

    Raises
    ------
    CollectionError: no unit, or a receipt that is missing or of something else; names the file.
    """
    expected = receipt(plan, cell, attempt_id, "after")
    if expected is None:
        return
    owners = sorted(raw.rglob(PROVENANCE))
    if not owners:
        raise CollectionError(f"{raw}: no unit has a {PROVENANCE}, so that no receipt of its points is expected")
    for owner in owners:
        path = owner.with_name(RECEIPT_NAME)
        try:
            found = read_document(path)
        except (OSError, OnboardError) as fault:
            raise CollectionError(f"{path}: no receipt of the measured points: {fault}") from None
        if found != expected:
            raise CollectionError(f"{path}: expected the receipt {expected}, found {found}")
