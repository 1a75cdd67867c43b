"""The memory that a verified collection observed: by its own records, or by those of a runtime probe's instrumentation.

Source: onboarding.md section 7 (step 6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.instrumentation import contained_file, load_instrumentation
from fpmsdk.collect.memory import resolve_memory
from fpmsdk.collect.runtime_settings import LaunchedSettings
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError, EvidenceError
from fpmsdk.onboard.bindings import checkpoint_observations
from fpmsdk.onboard.collection_source import CollectionSource
from fpmsdk.onboard.finalize_revision import verify_revision
from fpmsdk.onboard.graph_settings import reviewed_graphs
from fpmsdk.onboard.imported_profile import verify_collection_observations
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.request import SupportRequest

_OBSERVED_FILES = ("launch_artifacts", "artifacts", "runtime_artifacts")


@dataclass(frozen=True)
class CollectedMemory:
    """Resources that cells observed, by name; the files they rest on; how they compare with an accepted probe."""

    observations: dict[str, dict[str, Any]]
    files: tuple[Path, ...]
    compatibility: dict[str, Any] | None = None


def collected_memory(
    request: SupportRequest, source: CollectionSource, revision: SupportRequest | None = None
) -> CollectedMemory:
    """Resolve the memory of every cell of a collection.

    Parameters
    ----------
    request: the request of the collection.
    source: the verified collection.
    revision: an accepted request that lowers the capacity to what this collection observed.

    Raises
    ------
    EvidenceError: a record is missing, unresolved, of another engine, or contradicts launch, rank or accepted probe.
    """
    try:
        return _collected(request, source, revision)
    except CollectionError as fault:
        raise EvidenceError(str(fault), str(source.folder)) from fault


def _collected(request: SupportRequest, source: CollectionSource, revision: SupportRequest | None) -> CollectedMemory:
    if probe_manifest(request) is None:
        observations = {
            f"{cell.workload_kind} {cell.cell_id}": _cell_memory(request, source, cell) for cell in source.plan.cells
        }
        return CollectedMemory(observations, ())
    checkpoint = read_document(source.checkpoint)
    index = _observation_index(source, checkpoint)
    observed = verify_collection_observations(request, index, checkpoint, bound_of=revision)
    if revision is not None:
        verify_revision(request, revision, observed)
    return CollectedMemory(
        {"the bound collection phases": observed["resources"]},
        tuple(_observed_files(index, observed["provenance"])),
        observed["compatibility"],
    )


def _cell_memory(request: SupportRequest, source: CollectionSource, cell: Cell) -> dict[str, Any]:
    limits, identity = request.scheduler_limits(), request.identity
    version = identity.runtime_framework_version or identity.framework_version
    assert version is not None
    moe = cell.resolved_dtypes["moe_quant_mode"]
    return resolve_memory(
        source.plan,
        cell,
        source.campaign / "cells" / cell.cell_id / "raw",
        attempt_id=source.attempts[cell.cell_id],
        launched=LaunchedSettings(
            topology=cell.topology,
            max_model_len=request.search.context_length,
            max_num_batched_tokens=limits["max_batched_tokens"],
            max_num_seqs=limits["max_sequences"],
            gpu_memory_utilization=request.collection.memory_fraction,
            gemm_quant_mode=str(cell.resolved_dtypes["gemm_quant_mode"]),
            moe_quant_mode=moe if identity.model_kind == "moe" else None,
            kv_cache_dtype=cell.kv_cache_dtype,
            moe_backend=str(cell.backend_columns["moe_backend"]),
        ),
        backend_version=version,
        model_revision=identity.model_revision,
        requested_graphs=reviewed_graphs(source.plan.options, cell.workload_kind),
    )


def _observation_index(source: CollectionSource, checkpoint: Mapping[str, Any]) -> Path:
    index = checkpoint_observations(source.checkpoint, checkpoint)
    if source.folder not in index.parents:
        raise EvidenceError(
            f"{source.checkpoint}: runtime_observations: must be a file of the collection in {source.folder}, found "
            f"{index}",
            str(source.checkpoint),
        )
    return index


def _observed_files(index: Path, provenance: Mapping[str, Any]) -> list[Path]:
    root = index.parent
    references = [reference for name in _OBSERVED_FILES for reference in provenance[name]]
    bundle = contained_file(root, provenance["instrumentation"]["manifest"])
    declared = [bundle.parent / name for name in load_instrumentation(bundle).files]
    return [index, *(contained_file(root, reference["path"]) for reference in references), bundle, *declared]
