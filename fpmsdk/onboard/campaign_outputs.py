"""What earlier campaigns left in a plan folder, and whether a new one may go on there.

Source: onboarding.md section 5 (collection gate 2, and the publication after it).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fpmsdk.collect.paths import INPUTS, PLAN, checkpoint_path
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError, OnboardError
from fpmsdk.onboard.collector_command import ARTIFACT_FOLDER, CHECKPOINT_FOLDER, DATA_FOLDER

_SMOKE_FOLDER = "smoke"


def has_formal_checkpoint(folder: Path) -> bool:
    """Whether a formal campaign of this plan folder has begun."""
    return any((folder / CHECKPOINT_FOLDER).rglob(checkpoint_path(Path(), smoke=False).name))


def require_unoccupied(folder: Path, checkpoint_dir: Path, *, smoke: bool, resume: bool) -> None:
    """Refuse to start a campaign over the outputs of an earlier one; smoke and formal campaigns are independent.

    Parameters
    ----------
    checkpoint_dir: the folder of the checkpoint that `resume` would continue.

    Raises
    ------
    OnboardError: there are outputs, and either `resume` is not set or their checkpoint cannot be read.
    """
    if not _is_occupied(folder, smoke=smoke):
        return
    if not resume:
        raise OnboardError(
            f"{folder}: existing outputs of a {'smoke' if smoke else 'formal'} campaign; pass --resume to continue it, "
            "or plan in a new output directory",
            "--resume",
        )
    path = checkpoint_path(checkpoint_dir, smoke=smoke)
    try:
        document = read_document(path)
    except (OnboardError, OSError) as fault:
        raise _unreadable(path, str(fault)) from None
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str) or not document["schema"]:
        raise _unreadable(path, "schema is missing")
    if not re.fullmatch("[0-9a-f]{64}", str(document.get("plan_sha256"))):
        raise _unreadable(path, f"plan_sha256 is {document.get('plan_sha256')!r}")
    if not isinstance(document.get("cells"), dict):
        raise _unreadable(path, "cells are missing")


def published_label(checkpoint_dir: Path) -> str | None:
    """The version label under which a formal campaign published its table.

    Raises
    ------
    CollectionError: the campaign recorded no complete publication.
    OnboardError: the checkpoint or the sidecar of the table cannot be read.
    """
    path = checkpoint_path(checkpoint_dir, smoke=False)
    database: Any = read_document(path).get("database")
    if not isinstance(database, dict) or database.get("status") != "passed":
        raise CollectionError(f"{path}: no completed publication is recorded; inspect its cells, then pass --resume")
    label = read_document(database["metadata"]).get("backend_version")
    return None if label is None else str(label)


def _is_occupied(folder: Path, *, smoke: bool) -> bool:
    artifacts = (folder / ARTIFACT_FOLDER).glob(f"*/{_SMOKE_FOLDER}/*" if smoke else "*/*")
    # What a campaign writes before its checkpoint, and locks and drafts, is not yet a campaign.
    outputs = {path.name for path in artifacts if not path.name.startswith(".")} - {PLAN, INPUTS}
    if outputs - ({_SMOKE_FOLDER} if not smoke else set()):
        return True
    if any((folder / CHECKPOINT_FOLDER).rglob(checkpoint_path(Path(), smoke=smoke).name)):
        return True
    return not smoke and any((folder / DATA_FOLDER).glob("*"))


def _unreadable(path: Path, reason: str) -> OnboardError:
    return OnboardError(
        f"{path}: existing outputs need a readable checkpoint of their campaign: {reason}; restore it, or plan in a "
        "new output directory",
        str(path),
    )
