"""Identity of performance data: a digest of everything that table loading reads or is decided by.

Neither the tables nor their meaning are looked at, only names and bytes. What a process saw of a root when it first
loaded it is remembered as long as the process lives: a model is saved and restored with the data it really read.
Source: snapshot.md section 7.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from fpmsdk.errors import PerfDataNotAvailableError
from fpmsdk.perfdb import forward_cells
from fpmsdk.perfdb.database import forget_databases
from fpmsdk.perfdb.forward_schema import sidecar_path
from fpmsdk.perfdb.layout import LEGACY_ROOTS, is_resolvable
from fpmsdk.perfdb.roots import SystemsRoot, forget_root

FORMAT_VERSION = 2
_BUFFER_BYTES = 1 << 18  # stays in the cache between reading and hashing


class Entry(NamedTuple):
    """One thing that resolution can see.

    `kind` is file, directory, unread (a dangling link or special file) or absent (the data dir, when missing);
    `name` starts with root/, data/ or external/; `size_bytes` and `sha256` describe a file's content, `target`
    a link that leads nowhere.
    """

    kind: str
    name: str
    size_bytes: int = 0
    sha256: str = ""
    target: str = ""


class Fingerprint(NamedTuple):
    """A digest and the entries it covers, sorted by name."""

    digest: str
    entries: tuple[Entry, ...]


# Content by path that somebody has just read and digested: (size in bytes, SHA-256).
Digested = Mapping[str, tuple[int, str]]

_known: dict[tuple[str, str, str | None], Fingerprint] = {}
_known_lock = threading.Lock()


def fingerprint(root: SystemsRoot, system: str, external: str | None = None) -> Fingerprint:
    """Return the fingerprint as first taken by this process; concurrent first calls share one computation.

    The first call for a key ends the sharing of whatever the process parsed of that root and system before, which may
    be older than what the fingerprint covers: open the root after this call.

    Parameters: `root`, made anew for this call; `external`, a Parquet file outside the root whose same-stem metadata
    file belongs to it.
    Raises: `PerfDataNotAvailableError` when something cannot be read.
    Source: op-level.md section 1.4, snapshot.md section 7.
    """
    identity = (root.path, system, external)
    with _known_lock:
        if identity not in _known:
            _known[identity] = measure_fingerprint(root, system, external)
            _stop_sharing(root, system, external)
        return _known[identity]


def known_fingerprint(root_path: str, system: str, external: str | None = None) -> Fingerprint | None:
    """Return what `fingerprint` has taken in this process, None when it has not."""
    with _known_lock:
        return _known.get((root_path, system, external))


def accept_fingerprint(root: SystemsRoot, system: str, external: str | None, measured: Fingerprint) -> Fingerprint:
    """Remember a fingerprint just measured as the first one, unless one is known, and stop sharing older tables.

    Parameters: `root`, with which it was measured.
    Returns: the one that is remembered now.
    """
    with _known_lock:
        known = _known.setdefault((root.path, system, external), measured)
        _stop_sharing(root, system, external)
        return known


def _stop_sharing(root: SystemsRoot, system: str, external: str | None) -> None:
    # Caches of parsed data are keyed by path, not by content.
    forget_root(root.path)
    forget_databases(root.path, system)
    forward_cells.forget_tables(root.tree(system).data_dir, external)


def measure_fingerprint(
    root: SystemsRoot, system: str, external: str | None = None, digested: Digested | None = None
) -> Fingerprint:
    """Return the fingerprint of what is on disk now; see `fingerprint`.

    Parameters: `digested`, files that need not be read again.
    """
    try:
        found = _entries(root, system, external, _Reader(digested or {}))
        entries = tuple(sorted(found, key=lambda entry: entry.name.encode()))
    except OSError as fault:
        raise PerfDataNotAvailableError(
            f"perf database error: cannot read {fault.filename}: {fault.strerror}"
        ) from fault
    digest = hashlib.sha256(msgspec.json.encode((FORMAT_VERSION, entries))).hexdigest()
    return Fingerprint(digest, entries)


def first_change(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> str:
    """Return the first entry, by name, in which two fingerprints differ, with what was and what is.

    >>> first_change((Entry("file", "root/a", 1, "aa"),), (Entry("file", "root/a", 2, "bb"),))
    'root/a: expected file of 1 bytes with SHA-256 aa, found file of 2 bytes with SHA-256 bb'
    """
    old, new = ({entry.name: entry for entry in entries} for entries in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            return f"{name}: expected {_described(old.get(name))}, found {_described(new.get(name))}"
    return "nothing"


def _described(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    if entry.kind == "file":
        return f"file of {entry.size_bytes} bytes with SHA-256 {entry.sha256}"
    return f"{entry.kind} -> {entry.target}" if entry.target else entry.kind


class _Reader:
    """Describes files, all through one buffer; `digested` ones are not read."""

    def __init__(self, digested: Digested) -> None:
        self._digested = digested
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def leaf(self, path: str, name: str) -> Entry:
        """The entry of what is no directory."""
        if path in self._digested:
            return Entry("file", name, *self._digested[path])
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return _unread(path, name)
        except OSError as fault:
            # What has no content to read cannot always be opened either: a socket, a link to itself.
            if fault.errno in (errno.ENXIO, errno.ELOOP):
                return _unread(path, name)
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return _unread(path, name)
            digest, size = hashlib.sha256(), 0
            while count := os.readv(descriptor, [self._buffer]):
                digest.update(self._buffer[:count])
                size += count
        finally:
            os.close(descriptor)
        return Entry("file", name, size, digest.hexdigest())


def _entries(root: SystemsRoot, system: str, external: str | None, reader: _Reader) -> Iterator[Entry]:
    for name, path, is_directory in _children(root.path):
        if not is_directory:
            yield reader.leaf(path, f"root/{name}")
    data_dir = root.tree(system).data_dir
    if os.path.isdir(data_dir):
        yield from _below(data_dir, "data", frozenset(), reader)
    else:
        yield Entry("absent", "data")
    if external is not None:
        # Wherever it lies and whatever it is called.
        yield reader.leaf(external, "external/table")
        yield reader.leaf(sidecar_path(external), "external/metadata")


def _children(directory: str) -> list[tuple[str, str, bool]]:
    # Name, path and whether it is a directory, links followed. Most file systems tell that without a look at each.
    with os.scandir(directory) as entries:
        return [(entry.name, entry.path, entry.is_dir()) for entry in entries if is_resolvable(entry.name)]


def _below(directory: str, name: str, ancestors: frozenset[tuple[int, int]], reader: _Reader) -> Iterator[Entry]:
    status = os.stat(directory)
    identity = (status.st_dev, status.st_ino)
    # A link to an ancestor would never end.
    if identity in ancestors:
        yield Entry("unread", name)
        return
    yield Entry("directory", name)
    holds_versions = os.path.basename(directory) in LEGACY_ROOTS
    for child, path, is_directory in _children(directory):
        if not is_directory:
            yield reader.leaf(path, f"{name}/{child}")
        elif not (holds_versions and child.startswith("_")):
            yield from _below(path, f"{name}/{child}", ancestors | {identity}, reader)


def _unread(path: str, name: str) -> Entry:
    return Entry("unread", name, target=os.readlink(path) if os.path.islink(path) else "")
