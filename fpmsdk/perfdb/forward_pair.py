"""Reads a whole-forward pair: the bytes of table and sidecar, checked rule by rule in the specified order.

Returns plain columns; what they mean for a model is in `forward_cells.py`. Source: fpm-interpolation.md section 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import FpmDataError, FpmNotCollectedError
from fpmsdk.files import is_git_lfs_pointer
from fpmsdk.perfdb.forward_lock import lock_path, locked
from fpmsdk.perfdb.forward_schema import (
    COORDINATE_COLUMNS,
    COORDINATE_SYSTEM,
    EXECUTION_COLUMNS,
    FLAG_COLUMNS,
    IDENTITY_COLUMNS,
    KNEE_AXES,
    KNOB_COLUMNS,
    NAME_COLUMNS,
    PARALLEL_COLUMNS,
    PARTITION_POLICY,
    PER_ROW_SAMPLES,
    PHASES,
    REAL_KV,
    REPEATS_OF_POLICY,
    SCHEMA_NAME,
    SCHEMA_VERSIONS,
    SINGLE_SAMPLE,
    TEXT_COLUMNS,
    is_whole,
    required_columns,
    sidecar_path,
)

_U32_MAX = 2**32 - 1
_LARGEST_KEY = 2**62
_OPTIONAL_COLUMNS = ("dcp", "kv_seed_regime", "measurement_policy", "measurement_repeats")


class Codes(NamedTuple):
    """A column as the distinct texts it holds, and for each row which one."""

    codes: NDArray[np.int64]
    values: tuple[str, ...]

    def of(self, row: int) -> str:
        """Text of a row."""
        return self.values[int(self.codes[row])]

    def equals(self, value: str) -> NDArray[np.bool_]:
        """Rows that hold a text."""
        return np.array([known == value for known in self.values], np.bool_)[self.codes]


class PairRows(NamedTuple):
    """Every row of a table. An identity column that the file leaves out is absent from `texts`.

    `coordinates` is int64[3, n]: batch, prefill tokens, KV tokens. `sha256` is the digest of the table's bytes.
    """

    path: str
    sidecar: dict[str, Any]
    sha256: str
    texts: dict[str, Codes]
    coordinates: NDArray[np.int64]
    latency_ms: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.latency_ms)


def read_pair(path: str, system: str, backend: str, backend_version: str, *, is_locked: bool = False) -> PairRows:
    """Read and check a pair.

    Parameters
    ----------
    path: the table; its sidecar lies beside it.
    system, backend, backend_version: what both files must say they were measured on.
    is_locked: the caller keeps others from publishing; else files that do not belong together are read again when a
        publication that may be under way has ended.

    Raises
    ------
    FpmNotCollectedError: there is no table.
    FpmDataError: the pair breaks a rule; the first one in the order of section 1.5.

    >>> import fpmsdk.sample
    >>> pair = fpmsdk.sample.forward_pair()
    >>> rows = read_pair(pair, "cpu-2-cores", "vllm", "0.31.0")
    >>> rows.num_rows, rows.texts["workload_kind"].of(0)
    (217, 'decode')
    """
    content, sidecar, digest = _read_files(path, is_locked)
    _check_sidecar(path, sidecar, {"system": system, "backend": backend, "backend_version": backend_version}, digest)
    knees_of(sidecar_path(path), sidecar)
    columns, count = _decode(path, content, required_columns(int(sidecar["schema_version"])))
    if not is_whole(sidecar.get("row_count")) or sidecar["row_count"] != count:
        raise _fault(path, f"row_count mismatch: the sidecar says {sidecar.get('row_count')!r}, the table has {count}")
    if count == 0:
        raise _fault(path, "the table has no rows")
    rows = PairRows(
        path,
        sidecar,
        digest,
        {name: column for name, column in columns.items() if isinstance(column, Codes)},
        np.stack([_plain(columns[name]) for name in COORDINATE_COLUMNS]),
        _plain(columns["latency_ms"]),
    )
    _check_rows(rows, {"system": system, "backend": backend, "backend_version": backend_version})
    _check_keys(rows)
    return rows


def _fault(path: str, reason: str) -> FpmDataError:
    return FpmDataError(f"perf database error: {path}: {reason}; collect or copy the pair again")


def _read_files(path: str, is_locked: bool) -> tuple[bytes, dict[str, Any], str]:
    # The bytes of the table, the sidecar, and the digest of those bytes.
    fault: FpmDataError | None = None
    try:
        content, sidecar, digest = _read_once(path)
    except FpmDataError as error:
        fault = error
    else:
        if sidecar.get("parquet_sha256") == digest:
            return content, sidecar, digest
    if not is_locked and os.path.exists(lock_path(path)):
        with locked(path, exclusive=False):
            return _read_once(path)
    if fault is not None:
        raise fault
    return content, sidecar, digest


def _read_once(path: str) -> tuple[bytes, dict[str, Any], str]:
    content = _read_table(path)
    sidecar = _read_sidecar(sidecar_path(path))
    return content, sidecar, hashlib.sha256(content).hexdigest()


def _read_table(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise FpmNotCollectedError(
            f"perf database error: File does not exist at {path}. No fpm_forward data collected for this "
            "backend/version; collect it, name another table with fpm_parquet_path, or use another estimation_mode"
        ) from None
    except OSError as fault:
        raise FpmDataError(f"perf database error: cannot read {path}: {fault.strerror}") from fault


def _read_sidecar(path: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise _fault(path, "the sidecar is missing") from None
    except OSError as fault:
        raise FpmDataError(f"perf database error: cannot read {path}: {fault.strerror}") from fault
    except (ValueError, RecursionError) as fault:
        raise _fault(path, f"the sidecar is not JSON: {fault}") from fault
    if not isinstance(document, dict):
        raise _fault(path, f"the sidecar must be a JSON object, found {type(document).__name__}")
    return document


def knees_of(path: str, sidecar: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Declared knees by axis, each ascending; none where the sidecar declares none.

    Raises: `FpmDataError` for an unknown axis or a knee that is not a positive integer.

    >>> knees_of("t.metadata.json", {"knees": {"total_prefill_tokens": [512, 128]}})
    {'total_prefill_tokens': (128, 512), 'kv_tokens_per_request': ()}
    """
    declared = sidecar.get("knees", {})
    if not isinstance(declared, dict) or not set(declared) <= set(KNEE_AXES):
        raise _fault(path, f"knees must be an object of {', '.join(KNEE_AXES)}, found {declared!r}")
    for axis, values in declared.items():
        if not isinstance(values, list) or any(type(value) is not int or value < 1 for value in values):
            raise _fault(path, f"knees.{axis} must be a list of positive integers, found {values!r}")
    return {axis: tuple(sorted(declared.get(axis, ()))) for axis in KNEE_AXES}


