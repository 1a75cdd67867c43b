"""The checkpoint of a campaign: what is known of every cell, replaced whole at every step.

Source: collector.md section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fpmsdk.collect.paths import checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import OnboardError

SCHEMA = "aic-fpm-collector-checkpoint-v3"


class Checkpoint:
    """The document of a campaign, in memory and in its file.

    Attributes
    ----------
    path: the file.
    document: `{schema, plan_sha256, cells, ...}`; `save` writes it.
    """

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @classmethod
    def open(cls, plan: CollectionPlan, folder: Path, *, smoke: bool, resume: bool) -> Checkpoint:
        """The checkpoint to continue, or a new one.

        Raises
        ------
        OnboardError: the checkpoint is of another plan or schema, or is no document.
        """
        path = checkpoint_path(folder, smoke=smoke)
        if not resume or not path.exists():
            return cls(path, {"schema": SCHEMA, "plan_sha256": plan.sha256, "cells": {}})
        document = read_document(path)
        if (
            not isinstance(document, dict)
            or document.get("schema") != SCHEMA
            or document.get("plan_sha256") != plan.sha256
            or not isinstance(document.get("cells"), dict)
        ):
            found = document.get("plan_sha256") if isinstance(document, dict) else None
            raise OnboardError(
                f"{path}: this FPM checkpoint does not match the current frozen plan {plan.sha256}, found {found!r}; "
                "resume with the arguments of that campaign, or start another one in another --checkpoint-dir",
                str(path),
            )
        return cls(path, document)

    def entry(self, cell_id: str) -> dict[str, Any]:
        """What is known of a cell; empty when it never ran."""
        found = self.document["cells"].get(cell_id)
        return found if isinstance(found, dict) else {}

    def put(self, cell_id: str, entry: dict[str, Any]) -> None:
        """Replace what is known of a cell, in memory."""
        self.document["cells"][cell_id] = entry

    def status(self, cell_id: str) -> str | None:
        """`running`, `passed`, `failed`, `interrupted`, `cleanup_failed`, or None."""
        return self.entry(cell_id).get("status")

    def save(self) -> None:
        """Replace the file. Raises `OSError` when it cannot be written; then the former state stays."""
        write_document(self.path, self.document)


@contextmanager
def campaign_lock(checkpoint: Path, root: Path) -> Iterator[None]:
    """Own a campaign: its checkpoint and its artifacts, while the block runs.

    Raises
    ------
    OnboardError: another process has it.
    """
    with ExitStack() as locks:
        locks.enter_context(exclusive(checkpoint.with_name(f".{checkpoint.name}.lock"), "this checkpoint"))
        locks.enter_context(exclusive(root / ".campaign.lock", "this campaign"))
        yield
