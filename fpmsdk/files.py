"""Writing a file whole or not at all, and telling a file from its stand-in; not what goes into it."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_GIT_LFS_POINTER = b"version https://git-lfs"
# Names of the hidden files in which `whole_file` writes; one that is still there was left behind by a killed process.
DRAFT_PREFIX = ".fpmsdk-"


def is_git_lfs_pointer(content: bytes) -> bool:
    """Whether bytes read from a file are the pointer that a checkout without Git LFS has in its place.

    Parameters
    ----------
    content: the file, or its first bytes.

    Example
    -------
    >>> is_git_lfs_pointer(b"version https://git-lfs.github.com/spec/v1")
    True
    """
    return content.startswith(_GIT_LFS_POINTER)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write; it takes the place of `path` when the block ends, and never when it fails.

    A symbolic link stays and its target is written, permissions stay, and what is no regular file (a device, a
    pipe) is written directly. Until then the bytes are in a hidden file of the same directory, which only a killed
    process leaves behind.

    Parameters
    ----------
    path: the file, existing or not, in an existing directory.

    Raises
    ------
    OSError: it cannot be written; names `path`.

    Example
    -------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "report.json"
    >>> with whole_file(target) as file:
    ...     _ = file.write(b"{}")
    >>> target.read_bytes()
    b'{}'
    """
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    # Named by chance alone: threads do not meet, and a long target name fits.
    draft = target.with_name(f"{DRAFT_PREFIX}{os.urandom(8).hex()}")
    try:
        with _blaming(path, draft), open(draft, "x+b") as file:
            if mode is not None:
                os.chmod(draft, stat.S_IMODE(mode))
            yield file
        with _blaming(path, draft):
            os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


@contextmanager
def _blaming(path: str | os.PathLike[str], draft: Path) -> Iterator[None]:
    # The hidden file means nothing to whoever named the target.
    try:
        yield
    except OSError as fault:
        if fault.errno is None or fault.filename not in (None, os.fspath(draft)):
            raise
        raise type(fault)(fault.errno, fault.strerror or str(fault), os.fspath(path)) from None


class UnfitFileError(ValueError):
    """What is at a path is no regular file, or larger than whoever reads it accepts."""


def read_regular(path: str | os.PathLike[str], *, limit_bytes: int, follow_links: bool = True) -> bytes:
    """The content of a regular file whose size was looked at before anything of it is read.

    Neither a pipe nor a device is ever waited for.

    Parameters
    ----------
    limit_bytes: the largest size that is read.
    follow_links: whether `path` itself may be a symbolic link.

    Raises
    ------
    UnfitFileError: no regular file, larger than `limit_bytes`, or of another size than it said.
    OSError: it cannot be read.

    Example
    -------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "state"
    >>> _ = file.write_bytes(b"123")
    >>> read_regular(file, limit_bytes=3)
    b'123'
    >>> read_regular(file, limit_bytes=2)
    Traceback (most recent call last):
        ...
    fpmsdk.files.UnfitFileError: expected at most 2 bytes, found 3
    """
    with _opened(path, limit_bytes, follow_links) as (file, size):
        content = file.read(size + 1)
    if len(content) != size:
        raise UnfitFileError(f"expected {size} bytes, as the file said, found {len(content)}")
    return content


def read_large(path: str | os.PathLike[str], *, limit_bytes: int, follow_links: bool = True) -> memoryview:
    """`read_regular` of what may be very large, into memory with large pages where the system has them.

    Handing out small pages takes longer than filling them.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "state"
    >>> _ = file.write_bytes(b"123")
    >>> read_large(file, limit_bytes=3).tobytes()
    b'123'
    """
    import numpy as np

    with _opened(path, limit_bytes, follow_links) as (file, size):
        content = np.empty(size, np.uint8).data  # numpy asks for them
        found = file.readinto(content) + len(file.read(1))
    if found != size:
        raise UnfitFileError(f"expected {size} bytes, as the file said, found {found}")
    return content


@contextmanager
def _opened(
    path: str | os.PathLike[str], limit_bytes: int, follow_links: bool
) -> Iterator[tuple[io.BufferedReader, int]]:
    # The file and its size.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as fault:
        if not follow_links and os.path.islink(path):
            raise UnfitFileError("expected a regular file, found a symbolic link") from fault
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise UnfitFileError("expected a regular file")
    with open(descriptor, "rb") as file:
        if status.st_size > limit_bytes:
            raise UnfitFileError(f"expected at most {limit_bytes} bytes, found {status.st_size}")
        yield file, status.st_size


def sha256(content: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal. `hashlib`, which brings all of OpenSSL, is loaded by the first call and not before."""
    import hashlib

    return hashlib.sha256(content).hexdigest()


def write_directory(
    path: str | os.PathLike[str], files: Mapping[str, bytes], confirm: Callable[[], None] | None = None
) -> None:
    """Make a directory of some files, whole or not at all; everything is durable when the call returns.

    Until then it is a hidden directory beside `path`, which only a killed process leaves behind.

    Parameters
    ----------
    path: where nothing is yet, in an existing directory.
    files: contents by name, or by path below the directory, written in this order.
    confirm: called when everything is written and before it is in its place; what it raises leaves nothing behind.

    Raises
    ------
    FileExistsError: something is at `path`.
    OSError: it cannot be written; nothing is left.

    Example
    -------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> write_directory(target, {"manifest.json": b"{}"})
    >>> (target / "manifest.json").read_bytes()
    b'{}'
    """
    target = os.path.abspath(path)
    parent = os.path.dirname(target)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "only written where nothing is", target)
    draft = os.path.join(parent, f".fpmsdk-{os.urandom(8).hex()}")
    with _blaming(path, Path(draft)):
        os.mkdir(draft)
    try:
        for name, content in files.items():
            os.makedirs(os.path.dirname(os.path.join(draft, name)), exist_ok=True)
            with open(os.path.join(draft, name), "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for folder, _, _ in os.walk(draft):
            _sync(folder)
        if confirm is not None:
            confirm()
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "only written where nothing is", target)
        # Of two writers one finds the other's directory, which is not empty.
        os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync(parent)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
