"""Replaces both files of a whole-forward pair, so that whoever dies on the way leaves a pair that can be built upon.

The sidecar is the commit record: the table is replaced first, the sidecar second, each in one step, under a lock.
Source: fpm-interpolation.md section 1.4.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmsdk.errors import FpmDataError
from fpmsdk.perfdb.forward_pair import read_pair
from fpmsdk.perfdb.forward_schema import sidecar_path

if TYPE_CHECKING:
    import pyarrow as pa

_STAGED = "table.parquet"


def commit_pair(path: str, table: pa.Table, sidecar: Mapping[str, Any]) -> None:
    """Put a table and its sidecar in the place of those at `path`; the caller holds the lock of the pair.

    Parameters
    ----------
    path: the table, `*.parquet`, in an existing folder.
    table: every row of the pair.
    sidecar: every key but `parquet_sha256`, which is that of the written bytes.

    Raises
    ------
    FpmDataError: what would be published cannot be read. Nothing is changed then.
    OSError: it cannot be written.
    """
    import pyarrow.parquet as pq

    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.TemporaryDirectory(dir=folder, prefix=_staging_prefix(path)) as staging:
        staged = os.path.join(staging, _STAGED)
        pq.write_table(table, staged, compression="zstd")
        document = {**sidecar, "parquet_sha256": hashlib.sha256(Path(staged).read_bytes()).hexdigest()}
        staged_sidecar = sidecar_path(staged)
        Path(staged_sidecar).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        try:  # what is published can be read
            read_pair(staged, *(str(document[name]) for name in ("system", "backend", "backend_version")))
        except FpmDataError as fault:
            raise FpmDataError(
                str(fault).replace(staged.removesuffix(".parquet"), path.removesuffix(".parquet"))
            ) from None
        for file in (staged, staged_sidecar):
            _sync(file)
        os.replace(staged, path)
        os.replace(staged_sidecar, sidecar_path(path))
        _sync(folder)


def end_interrupted(path: str) -> None:
    """Finish or undo what publishers of a pair left that died on the way; the caller holds the lock of the pair."""
    folder = os.path.dirname(os.path.abspath(path))
    for name in os.listdir(folder):
        if not name.startswith(_staging_prefix(path)):
            continue
        staging = os.path.join(folder, name)
        staged_sidecar = sidecar_path(os.path.join(staging, _STAGED))
        replaced = not os.path.exists(os.path.join(staging, _STAGED))
        # With the table replaced and the sidecar not, the staged sidecar is the commit record.
        if (
            replaced
            and os.path.exists(staged_sidecar)
            and _digest_of(path) == sidecar_document(staged_sidecar)["parquet_sha256"]
        ):
            os.replace(staged_sidecar, sidecar_path(path))
            _sync(folder)
        shutil.rmtree(staging)


def sidecar_document(path: str) -> dict[str, Any]:
    """The JSON object of a sidecar.

    Raises: `FpmDataError` when it cannot be read or is none.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as fault:
        raise FpmDataError(f"perf database error: {path}: the sidecar cannot be read: {fault}") from fault
    if not isinstance(document, dict):
        raise FpmDataError(f"perf database error: {path}: the sidecar must be a JSON object")
    return document


def _staging_prefix(path: str) -> str:
    return f".{os.path.basename(path)}.publish-"


def _digest_of(path: str) -> str | None:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.exists(path) else None


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
