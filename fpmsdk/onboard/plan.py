"""Writing a plan: its folder, its lock, and an order of writes from which every interruption can be continued.

Source: onboarding.md section 5 (create_plan).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import parse_document
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import OnboardError
from fpmsdk.files import DRAFT_PREFIX, whole_file
from fpmsdk.onboard.collector_command import DATA_FOLDER
from fpmsdk.onboard.plan_check import LOCK_FILE, check_rewritable, is_empty, plan_folder
from fpmsdk.onboard.plan_documents import PLAN_FILE, REQUEST_FILE, plan_documents
from fpmsdk.onboard.request import SupportRequest


@contextmanager
def plan_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a plan folder while the block runs; it is never waited for.

    Raises
    ------
    OnboardError: another process holds it.
    """
    with exclusive(folder / LOCK_FILE, f"the plan in {folder}"):
        yield


def create_plan(request: SupportRequest, output_dir: str | Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the plan of a request, or refresh the one that is there.

    Only files that are missing or differ are written, each whole or not at all; collected data and results are never
    touched.

    Parameters
    ----------
    output_dir: the plan folder; made when it does not exist.
    overwrite: whether a plan of the same collection may be there, complete or interrupted.

    Returns
    -------
    The content of `support-plan.json`.

    Raises
    ------
    OnboardError: the folder is not empty, holds something else than a plan of this collection, or is locked; or the
        request cannot be planned.
    EvidenceError: the folder holds links, or finalised data that changed.
    OSError: a file cannot be written; what was written is continued by the same call with `overwrite`.

    Example: the guide of the onboarding stages.
    """
    folder = plan_folder(output_dir)
    documents = plan_documents(request, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with plan_lock(folder):
        if not is_empty(folder):
            if not overwrite:
                raise OnboardError(
                    f"{folder}: the output directory is not empty; pass --overwrite for the same collection, or choose "
                    "a new one",
                    str(folder),
                )
            check_rewritable(request, folder)
        for path in _write_order(folder, documents):
            _write(folder / path, documents[path])
        if "systems_root" in (plan := parse_document(documents[PLAN_FILE], PLAN_FILE))["outputs"]:
            (folder / DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    return dict(plan)


def _write_order(folder: Path, documents: dict[str, bytes]) -> list[str]:
    """What has to be written, in the order in which an interruption can be told from a modification.

    A first write starts with the request and ends with the plan. A refresh writes the request after the evaluation
    files: while the old one is there, both forms of those can be told.
    """
    changed = [path for path, content in documents.items() if _content(folder / path) != content]
    if PLAN_FILE in changed and (folder / PLAN_FILE).exists():
        last = [path for path in (REQUEST_FILE, PLAN_FILE) if path in changed]
        return [*(path for path in changed if path not in last), *last]
    return changed


def _content(place: Path) -> bytes | None:
    try:
        return place.read_bytes()
    except FileNotFoundError:
        return None


def _write(place: Path, content: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    # Only this process writes here: it holds the lock.
    for draft in place.parent.glob(f"{DRAFT_PREFIX}*"):
        draft.unlink()
    with whole_file(place) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
