"""Writes whole-forward pairs: new rows merged onto a published pair, so that a reader never sees half of a change.

How both files are replaced is in `forward_commit.py`.
Source: fpm-interpolation.md section 1.4.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fpmsdk.config.schema import shown
from fpmsdk.errors import FpmDataError, FpmNotCollectedError
from fpmsdk.perfdb.forward_commit import commit_pair, end_interrupted, sidecar_document
from fpmsdk.perfdb.forward_lock import locked
from fpmsdk.perfdb.forward_pair import read_pair
from fpmsdk.perfdb.forward_schema import (
    COORDINATE_COLUMNS,
    COORDINATE_SYSTEM,
    EXECUTION_COLUMNS,
    LEGACY_EXECUTION,
    PER_ROW_SAMPLES,
    SCHEMA_NAME,
    SINGLE_SAMPLE,
    required_columns,
    sidecar_path,
)

WRITTEN_VERSION = 7
# Columns whose distinct values the sidecar lists.
_LISTED = {
    "source_plan_sha256": "source_plan_sha256",
    "collector_attempt_ids": "collector_attempt_id",
    "runtime_run_ids": "runtime_run_id",
    "runtime_grid_digests": "runtime_grid_digest",
    "model_paths": "model_path",
}
_RUN_COLUMNS = ("runtime_run_id", "collector_attempt_id")

Row = Mapping[str, Any]


class Published(NamedTuple):
    """What a publication did: rows of the pair, rows added to it, and cells that another run had published before."""

    path: str
    num_rows: int
    added_rows: int
    dropped_cells: tuple[str, ...]


def publish_rows(path: str, rows: Sequence[Row], *, facts: Mapping[str, Any] | None = None) -> Published:
    """Add measured rows to a pair, which is created when it does not exist.

    Parameters
    ----------
    path: the table, `*.parquet`; its sidecar is written beside it.
    rows: columns of the format by name; execution columns may be left out and further columns are kept. All rows are of
        one system, backend and version.
    facts: further keys of the sidecar, such as `aic_revision` or `knees`; declared knees stay unless given anew.

    Raises
    ------
    FpmDataError: the rows contradict each other, the published pair, or a rule of the format. Nothing is changed then.

    Example
    -------
    >>> import tempfile
    >>> row = {
    ...     "cell_id": "first", "model_path": "org/m", "system": "x100", "backend": "vllm", "backend_version": "0.24.0",
    ...     "weight_quantization": "bfloat16", "gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16",
    ...     "fmha_quant_mode": "bfloat16", "comm_quant_mode": "half", "kv_cache_dtype": "bfloat16",
    ...     "tp": 1, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1, "moe_backend": "auto",
    ...     "attention_backend": "auto", "enable_wideep": False, "enable_eplb": False, "workload_kind": "decode",
    ...     "batch_size": 1, "total_prefill_tokens": 0, "total_kv_read_tokens": 64, "partition_policy": "balanced_v1",
    ...     "latency_ms": 3.5}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     publish_rows(f"{folder}/t.parquet", [row]).added_rows
    1
    """
    return _publish(path, rows, facts)


def _publish(
    path: str, rows: Sequence[Row], facts: Mapping[str, Any] | None = None, *, one_attention_backend: bool = False
) -> Published:
    if not path.endswith(".parquet"):
        raise FpmDataError(f"{path}: the table of a pair is a *.parquet file; name it so")
    _check_facts(path, facts)
    completed = [_completed(path, number, row) for number, row in enumerate(rows)]
    measured_on = _one_origin(path, completed)
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    with locked(path, exclusive=True):
        end_interrupted(path)
        known = _published_rows(path, measured_on)
        if one_attention_backend:
            _check_one_attention_backend([*known, *completed])
        merged, dropped = _merge(path, known, completed)
        declared = {"knees": sidecar_document(sidecar_path(path)).get("knees")} if known else {}
        kept = {key: value for key, value in declared.items() if value is not None}
        _replace(path, merged, measured_on, kept | dict(facts or {}))
    return Published(path, len(merged), len(merged) - len(known), dropped)


def _completed(path: str, number: int, row: Any) -> dict[str, Any]:
    # A row of plain values with every column of the key.
    if not isinstance(row, Mapping):
        raise FpmDataError(f"{path}: row {number} must hold columns by name, found {shown(row)}")
    completed = dict(zip(EXECUTION_COLUMNS, LEGACY_EXECUTION, strict=True)) | dict(row)
    if missing := [name for name in required_columns(WRITTEN_VERSION) if name not in completed]:
        raise FpmDataError(f"{path}: row {number} lacks {', '.join(missing)}")
    for name, value in completed.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(name, str) or not isinstance(plain, str | int | float | None):
            raise FpmDataError(
                f"{path}: row {number}: {name} must be a text, a number or a truth value, found {shown(value)}"
            )
        completed[name] = plain
    return completed


def _check_facts(path: str, facts: Mapping[str, Any] | None) -> None:
    try:
        json.dumps(dict(facts or {}), allow_nan=False)
    except (TypeError, ValueError) as fault:
        raise FpmDataError(f"{path}: facts must be an object of JSON: {fault}") from fault


def merge_pairs(target: str, sources: Sequence[str]) -> Published:
    """Publish the rows of several pairs, in order, into one pair.

    Raises
    ------
    FpmDataError: a source is faulty, was measured on something else, or with another attention backend than the others
        or the target.

    >>> import tempfile
    >>> import fpmsdk.sample
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     merge_pairs(f"{folder}/t.parquet", [fpmsdk.sample.forward_pair()]).num_rows
    217
    """
    rows: list[Row] = []
    for source in sources:
        read_pair(source, *read_origin(source))  # every check of the format
        rows += _table_rows(source)
    _check_one_attention_backend(rows)
    return _publish(target, rows, one_attention_backend=True)


def _check_one_attention_backend(rows: Sequence[Row]) -> None:
    backends = sorted({str(row["attention_backend"]) for row in rows})
    if len(backends) > 1:
        raise FpmDataError(
            f"attention_backend: a merge cannot mix {' and '.join(map(repr, backends))}; their timings are of "
            "different kernels, keep them in pairs of their own"
        )


def read_origin(path: str) -> tuple[str, str, str]:
    """System, backend and version that the sidecar of a pair states.

    Raises: `FpmNotCollectedError` without a table, `FpmDataError` when the sidecar is missing or no JSON object.

    >>> import fpmsdk.sample
    >>> read_origin(fpmsdk.sample.forward_pair())
    ('cpu-2-cores', 'vllm', '0.31.0')
    """
    if not os.path.exists(path):
        raise FpmNotCollectedError(f"perf database error: File does not exist at {path}; name the table of a pair")
    sidecar = sidecar_document(sidecar_path(path))
    return str(sidecar.get("system")), str(sidecar.get("backend")), str(sidecar.get("backend_version"))


def _one_origin(path: str, rows: Sequence[Row]) -> dict[str, str]:
    measured_on = {}
    for name in ("system", "backend", "backend_version"):
        values = sorted({str(row.get(name)) for row in rows})
        if len(values) != 1:
            raise FpmDataError(f"{path}: rows must be of one {name}, found {', '.join(values) or 'no rows'}")
        measured_on[name] = values[0]
    return measured_on


def _published_rows(path: str, measured_on: Mapping[str, str]) -> list[dict[str, Any]]:
    if not os.path.exists(path):
        return []
    read_pair(path, *measured_on.values(), is_locked=True)  # a damaged pair is not built upon
    return [dict(zip(EXECUTION_COLUMNS, LEGACY_EXECUTION, strict=True)) | row for row in _table_rows(path)]


def _table_rows(path: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path, use_threads=False).to_pylist()
    return rows


def _merge(
    path: str, known: list[dict[str, Any]], incoming: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    published = {(row["cell_id"], _run_of(row)) for row in known}
    cells = {cell for cell, _ in published}
    dropped = tuple(
        sorted({row["cell_id"] for row in incoming if row["cell_id"] in cells} - _same_run(published, incoming))
    )
    by_key = {_key(row): row for row in known}
    for row in incoming:
        if row["cell_id"] in dropped:
            continue
        present = by_key.setdefault(_key(row), row)
        if present is not row and _values(present) != _values(row):
            coordinates = {name: row[name] for name in COORDINATE_COLUMNS}
            raise FpmDataError(
                f"{path}: {row['cell_id']} at {coordinates} is {present['latency_ms']} ms in one row and "
                f"{row['latency_ms']} ms in another; a published point is never changed"
            )
    return [by_key[key] for key in sorted(by_key)], dropped


def _same_run(published: set[tuple[str, tuple[Any, ...]]], incoming: list[dict[str, Any]]) -> set[str]:
    return {row["cell_id"] for row in incoming if (row["cell_id"], _run_of(row)) in published}


def _run_of(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _RUN_COLUMNS)


def _values(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _key(row: Row) -> tuple[tuple[int, Any], ...]:
    # The physical key; empty values and unlike types have a place in the order too.
    names = (*required_columns(WRITTEN_VERSION)[:-1], "dcp")
    values = (row.get(name) for name in names)
    return tuple((0, "") if value is None else (1 if isinstance(value, str) else 2, value) for value in values)


def _replace(path: str, rows: list[dict[str, Any]], measured_on: dict[str, str], facts: dict[str, Any]) -> None:
    import pyarrow as pa

    try:
        table = pa.Table.from_pylist(rows, _schema(rows))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as fault:
        raise FpmDataError(f"{path}: rows do not fit the format: {fault}") from fault
    sidecar = {
        "schema_name": SCHEMA_NAME,
        "schema_version": WRITTEN_VERSION,
        "coordinate_system": COORDINATE_SYSTEM,
        "measurement_policy": _policy(rows),
        **measured_on,
        "row_count": len(rows),
        "warmup_repeats": 0,
        "measurement_repeats": 1,
        **{key: sorted({str(row[name]) for row in rows if row.get(name)}) for key, name in _LISTED.items()},
        **facts,
    }
    commit_pair(path, table, sidecar)


def _policy(rows: list[dict[str, Any]]) -> str:
    policies = {row.get("measurement_policy") for row in rows}
    return SINGLE_SAMPLE if policies <= {None, SINGLE_SAMPLE} else PER_ROW_SAMPLES


def _schema(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    names = [*required_columns(WRITTEN_VERSION)]
    names += sorted({name for row in rows for name in row} - set(names))
    fields = []
    for name in names:
        found = next((kinds.get(type(row[name])) for row in rows if row.get(name) is not None), None)
        kind = pa.float64() if name == "latency_ms" else found or pa.string()
        fields.append(pa.field(name, kind))
    return pa.schema(fields)
