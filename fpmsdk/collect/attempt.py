"""One attempt to measure one cell: from its launch files to validated results, cleaned up whatever happens.

Source: collector.md section 2.2.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fpmsdk.collect.artifact import NativeCollection, validate_native
from fpmsdk.collect.cells import Cell
from fpmsdk.collect.checkpoint import Checkpoint
from fpmsdk.collect.executor import CellExecutor, CellLaunch, ExecutorFactory
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.points import FILE_NAME as POINTS_FILE
from fpmsdk.collect.receipts import check_receipts, write_receipts
from fpmsdk.collect.render import CONTRACT, RUN_SCRIPT, STARTUP, render_cell, require_launch_files
from fpmsdk.documents.canonical import write_document
from fpmsdk.documents.evidence import refuse_links

logger = logging.getLogger(__name__)

_SETTLE_TRIES = 6
_SETTLE_S = 3.0


class ObservationArchive(Protocol):
    """Keeps what the observers of an engine write, of every attempt of a campaign."""

    def staged_files(self, launch: CellLaunch, attempt_id: str) -> Sequence[Path]:
        """Files that are staged beside the engine, the context of this attempt among them."""
        ...

    def record(self, cell: Cell, entry: Mapping[str, Any], folder: Path) -> str:
        """Keep the observations of an attempt; the path of the index. Raises when they cannot be kept."""
        ...


@dataclass(frozen=True, kw_only=True)
class AttemptContext:
    """What all attempts of one invocation share."""

    plan: CollectionPlan
    root: Path
    deployment: Mapping[str, Any]
    executor: ExecutorFactory
    checkpoint: Checkpoint
    errors: list[dict[str, Any]]
    smoke: bool
    resume: bool
    observations: ObservationArchive | None = None

    @property
    def settle_s(self) -> float:
        """Seconds between two looks at results that may still be written; local engines have ended by then."""
        return 0.0 if self.plan.executor in ("local", "fake") else _SETTLE_S

    def folder(self, cell: Cell) -> Path:
        """`cells/<cell_id>`."""
        return self.root / "cells" / cell.cell_id


def now() -> str:
    """The time in UTC, as checkpoints state it."""
    return datetime.now(UTC).isoformat()


def error_record(classification: str, fault: BaseException, cell: Cell | None = None) -> dict[str, Any]:
    """An entry of the list of errors of a campaign.

    >>> error_record("campaign_cell_failed", ValueError("no"))["error_type"]
    'ValueError'
    """
    record = {
        "module": "fpm_forward",
        "error_type": type(fault).__name__,
        "error_message": str(fault),
        "classification": classification,
    }
    return record if cell is None else {**record, "cell_id": cell.cell_id}


def run_attempt(context: AttemptContext, cell: Cell) -> dict[str, Any]:
    """Run a cell once and keep what came of it in the checkpoint.

    Returns
    -------
    The entry of the cell.

    Raises
    ------
    KeyboardInterrupt: after results were salvaged and the cell was cleaned up.
    OSError: the checkpoint cannot be written; the cell was cleaned up, and its former state stays.
    """
    plan, checkpoint, folder = context.plan, context.checkpoint, context.folder(cell)
    started = time.monotonic()
    entry = {
        "status": "running",
        "started_at": now(),
        "attempt_id": uuid.uuid4().hex,
        **settings_of(plan, cell, smoke=context.smoke),
    }
    # Known before any work: whoever finds this entry knows that something may be left behind.
    checkpoint.put(cell.cell_id, entry)
    checkpoint.save()
    for stale in (folder / "raw", folder / "logs") if context.resume else (folder,):
        shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_document(folder / "cell.json", cell.document())
    phases: dict[str, float] = {}
    resource: CellExecutor | None = None

    def timed(name: str, begin: float) -> None:
        phases[name] = round(time.monotonic() - begin, 3)

    try:
        launch = render_cell(plan, cell, folder, context.deployment, smoke=context.smoke)
        require_launch_files(folder)
        resource = context.executor(launch)
        timed("render_s", started)
        units = _run(context, launch, resource, entry["attempt_id"], timed)
        collection = validate_attempt(plan, cell, folder, entry["attempt_id"])
        entry = {**entry, "status": "passed", "artifact_dir": str(folder), "pods": units, **summary(cell, collection)}
    except KeyboardInterrupt:
        _salvage(resource, cell, context.settle_s)
        entry = {**entry, "status": "interrupted", "artifact_dir": str(folder)}
        raise
    except Exception as fault:
        _salvage(resource, cell, context.settle_s)
        entry = {**entry, "status": "failed", "artifact_dir": str(folder), "error_type": type(fault).__name__}
        entry["error"] = str(fault)
        context.errors.append(error_record("campaign_cell_failed", fault, cell))
    finally:
        if resource is not None:
            try:
                resource.cleanup()
            except Exception as fault:
                entry = with_cleanup_error(entry, fault)
                context.errors.append(error_record("resource_cleanup_failed", fault, cell))
        entry = {
            **entry,
            "collector_phase_seconds": phases,
            "completed_at": now(),
            "duration_seconds": round(time.monotonic() - started, 3),
        }
        entry = archived(context, cell, entry)
        checkpoint.put(cell.cell_id, entry)
        checkpoint.save()
    return entry


def _run(
    context: AttemptContext,
    launch: CellLaunch,
    resource: CellExecutor,
    attempt: str,
    timed: Callable[[str, float], None],
) -> list[str]:
    plan, cell = launch.plan, launch.cell
    # Names follow from the cell, so that an engine of an earlier process would be taken for this one's.
    resource.cleanup()
    resource.apply()
    begin = time.monotonic()
    units = resource.wait_ready(launch.num_nodes)
    timed("schedule_s", begin)
    begin = time.monotonic()
    resource.stage(units, staged_files(context, launch, attempt))
    resource.prepare_attempt(
        units,
        cell_id=cell.cell_id,
        plan_sha256=plan.sha256,
        attempt_id=attempt,
        expected_backend_version=plan.backend_version,
    )
    write_receipts(resource, units, plan, cell, attempt, phase="before")
    timed("stage_s", begin)
    begin = time.monotonic()
    resource.execute(units)
    write_receipts(resource, units, plan, cell, attempt, phase="after")
    timed("execute_wall_s", begin)
    begin = time.monotonic()
    resource.collect(units)
    timed("collect_s", begin)
    return units


def staged_files(context: AttemptContext, launch: CellLaunch, attempt: str) -> list[Path]:
    """Files of a cell that are copied beside the engine."""
    files = [launch.folder / name for name in (RUN_SCRIPT, CONTRACT, STARTUP)]
    if context.observations is not None:
        files += context.observations.staged_files(launch, attempt)
    if launch.plan.benchmark_points is not None:
        files.append(launch.folder / POINTS_FILE)
    return files


def validate_attempt(plan: CollectionPlan, cell: Cell, folder: Path, attempt: str) -> NativeCollection:
    """The validated results of an attempt.

    Raises
    ------
    CollectionError, OSError: what is wrong with them.
    EvidenceError: a symbolic link is among them.
    """
    refuse_links(folder / "raw")
    check_receipts(plan, cell, folder / "raw", attempt)
    return validate_native(plan, cell, folder / "raw", attempt_id=attempt)


def with_cleanup_error(entry: dict[str, Any], fault: Exception) -> dict[str, Any]:
    """The entry of a cell whose resources could not be verified to be gone."""
    status = "cleanup_failed" if entry["status"] == "passed" else entry["status"]
    return {**entry, "status": status, "cleanup_error": str(fault)}


def archived(context: AttemptContext, cell: Cell, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry after its observations were kept, failed when they could not be."""
    if context.observations is None:
        return entry
    try:
        index = context.observations.record(cell, entry, context.folder(cell))
    except Exception as fault:
        context.errors.append(error_record("runtime_observation_archive_failed", fault, cell))
        return {**entry, "status": "failed", "observation_error": str(fault)}
    context.checkpoint.document["runtime_observations"] = index
    return {name: value for name, value in entry.items() if name != "observation_error"}


