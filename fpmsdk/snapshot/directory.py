"""Reads a snapshot directory: the pinned manifest, and each recorded file once, its size before its bytes.

Source: snapshot.md section 6.
"""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from fpmsdk.config.schema import shown
from fpmsdk.config.state_snapshot import MANIFEST_FILE, read_manifest_bytes
from fpmsdk.errors import StateSnapshotError, StateSnapshotIOError
from fpmsdk.files import read_large, read_regular, sha256
from fpmsdk.snapshot.manifest import Manifest, RecordedFile, decode_manifest

Content = TypeVar("Content", bytes, memoryview)


class SnapshotDirectory(NamedTuple):
    """A snapshot whose manifest was read and checked; `sha256` is the manifest's."""

    path: str
    sha256: str
    manifest: Manifest

    def read(self, file: RecordedFile) -> bytes:
        """The bytes of a recorded file, checked; use them and read nothing again.

        Raises
        ------
        StateSnapshotIOError: it is missing or cannot be read.
        StateSnapshotError: a link, of another size, or with another digest.
        """
        return self._checked(file, read_regular)

    def read_large(self, file: RecordedFile) -> memoryview:
        """The same of a file that may be very large."""
        return self._checked(file, read_large)

    def _checked(self, file: RecordedFile, read: Callable[..., Content]) -> Content:
        path = os.path.join(self.path, file.path)
        try:
            self._refuse_links(file.path)
            size = os.lstat(path).st_size
            if size != file.size:
                raise StateSnapshotError(f"{path}: expected {file.size} bytes, found {size}")
            content = read(path, limit_bytes=file.size, follow_links=False)
        except OSError as fault:
            raise StateSnapshotIOError.of(fault, path) from fault
        except StateSnapshotError:
            raise
        except ValueError as fault:
            raise StateSnapshotError(f"{path}: {fault}") from None
        digest = sha256(content)
        if digest != file.sha256:
            raise StateSnapshotError(f"{path}: expected SHA-256 {shown(file.sha256)}, found {digest!r}")
        return content

    def _refuse_links(self, relative: str) -> None:
        # The directories on the way; the file itself is opened without following.
        folder = self.path
        for name in relative.split("/")[:-1]:
            folder = os.path.join(folder, name)
            if os.path.islink(folder):
                raise StateSnapshotError(f"{folder}: expected a directory, found a symbolic link")


def open_snapshot(path: str, pinned_sha256: str | None = None) -> SnapshotDirectory:
    """Read the manifest of a snapshot.

    Parameters
    ----------
    path: absolute path of the directory.
    pinned_sha256: what a configuration expects of the manifest; None for whoever only looks.

    Raises
    ------
    StateSnapshotIOError: no snapshot there, or it cannot be read.
    StateSnapshotError: not the pinned manifest, of another version, or malformed.
    """
    content = read_manifest_bytes(path)
    where = os.path.join(path, MANIFEST_FILE)
    digest = sha256(content)
    if pinned_sha256 is not None and digest != pinned_sha256:
        raise StateSnapshotError(
            f"{where}: expected SHA-256 {pinned_sha256!r}, as the configuration pins it, found {digest!r}"
        )
    return SnapshotDirectory(path, digest, decode_manifest(content, where))
