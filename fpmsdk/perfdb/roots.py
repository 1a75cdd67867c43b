"""One systems root: its systems, versions and the files behind each table.

Finding a root is the business of `fpmsdk.config.systems`; loading tables that of `database`.
"""

from __future__ import annotations

import difflib
import os

from fpmsdk.errors import PerfDataNotAvailableError, UnknownSystemError
from fpmsdk.perfdb.documents import read_mapping
from fpmsdk.perfdb.hardware import SystemSpec, parse_system
from fpmsdk.perfdb.lanes import LANE_DEFAULTS
from fpmsdk.perfdb.layout import DataTree
from fpmsdk.perfdb.sidecars import SHARING_MANIFEST, SharingGroup, read_sharing_manifest
from fpmsdk.perfdb.sources import Source, resolve_library_source, resolve_sources
from fpmsdk.perfdb.tables import SCHEMAS
from fpmsdk.perfdb.versions import (
    QUERY_VERSIONS,
    ResolvedVersion,
    Slots,
    choose,
    newer_than,
    newest_first,
    overriding_systems,
    slot_entry,
)

_NOT_SYSTEMS = frozenset({QUERY_VERSIONS, SHARING_MANIFEST, LANE_DEFAULTS})


class SystemsRoot:
    """A directory of hardware descriptions and measurements, as it was when first looked at.

    Parameters: `path`, the directory. Nothing is read before it is needed; what was read is kept.
    Source: op-level.md section 1.

    >>> import tempfile
    >>> from fpmsdk.sample.tiny import write_systems
    >>> root = open_root(write_systems(tempfile.mkdtemp()))
    >>> root.systems(), root.resolve_version("tiny_gpu", "vllm", None).version
    (('tiny_gpu',), '0.24.0')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        # Everything read stays as first read, so that one object never mixes two states of the directory.
        self._specs: dict[str, SystemSpec] = {}
        self._trees: dict[str, DataTree] = {}
        self._slots: dict[tuple[str, str], Slots | None] = {}
        self._groups: tuple[SharingGroup, ...] | None = None

    def systems(self) -> tuple[str, ...]:
        """Return the names of the described systems, sorted.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> root.systems()
        ('tiny_gpu',)
        """
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return tuple(
            sorted(
                name.removesuffix(".yaml")
                for name in names
                if name.endswith(".yaml") and name not in _NOT_SYSTEMS and not name.startswith(".")
            )
        )

    def spec(self, system: str) -> SystemSpec:
        """Return the hardware of a system.

        Raises: `UnknownSystemError` naming the nearest systems; `PerfDataNotAvailableError` when its description
        cannot be read; `PerfDataCorruptError`.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> root.spec("tiny_gpu").sm_version
        90
        >>> root.spec("tiny_gpus")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        fpmsdk.errors.UnknownSystemError: ...no system 'tiny_gpus' in ...; nearest: tiny_gpu
        """
        if system in self._specs:
            return self._specs[system]
        path = os.path.join(self.path, f"{system}.yaml")
        known = self.systems()
        if system not in known:
            by_lower_case = {name.lower(): name for name in known}
            close = difflib.get_close_matches(system.lower(), by_lower_case, n=3, cutoff=0.4)
            nearest = [by_lower_case[name] for name in close] or known
            raise UnknownSystemError(
                f"failed to find performance data roots: no system {system!r} in {self.path}; "
                f"nearest: {', '.join(nearest) or 'none'}"
            )
        try:
            document = read_mapping(path)
        except FileNotFoundError:
            raise PerfDataNotAvailableError(
                f"perf database error: {path} has vanished or is a link that leads nowhere"
            ) from None
        self._specs[system] = parse_system(system, document, path)
        return self._specs[system]

    def tree(self, system: str) -> DataTree:
        """Return the directories of a system's measurements.

        Raises: as `spec`.
        Source: op-level.md section 1.1.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> [directory.family for directory in root.tree("tiny_gpu").versions("vllm")["0.24.0"]]
        ['attention', 'gemm']
        """
        if system not in self._trees:
            self._trees[system] = DataTree(os.path.join(self.path, self.spec(system).data_dir))
        return self._trees[system]

    def slots(self, system: str, backend: str) -> Slots | None:
        """Return the queryable versions, or None when nothing governs this system and backend.

        Raises: as `spec`; `PerfDataCorruptError` for a malformed `query_versions.yaml`.
        Source: op-level.md section 1.2.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> root.slots("tiny_gpu", "vllm") is None
        True
        >>> import pathlib
        >>> _ = pathlib.Path(root.path, "query_versions.yaml").write_text('defaults: {vllm: {current: "0.24.0"}}')
        >>> SystemsRoot(root.path).slots("tiny_gpu", "vllm").listed()
        {'current': '0.24.0'}
        """
        if (system, backend) not in self._slots:
            self._slots[system, backend] = self._read_slots(system, backend)
        return self._slots[system, backend]

    def _read_slots(self, system: str, backend: str) -> Slots | None:
        path = os.path.join(self.path, QUERY_VERSIONS)
        try:
            document = read_mapping(path)
        except FileNotFoundError:
            return None
        entry = slot_entry(document, system, backend, path)
        if entry is None or not self.tree(system).versions(backend):
            return None
        if entry.is_override:
            return Slots(entry.current, entry.previous, lambda: None)
        fleet = set(self.systems()) - overriding_systems(document, backend, path)
        return Slots(
            entry.current, entry.previous, lambda: newer_than(entry.current, self._measured_versions(fleet, backend))
        )

    def _measured_versions(self, systems: set[str], backend: str) -> set[str]:
        return {
            version
            for system in systems
            for version, directories in self.tree(system).versions(backend).items()
            if any(directory.holds_data() for directory in directories)
        }

    def resolve_version(
        self, system: str, backend: str, requested: str | None, *, allow_unlisted: bool = False
    ) -> ResolvedVersion:
        """Map a requested version, alias or None onto the queryable versions.

        Where no slots govern the system, None means the newest version that the backend was measured with, if any.
        Raises: `UnlistedVersionError`, `UnknownSystemError`, `PerfDataCorruptError`.
        Source: op-level.md section 1.2.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> root.resolve_version("tiny_gpu", "vllm", None)
        ResolvedVersion(version='0.24.0', tolerate_dirless=False)
        """
        resolved = choose(
            requested,
            self.slots(system, backend),
            self.tree(system).versions(backend),
            f"{backend} on {system}",
            allow_unlisted=allow_unlisted,
        )
        if resolved.version is None:
            return resolved._replace(version=next(iter(newest_first(self._measured_versions({system}, backend))), None))
        return resolved

    def sources(
        self, system: str, backend: str, version: str, table: str, *, shared: bool = True, strict: bool = False
    ) -> tuple[Source, ...]:
        """Return the files of a table, most trusted first; see `sources.resolve_sources`.

        Parameters: `table`, a key of `SCHEMAS`; `shared`, whether other versions and backends may fill in; `strict`,
        whether faulty metadata are errors instead of warnings.
        Raises: as `spec`; `PerfDataCorruptError` under `strict`.
        Source: op-level.md section 1.3.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> [(source.channel, source.version) for source in root.sources("tiny_gpu", "vllm", "0.24.0", "gemm_perf")]
        [('primary', '0.24.0')]
        """
        schema = SCHEMAS[table]
        tree = self.tree(system)
        if schema.library is not None:
            spec = self.spec(system)
            library_version = spec.nccl_version if schema.library == "nccl" else spec.oneccl_version
            return resolve_library_source(tree, schema.library, library_version, schema.file)
        groups = self._sharing_groups() if shared else ()
        return resolve_sources(tree, groups, backend, version, schema.file, shared=shared, strict=strict)

    def _sharing_groups(self) -> tuple[SharingGroup, ...]:
        if self._groups is None:
            self._groups = read_sharing_manifest(os.path.join(self.path, SHARING_MANIFEST))
        return self._groups


_roots: dict[str, SystemsRoot] = {}


def open_root(path: str | os.PathLike[str]) -> SystemsRoot:
    """Return the systems root at a directory: one object per process and path.

    Nothing is read, so that a directory that does not exist is found out by its first use.
    Source: op-level.md section 1.

    >>> open_root("/nowhere").systems(), open_root("/nowhere") is open_root("/nowhere/.")
    ((), True)
    """
    place = os.path.abspath(path)
    return _roots.get(place) or _roots.setdefault(place, SystemsRoot(path))
