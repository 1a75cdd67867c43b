"""Changing a session: one merge patch, one revision, one writer at a time; whole or not at all.

Source: onboarding.md section 6.1 (save protocol, artifacts, invalidation, acceptance).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import pretty_bytes
from fpmsdk.documents.evidence import file_meta
from fpmsdk.documents.lock import exclusive
from fpmsdk.documents.strict import checked
from fpmsdk.errors import OnboardError
from fpmsdk.files import whole_file
from fpmsdk.onboard.checkpoint import (
    Acceptance,
    Artifact,
    Checkpoint,
    Configuration,
    Progress,
    artifact_path,
    checkpoint_path,
    load_checkpoint,
    lock_path,
    reference_faults,
)
from fpmsdk.onboard.checkpoint_context import context_digest
from fpmsdk.onboard.checkpoint_merge import merge_patch
from fpmsdk.onboard.checkpoint_report import artifact_issues, verified_draft, verify_evidence
from fpmsdk.onboard.runtime_profile import preserve_runtime_overrides

_REVIEW_STAGE, _VALIDATION_STAGE = 3, 6
_OWNED = ("schema_version", "revision")
_CAPTURED = ("sha256", "context_sha256")


def save_checkpoint(
    path: Path,
    *,
    patch: Mapping[str, Any] | None = None,
    expected_revision: int | None = None,
    accept: Sequence[str] = (),
) -> tuple[Checkpoint, bool]:
    """Apply a merge patch and acceptances to a session, and write it.

    Parameters
    ----------
    path: as `checkpoint_path` returns it; its folder is made when it is missing.
    patch: RFC 7386: null removes, arrays replace. None with no acceptance only reads an existing session.
    expected_revision: the revision that was read; needed when the session exists.
    accept: configurations whose complete drafts the user has approved.

    Returns
    -------
    The session, and whether it was written.

    Raises
    ------
    OnboardError: another writer, another revision, or a change that breaks a rule; the file is untouched.
    OSError: it cannot be written; the file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(lock_path(path), f"the checkpoint {path}"):
        checkpoint_path(path)  # a link may have been put there since
        exists = path.exists()
        old = load_checkpoint(path) if exists else Checkpoint()
        if exists and patch is None and not accept:
            return old, False
        if expected_revision != old.revision and (exists or expected_revision is not None):
            raise OnboardError(
                f"{path}: the checkpoint is at revision {old.revision}; read it, then retry with --expect-revision "
                f"{old.revision}",
                "--expect-revision",
            )
        state = _changed(old, dict(patch or {}), path)
        for label in dict.fromkeys(accept):
            state = _accepted(state, label, path)
        _write(path, state)
    return state, True


def _changed(old: Checkpoint, patch: dict[str, Any], path: Path) -> Checkpoint:
    _refuse_owned_fields(patch)
    merged = merge_patch(old.document(), patch)
    state = checked(Checkpoint, {**merged, "revision": old.revision + 1}, "update")
    state = _with_preserved_overrides(state, old)
    state = _with_captured_artifacts(state, old, path)
    configurations = dict(state.configurations)
    for label, before in old.configurations.items():
        if label in state.configurations:
            # Anything but `blocked` is overwritten: what was reported of the old draft does not hold for the new one.
            asked = (patch.get("configurations", {}).get(label) or {}).get("progress")
            blocked = isinstance(asked, dict) and asked.get("status") == "blocked"
            configurations[label] = _invalidated(state, state.configurations[label], old, before, keep_progress=blocked)
    return state.model_copy(update={"configurations": configurations})


def _refuse_owned_fields(patch: Mapping[str, Any]) -> None:
    for name in _OWNED:
        if name in patch:
            raise OnboardError(f"update: {name}: is kept by the checkpoint itself; leave it out", name)
    configurations = patch.get("configurations", {})
    groups = {"artifacts": patch.get("artifacts")}
    if isinstance(configurations, Mapping):
        for label, configuration in configurations.items():
            if isinstance(configuration, Mapping):
                if "acceptance" in configuration:
                    place = f"configurations.{label}.acceptance"
                    raise OnboardError(
                        f"update: {place}: only --accept-profile {label} records an acceptance, after the user has "
                        "approved the draft",
                        place,
                    )
                groups[f"configurations.{label}.artifacts"] = configuration.get("artifacts")
    for group, artifacts in groups.items():
        for name, artifact in artifacts.items() if isinstance(artifacts, Mapping) else ():
            given = [field for field in _CAPTURED if isinstance(artifact, Mapping) and field in artifact]
            if given:
                place = f"{group}.{name}.{given[0]}"
                raise OnboardError(f"update: {place}: is taken when the file is registered; leave it out", place)


def _with_preserved_overrides(state: Checkpoint, old: Checkpoint) -> Checkpoint:
    configurations = dict(state.configurations)
    for label, configuration in state.configurations.items():
        before = old.configurations.get(label)
        if (
            before is not None
            and before.draft_request != configuration.draft_request
            and before.draft_request.get("fpm_profile") is not None
        ):
            draft = preserve_runtime_overrides(before.draft_request, configuration.draft_request, verify_evidence)
            configurations[label] = configuration.model_copy(update={"draft_request": draft})
    return state.model_copy(update={"configurations": configurations})


