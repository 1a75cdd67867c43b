"""Which files provide the rows of one table, in the order in which the first row of a coordinate wins.

Resolution only: nothing here opens a table.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fpmsdk.errors import PerfDataCorruptError, PerfDataWarning
from fpmsdk.perfdb.layout import COLLECTION_META, COMMUNICATION_FAMILY, REUSE, DataTree, VersionDir
from fpmsdk.perfdb.sidecars import SharingGroup, read_collection_meta, read_reuse
from fpmsdk.perfdb.versions import newest_first, parse_version


class Source(NamedTuple):
    """One file of a table.

    `channel` is primary, declared_reuse, fallback or cross_backend; `version` the one whose directory holds the file;
    `kernel_sources` the kernels whose rows may be taken, None for all rows.
    Source: op-level.md section 1.3.

    >>> Source("data/gemm/vllm/0.22.0/gemm_perf.parquet", "fallback", "0.22.0").kernel_sources is None
    True
    """

    path: str
    channel: str
    version: str
    kernel_sources: frozenset[str] | None = None


def resolve_sources(
    tree: DataTree,
    groups: Sequence[SharingGroup],
    backend: str,
    version: str,
    file: str,
    *,
    shared: bool,
    strict: bool,
) -> tuple[Source, ...]:
    """Return the existing files of a table, most trusted first.

    Parameters: `groups`, the sharing manifest; `shared`, whether other versions and backends may fill in;
    `strict`, whether malformed or incomplete metadata are errors instead of warnings.
    Raises: `PerfDataCorruptError` under `strict`.
    Warns: `PerfDataWarning` for malformed metadata otherwise.
    Source: op-level.md section 1.3; the rule for collectives is the one both public releases follow: older
    versions of the same backend fill in, declared reuse and other backends do not.
    """
    sources: dict[str, Source] = {}
    audit = _Audit(file.removesuffix(".parquet"), strict)
    if found := tree.locate(backend, version, file):
        audit.coverage(found[0])
        sources[found[1]] = Source(found[1], "primary", version)
    if not shared:
        return tuple(sources.values())

    reused = []
    for donor in _declared(tree, backend, version, audit):
        found = tree.locate(backend, donor, file)
        if found and found[0].family != COMMUNICATION_FAMILY and donor != version:
            audit.coverage(found[0])
            sources.setdefault(found[1], Source(found[1], "declared_reuse", donor))
            reused.append(donor)

    for donor in _older(tree, backend, version):
        if donor not in reused and (found := tree.locate(backend, donor, file)):
            audit.metadata(found[0])
            sources.setdefault(found[1], Source(found[1], "fallback", donor))

    for other, kernels in _sharing_backends(groups, backend, file):
        for donor in newest_first(tree.versions(other)):
            found = tree.locate(other, donor, file)
            if found and found[0].family != COMMUNICATION_FAMILY:
                audit.metadata(found[0])
                sources.setdefault(found[1], Source(found[1], "cross_backend", donor, kernels))
    return tuple(sources.values())


def resolve_library_source(tree: DataTree, library: str, version: str | None, file: str) -> tuple[Source, ...]:
    """Return the one file of a communication library: its tables belong to no backend and are never shared."""
    found = tree.locate(library, version, file) if version else None
    return (Source(found[1], "primary", str(version)),) if found else ()


class _Audit:
    """Checks of the metadata beside one table."""

    def __init__(self, table: str, strict: bool) -> None:
        self.table, self.strict = table, strict

    def metadata(self, directory: VersionDir) -> None:
        """Check that the collection record, if there is one, is well-formed."""
        self._listed(directory)

    def coverage(self, directory: VersionDir) -> None:
        """Check under `strict` that the collection record lists the table; legacy places have no records."""
        listed = self._listed(directory)
        if self.strict and not listed and directory.family is not None:
            path = os.path.join(directory.path, COLLECTION_META)
            raise PerfDataCorruptError(
                f"{path}: strict provenance needs a record of table {self.table!r}, which is missing; "
                "add it or set strict_provenance to false",
                path,
            )

    def _listed(self, directory: VersionDir) -> bool:
        try:
            meta = read_collection_meta(os.path.join(directory.path, COLLECTION_META))
        except FileNotFoundError:
            return False
        except PerfDataCorruptError as fault:
            self.refuse_or_warn(fault)
            return False
        return meta.legacy or self.table in meta.tables

    def refuse_or_warn(self, fault: PerfDataCorruptError) -> None:
        if self.strict:
            raise fault
        warnings.warn(f"ignored: {fault}", PerfDataWarning, stacklevel=2)

    def reuse(self, directory: VersionDir) -> list[str]:
        """Return the donor versions that a directory declares for the table."""
        try:
            entries = read_reuse(os.path.join(directory.path, REUSE))
        except FileNotFoundError:
            return []
        except PerfDataCorruptError as fault:
            self.refuse_or_warn(fault)
            return []
        return [donor for table, donor in entries if table == self.table]


def _declared(tree: DataTree, backend: str, version: str, audit: _Audit) -> Iterator[str]:
    for directory in tree.versions(backend).get(version, ()):
        if directory.family is not None:
            yield from audit.reuse(directory)


def _older(tree: DataTree, backend: str, version: str) -> list[str]:
    requested = parse_version(version)
    if requested is None:
        return []
    return newest_first(
        name for name in tree.versions(backend) if (parsed := parse_version(name)) is not None and parsed < requested
    )


def _sharing_backends(groups: Sequence[SharingGroup], backend: str, file: str) -> Iterator[tuple[str, frozenset[str]]]:
    kernels: dict[str, set[str]] = {}
    for group in groups:
        if group.file == file and backend in group.backends:
            for other in group.backends - {backend}:
                kernels.setdefault(other, set()).add(group.kernel_source)
    return ((other, frozenset(kernels[other])) for other in sorted(kernels))
