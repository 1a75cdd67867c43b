"""The checkpoint of an onboarding session: its document, where it is, how it is read.

One file holds what was decided so far for every configuration. It is data that an assistant or a person reports, never
a program to run. How it is changed is in `checkpoint_save`, what is verified of it in `checkpoint_report`.
Source: onboarding.md section 6.1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.errors import OnboardError

CHECKPOINT_SCHEMA: Literal["aisimulate-onboarding-checkpoint/v1"] = "aisimulate-onboarding-checkpoint/v1"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
JsonObject = dict[str, JsonValue]


class Progress(StrictDocument):
    """How far a session says it is; what it says is never taken as verified.

    >>> Progress(stage=3).status
    'in_progress'
    """

    stage: Annotated[int, Field(ge=1, le=6)] = 1
    status: Literal["in_progress", "blocked", "complete"] = "in_progress"
    blockers: list[str] = Field(default_factory=list)
    next_action: str | None = None


class Artifact(StrictDocument):
    """A file that a session refers to, with the bytes and the context it was registered for.

    `path` is relative to the folder of the checkpoint. `sha256` is absent only for a collector's checkpoint, which goes
    on changing; `context_sha256` is there unless the scope is `input`.

    >>> Artifact(path="config.json").scope
    'input'
    """

    path: Annotated[str, Field(min_length=1)]
    kind: Literal["file", "request", "profile", "collector_checkpoint"] = "file"
    scope: Literal["input", "collection", "validation"] = "input"
    archived: bool = False
    sha256: Digest | None = None
    context_sha256: Digest | None = None


class Acceptance(StrictDocument):
    """The exact draft that was accepted, by its context digest, and the revision that records it."""

    sha256: Digest
    revision: Annotated[int, Field(ge=1)]


class Configuration(StrictDocument):
    """One deployment of the session: what is known of it, its draft request, its files, its acceptance.

    >>> Configuration().progress.stage
    3
    """

    inputs: JsonObject = Field(default_factory=dict)
    validation_inputs: JsonObject = Field(default_factory=dict)
    draft_request: JsonObject = Field(default_factory=dict)
    progress: Progress = Progress(stage=3)
    artifacts: dict[str, Artifact] = Field(default_factory=dict)
    acceptance: Acceptance | None = None
    history: list[JsonObject] = Field(default_factory=list)


class Checkpoint(StrictDocument):
    """The whole session. `revision` grows by one with every save; 0 is a session that was never saved.

    >>> Checkpoint().document()["revision"]
    0
    """

    schema_version: Literal["aisimulate-onboarding-checkpoint/v1"] = CHECKPOINT_SCHEMA
    revision: Annotated[int, Field(ge=0)] = 0
    inputs: JsonObject = Field(default_factory=dict)
    validation_inputs: JsonObject = Field(default_factory=dict)
    research: JsonObject = Field(default_factory=dict)
    decisions: JsonObject = Field(default_factory=dict)
    pending_questions: list[JsonValue] = Field(default_factory=list)
    progress: Progress = Progress()
    artifacts: dict[str, Artifact] = Field(default_factory=dict)
    configurations: dict[str, Configuration] = Field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The plain JSON object."""
        return self.model_dump(mode="json")


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint is: absolute, its folder resolved, the file itself never a link.

    Raises
    ------
    OnboardError: a symbolic link or something else than a file is there.

    Example
    -------
    >>> checkpoint_path("session/../onboarding.json").name
    'onboarding.json'
    """
    place = Path(path).expanduser().absolute()
    place = place.parent.resolve() / place.name
    if place.is_symlink():
        raise OnboardError(f"{place}: a checkpoint may not be a symbolic link; give the file itself", str(place))
    if place.exists() and not place.is_file():
        raise OnboardError(f"{place}: a checkpoint must be a regular file; choose another path", str(place))
    return place


def lock_path(checkpoint: Path) -> Path:
    """The lock beside a checkpoint.

    >>> lock_path(Path("/s/onboarding.json")).name
    '.onboarding.json.lock'
    """
    return checkpoint.with_name(f".{checkpoint.name}.lock")


def artifact_path(checkpoint: Path, path: str) -> Path:
    """The absolute place of an artifact's path, links followed.

    Raises
    ------
    OnboardError: the path holds a NUL character.
    """
    if "\0" in path:
        raise OnboardError(f"artifacts: a path holds a NUL character: {path!r}", "artifacts")
    return (checkpoint.parent / Path(path).expanduser()).resolve()


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a file holds.

    Parameters
    ----------
    path: as `checkpoint_path` returns it.

    Raises
    ------
    OnboardError: it is missing, malformed or contradicts itself; every fault is a line.
    OSError: it cannot be read.
    """
    try:
        document = read_document(path)
    except FileNotFoundError:
        raise OnboardError(
            f"{path}: there is no checkpoint; make one with `fpmsdk onboard checkpoint --file {path} --update FILE`",
            str(path),
        ) from None
    if not isinstance(document, dict) or not {"schema_version", "revision"} <= document.keys():
        raise OnboardError(f"{path}: no onboarding checkpoint: schema_version and revision are missing", str(path))
    state = checked(Checkpoint, document, str(path))
    faults = [] if state.revision else ["revision: a saved checkpoint has at least 1, found 0"]
    faults += reference_faults(state)
    for name, entry in state.configurations.items():
        if entry.acceptance is not None and entry.acceptance.revision > state.revision:
            faults.append(
                f"configurations.{name}.acceptance.revision: {entry.acceptance.revision} is later than the "
                f"checkpoint's own {state.revision}"
            )
    for place, artifact in _references(state):
        if (artifact.sha256 is None) != (artifact.kind == "collector_checkpoint"):
            faults.append(f"{place}.sha256: must be recorded, except for a collector_checkpoint")
        if (artifact.context_sha256 is None) != (artifact.scope == "input"):
            faults.append(f"{place}.context_sha256: must be recorded for scope collection and validation only")
    if faults:
        raise OnboardError("\n".join(f"{path}: {fault}" for fault in faults), str(path))
    return state


def reference_faults(state: Checkpoint) -> list[str]:
    """What is wrong with the scopes of artifacts, one line each; empty when nothing is."""
    faults = []
    for place, artifact in _references(state):
        shared = place.startswith("artifacts.")
        if shared and artifact.scope != "input":
            faults.append(
                f"{place}.scope: shared artifacts are inputs; put {artifact.scope} files into a configuration"
            )
        if artifact.kind == "collector_checkpoint" and (shared or artifact.scope != "collection"):
            faults.append(f"{place}: a collector_checkpoint belongs to a configuration, with scope collection")
    return faults


def _references(state: Checkpoint) -> list[tuple[str, Artifact]]:
    found = [(f"artifacts.{name}", artifact) for name, artifact in state.artifacts.items()]
    for label, entry in state.configurations.items():
        found += [(f"configurations.{label}.artifacts.{name}", item) for name, item in entry.artifacts.items()]
    return found
