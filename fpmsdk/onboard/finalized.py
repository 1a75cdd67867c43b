"""Whether what a finalised request came with still holds: its table, and the quality that was told of it.

Making such a request is in `finalize`. Source: onboarding.md sections 5 (check_plan) and 7.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from fpmsdk.documents.evidence import verify_evidence
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.provenance import finalization_manifest
from fpmsdk.onboard.request import SupportRequest

DATA_FOLDER = PurePosixPath("systems/data")
_WHERE = "formal_data"


def verify_finalized_data(request: SupportRequest, folder: Path) -> None:
    """Compare table, sidecar and stated quality with the finalisation's; nothing to do without one.

    Parameters
    ----------
    folder: the folder that the finalised plan is in.

    Raises
    ------
    OnboardError: the manifest does not name a pair below `systems/data`.
    EvidenceError: a file of the pair is gone, linked or changed, or the collection has another quality than stated.
    """
    manifest = finalization_manifest(request)
    if manifest is None:
        return
    pair = manifest.get("formal_data")
    if not isinstance(pair, list) or len(pair) != 2:
        raise OnboardError(f"{_WHERE}: a finalisation names the table and its sidecar, found {pair!r}", _WHERE)
    for entry in pair:
        path = folder / _data_path(entry)
        for place in (path, *path.parents):
            if place == folder:
                break
            if place.is_symlink():
                raise EvidenceError(f"{place}: finalised data may not be reached through a link", str(place))
        verify_evidence({"path": str(path), "sha256": entry["sha256"]})
    # The quality of a collection is assessed from its plan folder, which is checked here.
    from fpmsdk.onboard.quality import verify_finalized_quality

    verify_finalized_quality(manifest)


def _data_path(entry: Any) -> PurePosixPath:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("relative_path", "sha256")):
        raise OnboardError(f"{_WHERE}: needs relative_path and sha256, found {entry!r}", _WHERE)
    path = PurePosixPath(entry["relative_path"])
    if path.is_absolute() or ".." in path.parts or DATA_FOLDER not in path.parents:
        raise OnboardError(f"{_WHERE}: relative_path must be below {DATA_FOLDER}, found {str(path)!r}", _WHERE)
    return path
