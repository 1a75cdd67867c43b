"""The formal table of one deployment as a holdout sees it: its rows, and copies of the pair with rows left out.

Source: onboarding.md section 8.3, steps 1, 2 and 6.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmsdk.documents.canonical import parse_document, pretty_bytes
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.files import read_regular, sha256
from fpmsdk.onboard.holdout_boundaries import Place, Row, is_eligible, place_of
from fpmsdk.onboard.holdout_select import Points
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.perfdb.documents import read_mapping
from fpmsdk.perfdb.forward_schema import EXECUTION_COLUMNS, IDENTITY_COLUMNS, LEGACY_EXECUTION, TABLE_FILE, sidecar_path

if TYPE_CHECKING:
    import pyarrow as pa

_LARGEST_FILE_BYTES = 2**31
_PLACE_COLUMNS = ("system", "backend", "backend_version")


@dataclass(frozen=True)
class SourceTable:
    """The files of a formal pair with its system, read once.

    Attributes
    ----------
    inputs: evidence references of `system`, `parquet` and `metadata`.
    names, contents: their paths relative to a systems root, and their bytes.
    table: the Parquet table.
    metadata: the sidecar.
    rows: every row of the table, in its order.
    is_of_deployment: bool[rows], those of the request's deployment and phases.
    """

    inputs: dict[str, dict[str, Any]]
    names: dict[str, str]
    contents: dict[str, bytes]
    table: pa.Table
    metadata: dict[str, Any]
    rows: list[dict[str, Any]]
    is_of_deployment: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def matching(self) -> list[dict[str, Any]]:
        """Rows of the deployment."""
        return [row for row, matches in zip(self.rows, self.is_of_deployment, strict=True) if matches]

    def eligible(self, phase: str) -> list[dict[str, Any]]:
        """Rows of the deployment and a phase that direct queries may use."""
        return [row for row in self.matching if row["workload_kind"] == phase and is_eligible(row)]

    def without(self, places: Collection[Place]) -> list[int]:
        """Indices of the rows that stay when every row of the deployment at some points goes."""
        return [
            index
            for index, (row, matches) in enumerate(zip(self.rows, self.is_of_deployment, strict=True))
            if not (matches and place_of(row) in places)
        ]

    def copy_to(self, root: Path) -> None:
        """Write the three files, as they were read, below a new systems root."""
        for key, name in self.names.items():
            _write(root / name, self.contents[key])

    def write_subset(self, root: Path, rows: list[int], derivation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Write a systems root with some rows of the table.

        Parameters
        ----------
        root: the new systems root.
        rows: indices of the rows to keep, in order.
        derivation: what the sidecar says of its origin, as `validation_derivation`.

        Returns
        -------
        Evidence references of `system`, `parquet` and `metadata`.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        _write(root / self.names["system"], self.contents["system"])
        parquet, sidecar = root / self.names["parquet"], root / self.names["metadata"]
        parquet.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(self.table.take(pa.array(rows, type=pa.int64())), parquet, compression="zstd")
        changes = {
            "row_count": len(rows),
            "parquet_sha256": file_evidence(parquet)["sha256"],
            "validation_derivation": dict(derivation),
        }
        _write(sidecar, pretty_bytes(self.metadata | changes))
        return {key: file_evidence(root / name) for key, name in self.names.items()}


def points_of(rows: list[dict[str, Any]]) -> Points:
    """The points of some rows of one phase, int64[rows, 3]."""
    return np.array([place_of(row)[1] for row in rows], np.int64).reshape(-1, 3)


def read_source(request: SupportRequest, systems_root: Path) -> SourceTable:
    """Read the pair and the system of a request's deployment.

    Parameters
    ----------
    request: with a profile.
    systems_root: an absolute systems directory whose system keeps its data beside it, in `data/<system>`.

    Raises
    ------
    OnboardError: no profile, the files are not all there, or the system keeps its data elsewhere.
    EvidenceError: a file is a symbolic link, the pair is not whole, or it has no rows of the deployment.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    deployment = request.profile_deployment()
    if deployment is None:
        raise OnboardError("fpm_profile: a holdout needs the profile of the measured deployment", "fpm_profile")
    folder = f"data/{deployment.system}/{deployment.backend}/{deployment.backend_version}"
    parquet = f"{folder}/{TABLE_FILE}"
    names = {"system": f"{deployment.system}.yaml", "parquet": parquet, "metadata": sidecar_path(parquet)}
    inputs, contents = {}, {}
    for key, name in names.items():
        path = systems_root / name
        if not path.is_file() or not path.resolve().is_relative_to(systems_root):
            raise OnboardError(
                f"{path}: missing; a holdout needs the system and the complete pair in one directory", str(path)
            )
        inputs[key] = file_evidence(path)
        contents[key] = read_regular(path, limit_bytes=_LARGEST_FILE_BYTES, follow_links=False)
        if sha256(contents[key]) != inputs[key]["sha256"]:
            raise EvidenceError(f"{path}: changed while it was read; wait until nothing writes to it", str(path))
    _require_local_data(deployment.system, inputs["system"]["path"])
    try:
        table = pq.read_table(pa.BufferReader(contents["parquet"]))
    except (pa.ArrowException, OSError) as fault:
        raise EvidenceError(f"{inputs['parquet']['path']}: not a complete Parquet file: {fault}") from None
    metadata = parse_document(contents["metadata"], inputs["metadata"]["path"])
    rows = table.to_pylist()
    matches = np.array([_matches(row, request) for row in rows], np.bool_)
    if not matches.any():
        raise EvidenceError(
            f"{inputs['parquet']['path']}: no rows of {request.identity.model!r} in the deployment of fpm_profile; "
            "give the systems directory that it was published into",
            inputs["parquet"]["path"],
        )
    return SourceTable(inputs, names, contents, table, metadata, rows, matches)


def _require_local_data(system: str, path: str) -> None:
    found = read_mapping(path).get("data_dir")
    if found != f"data/{system}":
        raise OnboardError(f"{path}: data_dir must be data/{system} for a holdout, found {found!r}", path)


def _matches(row: Row, request: SupportRequest) -> bool:
    deployment = request.profile_deployment()
    return (
        row["model_path"] == request.identity.model
        and row["workload_kind"] in request.collection_phases
        and all(row.get(name) == getattr(deployment, name) for name in (*_PLACE_COLUMNS, *IDENTITY_COLUMNS))
        and all(
            row.get(name, default) == default for name, default in zip(EXECUTION_COLUMNS, LEGACY_EXECUTION, strict=True)
        )
    )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
