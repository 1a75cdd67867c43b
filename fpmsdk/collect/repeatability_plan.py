"""The frozen plan of a repetition: what of a finished campaign is launched again, how often, and from which evidence.

Source: collector.md section 7.4 (freeze).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.checkpoint import SCHEMA as CHECKPOINT_SCHEMA
from fpmsdk.collect.launch_evidence import OVERRIDES_FILE, same_deployment
from fpmsdk.collect.measurement_records import coordinates_of
from fpmsdk.collect.paths import PLAN
from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.collect.repeatability_evidence import CellRecord, read_cell
from fpmsdk.collect.repeatability_points import (
    FULL_SWEEP,
    RepeatedPoint,
    bounded_selection,
    bounding_sizes,
    captured_sizes,
)
from fpmsdk.documents.canonical import digest, read_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.documents.strict import StrictDocument
from fpmsdk.errors import EvidenceError, OnboardError

PLAN_FILE = "repeatability-plan.json"
SCHEMA_NAME = "aisimulate_fpm_repeatability_plan"
SCHEMA_VERSION = 2
EVIDENCE_VERSION = 2


Threshold = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class RepeatPolicy(StrictDocument):
    """How often every cell is launched again, and how far the latencies of its points may scatter.

    `comparison_mode` is `full_grid` for the sweep of the source, or `bounded` for at most `max_points_per_cell` of its
    points, which is diagnostic. `cv_threshold` is sample standard deviation over mean, `source_agreement_threshold`
    |median / source - 1|.

    >>> RepeatPolicy().samples
    5
    """

    samples: Annotated[int, Field(ge=2)] = 5
    max_points_per_cell: Count = 12
    cv_threshold: Threshold = 0.05
    comparison_mode: Literal["full_grid", "bounded"] = "full_grid"
    max_attempts_per_sample: Count = 2
    source_agreement_threshold: Threshold = 0.05

    @property
    def is_full(self) -> bool:
        """Whether the whole sweep is repeated."""
        return self.comparison_mode == "full_grid"


def read_source(campaign_root: str | os.PathLike[str]) -> CollectionPlan:
    """The plan of a campaign that can be repeated.

    Raises
    ------
    OnboardError: no plan, a changed one, or one of schema 10, whose cells are not identified well enough.
    OSError: it cannot be read.

    Source: collector.md section 7.4.
    """
    plan = CollectionPlan.read(Path(campaign_root) / PLAN)
    if plan.schema_version != 11:
        raise OnboardError(
            f"{campaign_root}: a repetition needs a campaign of schema 11, found {plan.schema_version}; its data stay "
            "readable, collect anew to repeat it"
        )
    return plan


def read_deployment(plan: CollectionPlan, campaign_root: str | os.PathLike[str]) -> dict[str, Any]:
    """The archived deployment inputs that a campaign was launched with.

    Raises
    ------
    OnboardError: no object.
    EvidenceError: the file is gone, or is of another plan.
    """
    path = Path(campaign_root) / OVERRIDES_FILE
    try:
        overrides = read_document(path)
    except FileNotFoundError:
        raise EvidenceError(
            f"{path}: the deployment inputs of this campaign were not archived; collect a new campaign", str(path)
        ) from None
    if not isinstance(overrides, dict):
        raise OnboardError(f"{path}: expected an object of deployment inputs", str(path))
    if not same_deployment(plan, overrides):
        raise EvidenceError(f"{path}: other deployment inputs than the plan was made with; restore the file", str(path))
    return overrides


def freeze(
    plan: CollectionPlan,
    campaign_root: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    policy: RepeatPolicy,
    *,
    evidence_version: int = EVIDENCE_VERSION,
) -> dict[str, Any]:
    """Read a finished campaign and write down what repeating it means; nothing is launched.

    Parameters
    ----------
    plan: the plan of the campaign, of schema 11.
    campaign_root: its folder, with the raw artifacts of every cell.
    checkpoint: its formal checkpoint.
    policy: how much is repeated.
    evidence_version: 2; 1 reads a campaign as older assessments did.

    Returns
    -------
    The document of `repeatability-plan.json`, the same for the same files.

    Raises
    ------
    OnboardError: the campaign is of another plan, or the policy cannot cover its points.
    EvidenceError: a cell has not passed.
    CollectionError: raw artifacts do not validate.

    Source: collector.md section 7.4.
    """
    root, checkpoint = Path(campaign_root).expanduser().resolve(), Path(checkpoint).expanduser().resolve()
    if read_source(root).document != plan.document:
        raise EvidenceError(f"{root / PLAN}: another plan than the given one; give the plan of this campaign")
    attempts = passed_attempts(plan, checkpoint)
    cells = []
    for cell in plan.cells:
        record = read_cell(plan, cell, root / "cells" / cell.cell_id, attempts[cell.cell_id], evidence_version)
        cells.append(_frozen_cell(cell, record, policy))
    overrides = root / OVERRIDES_FILE
    document = {
        "schema_name": SCHEMA_NAME,
        "schema_version": SCHEMA_VERSION,
        **({"observation_evidence_version": 2} if evidence_version == 2 else {}),
        "source_plan_sha256": plan.sha256,
        "source_campaign_dir": str(root),
        "source_checkpoint": file_evidence(checkpoint),
        "source_deployment": file_evidence(overrides) if overrides.is_file() else None,
        "policy": policy.model_dump(mode="json"),
        "sampling": "independent_native_full_sweep_launches"
        if policy.is_full
        else "independent_native_subset_launches",
        "cells": cells,
    }
    return {**document, "sha256": digest(document)}


def passed_attempts(plan: CollectionPlan, checkpoint: Path) -> dict[str, str]:
    """The attempt of every cell of a plan, from a checkpoint in which all have passed.

    Raises
    ------
    EvidenceError: the checkpoint is of another plan, or a cell has not passed; names it.
    """
    document = read_document(checkpoint)
    if not isinstance(document, dict) or document.get("schema") != CHECKPOINT_SCHEMA:
        raise EvidenceError(f"{checkpoint}: no {CHECKPOINT_SCHEMA} document", str(checkpoint))
    if document.get("plan_sha256") != plan.sha256:
        raise EvidenceError(
            f"{checkpoint}: of the plan {document.get('plan_sha256')!r}, expected {plan.sha256!r}; give the checkpoint "
            "of this campaign",
            str(checkpoint),
        )
    attempts = {}
    for cell in plan.cells:
        entry = document.get("cells", {}).get(cell.cell_id, {})
        if entry.get("status") != "passed" or not entry.get("attempt_id"):
            raise EvidenceError(
                f"{checkpoint}: cell {cell.cell_id} has not passed, its status is {entry.get('status')!r}; finish the "
                "collection first",
                str(checkpoint),
            )
        attempts[cell.cell_id] = entry["attempt_id"]
    return attempts


def _frozen_cell(cell: Cell, record: CellRecord, policy: RepeatPolicy) -> dict[str, Any]:
    chosen = (
        [(point, [FULL_SWEEP]) for point in record.points]
        if policy.is_full
        else bounded_selection(record.points, policy.max_points_per_cell)
    )
    sizes = captured_sizes(record.points)
    kept = sizes if policy.is_full else bounding_sizes(record.points)
    manifest: dict[str, Any] = {"schema_version": 3, "prefill": [], "decode": []}
    manifest[cell.workload_kind] = [coordinates_of(point.point) for point, _ in chosen]
    return {
        "cell_id": cell.cell_id,
        "phase": cell.workload_kind,
        "source_attempt_id": record.collection.attempt_id,
        "source_runtime_run_id": record.collection.run_id,
        "source_measurement": record.measurement,
        "source_point_count": record.collection.num_points,
        "points": [_frozen_point(point, reasons) for point, reasons in chosen],
        "selection_coverage": {
            "covered_strata": sorted({reason for _, reasons in chosen for reason in reasons}),
            "uncovered_strata": [],
            "observed_expected_capture_sizes": sizes,
            "selected_capture_boundaries": kept,
            "unselected_capture_boundaries": sorted(set(sizes) - set(kept)),
        },
        "benchmark_points": manifest,
        "source_files": record.files,
        "source_launch": record.launch,
        "execution": record.execution,
    }


def _frozen_point(point: RepeatedPoint, reasons: Sequence[str]) -> dict[str, Any]:
    return {
        "key": point.key,
        "coordinates": coordinates_of(point.point),
        "source_point": dict(point.point),
        "source_wall_time_seconds": point.wall_s,
        "source_rank_wall_times": point.rank_walls_document(),
        "kv_seed_regime": point.regime,
        "selection_reasons": list(reasons),
    }


def launch_plan(source: CollectionPlan, frozen_cell: Mapping[str, Any], policy: RepeatPolicy) -> CollectionPlan:
    """The plan of one launch: one cell of the source, with its sweep or with the chosen points only.

    Parameters
    ----------
    source: the plan of the repeated campaign.
    frozen_cell: an entry of `cells` of the frozen plan.
    policy: of the frozen plan.
    """
    document = dict(source.document)
    document["cells"] = [cell for cell in document["cells"] if cell["cell_id"] == frozen_cell["cell_id"]]
    document["counts"] = {**document["counts"], "cells": 1}
    if not policy.is_full:
        manifest = frozen_cell["benchmark_points"]
        points = {"payload": manifest, "sha256": digest(manifest)}
        document["options"] = {**document["options"], "benchmark_points": points}
        document["point_generation"] = {
            **document["point_generation"],
            "source": "frozen_explicit_manifest",
            "manifest_sha256": points["sha256"],
            "planned_point_count": len(manifest["prefill"]) + len(manifest["decode"]),
        }
    document["sha256"] = plan_digest(document)
    return CollectionPlan.from_document(document)


def verify_frozen(frozen: Mapping[str, Any]) -> RepeatPolicy:
    """The policy of a frozen plan whose digest holds.

    Raises
    ------
    EvidenceError: the plan was changed since it was frozen.
    """
    content = {name: value for name, value in frozen.items() if name != "sha256"}
    if digest(content) != frozen.get("sha256"):
        raise EvidenceError(f"{PLAN_FILE}: changed since it was frozen; restore it, or repeat in a fresh directory")
    return RepeatPolicy.model_validate(frozen["policy"])
