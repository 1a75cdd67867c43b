"""The finished formal collection of a plan folder, verified from its request down to every published row.

What finalisation and validation rest on. Source: onboarding.md section 7, steps 2 to 5.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.checkpoint import SCHEMA as CHECKPOINT_SCHEMA
from fpmsdk.collect.commit import validate_commit
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.repeatability_plan import passed_attempts, read_source
from fpmsdk.collect.rows import attempt_rows
from fpmsdk.config.profile import DeploymentProfile
from fpmsdk.documents.canonical import canonical_bytes, read_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from fpmsdk.onboard.collector_command import (
    ARTIFACT_FOLDER,
    CHECKPOINT_FOLDER,
    COLLECTOR,
    DATA_FOLDER,
    collector_arguments,
)
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.version_binding import RESOLVED_FOLDER

CHECKPOINT_FILE = "fpm_forward.json"
_TOPOLOGY_AXES = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp")
_DTYPES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode")
# Where a campaign ran is no part of what was reviewed.
_DEPLOYMENT_OPTIONS = (
    "executor",
    "slurm_container_image",
    "slurm_container_mounts",
    "slurm_cpus_per_task",
    "slurm_cpu_bind",
)


@dataclass(frozen=True)
class CollectionSource:
    """A verified collection.

    Attributes
    ----------
    folder: the plan folder.
    plan: the frozen plan of its campaign.
    campaign: the folder of the campaign's artifacts.
    checkpoint: its formal checkpoint.
    attempts: the attempt of every cell.
    formal_data: evidence references of the table and its sidecar.
    """

    folder: Path
    plan: CollectionPlan
    campaign: Path
    checkpoint: Path
    attempts: dict[str, str]
    formal_data: tuple[dict[str, Any], dict[str, Any]]


def verify_source(request: SupportRequest, folder: Path) -> CollectionSource:
    """Verify that a plan folder holds the complete, published collection of a request.

    Parameters
    ----------
    request: with a profile, as it was collected.
    folder: absolute, without links.

    Returns
    -------
    CollectionSource: the plan is the request's, every cell passed and was published, and the table holds exactly the
        rows that the raw artifacts give now.

    Raises
    ------
    OnboardError: no plan of this request, or the campaign measured something else than was reviewed.
    EvidenceError: no single formal checkpoint, an incomplete publication, changed files, or raw artifacts that do not
        validate any more or are not what the pair holds.

    Source: onboarding.md section 7, steps 2 to 5.
    """
    try:
        return _verified(request, folder)
    except CollectionError as fault:
        # It was valid when it was published.
        raise EvidenceError(
            f"{fault}; these files were valid when they were published: restore them, or collect into a new plan",
            str(folder),
        ) from fault


def _verified(request: SupportRequest, folder: Path) -> CollectionSource:
    check_plan(request, folder)
    checkpoint = formal_checkpoint(folder)
    document = read_document(checkpoint)
    sha256 = document.get("plan_sha256") if isinstance(document, dict) else None
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise EvidenceError(f"{checkpoint}: plan_sha256 must be a SHA-256, found {sha256!r}", str(checkpoint))
    campaign = folder / ARTIFACT_FOLDER / sha256[:16]
    plan = read_source(campaign)
    attempts = passed_attempts(plan, checkpoint)
    _require_reviewed(request, plan, folder)
    deployment = request.profile_deployment()
    assert deployment is not None
    for cell in plan.cells:
        _require_deployment(cell, deployment)
    formal_data = _verify_publication(plan, campaign, document.get("database"), attempts, folder)
    return CollectionSource(folder, plan, campaign, checkpoint, attempts, formal_data)


def formal_checkpoint(folder: Path) -> Path:
    """The one formal checkpoint of a plan folder.

    Raises
    ------
    EvidenceError: there is none, or more than one.
    """
    found = sorted((folder / CHECKPOINT_FOLDER).rglob(CHECKPOINT_FILE))
    if len(found) != 1:
        child = folder / RESOLVED_FOLDER
        advice = (
            f"its collection is in {child}: name that folder" if child.is_dir() else "run the formal collection first"
        )
        raise EvidenceError(
            f"{folder / CHECKPOINT_FOLDER}: exactly one formal {CHECKPOINT_SCHEMA} checkpoint is needed, found "
            f"{', '.join(map(str, found)) or 'none'}; {advice}",
            str(folder),
        )
    return found[0]


def _require_reviewed(request: SupportRequest, plan: CollectionPlan, folder: Path) -> None:
    # The frozen plan is what the collector would make of the request now, wherever it ran.
    identity = request.identity
    if request.fpm_profile is None:
        raise OnboardError("fpm_profile: the request has none; only collections with a profile can be assessed")
    expected: dict[str, Any] = {
        "model_path": identity.model,
        "system": identity.gpu,
        "backend": identity.framework,
        "version label": identity.framework_version,
        "fpm_profile": request.fpm_profile.model_dump(mode="json"),
        "phases": sorted(request.collection_phases),
    }
    found: dict[str, Any] = {
        "model_path": plan.model_path,
        "system": plan.system,
        "backend": plan.backend,
        "version label": plan.label,
        "fpm_profile": plan.fpm_profile,
        "phases": sorted({cell.workload_kind for cell in plan.cells}),
    }
    if identity.runtime_framework_version is not None:
        expected["runtime version"] = identity.runtime_framework_version
        found["runtime version"] = plan.runtime_backend_version
    _require_equal(expected, found, "the collection")
    settings = parse_arguments(collector_arguments(request, folder)[len(COLLECTOR) :]).settings
    assert settings is not None
    _require_equal(_reviewed(settings.document()), _reviewed(plan.options), "its options differ: the collection")


def _reviewed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _DEPLOYMENT_OPTIONS}


def _require_deployment(cell: Cell, deployment: DeploymentProfile) -> None:
    _require_equal(
        {
            **{axis: getattr(deployment, axis) for axis in _TOPOLOGY_AXES},
            **{name: getattr(deployment, name) for name in (*_DTYPES, "kv_cache_dtype", *cell.backend_columns)},
        },
        {
            **cell.topology.document(),
            **{name: cell.resolved_dtypes[name] for name in _DTYPES},
            "kv_cache_dtype": cell.kv_cache_dtype,
            **cell.backend_columns,
        },
        f"cell {cell.cell_id}",
    )


def _require_equal(expected: Mapping[str, Any], found: Mapping[str, Any], what: str) -> None:
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise OnboardError(
                f"{name}: {what} has {found.get(name)!r}, the request asks for {expected.get(name)!r}; give the "
                "request that was collected",
                name,
            )


def _verify_publication(
    plan: CollectionPlan, campaign: Path, database: Any, attempts: Mapping[str, str], folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    import pyarrow.parquet as pq

    complete = {
        "status": "passed",
        "missing_cells": [],
        "skipped_first_publisher_wins": [],
        "plan_cells": len(plan.cells),
        "published_cells": len(plan.cells),
    }
    found = database if isinstance(database, dict) else {}
    for name, value in complete.items():
        if found.get(name) != value:
            raise EvidenceError(
                f"database.{name}: must be {value!r} for a complete publication of this campaign, found "
                f"{found.get(name)!r}; resume the collection, or collect into a fresh plan folder"
            )
    parquet, sidecar = (_data_file(found.get(name), name, folder) for name in ("parquet", "metadata"))
    references = file_evidence(parquet), file_evidence(sidecar)
    sealed = found.get("cell_rows")
    # Rows that no checkpoint sealed are compared with the raw artifacts below, as all are.
    commit = validate_commit(plan, parquet, sidecar, attempt_ids=attempts if sealed else None, cell_rows=sealed or None)
    promoted = commit.sidecar.get("kv_seed_classification", {}).get("cells", [])
    raw: Counter[bytes] = Counter()
    for cell in plan.cells:
        rows = attempt_rows(
            plan,
            cell,
            campaign / "cells" / cell.cell_id,
            attempt_id=attempts[cell.cell_id],
            is_dense_policy_on=cell.cell_id in promoted,
        )
        raw.update(map(canonical_bytes, rows))
    if raw != Counter(map(canonical_bytes, pq.read_table(parquet, use_threads=False).to_pylist())):
        raise EvidenceError(
            f"{parquet}: the published rows are not those of the raw artifacts; collect into a fresh plan folder",
            str(parquet),
        )
    return references


def _data_file(value: Any, name: str, folder: Path) -> Path:
    data = folder / DATA_FOLDER
    path = Path(value) if isinstance(value, str) else data
    if path != path.resolve() or data not in path.parents:
        raise EvidenceError(f"database.{name}: must be a file below {data}, found {value!r}")
    return path