def settings_of(plan: CollectionPlan, cell: Cell, *, smoke: bool) -> dict[str, Any]:
    """What is known of an attempt before it runs."""
    known: dict[str, Any] = {
        "total_gpus": cell.topology.gpus,
        "point_source": cell.point_source,
        "global_warmup_iterations": plan.document["options"]["global_warmup_iterations"],
    }
    points = plan.benchmark_points
    if points is not None:
        requested = len(points["payload"][cell.workload_kind])
        return {**known, "benchmark_points_sha256": points["sha256"], "requested_point_count": requested}
    if cell.workload_kind == "decode":
        return {**known, "decode_prefix_caching": "enabled" if cell.needs_warm_kv else "disabled"}
    sampling = plan.document["options"]["prefill_sampling"]
    if "cudagraph_policy" in sampling:
        known["prefill_cudagraph_policy"] = sampling["cudagraph_policy"]
    if smoke:
        return {**known, "prefill_max_new_token_samples": 2}
    return {
        **known,
        "prefill_cudagraph_capture_size_count": sampling["cudagraph_capture_size_count"],
        "prefill_requested_new_token_axis_count": sampling["new_token_axis_point_count"],
        "prefill_max_new_token_samples": sampling["prefill_max_new_token_samples"],
    }


def summary(cell: Cell, collection: NativeCollection) -> dict[str, Any]:
    """What was measured, in numbers that a checkpoint keeps."""
    batches, tokens, kv_tokens = (len(set(axis.tolist())) for axis in collection.coordinates)
    found: dict[str, Any] = {
        "measured_point_count": collection.num_points,
        "measured_batch_size_axis_count": batches,
        "measured_kv_read_axis_count": kv_tokens,
        "native_kv_seed_regime_counts": dict(Counter(regime or "unreported" for regime in collection.regimes)),
        "runtime_rank_count": len(collection.timings),
        "benchmark_elapsed_seconds": collection.elapsed_s,
        "measured_iteration_seconds": collection.measured_s,
    }
    if cell.workload_kind == "prefill":
        found["measured_new_token_axis_count"] = tokens
    if collection.kvwarm is not None:
        found["native_kvwarm"] = collection.kvwarm
    return found


def _salvage(resource: CellExecutor | None, cell: Cell, settle_s: float) -> None:
    """Fetch whatever results there are once they have stopped changing; a failure is logged, never raised."""
    if resource is None:
        return
    try:
        units = resource.pods()
        for unit in units:
            former = None
            for _ in range(_SETTLE_TRIES):
                current = resource.result_manifest(unit)
                if current == former:
                    break
                former = current
                time.sleep(settle_s)
        resource.collect(units, require_benchmark=False)
    except Exception as fault:
        logger.warning("results of %s were not salvaged completely: %s", cell.cell_id, fault)
