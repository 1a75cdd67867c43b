"""What a session amounts to now: which files still are what they were, which drafts are accepted, what comes next.

Source: onboarding.md section 6.1 (acceptance, report).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.documents.canonical import digest, read_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.documents.strict import checked
from fpmsdk.documents.yaml_files import read_yaml
from fpmsdk.errors import FpmSdkError, OnboardError
from fpmsdk.onboard.checkpoint import Artifact, Checkpoint, Configuration, artifact_path, lock_path
from fpmsdk.onboard.checkpoint_context import complete_request, context_digest
from fpmsdk.onboard.provenance import finalization_manifest
from fpmsdk.onboard.quality import verify_finalized_quality
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.runtime_profile import verify_checkpoint_launch, verify_runtime_profile

_VERIFICATION = {
    "scope": "Acceptance of exact profiles and the bytes of current files. Completed stages are what was reported.",
    "archived_artifacts": "History; neither their bytes nor their meaning are verified.",
    "collector_checkpoints": "That they exist and are JSON; the collector verifies its plan when it resumes.",
    "executed": False,
}


def checkpoint_report(state: Checkpoint, path: Path) -> dict[str, Any]:
    """Verify a session and tell what it amounts to; nothing is written.

    Parameters
    ----------
    state: the session.
    path: the checkpoint it was read from.

    Returns
    -------
    `checkpoint`, `state`, `configurations` by name with `profile_accepted`, `effective_status`, `reported_progress`
    and `next_action`, `integrity_issues` with `configuration`, `artifact` and `detail`, `archived_artifacts` and
    `verification`.
    """
    issues: list[dict[str, Any]] = []
    for name, artifact in state.artifacts.items():
        issues += [_issue(None, name, told) for told in artifact_issues(artifact, state, None, path)]
    shared_is_sound = not issues
    configurations = {}
    for label, configuration in state.configurations.items():
        own: list[dict[str, Any]] = []
        inputs_are_sound = shared_is_sound
        for name, artifact in configuration.artifacts.items():
            told = artifact_issues(artifact, state, configuration, path)
            own += [_issue(label, name, text) for text in told]
            inputs_are_sound &= not (told and artifact.scope == "input")
        accepted = configuration.acceptance is not None
        if configuration.acceptance is not None:
            try:
                verified_draft(state, label, path)
                if configuration.acceptance.sha256 != context_digest(state, configuration, "acceptance"):
                    raise OnboardError(
                        "the accepted inputs or draft have changed; review the draft and accept it again"
                    )
            except (FpmSdkError, OSError) as fault:
                accepted = False
                own.append(_issue(label, None, str(fault)))
        accepted &= inputs_are_sound
        configurations[label] = _standing(configuration, accepted, needs_attention=bool(own) or not inputs_are_sound)
        issues += own
    return {
        "checkpoint": str(path),
        "state": state.document(),
        "configurations": configurations,
        "integrity_issues": issues,
        "archived_artifacts": _archived(state),
        "verification": dict(_VERIFICATION),
    }


def verified_draft(state: Checkpoint, label: str, path: Path) -> SupportRequest:
    """The complete draft of a configuration, with the evidence its profile rests on verified.

    Raises
    ------
    OnboardError: the draft is incomplete, evidence does not hold, or launch facts changed since a probe.
    ConfigError: its profile holds no such deployment.
    """
    request = complete_request(state.configurations[label].draft_request)
    verify_evidence(request)
    verify_checkpoint_launch(state, label, path)
    return request


def verify_evidence(request: SupportRequest) -> None:
    """Verify whatever the memory of a profile rests on: a probe, a finalised collection under one, or its quality.

    Raises
    ------
    OnboardError, EvidenceError: the evidence does not hold; as `verify_runtime_profile` and `verify_finalization`.
    """
    verify_runtime_profile(request)
    manifest = finalization_manifest(request)
    if manifest is None:
        return
    # A finalisation may lead back to an accepted draft of this session.
    from fpmsdk.onboard.finalize import verify_finalization

    if "runtime_probe" in manifest:
        verify_finalization(request)
    else:
        verify_finalized_quality(manifest)


def artifact_issues(
    artifact: Artifact, state: Checkpoint, configuration: Configuration | None, path: Path
) -> list[str]:
    """Why a file cannot be relied on, one sentence each; empty when it can, and for archived files.

    Parameters
    ----------
    artifact: the reference.
    state, configuration: the session, and whose file it is; None for shared ones.
    path: the checkpoint.
    """
    if artifact.archived:
        return []
    place = artifact_path(path, artifact.path)
    if place in (path, lock_path(path)):
        return ["the reference is the checkpoint or its lock; remove it"]
    issues = []
    if configuration is not None and artifact.scope != "input":
        now = context_digest(state, configuration, artifact.scope)
        if artifact.context_sha256 != now:
            issues.append("stale: inputs or draft have changed since; archive this reference and register the new file")
    try:
        issues += _content_issues(artifact, configuration, path.parent / artifact.path)
    except FileNotFoundError:
        issues.append(f"the file is missing: {place}")
    except (FpmSdkError, OSError) as fault:
        issues.append(f"cannot be verified: {fault}")
    return issues


def _content_issues(artifact: Artifact, configuration: Configuration | None, place: Path) -> list[str]:
    if artifact.kind == "collector_checkpoint":
        if not isinstance(read_document(place), dict):
            raise OnboardError("expected a JSON object")
        return []
    if file_meta(place)["sha256"] != artifact.sha256:
        return ["the file has other bytes than when it was registered; restore it, or register it under a new path"]
    if configuration is None or artifact.kind not in ("request", "profile"):
        return []
    request = complete_request(configuration.draft_request)
    verify_evidence(request)
    assert request.fpm_profile is not None
    saved, current = read_yaml(place), request.document()
    if artifact.kind == "request":
        saved = checked(SupportRequest, saved, str(place)).document()
    else:
        saved = load_fpm_profile(saved).model_dump(mode="json", exclude_none=True)
        current = current["fpm_profile"]
    return [] if digest(saved) == digest(current) else [f"the {artifact.kind} in it is not the current draft's"]


def _issue(configuration: str | None, artifact: str | None, detail: str) -> dict[str, Any]:
    return {"configuration": configuration, "artifact": artifact, "detail": detail}


def _standing(configuration: Configuration, accepted: bool, *, needs_attention: bool) -> dict[str, Any]:
    status = "needs_attention" if needs_attention else "accepted" if accepted else "draft"
    following = {
        "needs_attention": "Resolve the integrity issues, then review what they affect.",
        "accepted": configuration.progress.next_action or "Plan the collection of the accepted draft.",
        "draft": configuration.progress.next_action or "Go on with the investigation, then review the profile.",
    }
    return {
        "profile_accepted": accepted,
        "effective_status": status,
        "reported_progress": configuration.progress.model_dump(mode="json"),
        "next_action": following[status],
    }


def _archived(state: Checkpoint) -> list[dict[str, Any]]:
    owners = [(None, state.artifacts), *((label, one.artifacts) for label, one in state.configurations.items())]
    return [
        {"configuration": owner, "artifact": name, "path": artifact.path}
        for owner, artifacts in owners
        for name, artifact in artifacts.items()
        if artifact.archived
    ]
