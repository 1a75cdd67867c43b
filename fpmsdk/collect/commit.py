"""Whether a published pair still holds what a campaign published, cell by cell.

Source: collector.md section 6.4 (commit validation).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fpmsdk.collect.publish import ROW_KEY, RUN_IDENTITY, SCHEMA_VERSION, Row, promoted_cells, run_identities
from fpmsdk.documents.canonical import canonical_bytes
from fpmsdk.errors import CollectionError, EvidenceError, FpmDataError
from fpmsdk.files import sha256
from fpmsdk.perfdb.forward_commit import sidecar_document
from fpmsdk.perfdb.forward_schema import COORDINATE_COLUMNS, PARTITION_POLICY, SCHEMA_NAME

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan

_DTYPES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "fmha_resolution")


class Commit(NamedTuple):
    """The sidecar of a pair, and the digest of the rows of each required cell."""

    sidecar: dict[str, Any]
    cell_rows: dict[str, str]


def validate_commit(
    plan: CollectionPlan,
    parquet: str | Path,
    sidecar: str | Path,
    *,
    attempt_ids: Mapping[str, str] | None = None,
    reused_cells: Collection[str] = (),
    cell_rows: Mapping[str, str] | None = None,
    cells: Sequence[Cell] | None = None,
) -> Commit:
    """Verify a published pair against the plan whose cells it must hold.

    Parameters
    ----------
    plan: the plan.
    parquet, sidecar: both files of the pair.
    attempt_ids: attempt of each cell, from a finished checkpoint.
    reused_cells: cells that another run had published before; their plan and attempt may differ.
    cell_rows: digests of the rows of each cell, from a finished checkpoint.
    cells: the required cells; all of the plan without it.

    Raises
    ------
    EvidenceError: a file is missing, or is not what the sidecar or the checkpoint says.
    CollectionError: the pair is of something else than the plan, or lacks a required cell or point.

    Source: collector.md section 6.4.
    """
    required = plan.cells if cells is None else tuple(cells)
    if outside := sorted(set(reused_cells) - {cell.cell_id for cell in required}):
        raise CollectionError(f"reused cells {', '.join(outside)} are not in the plan")
    document = _checked_sidecar(plan, Path(parquet), Path(sidecar))
    rows = _checked_rows(Path(parquet), Path(sidecar), document)
    runs = run_identities(rows, str(parquet))
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault(row["cell_id"], []).append(row)
    explicit = None if plan.benchmark_points is None else plan.benchmark_points["payload"]
    digests = {}
    for cell in required:
        where = f"{parquet}: {cell.cell_id}"
        found = by_cell.get(cell.cell_id)
        if not found:
            raise CollectionError(f"{where}: not published; collect this cell")
        _check_identity(plan, cell, document, found, where)
        is_reused = cell.cell_id in reused_cells
        if not is_reused:
            _check_run(plan, cell, runs[cell.cell_id], attempt_ids, where)
        coordinates = {tuple(row[name] for name in COORDINATE_COLUMNS) for row in found}
        if len(coordinates) != len(found):
            raise CollectionError(f"{where}: two rows of one coordinate")
        is_legacy = attempt_ids is not None and cell_rows is None
        if explicit is not None and (is_reused or is_legacy):
            _check_requested(explicit[cell.workload_kind], coordinates, where)
        digests[cell.cell_id] = found_digest = rows_digest(found)
        if cell_rows is not None and cell_rows.get(cell.cell_id) != found_digest:
            raise EvidenceError(
                f"{where}: the published rows differ from those of the checkpoint: expected "
                f"{cell_rows.get(cell.cell_id)}, found {found_digest}; restore the pair",
                str(parquet),
            )
        if is_legacy and explicit is None:
            raise CollectionError(f"{where}: the checkpoint seals no rows; validate the raw artifacts again")
    return Commit(document, digests)


def rows_digest(rows: Sequence[Row]) -> str:
    r"""SHA-256 over rows, whatever their order.

    >>> rows_digest([{"a": 1}, {"a": 2}]) == rows_digest([{"a": 2}, {"a": 1}])
    True
    """
    return sha256(b"\n".join(sorted(canonical_bytes(dict(row)) for row in rows)))


def _checked_sidecar(plan: CollectionPlan, parquet: Path, sidecar: Path) -> dict[str, Any]:
    for path in (parquet, sidecar):
        if not path.is_file():
            raise EvidenceError(f"{path}: what was published is missing; restore both files of the pair", str(path))
    try:
        document = sidecar_document(str(sidecar))
    except FpmDataError as error:
        raise EvidenceError(str(error), str(sidecar)) from None
    if document.get("schema_name") == SCHEMA_NAME and document.get("schema_version") == 6:
        raise CollectionError(
            f"{sidecar}: a historical schema-6 FPM publication, which is kept but cannot be finalized; schema 7 is "
            "required and nothing is migrated: use a fresh output directory for a new collection"
        )
    expected = {
        "schema_name": SCHEMA_NAME,
        "schema_version": SCHEMA_VERSION,
        "system": plan.system,
        "backend": plan.backend,
    }
    for name, accepted in expected.items():
        if document.get(name) != accepted:
            raise CollectionError(f"{sidecar}: {name} must be {accepted!r}, found {document.get(name)!r}")
    return document


def _checked_rows(parquet: Path, sidecar: Path, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = parquet.read_bytes()
    found = sha256(content)
    if document.get("parquet_sha256") != found:
        raise EvidenceError(
            f"{parquet}: digest mismatch: the sidecar says {document.get('parquet_sha256')!r}, the table has {found}; "
            "restore the pair",
            str(parquet),
        )
    file = pq.ParquetFile(pa.BufferReader(content))
    if missing := sorted({*ROW_KEY, *RUN_IDENTITY} - set(file.schema_arrow.names)):
        raise CollectionError(f"{parquet}: missing columns {', '.join(missing)} of schema {SCHEMA_VERSION}")
    count = document.get("row_count")
    if type(count) is not int or count < 1 or file.metadata.num_rows != count:
        raise CollectionError(f"{sidecar}: row_count says {count!r}, the table has {file.metadata.num_rows} rows")
    rows: list[dict[str, Any]] = file.read(use_threads=False).to_pylist()
    promoted_cells(document, rows, str(sidecar))
    return rows


def _check_identity(
    plan: CollectionPlan, cell: Cell, sidecar: Mapping[str, Any], rows: Sequence[Row], where: str
) -> None:
    expected = {
        "model_path": plan.model_path,
        "system": plan.system,
        "backend": plan.backend,
        "backend_version": sidecar.get("backend_version"),
        "weight_quantization": cell.weight_quantization,
        **{name: cell.resolved_dtypes[name] for name in _DTYPES},
        "kv_cache_dtype": cell.kv_cache_dtype,
        "parallel_strategy": cell.parallel_strategy,
        "workload_kind": cell.workload_kind,
        "partition_policy": PARTITION_POLICY,
        **cell.topology.document(),
        **cell.backend_columns,
        **cell.execution_columns,
        **({"input_text_sha256": cell.input_text_sha256} if cell.input_text_sha256 else {}),
    }
    for row in rows:
        for name, value in expected.items():
            if row.get(name) != value:
                raise CollectionError(f"{where}: {name} must be {value!r} as planned, found {row.get(name)!r}")
        latency = row.get("latency_ms")
        if not isinstance(latency, float) or not math.isfinite(latency) or latency <= 0:
            raise CollectionError(f"{where}: latency_ms must be positive and finite, found {latency!r}")


def _check_run(
    plan: CollectionPlan, cell: Cell, run: tuple[str, ...], attempt_ids: Mapping[str, str] | None, where: str
) -> None:
    if run[0] != plan.sha256:
        raise CollectionError(f"{where}: published by another plan, {run[0]}, than {plan.sha256}")
    if attempt_ids is not None and run[1] != attempt_ids.get(cell.cell_id):
        raise CollectionError(
            f"{where}: published by attempt {run[1]}, the checkpoint has {attempt_ids.get(cell.cell_id)}"
        )


def _check_requested(points: Sequence[Mapping[str, Any]], coordinates: Collection[Any], where: str) -> None:
    requested = {
        (point["batch_size"], point.get("total_prefill_tokens", 0), point["total_kv_read_tokens"]) for point in points
    }
    if missing := sorted(requested - set(coordinates)):
        shown = json.dumps(missing[:5])
        raise CollectionError(f"{where}: {len(missing)} requested points are not published, {shown} among them")
