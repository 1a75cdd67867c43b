"""Identity of performance data: a digest of everything that table loading reads or is decided by.

Neither the tables nor their meaning are looked at, only names and bytes. What a process saw of a root when it first
loaded it is remembered as long as the process lives: a model is saved and restored with the data it really read.
Source: snapshot.md section 7.
"""

from __future__ import annotations

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

    Parameters: `external`, a Parquet file outside the root whose same-stem metadata file belongs to it.
    Raises: `PerfDataNotAvailableError` when something cannot be read.
    Source: op-level.md section 1.4, snapshot.md section 7.
    """
    identity = (root.path, system, external)
    with _known_lock:
        if identity not in _known:
            _known[identity] = measure_fingerprint(SystemsRoot(root.path), system, external)
            _stop_sharing(root.path, system, external)
        return _known[identity]


def known_fingerprint(root_path: str, system: str, external: str | None = None) -> Fingerprint | None:
    """Return what `fingerprint` has taken in this process, None when it has not."""
    with _known_lock:
        return _known.get((root_path, system, external))


def accept_fingerprint(root_path: str, system: str, external: str | None, measured: Fingerprint) -> Fingerprint:
    """Remember a fingerprint just measured as the first one, unless one is known, and stop sharing older tables.

    Returns: the one that is remembered now.
    """
    with _known_lock:
        known = _known.setdefault((root_path, system, external), measured)
        _stop_sharing(root_path, system, external)
        return known


def _stop_sharing(root_path: str, system: str, external: str | None) -> None:
    # Caches of parsed data are keyed by path, not by content.
    data_dir = SystemsRoot(root_path).tree(system).data_dir
    forget_root(root_path)
    forget_databases(root_path, system)
    forward_cells.forget_tables(data_dir, external)


def measure_fingerprint(
    root: SystemsRoot, system: str, external: str | None = None, digested: Digested | None = None
) -> Fingerprint:
    """Return the fingerprint of what is on disk now; see `fingerprint`.

    Parameters: `digested`, files that need not be read again.
    """
    try:
        entries = tuple(sorted(_entries(root, system, external, digested or {}), key=lambda entry: entry.name.encode()))
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


def _entries(root: SystemsRoot, system: str, external: str | None, digested: Digested) -> Iterator[Entry]:
    for name in filter(is_resolvable, os.listdir(root.path)):
        path = os.path.join(root.path, name)
        if not os.path.isdir(path):
            yield _leaf(path, f"root/{name}", digested)
    data_dir = root.tree(system).data_dir
    if os.path.isdir(data_dir):
        yield from _below(data_dir, "data", frozenset(), digested)
    else:
        yield Entry("absent", "data")
    if external is not None:
        # Wherever it lies and whatever it is called.
        yield _leaf(external, "external/table", digested)
        yield _leaf(sidecar_path(external), "external/metadata", digested)


def _below(directory: str, name: str, ancestors: frozenset[tuple[int, int]], digested: Digested) -> Iterator[Entry]:
    status = os.stat(directory)
    identity = (status.st_dev, status.st_ino)
    # A link to an ancestor would never end.
    if identity in ancestors:
        yield Entry("unread", name)
        return
    yield Entry("directory", name)
    holds_versions = os.path.basename(directory) in LEGACY_ROOTS
    for child in filter(is_resolvable, os.listdir(directory)):
        path = os.path.join(directory, child)
        if not os.path.isdir(path):
            yield _leaf(path, f"{name}/{child}", digested)
        elif not (holds_versions and child.startswith("_")):
            yield from _below(path, f"{name}/{child}", ancestors | {identity}, digested)


def _leaf(path: str, name: str, digested: Digested) -> Entry:
    if path in digested:
        return Entry("file", name, *digested[path])
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        regular = False
    if not regular:
        return Entry("unread", name, target=os.readlink(path) if os.path.islink(path) else "")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry("file", name, file.tell(), digest)
