"""Publishes the rows of a campaign's cells as a whole-forward pair: merged onto what is there, or not at all.

Whether a published pair still is what a campaign says it published is in `commit.py`. Source: collector.md section 6.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from fpmsdk.collect.dense_policy import POLICY as DENSE_POLICY
from fpmsdk.collect.rows import DENSE_REGIME
from fpmsdk.errors import CollectionError, FpmDataError, OnboardError
from fpmsdk.perfdb.forward_commit import commit_pair, end_interrupted, sidecar_document
from fpmsdk.perfdb.forward_lock import locked
from fpmsdk.perfdb.forward_pair import read_pair
from fpmsdk.perfdb.forward_schema import (
    COORDINATE_COLUMNS,
    COORDINATE_SYSTEM,
    EXECUTION_COLUMNS,
    LEGACY_EXECUTION,
    SCHEMA_NAME,
    SINGLE_SAMPLE,
    TABLE_FILE,
    required_columns,
    sidecar_path,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from fpmsdk.collect.plan import CollectionPlan

SCHEMA_VERSION = 7
ROW_KEY = required_columns(SCHEMA_VERSION)[:-1]
RUN_IDENTITY = ("source_plan_sha256", "collector_attempt_id", "runtime_run_id", "runtime_grid_digest")

# Columns that older tables lack; their rows have no value there.
_ADDED_LATER = (
    "kv_seed_regime",
    "input_text_sha256",
    "input_token_ids_sha256",
    "input_tokenizer_revision",
    "runtime_backend_version",
)
_LISTED = dict(
    zip(
        ("source_plan_sha256", "collector_attempt_ids", "runtime_run_ids", "runtime_grid_digests", "model_paths"),
        (*RUN_IDENTITY, "model_path"),
        strict=True,
    )
)
# Files that declare a version without holding a measurement of it.
_MARKERS = frozenset(("reuse.yaml", "SHARED_LAYER_REUSE.txt", "collection_meta.yaml", "INCOMPLETE.txt"))

Row = Mapping[str, Any]


class PublishedCells(NamedTuple):
    """Both files of a pair, its number of rows, and the cells that another run had published before."""

    parquet: Path
    sidecar: Path
    row_count: int
    skipped_cells: tuple[str, ...]


def publish_cells(
    plan: CollectionPlan,
    rows_by_cell: Mapping[str, Sequence[Row]],
    *,
    systems_data: str | Path,
    is_curated: bool = False,
) -> PublishedCells:
    """Merge the rows of cells onto the pair of their system, backend and version.

    Published rows never change: a cell that another run published stays as it is, and the new rows of it are left out.

    Parameters
    ----------
    plan: the plan that was measured.
    rows_by_cell: rows of schema 7, as `fpmsdk.collect.rows` makes them, by cell id.
    systems_data: the `data` folder of a systems root.
    is_curated: that root is shared with operator tables, so that only a version they measured may appear in it.

    Raises
    ------
    OnboardError: a curated root has no measurements of the version.
    CollectionError: no rows, several versions, or a row that contradicts another or the published pair. Nothing is
        changed then.
    OSError: a file cannot be written.

    Source: collector.md section 6.4.
    """
    incoming = [dict(row) for rows in rows_by_cell.values() for row in rows]
    if not incoming:
        raise CollectionError("there are no rows to publish; collect at least one cell")
    runs = run_identities(incoming, "rows to publish")
    version = _one_version(incoming)
    data = Path(systems_data)
    if is_curated and not is_measured_version(data, plan.system, plan.backend, version):
        raise OnboardError(
            f"{data / plan.system}: no operator table of {plan.backend} {version}, so that this version cannot be "
            "added to the default systems data; publish a measured version, or name another database root"
        )
    folder = data / plan.system / plan.backend / version
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / TABLE_FILE
    sidecar = Path(sidecar_path(str(table)))
    with locked(str(table), exclusive=True):
        end_interrupted(str(table))
        known = _known_rows(plan, table, version)
        published = run_identities(known, str(table))
        skipped = tuple(sorted(cell for cell, run in runs.items() if published.get(cell, run) != run))
        kept = [row for row in incoming if row["cell_id"] not in skipped]
        if kept:
            merged = _merged(known, kept)
            _commit(plan, table, merged, version)
        else:
            merged = known
    return PublishedCells(table, sidecar, len(merged), skipped)


def run_identities(rows: Iterable[Row], where: str) -> dict[str, tuple[str, ...]]:
    """Plan, attempt, run and grid of every cell among rows.

    Raises
    ------
    CollectionError: a row lacks one of them, or a cell has rows of two runs; names `where`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for row in rows:
        cell = row.get("cell_id")
        if not isinstance(cell, str) or not cell:
            raise CollectionError(f"{where}: a row has no cell_id")
        run = tuple(row.get(name) for name in RUN_IDENTITY)
        for name, value in zip(RUN_IDENTITY, run, strict=True):
            if not isinstance(value, str) or not value:
                raise CollectionError(f"{where}: {cell}: {name} must be text, found {value!r}")
        if found.setdefault(cell, run) != run:  # type: ignore[arg-type]
            raise CollectionError(f"{where}: {cell}: rows of two runs, {found[cell]} and {run}; publish one of them")
    return found


