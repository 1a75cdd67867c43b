"""From a configuration to the snapshot it pins, and from a snapshot directory to its configuration.

Source: snapshot.md sections 2 and 6.
"""

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any

from fpmsdk.config.schema import shown
from fpmsdk.config.state_snapshot import MANIFEST_LIMIT_BYTES
from fpmsdk.errors import ConfigError, StateSnapshotError, StateSnapshotIOError
from fpmsdk.files import read_regular
from fpmsdk.snapshot.directory import SnapshotDirectory, open_snapshot
from fpmsdk.snapshot.identity import first_difference, identity_of, kind_of
from fpmsdk.snapshot.manifest import CONFIG_FILE, decode_document


def snapshot_path(path: str | bytes | PathLike[Any]) -> str:
    """The directory that a caller names, absolute and with links kept."""
    return os.path.abspath(os.fsdecode(path))


def pinned_section(config: Any) -> dict[str, Any] | None:
    """What a configuration, checked or not, says of a state snapshot; None when it says nothing."""
    estimator = config.get("estimator_config") if isinstance(config, Mapping) else None
    section = estimator.get("state_snapshot") if isinstance(estimator, Mapping) else None
    return dict(section) if isinstance(section, Mapping) else None


def read_config(directory: str) -> dict[str, Any]:
    """The configuration that a snapshot holds.

    Raises
    ------
    StateSnapshotIOError, StateSnapshotError: there is none, or it is no configuration of a snapshot.
    ConfigError: it pins another directory, as that of a copied snapshot does.
    """
    path = os.path.join(directory, CONFIG_FILE)
    try:
        content = read_regular(path, limit_bytes=MANIFEST_LIMIT_BYTES)
    except OSError as fault:
        raise StateSnapshotIOError.of(fault, path) from fault
    except ValueError as fault:
        raise StateSnapshotError(f"{path}: {fault}") from None
    config = decode_document(content, path)
    pinned = (pinned_section(config) or {}).get("path")
    if not isinstance(pinned, str):
        raise StateSnapshotError(
            f"{path}: estimator_config.state_snapshot.path: expected a path, found {shown(pinned)}"
        )
    if not _is_same(directory, pinned):
        raise ConfigError(
            f"{directory} is not the directory that its configuration pins, {pinned}; restore that one, or give as "
            "config= a configuration that names the copy",
            "estimator_config.state_snapshot.path",
        )
    return config


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def open_pinned(config: Mapping[str, Any]) -> SnapshotDirectory:
    """The snapshot that a canonical configuration pins, checked as far as its manifest.

    Raises
    ------
    StateSnapshotIOError, StateSnapshotError: missing, not the pinned one, of another version or of another model.
    """
    section = config["estimator_config"]["state_snapshot"]
    snapshot = open_snapshot(section["path"], section["sha256"])
    if difference := first_difference(snapshot.manifest.identity, identity_of(config), "identity"):
        raise StateSnapshotError(f"{snapshot.path}: {difference}; a snapshot restores the model that it was saved of")
    kind = kind_of(config)
    if snapshot.manifest.kind != kind:
        raise StateSnapshotError(f"{snapshot.path}: kind: expected {kind}, found {shown(snapshot.manifest.kind)}")
    return snapshot
