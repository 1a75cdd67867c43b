"""What a resumed campaign takes over from earlier processes: complete results whose checkpoint does not know it.

Source: collector.md section 2.3.
"""

from __future__ import annotations

import logging
from typing import Any

from fpmsdk.collect.attempt import (
    AttemptContext,
    archived,
    error_record,
    now,
    settings_of,
    summary,
    validate_attempt,
    with_cleanup_error,
)
from fpmsdk.collect.cells import Cell
from fpmsdk.collect.executor import CellExecutor, CellLaunch
from fpmsdk.collect.receipts import check_receipts
from fpmsdk.collect.render import LAUNCH_FILES, node_layout
from fpmsdk.errors import CollectionError, OnboardError

logger = logging.getLogger(__name__)

# Others have left resources that only another run cleans up.
_RECOVERABLE = ("failed", "interrupted", "running")


def recover(context: AttemptContext, cell: Cell) -> bool:
    """Take a cell as passed whose retained results are complete and of its attempt.

    Returns
    -------
    Whether the entry of the cell changed. Nothing is run; what an ended process may have left is cleaned up first.
    """
    entry = context.checkpoint.entry(cell.cell_id)
    status = entry.get("status")
    if status not in _RECOVERABLE or "cleanup_error" in entry:
        return False
    try:
        validate_attempt(context.plan, cell, context.folder(cell), _attempt_of(entry, cell))
    except (CollectionError, OnboardError, OSError) as fault:
        logger.info("%s (%s) cannot be recovered from its files: %s", cell.cell_id, status, fault)
        return False
    if status == "running":
        resource = left_behind(context, cell)
        try:
            if resource is None:
                return False
            resource.cleanup()
        except Exception as fault:
            logger.warning(
                "%s is not recovered, because what its process left could not be ended: %s", cell.cell_id, fault
            )
            return False
    original = {name: entry[name] for name in ("error_type", "error") if name in entry}
    recovered = {name: value for name, value in entry.items() if name not in original}
    recovered = {
        **recovered,
        "status": "passed",
        "artifact_dir": str(context.folder(cell)),
        "artifact_recovery": {
            "recovered_at": now(),
            "validation": "native_collection_plan_and_attempt_identity",
            "original_status": status,
            **original,
        },
    }
    context.checkpoint.put(cell.cell_id, archived(context, cell, recovered))
    return True


def _attempt_of(entry: dict[str, Any], cell: Cell) -> str:
    attempt = entry.get("attempt_id")
    if not isinstance(attempt, str) or not attempt:
        raise CollectionError(f"{cell.cell_id}: the checkpoint names no attempt; run the cell again")
    return attempt


def left_behind(context: AttemptContext, cell: Cell) -> CellExecutor | None:
    """An executor of what an earlier process may have left of a cell; None when it had not come that far."""
    folder = context.folder(cell)
    if not all((folder / name).is_file() for name in LAUNCH_FILES):
        return None
    return context.executor(CellLaunch(context.plan, cell, folder, *node_layout(context.plan, cell)))


def refresh(context: AttemptContext, cell: Cell, *, is_published: bool) -> bool:
    """Bring the figures of a passed cell up to date; results that cannot be read any more never demote it.

    Parameters
    ----------
    is_published: whether the published pair was verified, so that retained receipts are not needed any more.

    Raises
    ------
    CollectionError: the receipts of explicit points are missing or of something else.
    """
    checkpoint = context.checkpoint
    entry = checkpoint.entry(cell.cell_id)
    attempt = _attempt_of(entry, cell)
    if context.observations is not None:
        entry = archived(context, cell, entry)
        checkpoint.put(cell.cell_id, entry)
        if entry["status"] != "passed":
            return True
    if not is_published:
        check_receipts(context.plan, cell, context.folder(cell) / "raw", attempt)
    try:
        found = summary(cell, validate_attempt(context.plan, cell, context.folder(cell), attempt))
    except (CollectionError, OnboardError, OSError) as fault:
        logger.warning("the figures of %s are not brought up to date: %s", cell.cell_id, fault)
        return False
    updated = {**entry, **settings_of(context.plan, cell, smoke=context.smoke), **found}
    checkpoint.put(cell.cell_id, updated)
    return updated != entry


def clean_before_replacing(context: AttemptContext, cell: Cell) -> bool:
    """End what a former step of a cell still runs, before any of its files is replaced.

    Returns
    -------
    Whether the cell may run; its entry says why not.
    """
    # Steps of Slurm write into the folder itself, until they have ended.
    if context.plan.executor != "slurm":
        return True
    try:
        resource = left_behind(context, cell)
        if resource is not None:
            resource.cleanup()
    except Exception as fault:
        entry = with_cleanup_error({**context.checkpoint.entry(cell.cell_id), "status": "passed"}, fault)
        context.checkpoint.put(cell.cell_id, {**entry, "artifact_dir": str(context.folder(cell))})
        context.errors.append(error_record("resource_cleanup_failed", fault, cell))
        context.checkpoint.save()
        return False
    return True