def promoted_cells(sidecar: Mapping[str, Any], rows: Iterable[Row], where: str) -> frozenset[str]:
    """Cells whose synthetic KV counts as real by a declared policy; sidecar and rows must name the same.

    Raises
    ------
    CollectionError: another policy, or other cells than the rows show.
    """
    declared, named = sidecar.get("kv_seed_classification"), frozenset[str]()
    if declared is not None:
        cells = declared.get("cells") if isinstance(declared, dict) else None
        if (
            not isinstance(declared, dict)
            or declared.get("policy") != DENSE_POLICY
            or not isinstance(cells, list)
            or not cells
            or any(not isinstance(cell, str) or not cell for cell in cells)
            or len(set(cells)) != len(cells)
        ):
            raise CollectionError(
                f"{where}: kv_seed_classification must be policy {DENSE_POLICY} with distinct cells, found {declared!r}"
            )
        named = frozenset(cells)
    found = frozenset(row["cell_id"] for row in rows if row.get("kv_seed_regime") == DENSE_REGIME)
    if named != found:
        raise CollectionError(
            f"{where}: kv_seed_classification names {sorted(named)}, the rows show {sorted(found)}; publish again"
        )
    return named


def is_measured_version(systems_data: Path, system: str, backend: str, version: str) -> bool:
    """Whether any family of operator tables holds measurements of a version, and none of it is half collected.

    Source: collector.md section 6.4, step 2.
    """
    root = systems_data / system
    if not root.is_dir():
        return False
    folders = (family / backend / version for family in root.iterdir() if not family.name.startswith("."))
    return any(
        folder.is_dir()
        and not _is_partial(folder)
        and any(
            entry.is_file() and not entry.name.startswith(".") and entry.name not in _MARKERS
            for entry in folder.iterdir()
        )
        for folder in folders
    )


def _is_partial(folder: Path) -> bool:
    if (folder / "INCOMPLETE.txt").is_file():
        return True
    meta = folder / "collection_meta.yaml"
    if not meta.is_file():
        return False
    try:
        document = yaml.safe_load(meta.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return True  # what cannot be read cannot prove to be complete
    tables = document.get("tables") if isinstance(document, dict) else None
    return isinstance(tables, dict) and any(
        isinstance(table, dict) and table.get("status") == "partial" for table in tables.values()
    )


def _one_version(rows: Sequence[Row]) -> str:
    versions = sorted({str(row.get("backend_version") or "") for row in rows})
    if len(versions) != 1 or not versions[0]:
        raise CollectionError(f"rows must be of one backend_version, found {versions}; publish each on its own")
    version = versions[0]
    if version in (".", "..") or any(char.isspace() or char in "/\\\x00" for char in version):
        raise CollectionError(
            f"backend_version {version!r} cannot name a folder; use a label without spaces or slashes"
        )
    return version


def _known_rows(plan: CollectionPlan, table: Path, version: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    if not table.exists():
        return []
    try:
        read_pair(str(table), plan.system, plan.backend, version, is_locked=True)
        sidecar = sidecar_document(sidecar_path(str(table)))
    except FpmDataError as error:
        raise CollectionError(f"what is published cannot be built upon: {error}") from None
    rows: list[dict[str, Any]] = pq.read_table(table, use_threads=False).to_pylist()
    promoted_cells(sidecar, rows, sidecar_path(str(table)))
    if sidecar["schema_version"] < SCHEMA_VERSION:
        legacy = dict(zip(EXECUTION_COLUMNS, LEGACY_EXECUTION, strict=True))
        rows = [row | legacy for row in rows]
    return rows


def _merged(known: Sequence[dict[str, Any]], incoming: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_key = {_key(row): row for row in known}
    for row in incoming:
        present = by_key.setdefault(_key(row), row)
        if present is not row and present != row:
            differing = sorted(name for name in {*present, *row} if present.get(name) != row.get(name))
            coordinates = {name: row[name] for name in COORDINATE_COLUMNS}
            raise CollectionError(
                f"conflicting FPM database row: {row['cell_id']} at {coordinates} differs in {', '.join(differing)} "
                "from the published row, which is never changed"
            )
    absent = dict.fromkeys(_ADDED_LATER)
    return [row | {name: None for name in absent if name not in row} for _, row in sorted(by_key.items())]


def _key(row: Row) -> tuple[tuple[bool, Any], ...]:
    # No value sorts before every value.
    return tuple((row[name] is not None, row[name]) for name in ROW_KEY)


def _commit(plan: CollectionPlan, table: Path, rows: list[dict[str, Any]], version: str) -> None:
    import pyarrow as pa

    dense = sorted({row["cell_id"] for row in rows if row["kv_seed_regime"] == DENSE_REGIME})
    classification = {"policy": DENSE_POLICY, "cells": dense}
    sidecar = {
        "schema_name": SCHEMA_NAME,
        "schema_version": SCHEMA_VERSION,
        "coordinate_system": COORDINATE_SYSTEM,
        "measurement_policy": SINGLE_SAMPLE,
        "warmup_repeats": 0,
        "measurement_repeats": 1,
        "row_count": len(rows),
        **{key: sorted({str(row[name]) for row in rows}) for key, name in _LISTED.items()},
        "aic_revision": plan.document["aic_revision"],
        "system": plan.system,
        "backend": plan.backend,
        "backend_version": version,
        **({"kv_seed_classification": classification} if dense else {}),
    }
    try:
        commit_pair(str(table), _table(rows), sidecar)
    except (pa.ArrowException, FpmDataError) as error:
        raise CollectionError(f"{table}: the rows do not fit the format: {error}") from None


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    table = pa.Table.from_pylist(rows)
    # A column of the key without any value still is one of texts.
    for at, field in enumerate(table.schema):
        if pa.types.is_null(field.type) and field.name in ROW_KEY:
            table = table.set_column(at, field.name, table.column(at).cast(pa.string()))
    return table
