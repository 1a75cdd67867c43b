"""One launch of a repetition, read from what it left on disk and held against what was frozen.

Source: collector.md section 7.4 (run).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.checkpoint import SCHEMA as CHECKPOINT_SCHEMA
from fpmsdk.collect.paths import campaign_root, checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.rank_file import rank_files
from fpmsdk.collect.repeatability_evidence import read_cell
from fpmsdk.collect.repeatability_points import RepeatedPoint
from fpmsdk.collect.repeatability_report import observed_differences
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError, EvidenceError

# Attempts that did not end well although their raw artifacts may be complete.
RECOVERABLE = ("running", "interrupted", "failed")
_MEASURED = ("passed", "cleanup_failed", *RECOVERABLE)


class MissingSampleError(CollectionError):
    """A launch left no complete measurement; nothing contradicts what was frozen."""


def sample_folder(cell_id: str, sample_index: int, attempt_index: int) -> Path:
    """Where an attempt is, relative to the directory of the repetition; both indices count from 1.

    >>> sample_folder("fpm-1", 2, 1).as_posix()
    'samples/fpm-1/sample-02/attempt-01'
    """
    return Path("samples") / cell_id / f"sample-{sample_index:02d}" / f"attempt-{attempt_index:02d}"


def campaign_folder(plan: CollectionPlan, directory: Path) -> Path:
    """The campaign of an attempt."""
    return campaign_root(directory / "artifacts", plan.sha256, smoke=False)


def cell_folder(plan: CollectionPlan, directory: Path) -> Path:
    """The folder of the one cell of an attempt."""
    return campaign_folder(plan, directory) / "cells" / plan.cells[0].cell_id


def checkpoint_entry(plan: CollectionPlan, directory: Path) -> dict[str, Any]:
    """What the checkpoint of an attempt says of its cell.

    Raises
    ------
    MissingSampleError: there is no checkpoint, or it names no attempt that measured.
    EvidenceError: it is of another plan.
    """
    path = checkpoint_path(directory / "checkpoint", smoke=False)
    try:
        document = read_document(path)
    except FileNotFoundError:
        raise MissingSampleError(f"{path}: the launch ended before its checkpoint was written") from None
    cells = document.get("cells", {}) if isinstance(document, dict) else {}
    entry: dict[str, Any] = cells.get(plan.cells[0].cell_id, {})
    if entry.get("status") not in _MEASURED or not entry.get("attempt_id"):
        raise MissingSampleError(f"{path}: the launch has not measured, its status is {entry.get('status')!r}")
    if document.get("schema") != CHECKPOINT_SCHEMA or document.get("plan_sha256") != plan.sha256:
        raise EvidenceError(f"{path}: is of another plan than {plan.sha256}; keep it and repeat elsewhere", str(path))
    return entry


def read_sample(plan: CollectionPlan, frozen_cell: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The evidence of one attempt.

    Parameters
    ----------
    plan: of the launch, with one cell.
    frozen_cell: that cell in the frozen plan.
    directory: of the attempt.

    Returns
    -------
    Status of its collection, identities, measurement, execution, files, and by key the seconds of every point.

    Raises
    ------
    MissingSampleError: no complete measurement.
    CollectionError, EvidenceError: artifacts do not validate, or other points, regimes or workers than frozen.

    Source: collector.md section 7.4.
    """
    entry = checkpoint_entry(plan, directory)
    cell, folder = plan.cells[0], cell_folder(plan, directory)
    if len(rank_files(folder / "raw")) < cell.topology.dp:
        raise MissingSampleError(f"{folder / 'raw'}: result files of some ranks are missing")
    version = frozen_cell["source_measurement"]["schema_version"]
    record = read_cell(plan, cell, folder, entry["attempt_id"], version)
    _require_frozen_points(record.points, frozen_cell)
    if observed_differences(frozen_cell["execution"], record.execution):
        raise EvidenceError(f"{folder}: workers were observed to run another configuration than those of the source")
    return {
        "collector_status": entry["status"],
        "collector_error": {name: entry[name] for name in ("error_type", "error") if name in entry},
        "cleanup_error": entry.get("cleanup_error"),
        "attempt_id": record.collection.attempt_id,
        "runtime_run_id": record.collection.run_id,
        "runtime_grid_digest": record.collection.grid_digest,
        "measurement": record.measurement,
        "points": {
            point.key: {
                "wall_time_seconds": point.wall_s,
                "rank_wall_times": point.rank_walls_document(),
                "point": dict(point.point),
                "kv_seed_regime": point.regime,
            }
            for point in record.points
        },
        "raw_files": record.files,
        "launch": record.launch,
        "execution": record.execution,
    }


def _require_frozen_points(points: tuple[RepeatedPoint, ...], frozen_cell: Mapping[str, Any]) -> None:
    expected = {
        entry["key"]: RepeatedPoint(entry["key"], entry["source_point"], entry["kv_seed_regime"], ())
        for entry in frozen_cell["points"]
    }
    found = {point.key: point for point in points}
    if set(found) != set(expected):
        missing, further = len(set(expected) - set(found)), len(set(found) - set(expected))
        raise EvidenceError(
            f"{frozen_cell['cell_id']}: the launch did not measure exactly the frozen points: {missing} are missing, "
            f"{further} are new"
        )
    for key, point in found.items():
        if point.execution_regime != expected[key].execution_regime:
            raise EvidenceError(
                f"{frozen_cell['cell_id']}: point {key} ran as {point.execution_regime}, frozen is "
                f"{expected[key].execution_regime} (KV seed, launch mode, captured size, padding)"
            )
