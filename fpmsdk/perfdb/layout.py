"""Directories below a system's data dir: which versions of which backend exist where.

Looks at names and marker files only; opens no table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

COMMUNICATION_FAMILY = "comm"
BACKENDS = ("trtllm", "sglang", "vllm")
# First-level names that mean the legacy layout; every other one is a family of tables.
LEGACY_ROOTS = frozenset({*BACKENDS, "nccl", "oneccl"})
COLLECTION_META = "collection_meta.yaml"
REUSE = "reuse.yaml"
INCOMPLETE = "INCOMPLETE.txt"
MARKERS = frozenset({COLLECTION_META, REUSE, INCOMPLETE, "SHARED_LAYER_REUSE.txt"})


class VersionDir(NamedTuple):
    """One `<family>/<backend>/<version>` directory, or legacy `<backend>/<version>` with family None."""

    path: str
    family: str | None

    @property
    def usable(self) -> bool:
        """Whether tables may be taken from here: an incomplete collection without metadata may not."""
        return os.path.isfile(os.path.join(self.path, COLLECTION_META)) or not os.path.isfile(
            os.path.join(self.path, INCOMPLETE)
        )

    def holds_data(self) -> bool:
        """Whether there is any file that is not a marker."""
        return any(name not in MARKERS and os.path.isfile(os.path.join(self.path, name)) for name in _names(self.path))


class DataTree:
    """The directories of one system as they were when first asked for.

    Source: op-level.md sections 1.1 and 1.3. Families are visited in sorted order, so that the answer does
    not depend on the file system.
    """

    def __init__(self, data_dir: str) -> None:
        self.data_dir = data_dir
        self._versions: dict[str, dict[str, tuple[VersionDir, ...]]] = {}

    @cached_property
    def _families(self) -> tuple[str, ...]:
        return tuple(name for name in _directories(self.data_dir) if name not in LEGACY_ROOTS)

    def versions(self, backend: str) -> dict[str, tuple[VersionDir, ...]]:
        """Return every version directory of a backend by version; families first, the legacy place last."""
        if backend not in self._versions:
            found: dict[str, list[VersionDir]] = {}
            for family in (*self._families, None):
                place = os.path.join(self.data_dir, *((family,) if family else ()), backend)
                for version in _directories(place):
                    if not version.startswith("_"):
                        found.setdefault(version, []).append(VersionDir(os.path.join(place, version), family))
            self._versions[backend] = {version: tuple(dirs) for version, dirs in found.items()}
        return self._versions[backend]

    def locate(self, backend: str, version: str, file: str) -> tuple[VersionDir, str] | None:
        """Return the directory and path that provide `file`, or None."""
        for directory in self.versions(backend).get(version, ()):
            path = os.path.join(directory.path, file)
            if os.path.isfile(path) and directory.usable:
                return directory, path
        return None


def _names(path: str) -> list[str]:
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(name for name in names if is_resolvable(name))


def is_resolvable(name: str) -> bool:
    """Whether a directory entry takes part in resolution: hidden names and names that are not UTF-8 do not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith(".")


def _directories(path: str) -> Iterator[str]:
    return (name for name in _names(path) if os.path.isdir(os.path.join(path, name)))
