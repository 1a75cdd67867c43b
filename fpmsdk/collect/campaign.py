"""A campaign: every cell of a plan, run or resumed, and published when it is complete.

Source: collector.md section 2.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.collect.attempt import AttemptContext, ObservationArchive, error_record, now, run_attempt
from fpmsdk.collect.cells import Cell
from fpmsdk.collect.checkpoint import Checkpoint, campaign_lock
from fpmsdk.collect.cpu_policy import require_cpu_policy
from fpmsdk.collect.deployment_inputs import with_warm_up
from fpmsdk.collect.executor import ExecutorFactory
from fpmsdk.collect.interrupts import sigterm_interrupts
from fpmsdk.collect.paths import INPUTS, PLAN, RUN_MANIFEST, campaign_root, checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.publication import IncompleteCampaign, is_published, publish
from fpmsdk.collect.recovery import clean_before_replacing, recover, refresh
from fpmsdk.documents.canonical import write_document
from fpmsdk.errors import OnboardError


@dataclass(frozen=True)
class CampaignOutcome:
    """What one invocation left behind. `errors` is empty when everything that was asked for is done."""

    errors: list[dict[str, Any]]
    checkpoint: Path
    campaign_root: Path


def run_campaign(
    plan: CollectionPlan,
    *,
    executor: ExecutorFactory,
    artifact_root: Path,
    checkpoint_dir: Path,
    database_root: Path | None = None,
    deployment: Mapping[str, Any] | None = None,
    smoke: bool = False,
    limit: int | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    publish_partial: bool = False,
    publish: bool = True,
    observations: ObservationArchive | None = None,
) -> CampaignOutcome:
    """Run the cells of a plan and publish their measurements; every success and every failure is kept.

    Parameters
    ----------
    executor: makes what runs one cell.
    artifact_root, checkpoint_dir: where artifacts and the checkpoint go.
    database_root: the `data` folder to publish into; by default that of the installed systems root.
    deployment: checked deployment inputs.
    smoke: measure few points of the first `limit` cells (one by default) and publish nothing.
    resume: continue the campaign of this plan; `retry_failed` runs failed cells again.
    publish_partial: publish the passed cells though others are missing.
    publish: whether anything is published at all.
    observations: keeps what observers write, for a plan with runtime observations.

    Returns
    -------
    The errors, and where checkpoint and artifacts are.

    Raises
    ------
    OnboardError: contradicting arguments, another plan's checkpoint, or a campaign that another process runs.
    OSError: a file of the campaign cannot be written; what was reached stays, and `resume` continues it.
    KeyboardInterrupt: also for SIGTERM; after the running cell was salvaged and cleaned up.
    """
    _check(plan, smoke=smoke, limit=limit, resume=resume, retry_failed=retry_failed, observations=observations)
    root = campaign_root(artifact_root.expanduser().resolve(), plan.sha256, smoke=smoke)
    folder = checkpoint_dir.expanduser().resolve()
    root.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with campaign_lock(checkpoint_path(folder, smoke=smoke), root), sigterm_interrupts():
        checkpoint = Checkpoint.open(plan, folder, smoke=smoke, resume=resume)
        write_document(root / PLAN, plan.document)
        write_document(root / INPUTS, with_warm_up(deployment or {}))
        checkpoint.save()  # before any cell, so that whatever a kill leaves can be resumed
        context = AttemptContext(
            plan=plan,
            root=root,
            deployment=deployment or {},
            executor=executor,
            checkpoint=checkpoint,
            errors=[],
            smoke=smoke,
            resume=resume,
            observations=observations,
        )
        if observations is not None:
            checkpoint.document.setdefault("runtime_observation_attempt_id", uuid.uuid4().hex)
            checkpoint.save()
        cells = plan.cells[: limit or (1 if smoke else len(plan.cells))]
        published = publish and resume and not smoke and is_published(plan, checkpoint)
        if resume:
            _take_over(context, cells, published=published)
        _run_cells(context, cells, retry_failed=retry_failed)
        if not published:
            _conclude(context, cells, database_root, publish_partial=publish_partial, may_publish=publish)
        return CampaignOutcome(context.errors, checkpoint.path, root)


def _check(
    plan: CollectionPlan,
    *,
    smoke: bool,
    limit: int | None,
    resume: bool,
    retry_failed: bool,
    observations: ObservationArchive | None,
) -> None:
    if smoke and plan.benchmark_points is not None:
        raise OnboardError("benchmark_points: a smoke run measures its own few points", "benchmark_points")
    if limit is not None and (not smoke or limit < 1):
        raise OnboardError("limit: a positive number of cells, for a smoke run alone", "limit")
    if retry_failed and not resume:
        raise OnboardError("retry_failed: needs resume", "retry_failed")
    if (plan.runtime_observation is not None) != (observations is not None):
        raise OnboardError(
            "observations: a plan with runtime_observation keeps what its observers write, and no other plan does",
            "observations",
        )


def _take_over(context: AttemptContext, cells: Sequence[Cell], *, published: bool) -> None:
    changed = [recover(context, cell) for cell in cells]
    if any(changed):
        context.checkpoint.save()
    passed = [cell for cell in cells if context.checkpoint.status(cell.cell_id) == "passed"]
    changed = [refresh(context, cell, is_published=published) for cell in passed]
    if any(changed):
        context.checkpoint.save()


def _run_cells(context: AttemptContext, cells: Sequence[Cell], *, retry_failed: bool) -> None:
    started, attempts = now(), []
    skipped = {"passed"} if retry_failed else {"passed", "failed", "cleanup_failed"}
    try:
        for cell in cells:
            if context.resume and context.checkpoint.status(cell.cell_id) in skipped:
                continue
            require_cpu_policy(context.plan)
            if clean_before_replacing(context, cell):
                attempts.append(_timing(cell, run_attempt(context, cell)))
    finally:
        _write_manifest(context, started, attempts)


def _timing(cell: Cell, entry: Mapping[str, Any]) -> dict[str, Any]:
    measured = entry.get("measured_iteration_seconds")
    return {
        "cell_id": cell.cell_id,
        "attempt_id": entry["attempt_id"],
        "started_at": entry["started_at"],
        "completed_at": entry["completed_at"],
        "status": entry["status"],
        "topology": cell.topology.document(),
        "workload_kind": cell.workload_kind,
        "cell_total_s": entry["duration_seconds"],
        "collector_phase_seconds": entry["collector_phase_seconds"],
        "engine_timing": {
            "benchmark_elapsed_seconds": entry.get("benchmark_elapsed_seconds"),
            "measured_iteration_seconds": measured,
        },
        "engine_phase_seconds": {
            "engine_launch_s": None,
            "kvwarm_warmup_s": None,
            "seeding_s": None,
            "inference_s": measured,
            "note": "the engine reports no times of its launch, warm-up and seeding",
        },
    }


def _write_manifest(context: AttemptContext, started: str, attempts: list[dict[str, Any]]) -> None:
    write_document(
        context.root / RUN_MANIFEST,
        {
            "schema_name": "aic_fpm_run_manifest",
            "schema_version": 2,
            "plan_sha256": context.plan.sha256,
            "smoke": context.smoke,
            "run_started_at": started,
            "run_completed_at": now(),
            "run_total_s": round(sum(attempt["cell_total_s"] for attempt in attempts), 3),
            "attempts": attempts,
            "cells": {attempt["cell_id"]: attempt for attempt in attempts},
        },
    )


def _conclude(
    context: AttemptContext,
    cells: Sequence[Cell],
    database_root: Path | None,
    *,
    publish_partial: bool,
    may_publish: bool,
) -> None:
    plan, checkpoint = context.plan, context.checkpoint
    all_passed = all(checkpoint.status(cell.cell_id) == "passed" for cell in cells)
    complete = all_passed and not context.errors
    if context.smoke and complete:
        checkpoint.document["smoke"] = {
            "status": "passed",
            "cell_count": len(cells),
            "sampling_profile": "dynamo_native_minimal_axes",
            "formal_database_written": False,
        }
        checkpoint.save()
    elif not may_publish and complete:
        return
    elif may_publish and not context.smoke and _has_something(context, complete, publish_partial):
        publish(context, database_root)
    elif not context.errors:
        missing = [cell.cell_id for cell in plan.cells if checkpoint.status(cell.cell_id) != "passed"]
        context.errors.append(
            error_record(
                "campaign_incomplete",
                IncompleteCampaign(
                    f"not every cell has passed, and nothing was published; missing are {', '.join(missing)}; resume "
                    "with --resume, and with --resume-retry-failed for failed ones"
                ),
            )
        )


def _has_something(context: AttemptContext, complete: bool, publish_partial: bool) -> bool:
    passed = [cell for cell in context.plan.cells if context.checkpoint.status(cell.cell_id) == "passed"]
    return complete or (publish_partial and bool(passed))
