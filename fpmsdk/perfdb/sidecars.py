"""Metadata beside the tables: declared reuse, collection records and the cross-backend sharing manifest.

Turns documents into checked values; what they are used for is decided in `sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fpmsdk.perfdb.documents import ill_formed, read_mapping

SHARING_MANIFEST = "perf_data_reuse_manifest.yaml"
_ADMITTED_TIERS = ("shared", "shared_fallback")
_REUSE_KEYS = ("table", "from_version", "reason", "approved_by")


class SharingGroup(NamedTuple):
    """Backends that may read each other's rows of one table measured with one kernel."""

    file: str
    kernel_source: str
    backends: frozenset[str]


def read_reuse(path: str) -> list[tuple[str, str]]:
    """Return the (table, donor version) pairs of a `reuse.yaml`, in file order.

    Raises: `PerfDataCorruptError`; `FileNotFoundError` when absent.
    """
    entries = read_mapping(path).get("reuse")
    if not isinstance(entries, list):
        raise ill_formed(path, "reuse", entries, "a list")
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ill_formed(path, f"reuse[{number}]", entry, "a mapping")
        for key in _REUSE_KEYS:
            if not isinstance(entry.get(key), str) or not entry[key].strip():
                raise ill_formed(path, f"reuse[{number}].{key}", entry.get(key), "a non-empty string")
    return [(entry["table"], entry["from_version"]) for entry in entries]


class CollectionMeta(NamedTuple):
    """Tables a collection record lists, and whether it predates per-table records."""

    tables: frozenset[str]
    legacy: bool


def read_collection_meta(path: str) -> CollectionMeta:
    """Return what a `collection_meta.yaml` records.

    Raises: `PerfDataCorruptError`; `FileNotFoundError` when absent.
    """
    document = read_mapping(path)
    if document.get("schema_version", 1) not in (1, 2):
        raise ill_formed(path, "schema_version", document["schema_version"], "1 or 2")
    tables = document.get("tables", {})
    if not isinstance(tables, Mapping):
        raise ill_formed(path, "tables", tables, "a mapping")
    for table, entry in tables.items():
        if not isinstance(entry, Mapping):
            raise ill_formed(path, f"tables.{table}", entry, "a mapping")
    return CollectionMeta(frozenset(map(str, tables)), document.get("provenance") == "legacy")


def read_sharing_manifest(path: str) -> tuple[SharingGroup, ...]:
    """Return the groups of the manifest that may be shared; none when there is no manifest.

    Raises: `PerfDataCorruptError`.
    """
    try:
        groups = read_mapping(path).get("groups") or []
    except FileNotFoundError:
        return ()
    if not isinstance(groups, list):
        raise ill_formed(path, "groups", groups, "a list")
    return tuple(
        group
        for number, entry in enumerate(groups)
        if (group := _sharing_group(entry, f"groups[{number}]", path)) is not None
    )


def _sharing_group(entry: Any, place: str, path: str) -> SharingGroup | None:
    if not isinstance(entry, Mapping):
        raise ill_formed(path, place, entry, "a mapping")
    if entry.get("tier") not in _ADMITTED_TIERS:
        return None
    backends = entry.get("frameworks")
    if not isinstance(backends, list) or not all(isinstance(name, str) for name in backends):
        raise ill_formed(path, f"{place}.frameworks", backends, "a list of backend names")
    for key in ("op_file", "kernel_source"):
        if not isinstance(entry.get(key), str):
            raise ill_formed(path, f"{place}.{key}", entry.get(key), "a string")
    file: str = entry["op_file"]
    if file.endswith(".txt"):
        file = file[: -len(".txt")] + ".parquet"
    return SharingGroup(file, entry["kernel_source"], frozenset(backends))