def _check_sidecar(path: str, sidecar: dict[str, Any], measured_on: dict[str, str], digest: str) -> None:
    where = sidecar_path(path)
    accepted: dict[str, tuple[Any, ...]] = {
        "schema_name": (SCHEMA_NAME,),
        "schema_version": SCHEMA_VERSIONS,
        "coordinate_system": (COORDINATE_SYSTEM,),
        "measurement_policy": (SINGLE_SAMPLE, PER_ROW_SAMPLES),
        **{name: (value,) for name, value in measured_on.items()},
    }
    for name, values in accepted.items():
        found = sidecar.get(name)
        if isinstance(found, bool) or found not in values:
            expected = " or ".join(map(repr, values))
            raise _fault(where, f"unsupported {name} {found!r}, expected {expected}")
    if sidecar.get("parquet_sha256") != digest:
        raise _fault(
            where, f"digest mismatch: the sidecar says {sidecar.get('parquet_sha256')!r}, the table has {digest!r}"
        )


# --- columns ---


def _decode(path: str, content: bytes, required: Sequence[str]) -> tuple[dict[str, Any], int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if is_git_lfs_pointer(content):
        raise _fault(path, "the file is a Git LFS pointer, not data; run `git lfs pull`")
    try:
        metadata = pq.ParquetFile(pa.BufferReader(content)).metadata
        columns = [metadata.schema.column(at) for at in range(metadata.num_columns)]
        # Texts are read as codes; few of them are distinct.
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        file = pq.ParquetFile(pa.BufferReader(content), metadata=metadata, read_dictionary=texts)
        names = file.schema_arrow.names
        if missing := [name for name in required if name not in names]:
            raise _fault(path, f"missing column {', '.join(missing)}")
        wanted = [*required, *(name for name in _OPTIONAL_COLUMNS if name in names)]
        if repeated := [name for name in wanted if names.count(name) > 1]:
            raise _fault(path, f"repeated column {', '.join(repeated)}")
        table = file.read(columns=wanted, use_threads=False)
        # Decoding checks neither text nor the numbers that stand for it.
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise _fault(path, f"not a complete Parquet file: {' '.join(str(fault).split())}") from fault
    return {name: _column(path, name, table.column(name).combine_chunks()) for name in wanted}, table.num_rows


def _column(path: str, name: str, column: Any) -> Any:
    import pyarrow as pa

    found = column.type
    if name == "latency_ms":
        _require_type(path, name, found, pa.types.is_float64(found), "double")
        latency = _stored(column).copy()
        latency[_is_empty(column)] = np.nan
        return latency
    if name in COORDINATE_COLUMNS:
        _require_type(path, name, found, pa.types.is_integer(found), "integers")
        if column.null_count:
            raise _fault(path, f"{name} has {column.null_count} empty values")
        return _stored(column).astype(np.int64)
    if name in FLAG_COLUMNS:
        _require_type(path, name, found, pa.types.is_boolean(found) and not column.null_count, "boolean values")
    elif name in PARALLEL_COLUMNS or name in ("dcp", "measurement_repeats"):
        _require_type(path, name, found, pa.types.is_integer(found), "integers")
    else:
        text = found.value_type if pa.types.is_dictionary(found) else found
        _require_type(path, name, found, pa.types.is_string(text) or pa.types.is_large_string(text), "text")
    return _codes(column)


def _require_type(path: str, name: str, found: Any, holds: bool, accepted: str) -> None:
    if not holds:
        raise _fault(path, f"column {name} must hold {accepted}, found {found}")


def _codes(column: Any) -> Codes:
    # Empty values read as empty texts; truth values and integers as their Python texts.
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        values = [str(value) for value in column.dictionary.to_pylist()]
        column = column.indices
        codes = _stored(column).astype(np.int64)
    elif pa.types.is_boolean(column.type):
        codes, values = _bits(column, 1).astype(np.int64), ["False", "True"]
    else:
        found, codes = np.unique(_stored(column), return_inverse=True)
        values = [str(value) for value in found.tolist()]
    if column.null_count:
        if "" not in values:
            values.append("")
        codes[_is_empty(column)] = values.index("")
    return Codes(codes, tuple(values))


# Read from the buffers of a column: its own conversions load pandas, where that is installed.


def _stored(column: Any) -> NDArray[Any]:
    # Numbers as they lie in memory; what stands in place of empty values is any of them.
    stored = np.frombuffer(column.buffers()[1], column.type.to_pandas_dtype())
    return stored[column.offset : column.offset + len(column)]


def _bits(column: Any, buffer: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(column.buffers()[buffer], np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].astype(np.bool_)


def _is_empty(column: Any) -> NDArray[np.bool_]:
    return ~_bits(column, 0) if column.null_count else np.zeros(len(column), np.bool_)


def _plain(column: Any) -> NDArray[Any]:
    array = np.ascontiguousarray(column)
    array.setflags(write=False)
    return array


# --- rows ---


def _check_rows(rows: PairRows, measured_on: dict[str, str]) -> None:
    """Raise for the first row that breaks a rule, and of its rules for the first one."""
    texts = rows.texts
    batch, tokens, kv = rows.coordinates
    decode = texts["workload_kind"].equals("decode")
    prefill = texts["workload_kind"].equals("prefill")
    latency = rows.latency_ms
    checks: list[tuple[NDArray[np.bool_], str]] = [
        (prefill | decode, f"workload_kind must be one of {', '.join(PHASES)}"),
        (texts["partition_policy"].equals(PARTITION_POLICY), f"partition_policy must be {PARTITION_POLICY}"),
    ]
    checks += [
        (texts[name].equals(measured_on[name]), f"{name} must be {measured_on[name]!r}")
        for name in ("backend_version", "system", "backend")
    ]
    checks.append((np.isfinite(latency) & (latency > 0), "latency_ms must be finite and positive"))
    checks += [
        ((values >= 0) & (values <= _U32_MAX), f"{name} must be an integer in 0..={_U32_MAX}")
        for name, values in zip(COORDINATE_COLUMNS, rows.coordinates, strict=True)
    ]
    checks += [
        (batch >= 1, "batch_size must be at least 1"),
        (decode | (tokens >= 1), "total_prefill_tokens of a prefill row must be at least 1"),
        (prefill | (tokens == 0), "total_prefill_tokens of a decode row must be 0"),
    ]
    checks += [(~texts[name].equals(""), f"{name} must be a non-empty string") for name in KNOB_COLUMNS]
    if "model_config_sha256" in texts:
        bound = ~texts["model_config_sha256"].equals("") & (decode | (kv > 0))
        real = texts["kv_seed_regime"].equals(REAL_KV) if "kv_seed_regime" in texts else np.zeros(rows.num_rows, bool)
        checks.append((~bound | real, "config-bound cached prefill/decode requires real_kv provenance"))
    if rows.sidecar["measurement_policy"] == PER_ROW_SAMPLES:
        checks.append((_consistent_samples(rows), "measurement policy/repeats are inconsistent"))
    broken = [(int(np.argmin(holds)), order, reason) for order, (holds, reason) in enumerate(checks) if not holds.all()]
    if broken:
        row, _, reason = min(broken)
        raise _fault(rows.path, f"row {row}: {reason}; found {_describe(rows, row)}")


def _consistent_samples(rows: PairRows) -> NDArray[np.bool_]:
    if "measurement_policy" not in rows.texts or "measurement_repeats" not in rows.texts:
        return np.zeros(rows.num_rows, np.bool_)
    policies, repeats = rows.texts["measurement_policy"], rows.texts["measurement_repeats"]
    consistent = np.zeros(rows.num_rows, np.bool_)
    for policy, count in REPEATS_OF_POLICY.items():
        consistent |= policies.equals(policy) & repeats.equals(str(count))
    return consistent


def identity_names(rows: PairRows) -> tuple[str, ...]:
    """Columns that tell the cells of a table apart, besides the model."""
    return tuple(name for name in (*IDENTITY_COLUMNS, *EXECUTION_COLUMNS, "dcp") if name in rows.texts)


def _check_keys(rows: PairRows) -> None:
    physical = (*NAME_COLUMNS, *identity_names(rows), "workload_kind", "partition_policy")
    if (pair := _first_repetition(rows, physical)) is not None:
        raise _fault(rows.path, f"rows {pair[0]} and {pair[1]}: duplicate physical row key {_describe(rows, pair[1])}")
    logical = ("model_path", *identity_names(rows), "workload_kind")
    if (pair := _first_repetition(rows, logical)) is not None:
        first, second = pair
        names = ", ".join(
            f"{name} {rows.texts[name].of(first)!r} and {rows.texts[name].of(second)!r}"
            for name in ("cell_id", "weight_quantization")
        )
        raise _fault(rows.path, f"row {second} collides with row {first}: one point, {names}")


def _first_repetition(rows: PairRows, names: Sequence[str]) -> tuple[int, int] | None:
    first, group = groups_of([*(rows.texts[name].codes for name in names), *rows.coordinates])
    repeated = np.flatnonzero(first[group] != np.arange(rows.num_rows))
    if not len(repeated):
        return None
    row = int(repeated[0])
    return int(first[group[row]]), row


def groups_of(columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows that agree in every column: the first row of each group, and for each row the number of its group.

    >>> groups_of([np.array([3, 1, 3]), np.array([0, 0, 0])])
    (array([1, 0]), array([1, 0, 1]))
    """
    key, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low = int(column.min())
        extent = int(column.max()) - low + 1
        if size * extent > _LARGEST_KEY:
            key = np.unique(key, return_inverse=True)[1]
            size = int(key.max()) + 1
        key, size = key * extent + (column - low), size * extent
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first, group


def _describe(rows: PairRows, row: int) -> str:
    found = {name: rows.texts[name].of(row) for name in ("cell_id", *TEXT_COLUMNS[1:]) if name in rows.texts}
    coordinates = dict(zip(COORDINATE_COLUMNS, rows.coordinates[:, row].tolist(), strict=True))
    return str(found | coordinates | {"latency_ms": float(rows.latency_ms[row])})
