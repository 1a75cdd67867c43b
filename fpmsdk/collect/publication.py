"""When the measurements of a campaign are published, and what its checkpoint keeps of that.

Source: collector.md section 2.4.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fpmsdk.collect.attempt import AttemptContext, error_record
from fpmsdk.collect.checkpoint import Checkpoint
from fpmsdk.collect.commit import validate_commit
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.publish import publish_cells
from fpmsdk.collect.rows import attempt_rows
from fpmsdk.config.systems import HOW_TO_GET_DATA, default_systems_root
from fpmsdk.documents.evidence import refuse_links
from fpmsdk.errors import CollectionError, FpmSdkError, OnboardError

logger = logging.getLogger(__name__)


class IncompleteCampaign(CollectionError):
    """Cells of the plan have not passed, or are not in the published table."""


def is_published(plan: CollectionPlan, checkpoint: Checkpoint) -> bool:
    """Whether everything was published before, and the pair still is what was written then."""
    known = checkpoint.document.get("database")
    if not isinstance(known, dict) or known.get("status") != "passed":
        return False
    if known.get("plan_cells") != len(plan.cells) or known.get("missing_cells") != []:
        return False
    try:
        validate_commit(
            plan,
            known["parquet"],
            known["metadata"],
            attempt_ids={cell.cell_id: str(checkpoint.entry(cell.cell_id).get("attempt_id")) for cell in plan.cells},
            reused_cells=known["skipped_first_publisher_wins"],
            cell_rows=known["cell_rows"],
        )
    except (FpmSdkError, OSError, KeyError) as fault:
        logger.warning("the published pair is not that of the checkpoint, and is written anew: %s", fault)
        return False
    return True


def publish(context: AttemptContext, database_root: Path | None) -> None:
    """Publish the passed cells; a fault becomes an error of the campaign, and the checkpoint keeps what was done."""
    checkpoint = context.checkpoint
    try:
        checkpoint.document["database"] = _publish(context, database_root)
    except Exception as fault:
        checkpoint.document["database"] = {"status": "failed", "error_type": type(fault).__name__, "error": str(fault)}
        context.errors.append(
            {**error_record("formal_database_failed", fault), "module": "fpm_forward.database"},
        )
    checkpoint.save()
    missing = checkpoint.document["database"].get("missing_cells")
    if missing:
        incomplete = IncompleteCampaign(
            f"{len(missing)} of {len(context.plan.cells)} cells are not in the published table: {', '.join(missing)}"
        )
        context.errors.append(error_record("campaign_incomplete", incomplete))


def _publish(context: AttemptContext, database_root: Path | None) -> dict[str, Any]:
    plan, checkpoint = context.plan, context.checkpoint
    cells = [cell for cell in plan.cells if checkpoint.status(cell.cell_id) == "passed"]
    for cell in cells:
        refuse_links(context.folder(cell) / "raw")
    rows = {
        cell.cell_id: attempt_rows(
            plan, cell, context.folder(cell), attempt_id=str(checkpoint.entry(cell.cell_id)["attempt_id"])
        )
        for cell in cells
    }
    done = publish_cells(plan, rows, systems_data=_systems_data(database_root), is_curated=database_root is None)
    commit = validate_commit(plan, done.parquet, done.sidecar, reused_cells=done.skipped_cells, cells=cells)
    return {
        "status": "passed",
        "parquet": str(done.parquet),
        "metadata": str(done.sidecar),
        "row_count": sum(map(len, rows.values())),
        "published_cells": len(cells) - len(done.skipped_cells),
        "plan_cells": len(plan.cells),
        "missing_cells": [cell.cell_id for cell in plan.cells if cell not in cells],
        "skipped_first_publisher_wins": list(done.skipped_cells),
        "cell_rows": dict(commit.cell_rows),
    }


def _systems_data(database_root: Path | None) -> Path:
    if database_root is not None:
        return database_root.expanduser().resolve()
    root = default_systems_root()
    if root is None:
        raise OnboardError(f"--fpm-database-root: there is no systems root to publish into; {HOW_TO_GET_DATA}")
    return Path(root) / "data"
