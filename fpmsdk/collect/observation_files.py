"""Files of observations as an index refers to them, copied to where no engine writes any more.

Source: collector.md section 8.4 (artifacts of a phase).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fpmsdk.collect.instrumentation import OBSERVATION_SCHEMA
from fpmsdk.collect.observer_staging import CONTEXT_FILE
from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import OnboardError


def file_reference(root: Path, place: Path) -> dict[str, Any]:
    """`{path, size, sha256}` of a file, its path relative to `root`. Raises as `file_meta`."""
    return {"path": place.relative_to(root).as_posix(), **file_meta(place)}


def keep_phase_files(root: Path, folder: Path, target: Path | None = None) -> list[dict[str, Any]]:
    """Copy the launch files, results and logs of a phase, and refer to the copies.

    Parameters
    ----------
    root: the folder of the index.
    folder: the phase's: launch files, `raw/` and `logs/`.
    target: where the copies go; by default a fresh `evidence-<id>` inside `folder`.

    Returns
    -------
    `{path, kind, size, sha256}` of every copy but the launch context; `kind` is `observation` or `runtime-artifact`.

    Raises
    ------
    EvidenceError: a symbolic link or special file is among them.
    OSError: one cannot be copied.
    """
    kept = target or folder / f"evidence-{uuid.uuid4().hex}"
    kept.mkdir(parents=True)
    references = []
    for source in sorted(_files(folder)):
        meta = file_meta(source)  # refuses links before anything of them is read
        copied = kept / source.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copied)
        if source == folder / CONTEXT_FILE:
            continue
        kind = "observation" if _is_observation(copied) else "runtime-artifact"
        references.append({"path": copied.relative_to(root).as_posix(), "kind": kind, **meta})
    return references


def _files(folder: Path) -> Iterator[Path]:
    for place in folder.iterdir():
        if place.is_symlink() or not place.is_dir():
            yield place
    for name in ("raw", "logs"):
        for place in (folder / name).rglob("*"):
            if place.is_symlink() or not place.is_dir():
                yield place


def _is_observation(place: Path) -> bool:
    if place.suffix != ".json" or os.path.getsize(place) == 0:
        return False
    try:
        document = read_document(place)
    except OnboardError:
        return False
    return isinstance(document, dict) and document.get("schema_version") == OBSERVATION_SCHEMA
