"""Files that observers in the engine's workers write: what each worker resolved and initialised.

Source: collector.md section 7.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fpmsdk.collect.faults import mapping
from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import CollectionError, OnboardError

if TYPE_CHECKING:
    from fpmsdk.collect.artifact import NativeCollection

EXECUTION_GLOB = "fpm-execution-worker-*.json"
EXECUTION_SCHEMA = "aisimulate_fpm_runtime_execution"


class WorkerObservation(NamedTuple):
    """An observation file, and the reference that proves its bytes."""

    path: Path
    document: dict[str, Any]
    source: dict[str, Any]

    @property
    def provenance(self) -> dict[str, Any]:
        """Plan, cell and attempt that the observer was started for."""
        found = self.document.get("collector_provenance", {})
        return dict(mapping(found, f"{self.path}: collector_provenance"))

    def is_of(self, collection: NativeCollection) -> bool:
        """Whether it is of the schema, the attempt and the engine version of a collection."""
        version = self.document.get("schema_version")
        return (
            self.document.get("schema_name") == EXECUTION_SCHEMA
            and type(version) is int
            and version == 1
            and self.provenance.get("attempt_id") == collection.attempt_id
            and self.document.get("backend_version") == collection.backend_version
        )


def worker_observations(raw_root: Path) -> list[WorkerObservation]:
    """The execution observations below a folder, by path.

    Raises
    ------
    CollectionError: a file is no JSON object, or a symbolic link.
    """
    return [
        WorkerObservation(path, observation_document(path), file_evidence(path))
        for path in sorted(raw_root.rglob(EXECUTION_GLOB))
    ]


def observation_document(path: Path) -> dict[str, Any]:
    """The object that an observer wrote.

    Raises
    ------
    CollectionError: the file is no JSON object, or a symbolic link.
    """
    try:
        return dict(mapping(read_document(path), str(path)))
    except OnboardError as error:
        raise CollectionError(str(error)) from None
