"""References to files that may never change: their digests, taken once and verified at every reuse.

Source: onboarding.md section 0 (immutable evidence, symlinks), collector.md (conventions).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.errors import EvidenceError

_PORTION_BYTES = 1 << 20


def file_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """`{size, sha256}` of a regular file, read portion by portion.

    Raises
    ------
    EvidenceError: a symbolic link, or no regular file.
    OSError: it cannot be read.

    Example
    -------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "raw.json"
    >>> _ = file.write_bytes(b"{}")
    >>> file_meta(file)["size"]
    2
    """
    path = os.fspath(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as fault:
        if os.path.islink(path):
            raise EvidenceError(f"{path}: evidence may not be a symbolic link; give the file itself", path) from fault
        raise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise EvidenceError(f"{path}: evidence must be a regular file", path)
        hashed, size = hashlib.sha256(), 0
        while portion := file.read(_PORTION_BYTES):
            hashed.update(portion)
            size += len(portion)
    return {"size": size, "sha256": hashed.hexdigest()}


def file_evidence(path: str | os.PathLike[str]) -> dict[str, Any]:
    """`{path, sha256, size_bytes}` of a regular file, with its absolute path. Raises as `file_meta`."""
    absolute = os.path.abspath(path)
    meta = file_meta(absolute)
    return {"path": absolute, "sha256": meta["sha256"], "size_bytes": meta["size"]}


def manifest(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """`file_meta` of every regular file below a folder, by relative path, sorted.

    Raises
    ------
    EvidenceError: a symbolic link or special file is among them.
    OSError: something cannot be read.
    """
    root = Path(folder)
    found = {}
    for place in sorted(root.rglob("*")):
        if place.is_symlink() or not place.is_dir():
            found[place.relative_to(root).as_posix()] = file_meta(place)
    return dict(sorted(found.items()))


def verify_evidence(reference: Mapping[str, Any]) -> None:
    """Compare a file with the reference that was taken of it.

    Parameters
    ----------
    reference: `{path, sha256[, size_bytes]}`.

    Raises
    ------
    EvidenceError: the file is gone, is not regular or has other bytes; names the file and both digests.
    """
    path = os.fspath(reference["path"])
    try:
        found = file_meta(path)
    except FileNotFoundError:
        raise EvidenceError(f"{path}: this evidence is gone; restore it or start again without it", path) from None
    if found["sha256"] != reference["sha256"] or found["size"] != reference.get("size_bytes", found["size"]):
        raise EvidenceError(
            f"{path}: evidence was changed since it was recorded: expected sha256 {reference['sha256']}, found "
            f"{found['sha256']}; restore the file, or record new evidence",
            path,
        )


def refuse_links(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is a symbolic link or holds one, at any depth.

    Raises
    ------
    EvidenceError: names the link.
    """
    root = Path(folder)
    for place in (root, *root.rglob("*")):
        if place.is_symlink():
            raise EvidenceError(f"{place}: symbolic links are refused here; use the file or folder itself", str(place))
