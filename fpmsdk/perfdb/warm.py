"""Fill the compiled-table cache ahead of time, for images and read-only installs."""

from __future__ import annotations

import os

from fpmsdk.errors import PerfDataNotAvailableError
from fpmsdk.perfdb.database import open_database
from fpmsdk.perfdb.layout import BACKENDS
from fpmsdk.perfdb.roots import SystemsRoot, open_root
from fpmsdk.perfdb.tables import SCHEMAS


def compile_tables(root: str | os.PathLike[str] | SystemsRoot, system: str) -> int:
    """Load every table of the queryable versions of a system, so that the cache holds it.

    Returns: the number of tables that have rows.
    Raises: `UnknownSystemError`; `PerfDataCorruptError` for the first damaged file.
    """
    root = root if isinstance(root, SystemsRoot) else open_root(root)
    compiled = 0
    for backend in BACKENDS:
        slots = root.slots(system, backend)
        versions = root.tree(system).versions(backend) if slots is None else dict.fromkeys(slots.listed().values())
        for version in versions:
            database = open_database(root, system, backend, version, tolerate_dirless=True)
            for name in SCHEMAS:
                try:
                    database.table(name)
                except PerfDataNotAvailableError:
                    continue
                compiled += 1
    return compiled
