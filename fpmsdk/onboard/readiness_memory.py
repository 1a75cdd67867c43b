"""Whether the cells that a readiness report selects observed the memory that was accepted.

Source: onboarding.md section 6.5 (readiness of an imported profile).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import FpmSdkError
from fpmsdk.onboard.bindings import checkpoint_observations, verify_phase_bindings
from fpmsdk.onboard.request import SupportRequest


def selected_memory(
    request: SupportRequest, campaigns: Sequence[Mapping[str, Any]], selected: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The comparison with the accepted probe, and why there is none, one blocker each.

    Parameters
    ----------
    request: with an imported profile.
    campaigns, selected: of the readiness report; a formal attempt stands for its cell, also with its memory.
    """
    reports = {report["kind"]: report for report in campaigns}
    bindings, blockers = [], []
    for cell in selected:
        try:
            bindings.append(_binding(reports[cell["campaign"]], cell))
        except (FpmSdkError, OSError, KeyError, TypeError, AttributeError) as fault:
            blockers.append(f"runtime memory: {cell['campaign']}: {fault}")
    if blockers:
        return None, list(dict.fromkeys(blockers))
    try:
        return verify_phase_bindings(request, bindings), []
    except (FpmSdkError, OSError) as fault:
        return None, [f"runtime memory: {fault}"]


def _binding(report: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    path = Path(report["checkpoint"]["path"])
    checkpoint = read_document(path)
    index = file_evidence(checkpoint_observations(path, checkpoint))
    return {
        "phase": cell["cell"]["workload_kind"],
        "plan": {"path": report["source_plan"]["path"], "sha256": report["plan_sha256"]},
        "checkpoint": {name: report["checkpoint"][name] for name in ("path", "sha256")},
        "observations": {name: index[name] for name in ("path", "sha256")},
        "attempt_id": checkpoint.get("runtime_observation_attempt_id"),
        "collector_attempt_id": cell["attempt_id"],
    }
