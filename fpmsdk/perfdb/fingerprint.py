"""Identity of performance data: a digest of everything that table loading reads or is decided by.

Neither the tables nor their meaning are looked at, only names and bytes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from fpmsdk.errors import PerfDataNotAvailableError
from fpmsdk.perfdb.layout import LEGACY_ROOTS, is_resolvable
from fpmsdk.perfdb.roots import SystemsRoot

FORMAT_VERSION = 1


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


_known: dict[tuple[str, str, str | None], Fingerprint] = {}
_known_lock = threading.Lock()


def fingerprint(root: SystemsRoot, system: str, external: str | None = None) -> Fingerprint:
    """Return the fingerprint as first taken by this process; concurrent first calls share one computation.

    Parameters: `external`, a Parquet file outside the root whose same-stem metadata file belongs to it.
    Raises: `PerfDataNotAvailableError` when something cannot be read.
    Source: op-level.md section 1.4, snapshot.md section 7.
    """
    identity = (root.path, system, external)
    with _known_lock:
        if identity not in _known:
            _known[identity] = measure_fingerprint(root, system, external)
        return _known[identity]


def measure_fingerprint(root: SystemsRoot, system: str, external: str | None = None) -> Fingerprint:
    """Return the fingerprint of what is on disk now; see `fingerprint`."""
    try:
        entries = tuple(sorted(_entries(root, system, external), key=lambda entry: entry.name.encode()))
    except OSError as fault:
        raise PerfDataNotAvailableError(
            f"perf database error: cannot read {fault.filename}: {fault.strerror}"
        ) from fault
    digest = hashlib.sha256(msgspec.json.encode((FORMAT_VERSION, entries))).hexdigest()
    return Fingerprint(digest, entries)


def _entries(root: SystemsRoot, system: str, external: str | None) -> Iterator[Entry]:
    for name in filter(is_resolvable, os.listdir(root.path)):
        path = os.path.join(root.path, name)
        if not os.path.isdir(path):
            yield _leaf(path, f"root/{name}")
    data_dir = root.tree(system).data_dir
    if os.path.isdir(data_dir):
        yield from _below(data_dir, "data", frozenset())
    else:
        yield Entry("absent", "data")
    if external is not None:
        for path in (external, f"{os.path.splitext(external)[0]}.metadata.json"):
            yield _leaf(path, f"external/{os.path.basename(path)}")


def _below(directory: str, name: str, ancestors: frozenset[tuple[int, int]]) -> Iterator[Entry]:
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
            yield _leaf(path, f"{name}/{child}")
        elif not (holds_versions and child.startswith("_")):
            yield from _below(path, f"{name}/{child}", ancestors | {identity})


def _leaf(path: str, name: str) -> Entry:
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        regular = False
    if not regular:
        return Entry("unread", name, target=os.readlink(path) if os.path.islink(path) else "")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry("file", name, file.tell(), digest)
