"""Copies performance data: exactly what a fingerprint covers, so that the copy has the same fingerprint.

Where the copy goes is the caller's; nothing of the data is understood. Source: snapshot.md section 7.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from fpmsdk.errors import StateSnapshotError
from fpmsdk.perfdb.fingerprint import Entry, Fingerprint
from fpmsdk.perfdb.forward_schema import sidecar_path
from fpmsdk.perfdb.roots import SystemsRoot

SYSTEMS = "systems"
EXTERNAL_TABLE = "external/table.parquet"
EXTERNAL_METADATA = "external/table.metadata.json"


class Item(NamedTuple):
    """One thing to make: a directory, a link that leads nowhere to `target`, or the copy of the file `source`.

    `path` is relative to the packed data; `entry` tells what the copy must be.
    """

    entry: Entry
    path: str
    source: str


def packed_items(root: SystemsRoot, system: str, external: str | None, covered: Fingerprint) -> Iterator[Item]:
    """Yield what to make for a packed copy of the data of a system, directories before what is in them.

    Raises: `StateSnapshotError` when the data cannot be packed; says why.
    """
    data_dir = _plain_data_dir(root, system)
    sources = {"root": root.path, "data": os.path.join(root.path, data_dir)}
    if external is not None:
        sources |= {"external/table": external, "external/metadata": sidecar_path(external)}
    places = {"root": SYSTEMS, "data": f"{SYSTEMS}/{data_dir}"}
    places |= {"external/table": EXTERNAL_TABLE, "external/metadata": EXTERNAL_METADATA}
    for entry in covered.entries:
        if entry.kind == "absent":
            continue
        base = entry.name if entry.name in sources else entry.name.partition("/")[0]
        rest = entry.name[len(base) :]
        if entry.kind == "unread" and not entry.target:
            raise StateSnapshotError(
                f"include_perf_db: {sources[base]}{rest} is neither a file nor a directory that ends, and cannot be "
                "packed; remove it, or save without include_perf_db"
            )
        yield Item(entry, places[base] + rest, sources[base] + rest)


def _plain_data_dir(root: SystemsRoot, system: str) -> str:
    # The description is copied as it is, so its data_dir has to mean the copy.
    written = root.spec(system).data_dir
    path = PurePosixPath(written)
    where = f"include_perf_db: data_dir {written!r} of {system} in {root.path}"
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise StateSnapshotError(
            f"{where} is not made of plain relative names; such data can be referenced but not packed: save without "
            "include_perf_db"
        )
    inside = os.path.realpath(root.path)
    if os.path.commonpath([inside, os.path.realpath(os.path.join(root.path, written))]) != inside:
        raise StateSnapshotError(
            f"{where} leads outside of the root; such data can be referenced but not packed: save without "
            "include_perf_db"
        )
    return str(path)
