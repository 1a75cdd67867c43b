"""Running a campaign behind the gate: locks, acceptance, readiness before, and the report after, whatever happened.

Source: onboarding.md section 5 (collection gate 2 to 5).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fpmsdk.collect.options import CollectorOptions
from fpmsdk.collect.paths import checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.run import run_collector
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.errors import CollectionError, EvidenceError, FpmSdkError
from fpmsdk.onboard.campaign_outputs import published_label, require_unoccupied
from fpmsdk.onboard.collect import CollectionCall, Notice, Selected, collector_words, warn_of_graphs
from fpmsdk.onboard.collector_command import checkpoint_folder
from fpmsdk.onboard.collector_run import collector_plan
from fpmsdk.onboard.imported_profile import require_accepted, verify_collection_observations
from fpmsdk.onboard.plan import plan_lock
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.readiness import REPORT_FILE, assess_readiness, resumes_without_workers

COMPATIBILITY_FILE = "runtime-compatibility.json"

# Runs a frozen plan; the errors of its cells, empty when there were none.
CampaignRunner = Callable[[CollectorOptions, CollectionPlan], list[dict[str, Any]]]


def execute(
    selected: Selected, call: CollectionCall, *, notice: Notice, run: CampaignRunner = run_collector
) -> dict[str, Any]:
    """Run a campaign and write its readiness report.

    Parameters
    ----------
    notice: told warnings and what failed.
    run: the collector, unless a test stands for it.

    Returns
    -------
    The report of `fpm-readiness.json`, with `collector_exit_status`, `recovery_only` and, after a failure,
    `execution_error`.

    Raises
    ------
    OnboardError: rejected before anything ran: a plan that is not intact or is locked, outputs of another campaign, a
        profile that was not accepted, options that the collector refuses.
    """
    request, folder = selected.request, selected.folder
    words = collector_words(selected, call)
    warn_of_graphs(request, words, notice)
    check_plan(request, folder)
    require_accepted(request)
    checkpoint = checkpoint_folder(folder, call.checkpoint_dir)
    with plan_lock(folder):
        # Nobody changed it between the look and the lock.
        check_plan(request, folder)
        require_unoccupied(folder, checkpoint, smoke=call.smoke, resume=call.resume)
        options, plan = collector_plan(words)
        outcome: dict[str, Any] = {"collector_exit_status": None, "recovery_only": False}
        try:
            outcome["recovery_only"] = _require_readiness(selected, call, checkpoint, plan)
            errors = run(options, plan)
            outcome["collector_exit_status"] = 1 if errors else 0
            if errors:
                notice(json.dumps(errors, indent=2, sort_keys=True))
            elif not call.smoke:
                _verify_publication(selected, checkpoint)
        # Whatever failed after this point is a campaign that failed, and its report is what is left of it.
        except Exception as fault:
            outcome["execution_error"] = str(fault) if isinstance(fault, FpmSdkError | OSError) else repr(fault)
            notice(f"error: the collection failed: {outcome['execution_error']}")
        report = assess_readiness(request, folder, checkpoint, expected_plan=plan) | outcome
        write_document(folder / REPORT_FILE, report)
    return report


def exit_code(report: dict[str, Any]) -> int:
    """0 only when the collector succeeded and its evidence allows the full collection, else 1.

    >>> exit_code({"collector_exit_status": 0, "ready_for_full_collection": False})
    1
    """
    succeeded = report["collector_exit_status"] == 0 and "execution_error" not in report
    return 0 if succeeded and report["ready_for_full_collection"] else 1


def _require_readiness(selected: Selected, call: CollectionCall, checkpoint: Path, plan: CollectionPlan) -> bool:
    """Whether a formal run only recovers what ended before; refuse one that would start workers unprepared."""
    if call.smoke:
        return False
    recovers = call.resume and resumes_without_workers(plan, checkpoint_path(checkpoint, smoke=False))
    before = assess_readiness(selected.request, selected.folder, checkpoint, expected_plan=plan, resume=call.resume)
    if not before["ready_for_full_collection"] and not recovers:
        reasons = "; ".join(map(str, before["blockers"])) or before["status"]
        raise CollectionError(
            f"the full collection needs a smoke run of exactly this plan that is ready: {reasons}; see "
            "--check-readiness, and run --execute --smoke first"
        )
    return recovers


def _verify_publication(selected: Selected, checkpoint: Path) -> None:
    request, folder = selected.request, selected.folder
    if probe_manifest(request) is not None:
        document = read_document(checkpoint_path(checkpoint, smoke=False))
        index = Path(document["runtime_observations"]).resolve()
        if not index.is_relative_to(folder):
            raise EvidenceError(f"{index}: the observations of a campaign must be inside {folder}", str(index))
        compatibility = verify_collection_observations(request, index, document)
        write_document(folder / COMPATIBILITY_FILE, compatibility)
    label = published_label(checkpoint)
    if label != request.identity.framework_version:
        raise CollectionError(
            f"the table was published under the version label {label!r}, the request has "
            f"{request.identity.framework_version!r}, so that generated configurations cannot use it; the artifacts "
            "are kept: plan in a new output directory with the label of the table, or collect with a matching engine"
        )
