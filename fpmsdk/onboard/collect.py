"""The gate in front of the collector: which plan is collected, whether it may start, and what it prints.

Preview and readiness read only; running a campaign is in `collect_execute`.
Source: onboarding.md section 5 (collection gate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.collect.cpu_policy import resolve_cpu_policy
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.campaign_outputs import has_formal_checkpoint
from fpmsdk.onboard.collector_command import (
    ARTIFACT_FOLDER,
    checkpoint_folder,
    collector_arguments,
    onboard_command,
    shell_line,
)
from fpmsdk.onboard.collector_run import collector_plan
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.graph_advisory import graph_advisory
from fpmsdk.onboard.plan_check import check_plan, is_empty, plan_folder
from fpmsdk.onboard.plan_documents import PENDING_VERSION
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.readiness import assess_readiness
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.runtime_profile import runtime_collection_inputs
from fpmsdk.onboard.version_binding import Detector, bound_request, frozen_deployment, resolve_request
from fpmsdk.onboard.version_detect import detect_versions

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CollectionCall:
    """What `collect-fpm` is asked to do.

    Parameters
    ----------
    execute: whether to run; otherwise the collector's command is only shown.
    check_readiness: whether to look at saved evidence instead.
    smoke, limit, resume: as the options of the collector; a smoke run without a limit covers every cell.
    checkpoint_dir: folder of the checkpoint, inside the plan's own; None is the plan's own.
    deployment: options that were given; None when none was.
    """

    execute: bool = False
    check_readiness: bool = False
    smoke: bool = False
    limit: int | None = None
    resume: bool = False
    checkpoint_dir: str | Path | None = None
    deployment: CollectionDeployment | None = None


@dataclass(frozen=True)
class Selected:
    """The plan that is collected: that of the folder, or the one its runtime version was resolved into."""

    request: SupportRequest
    folder: Path
    deployment: CollectionDeployment | None


def select_collection(
    request: SupportRequest,
    output_dir: str | Path,
    call: CollectionCall,
    *,
    detect: Detector = detect_versions,
    notice: Notice = lambda _: None,
) -> Selected:
    """Find the plan that is collected; execution first sees which version of the engine runs, once.

    Parameters
    ----------
    notice: told the command that addresses the plan, when it was resolved just now.

    Raises
    ------
    OnboardError: contradictory options, another deployment than the recorded one, or a plan that is not intact.
    """
    if call.check_readiness and (call.execute or call.smoke or call.limit is not None or call.resume):
        raise OnboardError(
            "--check-readiness: only reads; it takes none of --execute, --smoke, --limit and --resume",
            "--check-readiness",
        )
    if call.limit is not None and (not call.smoke or call.limit < 1):
        raise OnboardError(f"--limit: must be at least 1 and needs --smoke, found {call.limit}", "--limit")
    folder = plan_folder(output_dir)
    deployment = frozen_deployment(call.deployment, folder)
    bound = bound_request(request, deployment, folder)
    if bound is None and call.execute and _needs_runtime(request, folder):
        if call.checkpoint_dir is not None:
            raise OnboardError(
                "--checkpoint-dir: the runtime version is not resolved yet; leave it out for the first run",
                "--checkpoint-dir",
            )
        bound = resolve_request(request, deployment, folder, detect=detect)
        notice(f"resolved collection: {shell_line(onboard_command('collect-fpm', bound[1]))}")
    return Selected(*(bound or (request, folder)), deployment)


def _needs_runtime(request: SupportRequest, folder: Path) -> bool:
    return (
        request.identity.runtime_framework_version is None
        and probe_manifest(request) is None
        and not has_formal_checkpoint(folder)
    )


def pending_version(selected: Selected, *, execute: bool) -> dict[str, Any] | None:
    """The status of a plan without a version label; None for one that has a label.

    Raises
    ------
    OnboardError: the plan is not intact.
    """
    if selected.request.identity.framework_version is not None:
        return None
    check_plan(selected.request, selected.folder)
    step = (
        "this campaign began without a version label; give the label in a request of its own, in a new output directory"
        if execute
        else "pass --execute --image IMAGE to read the version of the engine in the image"
    )
    return {"status": PENDING_VERSION, "simulation_ready": False, "next": step}


def collector_words(selected: Selected, call: CollectionCall) -> list[str]:
    """The collector's command for a selected plan, as separate words.

    Raises
    ------
    OnboardError: an option is out of range, or an imported profile no longer rests on its evidence.
    """
    checkpoint = checkpoint_folder(selected.folder, call.checkpoint_dir)
    probe_arguments, deployment = runtime_collection_inputs(selected.request, selected.deployment)
    if deployment is not None and deployment.executor == "slurm":
        cpus, bind = resolve_cpu_policy(
            deployment.cpus_per_task,
            deployment.cpu_bind,
            resume=call.resume,
            checkpoint_dir=checkpoint,
            artifact_root=selected.folder / ARTIFACT_FOLDER,
            smoke=call.smoke,
        )
        deployment = deployment.model_copy(update={"cpus_per_task": cpus, "cpu_bind": bind})
    return collector_arguments(
        selected.request,
        selected.folder,
        deployment=deployment,
        probe_arguments=probe_arguments,
        checkpoint=checkpoint,
        plan_only=not call.execute,
        smoke=call.smoke,
        limit=call.limit,
        resume=call.resume,
    )


def preview(selected: Selected, call: CollectionCall, *, notice: Notice) -> str:
    """The line that a shell would take to print the collector's frozen plan. Writes nothing.

    Parameters
    ----------
    notice: told warnings.

    Raises
    ------
    OnboardError: what is there is not the plan of this request, or the collector refuses it.
    """
    words = collector_words(selected, call)
    warn_of_graphs(selected.request, words, notice)
    if call.resume or not is_empty(selected.folder):
        check_plan(selected.request, selected.folder)
    if selected.request.fpm_profile is not None:
        # A profile may be right for timings that exist and wrong for new ones.
        collector_plan(words)
    return shell_line(words)


def readiness(selected: Selected, call: CollectionCall) -> dict[str, Any]:
    """The readiness report of the saved evidence. Writes nothing.

    Raises
    ------
    OnboardError: the plan is not intact, or the checkpoint folder is elsewhere.
    """
    checkpoint = checkpoint_folder(selected.folder, call.checkpoint_dir)
    check_plan(selected.request, selected.folder)
    return assess_readiness(selected.request, selected.folder, checkpoint)


def warn_of_graphs(request: SupportRequest, words: list[str], notice: Notice) -> None:
    """Tell of captures that only one of two phases gets."""
    policy = request.collection.prefill_cudagraph_policy
    advisory = graph_advisory(request.worker_type, policy, enforce_eager="--fpm-enforce-eager" in words)
    if advisory is not None:
        notice(advisory)
