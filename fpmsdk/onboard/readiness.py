"""Whether the saved evidence of a campaign allows the full collection, and whether resuming it starts a worker.

Reads only. Ready says nothing of coverage, repeatability, memory or serving accuracy.
Source: collector.md section 9, onboarding.md sections 5 and 6.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.paths import PLAN, campaign_root, checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import CollectionError, OnboardError
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.readiness_cell import cell_report
from fpmsdk.onboard.readiness_memory import selected_memory
from fpmsdk.onboard.request import SupportRequest

REPORT_FILE = "fpm-readiness.json"
CHECKPOINT_SCHEMA = "aic-fpm-collector-checkpoint-v3"
ARTIFACTS = "fpm-artifacts"
_OVERRIDES = "generator-overrides.json"
_SCOPE = (
    "sampled native timings, with runtime memory for imported profiles; no statement on coverage of queries, "
    "repeatability or serving accuracy"
)
_ENDED = frozenset(("passed", "failed", "cleanup_failed"))
_UNUSABLE = CollectionError, OnboardError, OSError, KeyError, TypeError, AttributeError, ValueError


def assess_readiness(
    request: SupportRequest,
    root: Path,
    checkpoint_dir: Path,
    *,
    expected_plan: CollectionPlan | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """The readiness report of a plan folder.

    A formal attempt stands for its cell as soon as the formal checkpoint names it, even when it failed.

    Parameters
    ----------
    root: the plan folder, with `fpm-artifacts`.
    checkpoint_dir: where the collector keeps `fpm_forward.json` and `fpm_forward_smoke.json`.
    expected_plan: the plan that the evidence must be of; None accepts any that the request describes.
    resume: whether an unfinished formal campaign may go on: an attempt that never ended leaves its cell to the smoke
        run, and a cell that has ended blocks no other, for it is not started again.
    """
    needs_memory = probe_manifest(request) is not None
    campaigns: list[dict[str, Any]] = []
    blockers: list[str] = []
    selected: dict[str, dict[str, Any]] = {}
    for is_smoke in (True, False):
        path = checkpoint_path(checkpoint_dir, smoke=is_smoke)
        if not path.exists():
            continue
        kind = "smoke" if is_smoke else "formal"
        report: dict[str, Any] = {"kind": kind, "cells": [], "errors": []}
        campaigns.append(report)
        try:
            _read_campaign(request, root, path, is_smoke, expected_plan, resume, report, selected)
        except _UNUSABLE as fault:
            report["errors"].append(str(fault))
            blockers.append(f"{kind}: {fault}")
    blockers += _selection_blockers(request, selected, expected_plan)
    judged = [cell for cell in selected.values() if not (resume and cell["campaign"] == "formal" and _has_ended(cell))]
    for cell in judged:
        name = f"{cell['cell']['workload_kind']} {cell['cell']['cell_id']}"
        blockers += [f"{name}: {blocker}" for blocker in cell["blockers"]]
    compatibility = None
    if needs_memory:
        compatibility, unmet = selected_memory(request, campaigns, list(selected.values()))
        blockers += unmet
    ready = bool(selected) and not blockers and all(cell["status"] == "ready" for cell in judged)
    return {
        "status": "ready" if ready else "blocked" if campaigns else "incomplete",
        "ready_for_full_collection": ready,
        "scope": _SCOPE,
        "request_identity": request.identity.model_dump(mode="json"),
        "blockers": blockers,
        "selected_cells": list(selected.values()),
        "campaigns": campaigns,
        "runtime_compatibility": compatibility,
    }


def matches_request(request: SupportRequest, plan: CollectionPlan) -> bool:
    """Whether a frozen plan measures what a request asks for."""
    identity, collection, options = request.identity, request.collection, plan.options
    limits, sizes = request.scheduler_limits(), request.topology_sizes()
    captures = collection.cudagraph_capture_sizes
    profile = None if request.fpm_profile is None else request.fpm_profile.model_dump(mode="json")
    sampling = options["prefill_sampling"]
    policy = sampling.get("cudagraph_policy", "explicit")
    expected = {
        "model": identity.model,
        "system": identity.gpu,
        "backend": identity.framework,
        "version": identity.framework_version,
        "profile": profile,
        "vllm_max_model_len": request.search.context_length,
        "max_num_batched_tokens": limits["max_batched_tokens"],
        "max_num_seqs": limits["max_sequences"],
        "policy": collection.prefill_cudagraph_policy,
        "worker_type": request.worker_type,
        "cudagraph_mode": collection.cudagraph_mode,
        "cudagraph_capture_sizes": None if captures is None else list(captures),
        "max_cudagraph_capture_size": collection.max_cudagraph_capture_size,
        "memory_fraction": collection.memory_fraction,
    }
    found = {name: options.get(name) for name in expected} | {
        "model": plan.model_path,
        "system": plan.system,
        "backend": plan.backend,
        "version": plan.label,
        "profile": plan.fpm_profile,
        "policy": policy,
        "memory_fraction": options.get("gpu_memory_utilization") or collection.__class__().memory_fraction,
    }
    runtime = identity.runtime_framework_version
    same_runtime = runtime is None or plan.runtime_backend_version == runtime
    layouts = {(cell.topology.tp, cell.topology.dp, cell.topology.moe_tp, cell.topology.moe_ep) for cell in plan.cells}
    return expected == found and same_runtime and layouts == {sizes}


def resumes_without_workers(plan: CollectionPlan, path: Path) -> bool:
    """Whether resuming a campaign cannot start a worker: every planned cell has ended, with an attempt of its own.

    Running, interrupted and absent cells may need a cleanup or a launch, even when their files look complete.
    """
    try:
        checkpoint = read_document(path)
        entries = [checkpoint["cells"][cell.cell_id] for cell in plan.cells]
        return (
            checkpoint["schema"] == CHECKPOINT_SCHEMA
            and checkpoint["plan_sha256"] == plan.sha256
            and all(entry["status"] in _ENDED and bool(entry["attempt_id"]) for entry in entries)
        )
    except _UNUSABLE:
        return False


def _read_campaign(
    request: SupportRequest,
    root: Path,
    path: Path,
    is_smoke: bool,
    expected_plan: CollectionPlan | None,
    resume: bool,
    report: dict[str, Any],
    selected: dict[str, dict[str, Any]],
) -> None:
    report["checkpoint"] = file_evidence(path)
    checkpoint = read_checkpoint(path)
    campaign = campaign_root(root / ARTIFACTS, checkpoint["plan_sha256"], smoke=is_smoke)
    plan = CollectionPlan.read(campaign / PLAN)
    if plan.sha256 != checkpoint["plan_sha256"] or not matches_request(request, plan):
        raise OnboardError(
            f"{campaign / PLAN}: is no collection of the reviewed request; use a new directory", str(path)
        )
    if expected_plan is not None and plan.sha256 != expected_plan.sha256:
        raise OnboardError(
            f"{campaign / PLAN}: is not the plan {expected_plan.sha256} of the current runtime and launch; start a new "
            "campaign",
            str(path),
        )
    report.update(
        plan_sha256=plan.sha256,
        source_plan=file_evidence(campaign / PLAN),
        runtime_identity=_runtime_identity(request, plan, campaign),
    )
    for cell in plan.cells:
        entry = checkpoint["cells"].get(cell.cell_id)
        found = cell_report(plan, cell, campaign, entry)
        report["cells"].append(found)
        stands = cell.cell_id in checkpoint["cells"] and (is_smoke or not resume or _has_ended(found))
        if cell.cell_id not in selected or stands:
            selected[cell.cell_id] = {"campaign": report["kind"], "plan_sha256": plan.sha256, **found}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint of a campaign.

    Raises
    ------
    OnboardError: it is of an unknown schema, or names no plan or cells.
    """
    checkpoint = read_document(path)
    fields = checkpoint if isinstance(checkpoint, Mapping) else {}
    sha256 = fields.get("plan_sha256")
    is_sha256 = isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) is not None
    if fields.get("schema") != CHECKPOINT_SCHEMA or not is_sha256 or not isinstance(fields.get("cells"), dict):
        raise OnboardError(
            f"{path}: no checkpoint of a campaign: expected schema {CHECKPOINT_SCHEMA}, plan_sha256 and cells",
            str(path),
        )
    return dict(fields)


