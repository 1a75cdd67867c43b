"""The folder of one sweep: whose it is, that nobody else works in it, and what an earlier sweep left there.

Source: predict-recommend.md sections 8.5 and 9.4.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.journal import JOURNAL, Journal, read_journal, same_sweep
from fpmsdk.recommendation.plan_files import remove_collect_plan

LOCK = ".recommend.lock"
FOLDER = "recommendations"
# Whatever predict or recommend write into the folder itself.
KNOWN_FILES = (
    "prediction.json",
    "fpm-coverage.json",
    "recommendation.json",
    "recommendation.csv",
    "recommendation.parquet",
    "requests.jsonl",
    "resource-plan.json",
    "resource-runtime.json",
    "execution-events.jsonl",
)
_RANKED = re.compile(r"[0-9]{4,}(\.yaml)?")


class Workspace(Struct, frozen=True):
    """The folder while a sweep has it, and the journal that it goes on from; None where it begins."""

    folder: Path
    journal: Journal | None

    @property
    def journal_path(self) -> Path:
        """Where the journal is."""
        return self.folder / JOURNAL

    def clear_results(self) -> None:
        """Remove what an earlier sweep or prediction left; links are removed, never followed, other files stay."""
        for name in KNOWN_FILES:
            (self.folder / name).unlink(missing_ok=True)
        remove_collect_plan(self.folder)
        ranked = self.folder / FOLDER
        if ranked.is_symlink():
            ranked.unlink()
            return
        if not ranked.is_dir():
            return
        for place in ranked.iterdir():
            if _RANKED.fullmatch(place.name) is None:
                continue
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink()
        if not any(ranked.iterdir()):
            ranked.rmdir()


@contextmanager
def workspace(
    path: str | os.PathLike[str], *, head: Mapping[str, Any], overwrite: bool, resume: bool
) -> Iterator[Workspace]:
    """Have a folder for a sweep while the block runs.

    Parameters
    ----------
    path: a folder that is new, empty, or that of a sweep.
    head: which sweep this is.
    overwrite: whether the results of another sweep in it are removed first.
    resume: whether the sweep that is in it is continued; where there is none, one begins.

    Raises
    ------
    OnboardError: the folder is in use, is somebody else's, or holds another sweep; nothing in it was changed.
    EvidenceError: its journal is damaged.
    """
    folder = Path(path)
    if overwrite and resume:
        raise OnboardError("--resume and --overwrite exclude each other; give one of them", "--resume")
    _look(folder, overwrite, resume)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / LOCK, "a sweep in this folder"):
        _look(folder, overwrite, resume)
        journal = None
        if resume and (folder / JOURNAL).exists():
            journal = read_journal(folder / JOURNAL)
            same_sweep(journal.head, head, folder / JOURNAL)
        opened = Workspace(folder, journal)
        if overwrite:
            opened.journal_path.unlink(missing_ok=True)
            opened.clear_results()
        yield opened


def _look(folder: Path, overwrite: bool, resume: bool) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise OnboardError(f"{folder}: the output directory is no directory; name another", str(folder))
    found = {place.name for place in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
    if not found or overwrite:
        return
    if JOURNAL not in found:
        raise OnboardError(
            f"{folder}: the output directory is not empty and holds no sweep; name another, or pass --overwrite, which "
            "removes results of predict and recommend and nothing else",
            str(folder),
        )
    if not resume:
        raise OnboardError(
            f"{folder}: the output directory holds a sweep; pass --resume to go on with it, or --overwrite to "
            "begin anew",
            str(folder),
        )
