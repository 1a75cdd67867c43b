"""What the artifacts of one measured cell say, as repetitions freeze and compare it.

Source: collector.md sections 7.2 to 7.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.collect.artifact import NativeCollection, validate_native
from fpmsdk.collect.cells import Cell
from fpmsdk.collect.execution_evidence import inspect_execution
from fpmsdk.collect.measurement import extract_measurements
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.receipts import check_receipts
from fpmsdk.collect.repeatability_points import RepeatedPoint, published_points
from fpmsdk.documents.evidence import file_evidence, manifest

_LAUNCH_FILES = ("generator-request.json", "run.sh", "fpm_env.sh", "collector-runtime-env.sh")


@dataclass(frozen=True)
class CellRecord:
    """One attempt of one cell.

    Attributes
    ----------
    collection: its validated measurements.
    points: those of them that are published, in order.
    measurement: identity of what was measured, point by point and rank by rank.
    execution: what the workers were observed to run.
    files: size and digest of every raw file, by relative path.
    launch: evidence references of the launch files; None for one that is not there.
    """

    collection: NativeCollection
    points: tuple[RepeatedPoint, ...]
    measurement: dict[str, Any]
    execution: dict[str, Any]
    files: dict[str, dict[str, Any]]
    launch: dict[str, dict[str, Any] | None]


def read_cell(plan: CollectionPlan, cell: Cell, folder: Path, attempt_id: str, evidence_version: int) -> CellRecord:
    """Validate an attempt and read everything that is compared between launches.

    Parameters
    ----------
    plan: the plan of the attempt.
    cell: its cell.
    folder: `cells/<cell_id>`, with `raw/` and the launch files.
    attempt_id: the attempt that the checkpoint names.
    evidence_version: 2, or 1 as in older assessments.

    Raises
    ------
    CollectionError: artifacts are missing, do not validate or are of another attempt.
    """
    raw = folder / "raw"
    collection = validate_native(plan, cell, raw, attempt_id=attempt_id)
    check_receipts(plan, cell, raw, attempt_id)
    return CellRecord(
        collection=collection,
        points=published_points(collection, cell.cell_id),
        measurement=extract_measurements(raw, collection, evidence_version=evidence_version),
        execution=inspect_execution(plan, cell, raw, collection, evidence_version=evidence_version),
        files=manifest(raw),
        launch={name: file_evidence(folder / name) if (folder / name).is_file() else None for name in _LAUNCH_FILES},
    )
