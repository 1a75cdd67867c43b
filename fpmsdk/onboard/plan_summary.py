"""What `plan` prints of a plan: identities, what is needed, and the next command. Source: onboarding.md section 1.2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fpmsdk.onboard.collector_command import onboard_command, shell_line
from fpmsdk.onboard.plan_documents import PLAN_FILE
from fpmsdk.onboard.request import SupportRequest


def plan_summary(request: SupportRequest, folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The summary of a plan.

    Parameters
    ----------
    folder: the plan folder, absolute.
    plan: the content of `support-plan.json`.

    Returns
    -------
    request_id, candidate_count, status (without a version label), collection_gpus_required, plan, commands,
    prerequisites, resources (with a profile), accuracy and the next command, quoted for a shell.
    """
    deployment = request.profile_deployment()
    summary = {
        "request_id": plan["request_id"],
        "candidate_count": plan.get("search", {}).get("candidate_count", 0),
    }
    if "status" in plan:
        summary["status"] = plan["status"]
    summary |= {
        "collection_gpus_required": request.worker_gpus,
        "plan": str(folder / PLAN_FILE),
        "commands": plan["outputs"]["commands"],
        "prerequisites": "unchecked" if deployment is None else "runtime_and_fpm_data_unchecked",
    }
    if deployment is not None:
        summary["resources"] = deployment.resources.memory_source
    return summary | {"accuracy": "not assessed", "next": shell_line(onboard_command("collect-fpm", folder))}
