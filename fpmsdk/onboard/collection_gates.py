"""The gates of a collection: what each of them rests on, and when it passes.

Source: onboarding.md section 8.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.repeatability_assess import assess
from fpmsdk.collect.repeatability_plan import RepeatPolicy, freeze
from fpmsdk.collect.repeatability_points import published_points
from fpmsdk.collect.repeatability_saved import read_saved
from fpmsdk.errors import EvidenceError
from fpmsdk.onboard.collection_source import CollectionSource
from fpmsdk.onboard.holdout import evaluate_holdout
from fpmsdk.onboard.holdout_boundaries import CellEvidence
from fpmsdk.onboard.holdout_select import AXES
from fpmsdk.onboard.policy import POLICY_V2, ValidationPolicy
from fpmsdk.onboard.request import SupportRequest

_POINT_FIELDS = (*AXES, "expected_cudagraph_mode", "expected_capture_size")


def repeat_policy(policy: ValidationPolicy) -> RepeatPolicy:
    """What a validation policy asks of repetitions.

    >>> repeat_policy(ValidationPolicy()) == RepeatPolicy()
    True
    """
    given = policy.repeatability
    return RepeatPolicy(
        samples=given.samples,
        max_points_per_cell=given.max_points_per_cell,
        cv_threshold=given.max_cv,
        comparison_mode=given.comparison_mode,
        max_attempts_per_sample=given.max_attempts_per_sample,
        source_agreement_threshold=given.max_source_relative_difference,
    )


def select_repeats(source: CollectionSource, policy: ValidationPolicy, evidence_version: int) -> dict[str, Any]:
    """The frozen plan of a repetition of a verified collection. Raises as `collect.repeatability_plan.freeze`."""
    return freeze(
        source.plan, source.campaign, source.checkpoint, repeat_policy(policy), evidence_version=evidence_version
    )


def overall(statuses: Iterable[str]) -> str:
    """One status of several: failed if one failed, passed if all passed, else incomplete.

    >>> overall(["passed", "incomplete", "failed"]), overall(["passed", "incomplete"]), overall(["passed"])
    ('failed', 'incomplete', 'passed')
    """
    found = list(statuses)
    if "failed" in found:
        return "failed"
    return "passed" if set(found) == {"passed"} else "incomplete"


def execution_gate(frozen: Mapping[str, Any]) -> dict[str, Any]:
    """Whether every cell was observed to run as planned."""
    passed = {"qualified": "passed"}
    statuses = [cell["execution"]["status"] for cell in frozen["cells"]]
    return {
        "status": overall(passed.get(status, status) for status in statuses),
        "cells": [{"cell_id": cell["cell_id"], **cell["execution"]} for cell in frozen["cells"]],
    }


def run_holdout(
    request: SupportRequest,
    source: CollectionSource,
    frozen: Mapping[str, Any],
    output: Path,
    policy: ValidationPolicy,
) -> dict[str, Any]:
    """Assess interpolation with the launch modes of every published point. Raises as `holdout.evaluate_holdout`."""
    return evaluate_holdout(
        request,
        systems_root=source.folder / "systems",
        output_dir=output,
        policy=policy.interpolation,
        evidence=[_cell_evidence(source, cell) for cell in frozen["cells"]],
    )


def _cell_evidence(source: CollectionSource, frozen_cell: Mapping[str, Any]) -> CellEvidence:
    # Of the whole sweep, also where only a part of it is repeated.
    cell = source.plan.cell(frozen_cell["cell_id"])
    raw = source.campaign / "cells" / cell.cell_id / "raw"
    collection = validate_native(source.plan, cell, raw, attempt_id=source.attempts[cell.cell_id])
    return CellEvidence(
        cell_id=cell.cell_id,
        identity={
            "source_plan_sha256": source.plan.sha256,
            "collector_attempt_id": collection.attempt_id,
            "runtime_run_id": collection.run_id,
            "runtime_grid_digest": collection.grid_digest,
        },
        native_graph_config=frozen_cell["execution"]["native_graph_config"],
        points=[
            {"workload_kind": collection.phase, **{name: point.point.get(name) for name in _POINT_FIELDS}}
            for point in published_points(collection, cell.cell_id)
        ],
    )


def assess_repeats(directory: Path, policy: ValidationPolicy, frozen: Mapping[str, Any]) -> dict[str, Any]:
    """Judge a repetition of a source under a policy.

    Parameters
    ----------
    directory: of the repetition.
    policy: its thresholds may differ from those that were frozen; what was launched may not.
    frozen: what repeating the source means now.

    Raises
    ------
    EvidenceError: the repetition is of another source, or of another selection or count.
    """
    saved = read_saved(directory)
    wanted = repeat_policy(policy)
    launched = {**saved.frozen["policy"]}
    for name in ("samples", "max_points_per_cell", "comparison_mode", "max_attempts_per_sample"):
        default = "bounded" if name == "comparison_mode" else None
        if launched.get(name, default) != getattr(wanted, name):
            raise EvidenceError(
                f"{directory}: launched with {name} {launched.get(name, default)!r}, the policy asks for "
                f"{getattr(wanted, name)!r}; only thresholds may differ, repeat in a fresh directory"
            )
    if _without_policy(saved.frozen) != _without_policy(frozen):
        raise EvidenceError(
            f"{directory}: repeats another source or other points; repeat this one in a fresh directory"
        )
    return assess(
        saved.frozen,
        saved.report,
        cv_threshold=wanted.cv_threshold,
        source_agreement_threshold=wanted.source_agreement_threshold,
    )


def _without_policy(frozen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in frozen.items() if name not in ("policy", "sha256")}


def repeatability_status(assessment: Mapping[str, Any], policy: ValidationPolicy) -> str:
    """The status of the gate. Launches that agree among themselves do not qualify the source that was published."""
    source = assessment.get("source_qualification", {}).get("status")
    population = assessment.get("new_population", {}).get("status")
    if "failed" in (assessment.get("status"), source, population) or population == "unstable":
        return "failed"
    is_qualifying = (
        policy.schema_version == POLICY_V2
        and policy.repeatability.comparison_mode == "full_grid"
        and assessment.get("schema_version") == 2
        and assessment.get("policy", {}).get("comparison_mode") == "full_grid"
    )
    is_qualified = source == population == "qualified" and assessment.get("status") == "passed"
    return "passed" if is_qualifying and is_qualified else "incomplete"
