"""What a configuration says of a learned source, as far as its path and its digest go.

What is in an artifact or a checkpoint is read elsewhere. Source: regression-and-learned.md section 3.5.
"""

import os
from typing import Any

from fpmsdk.errors import ConfigError, PerfDataNotAvailableError, StateSnapshotIOError
from fpmsdk.files import read_regular, sha256

SOURCE_LIMIT_BYTES = 1024**3
CHECKPOINT_MANIFEST = "manifest.json"
# Model and system of a model that was built from an artifact alone, and its artifact's path until it is saved.
FROM_LEARNED = "from_learned"
_PATH = "estimator_config.fpm_learned"


def pin_learned_source(estimator: dict[str, Any]) -> None:
    """Make the path of a learned source absolute and pin its content.

    The digest is that of the artifact, or of a checkpoint's manifest, which pins the other files. Where the source lies
    in a saved state that pins it already, it is left to the restore.

    Parameters
    ----------
    estimator: the stored form of `estimator_config`, changed in place.

    Raises
    ------
    PerfDataNotAvailableError: the source cannot be read; `StateSnapshotIOError` where it belongs to a saved state.
    ConfigError: it is no regular file, or another one than `source_sha256` says.
    """
    learned = estimator["fpm_learned"]
    name = "artifact_path" if learned["artifact_path"] is not None else "checkpoint_path"
    learned[name] = os.path.abspath(learned[name])
    in_snapshot = estimator["state_snapshot"] is not None
    if in_snapshot and learned["source_sha256"] is not None:
        return
    place = learned[name] if name == "artifact_path" else os.path.join(learned[name], CHECKPOINT_MANIFEST)
    try:
        found = sha256(read_regular(place, limit_bytes=SOURCE_LIMIT_BYTES))
    except OSError as fault:
        if in_snapshot:
            raise StateSnapshotIOError.of(fault, place) from fault
        raise PerfDataNotAvailableError(f"{_PATH}.{name}: {place} cannot be read: {fault}") from fault
    except ValueError as fault:
        raise ConfigError(f"invalid engine config: {_PATH}.{name}: {place}: {fault}", f"{_PATH}.{name}") from None
    pinned = learned["source_sha256"]
    if pinned is not None and pinned.lower() != found:
        raise ConfigError(
            f"invalid engine config: {_PATH}.source_sha256: expected {found!r}, as of {place}, found {pinned!r}; "
            "the source changed since",
            f"{_PATH}.source_sha256",
        )
    learned["source_sha256"] = found