def _runtime_identity(request: SupportRequest, plan: CollectionPlan, campaign: Path) -> dict[str, Any]:
    return {
        "model": plan.model_path,
        "model_revision": request.identity.model_revision,
        "system": plan.system,
        "backend": plan.backend,
        "backend_version": plan.label,
        "collector_revision": plan.document["aic_revision"],
        "generator_config_sha256": plan.document["generator_config_sha256"],
        "deployment": read_document(campaign / _OVERRIDES),
        "executor": plan.executor,
        "slurm_image": plan.options.get("slurm_container_image"),
        "runtime_observation": plan.runtime_observation,
        "scope": "what was asked for and frozen; what was observed is told cell by cell",
    }


def _selection_blockers(
    request: SupportRequest, selected: Mapping[str, Mapping[str, Any]], expected_plan: CollectionPlan | None
) -> list[str]:
    blockers = []
    if len({cell["plan_sha256"] for cell in selected.values()}) > 1:
        blockers.append("the phases were measured under different frozen plans")
    if expected_plan is not None and set(selected) != {cell.cell_id for cell in expected_plan.cells}:
        blockers.append("not every planned cell has saved evidence")
    phases = {cell["cell"]["workload_kind"] for cell in selected.values()}
    if phases != set(request.collection_phases):
        missing: Sequence[str] = [phase for phase in request.collection_phases if phase not in phases]
        blockers.append(
            "every phase of the serving role must have evidence: expected "
            f"{' and '.join(request.collection_phases)}, missing {' and '.join(missing) or 'none'}"
        )
    return blockers


def _has_ended(cell: Mapping[str, Any]) -> bool:
    return cell["checkpoint_status"] in _ENDED
