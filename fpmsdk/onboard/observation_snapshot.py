"""A copy of the evidence of one configuration, file by file and digest by digest, that an import can rest on.

Source: onboarding.md section 6.3 (snapshot of the active attempt).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.instrumentation import contained_file, load_instrumentation
from fpmsdk.documents.canonical import write_document
from fpmsdk.errors import EvidenceError, FpmSdkError, OnboardError
from fpmsdk.files import sha256

INDEX_FILE, SOURCE_INDEX_FILE, RAW_FOLDER = "observations.json", "source-index.json", "raw"


def snapshot_attempt(index_path: Path, index: Mapping[str, Any], label: str, folder: Path) -> tuple[Path, list[str]]:
    """Copy what the active attempt of a configuration refers to into a fresh folder.

    Parameters
    ----------
    index_path, index: the index of observations and its value.
    label: the configuration.
    folder: where the copies go; files below `raw/`, with an index of their own.

    Returns
    -------
    The copied index, and what could not be copied, one sentence each.

    Raises
    ------
    EvidenceError: the index says nothing of the configuration.
    OSError: a copy cannot be written.
    """
    saved = copy.deepcopy(index["configurations"].get(label))
    if not isinstance(saved, dict):
        raise EvidenceError(f"{index_path}: no observations of {label!r}; probe it first", str(index_path))
    attempts = saved.get("attempts")
    active = [
        attempt
        for attempt in (attempts if isinstance(attempts, list) else [])
        if isinstance(attempt, dict) and attempt.get("attempt_id") == saved.get("active_attempt_id")
    ]
    if len(active) == 1:
        saved["attempts"] = active
    folder.mkdir(parents=True)
    diagnostics: list[str] = []
    for attempt in active:
        for reference, name, digest in _files(index_path.parent, attempt, diagnostics):
            try:
                _copy(index_path.parent, name, digest, folder / RAW_FOLDER)
                if reference is not None:
                    reference["path"] = f"{RAW_FOLDER}/{name}"
            except (OnboardError, OSError) as fault:
                diagnostics.append(str(fault))
        bundle = attempt.get("bundle")
        if isinstance(bundle, dict) and isinstance(bundle.get("manifest"), str):
            bundle["manifest"] = f"{RAW_FOLDER}/{bundle['manifest']}"
    (folder / SOURCE_INDEX_FILE).write_bytes(index_path.read_bytes())
    target = folder / INDEX_FILE
    write_document(target, {"schema_version": index["schema_version"], "configurations": {label: saved}})
    return target, diagnostics


def _files(
    root: Path, attempt: Mapping[str, Any], diagnostics: list[str]
) -> Iterator[tuple[dict[str, Any] | None, Any, Any]]:
    """Reference, relative path and digest of every file; no digest of the manifest, which the bundle itself covers."""
    try:
        manifest = contained_file(root, attempt["bundle"]["manifest"])
        bundle = load_instrumentation(manifest)
        if bundle.sha256 != attempt["bundle"]["sha256"]:
            raise EvidenceError(
                f"{manifest}: the bundle has digest {bundle.sha256}, recorded is another", str(manifest)
            )
        yield None, manifest.relative_to(root).as_posix(), None
        for name, digest in bundle.files.items():
            yield None, (manifest.parent / name).relative_to(root).as_posix(), digest
    except (FpmSdkError, OSError, KeyError, TypeError) as fault:
        diagnostics.append(f"instrumentation: {fault}")
    phases = attempt.get("phases")
    for name, phase in phases.items() if isinstance(phases, dict) else ():
        artifacts = phase.get("artifacts") if isinstance(phase, dict) else None
        for reference in [phase.get("launch_manifest"), *artifacts] if isinstance(artifacts, list) else [None]:
            if not isinstance(reference, dict) or not {"path", "sha256"} <= reference.keys():
                diagnostics.append(f"{name}: malformed reference to an artifact: {reference!r}")
            else:
                yield reference, reference["path"], reference["sha256"]


def _copy(root: Path, name: Any, digest: Any, target: Path) -> None:
    source = contained_file(root, name)
    content = source.read_bytes()
    if digest is not None and sha256(content) != digest:
        raise EvidenceError(
            f"{source}: evidence was changed since it was recorded; restore it, or probe again", str(source)
        )
    copied = target / name
    copied.parent.mkdir(parents=True, exist_ok=True)
    if copied.exists() and copied.read_bytes() != content:
        raise EvidenceError(f"{copied}: two files of the evidence have this place", str(copied))
    copied.write_bytes(content)
