"""Writes a directory whole or not at all: staged beside its destination, made durable, renamed into place.

Source: snapshot.md section 5.
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from fpmsdk._ext.writeback import begin_writeback
from fpmsdk.errors import StateSnapshotError, StateSnapshotExistsError, StateSnapshotIOError
from fpmsdk.snapshot.digest import BackgroundDigest
from fpmsdk.snapshot.manifest import RecordedFile

# Hidden, and told from a snapshot at a glance. Nothing ever reads one; only a killed process leaves one behind.
STAGING_PREFIX = ".fpmsdk-snapshot-staging-"
# Larger writes are slower: the kernel looks for larger pieces of memory to keep them in.
_CHUNK_BYTES = 1 << 20
_MOST_OPEN_FILES = 16


class Staging:
    """A directory in the making. Paths are relative, with slashes; nothing is durable before `make_durable` returns."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._directories = [folder]
        self._written: list[int] = []  # descriptors of the files that still need their fsync

    def path(self, relative: str) -> str:
        """Where a part lies until it is published."""
        return os.path.join(self._folder, relative)

    def directory(self, relative: str) -> None:
        """Make a directory and those it lies in, unless they are there."""
        if relative and self.path(relative) not in self._directories:
            self.directory(os.path.dirname(relative))
            os.mkdir(self.path(relative))
            self._directories.append(self.path(relative))

    def write(self, relative: str, content: bytes | memoryview, digest: BackgroundDigest | None = None) -> RecordedFile:
        """Write a file; `digest` is that of its content, where somebody has begun it."""
        if digest is None:
            digest = BackgroundDigest()
            digest.update(content)
        view = memoryview(content)
        self._store(relative, (view[at : at + _CHUNK_BYTES] for at in range(0, len(view), _CHUNK_BYTES)))
        return RecordedFile(relative, len(view), digest.hexdigest())

    def copy(self, source: BinaryIO, relative: str) -> RecordedFile:
        """Write a file with what is left to read of another."""
        digest, size = hashlib.sha256(), 0

        def chunks() -> Iterator[bytes]:
            nonlocal size
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        self._store(relative, chunks())
        return RecordedFile(relative, size, digest.hexdigest())

    def link(self, target: str, relative: str) -> None:
        """Make a symbolic link."""
        self.directory(os.path.dirname(relative))
        os.symlink(target, self.path(relative))

    def _store(self, relative: str, chunks: Iterable[bytes | memoryview]) -> None:
        self.directory(os.path.dirname(relative))
        if len(self._written) == _MOST_OPEN_FILES:
            self._settle()
        descriptor = os.open(self.path(relative), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._written.append(descriptor)
        for chunk in chunks:
            _write_all(descriptor, chunk)
            begin_writeback(descriptor)

    def _settle(self) -> None:
        # All are on their way to the disk already; the first wait is the longest.
        for descriptor in self._written:
            os.fsync(descriptor)
        self.close()

    def make_durable(self) -> None:
        """Make every file durable, then the entries of every directory, inner ones first."""
        self._settle()
        for folder in reversed(self._directories):
            _sync_directory(folder)

    def close(self) -> None:
        """Let go of files whose bytes are durable, or no longer wanted."""
        while self._written:
            os.close(self._written.pop())


def publish(destination: str, write: Callable[[Staging], None]) -> None:
    """Make a directory of what `write` stages.

    Parameters
    ----------
    destination: absolute path; nothing may be there, and its parent is a directory.

    Raises
    ------
    StateSnapshotIOError: the destination exists (then also a `FileExistsError`, of two concurrent calls in one of
        them), or something cannot be written. Nothing is left behind.
    """
    parent = os.path.dirname(destination)
    refuse_existing(destination)
    try:
        # Named by chance alone, so that a long destination fits.
        folder = os.path.join(parent, f"{STAGING_PREFIX}{os.urandom(8).hex()}")
        try:
            os.mkdir(folder)
        except OSError as fault:
            # The hidden directory means nothing to whoever named the destination.
            fault.filename = destination
            raise
        staging = Staging(folder)
        try:
            write(staging)
            staging.make_durable()
            _move(folder, destination)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            staging.close()
    except OSError as fault:
        raise StateSnapshotIOError.of(fault, destination) from fault
    with contextlib.suppress(OSError):
        _sync_directory(parent)


def refuse_existing(destination: str) -> None:
    """Raise unless a directory can be made at an absolute path, as far as names go.

    Raises
    ------
    StateSnapshotIOError: something is there, or it would lie below what is no directory.
    """
    try:
        os.lstat(destination)
    except FileNotFoundError:
        return
    except OSError as fault:
        raise StateSnapshotIOError.of(fault, destination) from fault
    except ValueError as fault:
        raise StateSnapshotError(f"{destination!r}: {fault}") from None
    raise StateSnapshotExistsError(errno.EEXIST, "a snapshot is only written where nothing is", destination)


def _move(folder: str, destination: str) -> None:
    try:
        os.rename(folder, destination)
    except OSError:
        # Another writer was first.
        refuse_existing(destination)
        raise


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    # One call may take only a part.
    written = os.write(descriptor, content)
    while written < len(content):
        written += os.write(descriptor, memoryview(content)[written:])


def _sync_directory(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
