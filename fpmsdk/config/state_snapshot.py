"""What a configuration says of a state snapshot, as far as a path and the digest of its manifest go.

What is in a manifest is read elsewhere. Source: snapshot.md section 2.
"""

import os
from typing import Any

from fpmsdk.errors import StateSnapshotError, StateSnapshotIOError
from fpmsdk.files import UnfitFileError, read_regular, sha256

MANIFEST_FILE = "manifest.json"
MANIFEST_LIMIT_BYTES = 64 * 1024**2


def pin_state_snapshot(section: dict[str, Any]) -> None:
    """Make the path absolute, lexically so that a mount alias stays valid, and fill in the digest where none is given.

    Parameters
    ----------
    section: the stored form of `estimator_config.state_snapshot`, changed in place.

    Raises
    ------
    StateSnapshotIOError, StateSnapshotError: the manifest has to be read and cannot be.
    """
    section["path"] = os.path.abspath(section["path"])
    if section["sha256"] is None:
        section["sha256"] = sha256(read_manifest_bytes(section["path"]))


def read_manifest_bytes(directory: str) -> bytes:
    """The bytes of a snapshot's manifest.

    Raises
    ------
    StateSnapshotIOError: there is none, or it cannot be read.
    StateSnapshotError: no regular file, or larger than a manifest may be.
    """
    path = os.path.join(directory, MANIFEST_FILE)
    try:
        return read_regular(path, limit_bytes=MANIFEST_LIMIT_BYTES)
    except OSError as fault:
        raise StateSnapshotIOError.of(fault, path) from fault
    except ValueError as fault:  # also a path that no file can have
        raise StateSnapshotError(f"{path}: {fault}") from (None if isinstance(fault, UnfitFileError) else fault)
