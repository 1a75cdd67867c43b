"""The performance database of one system, backend and version: tables loaded on first use, then immutable.

One instance per process and identity; threads share it, and concurrent first loads share one load.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from copy import copy
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fpmsdk.errors import FpmSdkError, PerfDataCorruptError, PerfDataNotAvailableError
from fpmsdk.perfdb import cache, compiled, lanes
from fpmsdk.perfdb.hardware import SystemSpec
from fpmsdk.perfdb.parquet import Rows, read_content, read_rows
from fpmsdk.perfdb.roots import SystemsRoot, open_root
from fpmsdk.perfdb.slices import Block, Table, merge
from fpmsdk.perfdb.sources import Source
from fpmsdk.perfdb.tables import SCHEMAS, TableSchema


class PerfDatabase:
    """Tables of one system, backend and version. Made by `open_database`.

    Parameters: `root`, `system`, `backend` and a literal `version`; `shared`, whether other versions and backends fill
    in; `strict`, whether faulty metadata are errors.
    Raises: as `SystemsRoot.spec`.
    Source: op-level.md sections 1.3 to 1.5.

    >>> import tempfile
    >>> from fpmsdk.sample.tiny import write_systems
    >>> root = open_root(write_systems(tempfile.mkdtemp()))
    >>> database = open_database(root, "tiny_gpu", "vllm", "0.24.0")
    >>> database.spec.sm_version, database.table("gemm_perf").rows
    (90, 16)
    """

    def __init__(
        self, root: SystemsRoot, system: str, backend: str, version: str, *, shared: bool, strict: bool
    ) -> None:
        self.root, self.system, self.backend, self.version = root, system, backend, version
        self.shared, self.strict = shared, strict
        self.spec: SystemSpec = root.spec(system)
        # What a consumer makes of the tables and wants to keep as long as they live.
        self.derived: object | None = None
        self._outcomes: dict[str, Table | FpmSdkError] = {}
        # The digest and the modification of every file that a table was taken from.
        self._read: dict[str, tuple[str, tuple[int, int]]] = {}
        self._locks = {name: threading.Lock() for name in SCHEMAS}

    def table(self, name: str) -> Table:
        """Return a table, loading it on first use.

        Parameters: `name`, a key of `SCHEMAS` such as `"gemm_perf"`.
        Raises: `PerfDataNotAvailableError` when no source has a row for it, the same way every time;
        `PerfDataCorruptError` when a file of it is damaged, or when files of tables loaded before have changed since.
        Source: op-level.md sections 1.3 and 1.5.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> gemm = open_database(root, "tiny_gpu", "vllm", "0.24.0").table("gemm_perf")
        >>> list(gemm.slices), [axis[-1].item() for axis in gemm.slices["bfloat16",].axes]
        ([('bfloat16',)], [2048, 2048, 2048])
        """
        outcome = self._outcomes.get(name)
        if outcome is None:
            with self._locks[name]:
                outcome = self._outcomes.get(name)
                if outcome is None:
                    outcome = self._outcomes[name] = self._attempt(name)
        if isinstance(outcome, FpmSdkError):
            # A copy: one exception object must not collect the tracebacks of several threads.
            raise copy(outcome)
        return outcome

    def lane_order(self, name: str, architecture: str | None = None, override: str | None = None) -> tuple[str, ...]:
        """Return the lanes of an attention table in the order in which they may serve an operator.

        Parameters: `name`, an attention table; `architecture`, of the model; `override`, the attention
        backend asked for.
        Raises: `UnsupportedAttentionBackendError`.
        Source: op-level.md section 3.8.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> open_database(root, "tiny_gpu", "vllm", "0.24.0").lane_order("context_attention_perf")
        ('default',)
        """
        try:
            table = self.table(name)
        except PerfDataNotAvailableError:
            table = None
        return lanes.lane_order(
            table,
            lanes.defaults_file(self.root.path),
            backend=self.backend,
            version=self.version,
            sm_version=self.spec.sm_version,
            architecture=architecture,
            override=override,
        )

    def _attempt(self, name: str) -> Table | FpmSdkError:
        try:
            return self._load(name)
        except FpmSdkError as fault:
            return fault

    def _load(self, name: str) -> Table:
        schema = SCHEMAS[name]
        sources = self.root.sources(
            self.system, self.backend, self.version, name, shared=self.shared, strict=self.strict
        )
        contents = [read_content(source.path) for source in sources]
        digests = [xxhash.xxh3_128_hexdigest(content) for content in contents]
        if contents:
            self._refuse_changes()
        self._read |= {
            source.path: (digest, _modification(source.path)) for source, digest in zip(sources, digests, strict=True)
        }
        key = cache.key("table", name.encode(), self._identity(sources, digests))
        if (stored := cache.load(key)) is not None:
            with contextlib.suppress(ValueError):
                return Table.of(*compiled.unpack(stored), sources)
        blocks = [
            block
            for source in sources
            if (block := _block(schema, source, contents.pop(0), eager=self._serves_eager())) is not None
        ]
        if not blocks:
            raise PerfDataNotAvailableError(self._missing(name, schema, sources))
        keys, arrays = merge(blocks)
        if (stored := cache.store(key, compiled.pack(keys, arrays))) is not None:
            # Pages of the file take the place of the heap: they count once for all processes, and only where used.
            keys, arrays = compiled.unpack(stored)
        return Table.of(keys, arrays, sources)

    def _refuse_changes(self) -> None:
        # Tables of two states of the data must not price one pass.
        for path, (digest, modification) in list(self._read.items()):
            with contextlib.suppress(OSError, PerfDataNotAvailableError):
                if _modification(path) == modification or xxhash.xxh3_128_hexdigest(Path(path).read_bytes()) == digest:
                    continue
            raise PerfDataCorruptError(
                f"{path}: changed or vanished since this process loaded it; loaded tables stay as they are, but no "
                "other one can be loaded beside them: start a new process",
                path,
            )

    def _serves_eager(self) -> bool:
        # Parts without an SM version (Intel XPU) run collectives uncaptured.
        return self.spec.sm_version is None

    def _identity(self, sources: tuple[Source, ...], digests: list[str]) -> bytes:
        """Everything the compiled table follows from, besides this code."""
        described = [
            (
                source.channel,
                None if source.kernel_sources is None else sorted(source.kernel_sources),
                digest,
            )
            for source, digest in zip(sources, digests, strict=True)
        ]
        return msgspec.json.encode((self._serves_eager(), described))

    def _missing(self, name: str, schema: TableSchema, sources: tuple[Source, ...]) -> str:
        looked = (
            f"none of {[source.path for source in sources]} has a usable row"
            if sources
            else f"no {schema.file} below {self.root.tree(self.system).data_dir}"
        )
        return (
            f"perf database error: no {name} data for {self.backend} {self.version} on {self.system}: {looked}; "
            "choose another version, system or estimation mode, or install the data"
        )


_databases: dict[tuple[str, str, str, str, bool, bool], PerfDatabase] = {}
_databases_lock = threading.Lock()


def open_database(
    root: str | os.PathLike[str] | SystemsRoot,
    system: str,
    backend: str,
    version: str,
    *,
    enable_shared_layer: bool = True,
    strict_provenance: bool = False,
    tolerate_dirless: bool = False,
    keep: bool = True,
) -> PerfDatabase:
    """Return the database of a system, backend and version: one instance per process and identity.

    Parameters: `root`, a systems root; `system` and `backend` by name; `version`, a literal version (see
    `SystemsRoot.resolve_version`); `enable_shared_layer`, whether other versions and backends fill in missing rows;
    `strict_provenance`, whether faulty metadata are errors; `tolerate_dirless`, whether the version need not have a
    directory; `keep`, whether others shall share the instance, false for a root that soon ceases to exist.
    Raises: `UnknownSystemError`; `PerfDataNotAvailableError` when the backend has no directory of that version.
    Source: op-level.md sections 1.2 and 1.3.

    >>> import tempfile
    >>> from fpmsdk.sample.tiny import write_systems
    >>> root = open_root(write_systems(tempfile.mkdtemp()))
    >>> open_database(root, "tiny_gpu", "vllm", "0.24.0") is open_database(root.path, "tiny_gpu", "vllm", "0.24.0")
    True
    """
    root = root if isinstance(root, SystemsRoot) else open_root(root)
    versions: Mapping[str, object] = root.tree(system).versions(backend)
    if version not in versions and not tolerate_dirless:
        raise PerfDataNotAvailableError(
            f"perf database error: no {backend} {version} data for {system} in {root.path}; "
            f"present: {', '.join(sorted(versions)) or 'none'}"
        )
    identity = (root.path, system, backend, version, enable_shared_layer, strict_provenance)
    with _databases_lock:
        if identity in _databases:
            return _databases[identity]
        database = PerfDatabase(root, system, backend, version, shared=enable_shared_layer, strict=strict_provenance)
        if keep:
            _databases[identity] = database
        return database


def _modification(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as fault:
        raise PerfDataNotAvailableError(f"perf database error: cannot read {path}: {fault.strerror}") from fault
    return status.st_size, status.st_mtime_ns


def _block(schema: TableSchema, source: Source, content: bytes, *, eager: bool) -> Block | None:
    """Return the rows of one file that count, or None when there are none."""
    rows = read_rows(source.path, content, schema.required(), schema.optional())
    if source.kernel_sources is not None:
        if "kernel_source" not in rows:
            return None
        kernels = rows.text("kernel_source")
        allowed = np.array([kernel in source.kernel_sources for kernel in kernels.values], np.bool_)
        rows.keep(allowed[kernels.codes])
    if rows.count and schema.admit is not None:
        rows.keep(schema.admit(rows, eager))
    if not rows.count:
        return None
    axes = tuple(column.derive(rows) for column in schema.axes)
    for column, values in zip(schema.axes, axes, strict=True):
        if int(values.min()) < 1:
            name = " + ".join(column.required)
            raise rows.impossible(f"{np.count_nonzero(values < 1)} of {rows.count} rows have {name} 0")
    return Block(
        key=tuple(column.derive(rows) for column in schema.key),
        axes=axes,
        latency_ms=_latency(rows, allows_zero=schema.allows_zero),
        power_w=_power(rows) if "power" in rows else None,
        is_primary=source.channel == "primary",
    )


def _latency(rows: Rows, *, allows_zero: bool) -> NDArray[np.float64]:
    latency = rows.floats("latency")
    _refuse(rows, latency, ~np.isfinite(latency) | ((latency < 0) if allows_zero else (latency <= 0)), "latency", "ms")
    return latency


def _power(rows: Rows) -> NDArray[np.float64]:
    # NaN where it was not measured.
    power = rows.floats("power")
    _refuse(rows, power, (power < 0) | np.isinf(power), "power", "W")
    return power


def _refuse(rows: Rows, values: NDArray[np.float64], bad: NDArray[np.bool_], name: str, unit: str) -> None:
    if bad.any():
        first = values[int(np.argmax(bad))]
        raise rows.impossible(
            f"{np.count_nonzero(bad)} of {rows.count} rows have an impossible {name}, first {first} {unit}"
        )
