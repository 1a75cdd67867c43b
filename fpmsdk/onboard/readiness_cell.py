"""What the saved evidence of one cell is good for: counts of its seeding, what blocks it, and what to do next.

Reads only; nothing is fetched, run or recovered.
Source: collector.md section 9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.cells import Cell
from fpmsdk.collect.execution_evidence import inspect_execution
from fpmsdk.collect.launch_evidence import ENVIRONMENT_FILES, REQUEST_FILE, SCRIPT_FILE
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.rank_file import fields_of, rank_files, value_of
from fpmsdk.collect.rows import cell_rows
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import CollectionError, OnboardError
from fpmsdk.onboard.graph_settings import graph_blockers

FAKE_FALLBACK = "fake_fallback"
CLASSIFICATION_SCOPE = (
    "Counts are those of the verified native artifacts as they are aggregated now; a table that is already published "
    "keeps its saved classification. Publish a revised one into a fresh directory and keep the original pair."
)
_READY = "the full collection may start; repeatability, coverage, memory and serving accuracy are assessed apart"
_NOT_READY = (
    "look at the saved evidence and resolve the blockers before a full collection of the same plan; another runtime "
    "or launch needs a new bounded campaign"
)
_RUN_AGAIN = CollectionError, OnboardError, OSError


def cell_report(plan: CollectionPlan, cell: Cell, campaign: Path, entry: Any) -> dict[str, Any]:
    """The report of a cell.

    Parameters
    ----------
    campaign: the folder of the campaign, with `cells/<cell_id>`.
    entry: what the checkpoint says of the cell; None when it says nothing.

    Returns
    -------
    `status` ready, blocked (there is evidence, and it does not suffice) or incomplete (there is none to judge).
    """
    folder = campaign / "cells" / cell.cell_id
    entry = entry if isinstance(entry, Mapping) else {}
    report: dict[str, Any] = {
        "cell": cell.document(),
        "checkpoint_status": entry.get("status", "missing"),
        "attempt_id": entry.get("attempt_id"),
        "status": "incomplete",
        "blockers": [],
        "raw_artifact_root": str(folder / "raw"),
        "native_regime_counts": {},
        "formal_regime_counts": {},
        "classification_scope": CLASSIFICATION_SCOPE,
        "direct_eligible_points": 0,
        "coverage": "unverified",
        "rank_diagnostics": [],
        "launch_evidence": [],
        "cache_observation_evidence": [],
    }
    try:
        _inspect(plan, cell, folder, entry, report)
        report["status"] = "blocked" if report["blockers"] else "ready"
    except _RUN_AGAIN as fault:
        report["blockers"].append(str(fault))
        report["status"] = "blocked" if report["rank_diagnostics"] else "incomplete"
    report["next_action"] = _READY if report["status"] == "ready" else _NOT_READY
    return report


def _inspect(plan: CollectionPlan, cell: Cell, folder: Path, entry: Mapping[str, Any], report: dict[str, Any]) -> None:
    raw = folder / "raw"
    launch = (REQUEST_FILE, SCRIPT_FILE, *ENVIRONMENT_FILES)
    report["launch_evidence"] = [file_evidence(folder / name) for name in launch if (folder / name).is_file()]
    report["cache_observation_evidence"] = [file_evidence(path) for path in sorted(raw.rglob("fpm-memory-*.json"))]
    # Kept also when the attempt is refused below, and then for reading alone.
    report["rank_diagnostics"] = [_rank_diagnostic(path) for path in rank_files(raw)]
    attempt = entry.get("attempt_id")
    if not isinstance(attempt, str) or not attempt:
        raise CollectionError(f"{cell.cell_id}: the checkpoint names no attempt; look at its artifacts before a retry")
    collection = validate_native(plan, cell, raw, attempt_id=attempt)
    report.update(
        native_regime_counts=dict(Counter(regime or "unreported" for regime in collection.regimes)),
        kvwarm=collection.kvwarm,
        observed_backend_version=collection.backend_version,
        runtime_run_id=collection.run_id,
        runtime_grid_digest=collection.grid_digest,
    )
    for diagnostic in report["rank_diagnostics"]:
        diagnostic["verified"] = True
    rows = cell_rows(plan, cell, collection, folder)
    formal = Counter(row["kv_seed_regime"] for row in rows)
    eligible = len(rows) - formal[FAKE_FALLBACK]
    report.update(
        formal_regime_counts=dict(formal),
        direct_eligible_points=eligible,
        coverage="partial" if formal[FAKE_FALLBACK] else "sampled_points_only",
        execution=inspect_execution(plan, cell, raw, collection),
    )
    report["blockers"] += _blockers(plan, cell, folder, entry, report)


def _blockers(
    plan: CollectionPlan, cell: Cell, folder: Path, entry: Mapping[str, Any], report: Mapping[str, Any]
) -> list[str]:
    blockers = []
    if cell.workload_kind == "decode" and report["kvwarm"] is None:
        blockers.append("the decode artifact does not say how its KV was warmed up")
    if report["direct_eligible_points"] == 0:
        blockers.append(f"{cell.workload_kind} has no points that direct queries may use")
    execution = report["execution"]
    blockers += graph_blockers(plan, cell, folder, execution)
    blockers += execution["failures"]
    cpu = execution["cpu_affinity"]
    if cpu["policy_required"]:
        blockers += [f"CPU affinity: {missing}" for missing in cpu["missing_evidence"]]
    if entry.get("cleanup_error"):
        blockers.append(f"resources of the attempt are not cleaned up: {entry['cleanup_error']}")
    if entry.get("status") != "passed":
        blockers.append(f"the attempt is {entry.get('status')!r}, not passed; inspect it or resume")
    return blockers


def _rank_diagnostic(path: Path) -> dict[str, Any]:
    fields = fields_of(path)
    results = value_of(fields, "results")
    counts: Counter[str] = Counter()
    for row in results if isinstance(results, list) else ():
        if isinstance(row, Mapping):
            regime = row.get("kv_seed_regime")
            counts[regime if isinstance(regime, str) else "unreported" if regime is None else "invalid"] += 1
    return {
        "source": file_evidence(path),
        "verified": False,
        "kvwarm": value_of(fields, "kvwarm"),
        "regime_counts": dict(counts),
    }