def _with_captured_artifacts(state: Checkpoint, old: Checkpoint, path: Path) -> Checkpoint:
    shared = _captured(state.artifacts, old.artifacts, path, "artifacts")
    state = state.model_copy(update={"artifacts": shared})
    configurations = {}
    for label, configuration in state.configurations.items():
        before = old.configurations.get(label, Configuration())
        artifacts = _captured(configuration.artifacts, before.artifacts, path, f"configurations.{label}.artifacts")
        configurations[label] = configuration.model_copy(update={"artifacts": artifacts})
    state = state.model_copy(update={"configurations": configurations})
    if faults := reference_faults(state):
        raise OnboardError("\n".join(f"update: {fault}" for fault in faults), "artifacts")
    # The context of a result holds the input files, so that it is taken after all of them.
    for label, configuration in configurations.items():
        artifacts = {
            name: artifact
            if artifact.scope == "input" or artifact.context_sha256 is not None
            else artifact.model_copy(update={"context_sha256": context_digest(state, configuration, artifact.scope)})
            for name, artifact in configuration.artifacts.items()
        }
        configurations[label] = configuration.model_copy(update={"artifacts": artifacts})
    return state.model_copy(update={"configurations": configurations})


def _captured(
    artifacts: Mapping[str, Artifact], before: Mapping[str, Artifact], path: Path, group: str
) -> dict[str, Artifact]:
    captured = {}
    for name, artifact in artifacts.items():
        place = artifact_path(path, artifact.path)
        where = f"{group}.{name}"
        if place in (path, lock_path(path)):
            raise OnboardError(f"update: {where}.path: is the checkpoint or its lock", f"{where}.path")
        known = before.get(name)
        digests: dict[str, str | None] = {"sha256": None, "context_sha256": None}
        if known is not None and artifact_path(path, known.path) == place:
            if (known.kind, known.scope) != (artifact.kind, artifact.scope):
                raise OnboardError(f"update: {where}: remove the reference before its kind or scope can change", where)
            digests = {"sha256": known.sha256, "context_sha256": known.context_sha256}
        elif not place.is_file():
            raise OnboardError(f"update: {where}.path: there is no such file: {place}", f"{where}.path")
        elif artifact.kind != "collector_checkpoint":
            digests["sha256"] = file_meta(place)["sha256"]
        captured[name] = artifact.model_copy(update={"path": os.path.relpath(place, path.parent), **digests})
    return captured


def _invalidated(
    state: Checkpoint, now: Configuration, old: Checkpoint, before: Configuration, *, keep_progress: bool
) -> Configuration:
    def differs(scope: Any) -> bool:
        return context_digest(state, now, scope) != context_digest(old, before, scope)

    drafts_differ = before.draft_request != now.draft_request
    changed = differs("acceptance")
    changes: dict[str, Any] = {}
    if drafts_differ or (changed and before.acceptance is not None):
        event = {
            "event": "draft_replaced" if drafts_differ else "acceptance_invalidated",
            "revision": old.revision,
            "draft_request": copy.deepcopy(before.draft_request),
            "inputs": copy.deepcopy(before.inputs),
            "shared_inputs": copy.deepcopy(old.inputs),
            "acceptance": before.acceptance.model_dump(mode="json") if before.acceptance else None,
            "artifacts": {name: artifact.model_dump(mode="json") for name, artifact in before.artifacts.items()},
            "shared_artifacts": {name: artifact.model_dump(mode="json") for name, artifact in old.artifacts.items()},
        }
        changes["history"] = [*now.history, event]
    if changed:
        changes["acceptance"] = None
        if now.progress.stage >= _REVIEW_STAGE and not keep_progress:
            changes["progress"] = Progress(stage=_REVIEW_STAGE, next_action="Review the changed draft and accept it.")
    elif differs("validation") and not differs("collection") and now.progress.stage >= _VALIDATION_STAGE:
        changes["progress"] = Progress(
            stage=_VALIDATION_STAGE, next_action="Validate again with the changed validation inputs."
        )
    return now.model_copy(update=changes)


def _accepted(state: Checkpoint, label: str, path: Path) -> Checkpoint:
    configuration = state.configurations.get(label)
    if configuration is None:
        known = ", ".join(state.configurations) or "none"
        raise OnboardError(f"--accept-profile: no configuration {label!r}; there are {known}", "--accept-profile")
    verified_draft(state, label, path)
    inputs: list[tuple[str, Artifact, Configuration | None]]
    inputs = [(name, artifact, None) for name, artifact in state.artifacts.items()]
    inputs += [(name, artifact, configuration) for name, artifact in configuration.artifacts.items()]
    issues = [
        f"{name}: {told}"
        for name, artifact, owner in inputs
        if artifact.scope == "input"
        for told in artifact_issues(artifact, state, owner, path)
    ]
    if issues:
        raise OnboardError(
            "\n".join(f"--accept-profile: {label}: input file {issue}" for issue in issues), "--accept-profile"
        )
    acceptance = Acceptance(sha256=context_digest(state, configuration, "acceptance"), revision=state.revision)
    accepted = configuration.model_copy(update={"acceptance": acceptance})
    return state.model_copy(update={"configurations": {**state.configurations, label: accepted}})


def _write(path: Path, state: Checkpoint) -> None:
    content = pretty_bytes(state.document())
    with whole_file(path) as file:
        os.fchmod(file.fileno(), 0o600)  # it may hold what is nobody else's business
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
