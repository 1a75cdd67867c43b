"""How well a formal table predicts its own points: some are withheld and asked of the rest, strictly.

Only the envelope, the neighbours of launch-mode changes and what is left beside the withheld points may answer.
Ordinary estimates are not touched. Source: onboarding.md section 8.3.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.documents.canonical import pretty_bytes, write_document
from fpmsdk.documents.evidence import file_evidence, verify_evidence
from fpmsdk.errors import EvidenceError, PerfDataNotAvailableError
from fpmsdk.files import sha256
from fpmsdk.onboard.holdout_boundaries import (
    Boundaries,
    CellEvidence,
    Place,
    mode_boundaries,
    place_of,
    point_document,
)
from fpmsdk.onboard.holdout_select import AXES, TARGET_FRACTION, boundary_axes, envelope_anchors, select_points
from fpmsdk.onboard.holdout_table import SourceTable, points_of, read_source
from fpmsdk.onboard.outputs import fresh_directory
from fpmsdk.onboard.policy import InterpolationPolicy
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.perfmodel.model import ForwardPassPerfModel

REPORT_FILE = "interpolation-validation.json"
# Results of an assessment; the rest of a report says where its files are.
_REPRODUCED = (
    "status",
    "policy",
    "capture_boundaries",
    "phases",
    "predictions",
    "native_query_coverage",
    "worker_type",
    "collection_phases",
)
_PLAN_FILE = "holdout-plan.json"
_CONFIG_FILE = "perfmodel-config.json"
_LIMITATIONS = (
    "every reference is the one published measurement; its noise is part of the error, also where repeats exist",
    "the withheld points are a bounded sample: no confidence interval, and no statement about the whole domain",
    "launch modes are those the engine expected of its points, not those observed at each call",
    "neighbours of known mode changes stay in the table, so that interpolation across them is not tested",
    "changes of capture size or kernel within one mode are not told apart",
)


def evaluate_holdout(
    request: SupportRequest,
    *,
    systems_root: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    policy: InterpolationPolicy,
    evidence: Sequence[CellEvidence] | None = None,
) -> dict[str, Any]:
    """Withhold points of a published table, predict them from the rest, and write the assessment.

    Parameters
    ----------
    request: the deployment; its memory may be pending.
    systems_root: directory with the system and the published pair.
    output_dir: a fresh directory apart from it, for `source-systems/`, `holdout-plan.json`, `systems/`,
        `perfmodel-config.json` and `interpolation-validation.json`.
    policy: how many points, and the accepted errors.
    evidence: launch modes of every cell; without it mode changes are not kept apart.

    Returns
    -------
    The report: `status` passed, failed or incomplete; per phase the quantiles of the absolute relative error, its mean
    with sign, and the unsupported fraction; every prediction in milliseconds.

    Raises
    ------
    OnboardError: inputs do not fit, or the output is not fresh.
    EvidenceError: files or evidence contradict each other, or a withheld point was answered as measured.
    PerfDataNotAvailableError: the pair breaks a rule of its format.

    Source: onboarding.md section 8.3.
    """
    root = Path(systems_root).expanduser().resolve()
    output = fresh_directory(output_dir, [root], "holdout output")
    source = read_source(request, root)
    source.copy_to(output / "source-systems")
    # Construction checks the whole pair before anything is derived from it.
    ForwardPassPerfModel.best_available(_config(request, output / "source-systems")).close()
    points = {phase: points_of(source.eligible(phase)) for phase in request.collection_phases}
    envelope = [
        (phase, point)
        for phase in request.collection_phases
        for point in sorted(envelope_anchors(phase, points[phase]))
    ]
    boundaries = mode_boundaries(source.matching, evidence, envelope)
    selected = _select(request, source, policy, set(envelope) | boundaries.anchors)
    plan = _plan(request, source, policy, boundaries, envelope, selected)
    write_document(output / _PLAN_FILE, plan)
    training = source.write_subset(
        output / "systems",
        source.without({place_of(row) for row in selected}),
        {"kind": "coordinate_holdout", "plan": file_evidence(output / _PLAN_FILE)},
    )
    config = ForwardPassPerfModel.normalize_config(_config(request, output / "systems"))
    write_document(output / _CONFIG_FILE, config)
    predictions, coverage, diagnostics = _predict(config, selected)
    report = {
        "schema_version": 1,
        "scope": "forward_timing_interpolation_only",
        "serving_accuracy": "not_assessed",
        "measurement_noise": "not_separated_from_interpolation_error",
        "reference_measurement_policy": source.metadata.get("measurement_policy"),
        "limitations": list(_LIMITATIONS),
        "policy": plan["policy"],
        "capture_boundaries": boundaries.report,
        "predictions": predictions,
        "native_query_coverage": coverage,
        "native_diagnostics": diagnostics,
        "artifacts": {
            "holdout_plan": file_evidence(output / _PLAN_FILE),
            "perfmodel_config": file_evidence(output / _CONFIG_FILE),
            **{f"training_{key}": reference for key, reference in training.items()},
            "source": source.inputs,
        },
        **_verdict(request, source, boundaries, predictions, policy),
        **_role(request),
    }
    write_document(output / REPORT_FILE, report)
    return report


def _config(request: SupportRequest, root: Path) -> dict[str, Any]:
    deployment = request.profile_deployment()
    assert deployment is not None
    return {
        **request.pricing_identity(deployment),
        "systems_paths": [str(root)],
        "estimation_mode": "fpm_interpolation",
        "fallback_policy": "deny",
        "estimator_config": {"fpm_interpolation": {"method": "direct", "collect_coverage": True}},
    }


def _role(request: SupportRequest) -> dict[str, Any]:
    # Requests without a role keep the form their reports always had.
    if request.worker_type is None:
        return {}
    return {"worker_type": request.worker_type, "collection_phases": list(request.collection_phases)}


def _select(
    request: SupportRequest, source: SourceTable, policy: InterpolationPolicy, kept: set[Place]
) -> list[dict[str, Any]]:
    # Rows to withhold, each with the axes at whose ends it lies.
    selected: list[dict[str, Any]] = []
    for phase in request.collection_phases:
        rows = source.eligible(phase)
        points, by_point = points_of(rows), {place_of(row)[1]: row for row in rows}
        anchors = {point for kept_phase, point in kept if kept_phase == phase}
        chosen = select_points(phase, points, anchors, limit=policy.max_points_per_phase, seed=policy.seed)
        selected += [{**by_point[point], "boundary_axes": boundary_axes(point, points)} for point in chosen]
    return selected


def _plan(
    request: SupportRequest,
    source: SourceTable,
    policy: InterpolationPolicy,
    boundaries: Boundaries,
    envelope: Sequence[Place],
    selected: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    num_eligible = sum(len(source.eligible(phase)) for phase in request.collection_phases)
    num_training = len(source.without({place_of(row) for row in selected}))
    return {
        "schema_version": 1,
        "scope": "withheld_coordinate_direct_interpolation",
        "inputs": source.inputs,
        "request_sha256": sha256(pretty_bytes(request.model_dump(mode="json"))),
        "policy": {
            **policy.model_dump(mode="json"),
            "target_holdout_fraction": TARGET_FRACTION,
            "small_table_minimum_points": 1,
            "selection": "retained_envelope_execution_boundaries_seeded_farthest_shape_v2",
            "fold": "simultaneously_remove_all_selected_coordinates",
        },
        "capture_boundaries": boundaries.report,
        "source_row_count": len(source.rows),
        "matching_row_count": len(source.matching),
        "eligible_row_count": num_eligible,
        "excluded_fake_fallback_count": len(source.matching) - num_eligible,
        "removed_row_count": len(source.rows) - num_training,
        "training_row_count": num_training,
        "retained_envelope_anchors": [point_document(place) for place in envelope],
        "selected_points": list(selected),
        **_role(request),
    }


def _predict(
    config: dict[str, Any], selected: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    model = ForwardPassPerfModel.best_available(config)
    try:
        diagnostics = model.diagnostics()
        predictions = [_prediction(model, row) for row in selected]
        coverage = model.fpm_query_coverage()
    finally:
        model.close()
    if coverage is None or coverage["queries"]["measured"]:
        raise EvidenceError(
            f"{config['systems_paths'][0]}: a withheld point was answered as measured, so that it is still in the "
            "table; start a fresh holdout"
        )
    return predictions, coverage, diagnostics


def _prediction(model: ForwardPassPerfModel, row: Mapping[str, Any]) -> dict[str, Any]:
    phase, measured_ms = row["workload_kind"], row["latency_ms"]
    prediction = {
        "phase": phase,
        "coordinates": {name: row[name] for name in AXES},
        "cell_id": row["cell_id"],
        "kv_seed_regime": row.get("kv_seed_regime"),
        "boundary_axes": row["boundary_axes"],
        "measured_ms": measured_ms,
    }
    batch, tokens, kv = (row[name] for name in AXES)
    if phase == "prefill":
        scheduled = {"num_prefill_requests": batch, "sum_prefill_tokens": tokens, "sum_prefill_kv_tokens": kv}
    else:
        scheduled = {"num_decode_requests": batch, "sum_decode_kv_tokens": kv}
    try:
        predicted_ms = model.estimate_forward_pass_time_ms({"scheduled_requests": scheduled})
    except PerfDataNotAvailableError as fault:
        return prediction | {"status": "unsupported", "reason": str(fault)}
    if predicted_ms is None or not math.isfinite(predicted_ms) or predicted_ms <= 0:
        raise EvidenceError(f"{point_document(place_of(row))}: predicted {predicted_ms!r} ms, which is no latency")
    relative_error = (predicted_ms - measured_ms) / measured_ms
    return prediction | {"status": "predicted", "predicted_ms": predicted_ms, "relative_error": relative_error}


def _verdict(
    request: SupportRequest,
    source: SourceTable,
    boundaries: Boundaries,
    predictions: Sequence[Mapping[str, Any]],
    policy: InterpolationPolicy,
) -> dict[str, Any]:
    phases = {
        phase: phase_report([entry for entry in predictions if entry["phase"] == phase], policy)
        for phase in request.collection_phases
    }
    graphs = [graph["source"] for cell in boundaries.report["cells"] for graph in cell["native_graph_config"]]
    unchanged = all(_is_unchanged(reference) for reference in (*source.inputs.values(), *graphs))
    statuses = {phase["status"] for phase in phases.values()}
    if not unchanged or "failed" in statuses:
        status = "failed"
    elif boundaries.report["status"] == "incomplete" or "not_assessed" in statuses:
        status = "incomplete"
    else:
        status = "passed"
    return {
        "status": status,
        "phases": phases,
        "source_artifacts_unchanged": unchanged,
        "issues": [] if unchanged else ["files of the source changed during the assessment"],
    }


def _is_unchanged(reference: Mapping[str, Any]) -> bool:
    try:
        verify_evidence(reference)
    except EvidenceError:
        return False
    return True


def phase_report(predictions: Sequence[Mapping[str, Any]], policy: InterpolationPolicy) -> dict[str, Any]:
    """The figures and the verdict of one phase.

    Parameters
    ----------
    predictions: entries with `status`, `boundary_axes` and, when predicted, `relative_error`.
    policy: the accepted 95th percentile of the absolute relative error, and unsupported fraction.

    >>> phase_report([], InterpolationPolicy())["status"]
    'not_assessed'
    """
    errors = np.array([entry["relative_error"] for entry in predictions if entry["status"] == "predicted"])
    unsupported = [entry for entry in predictions if entry["status"] == "unsupported"]
    fraction = len(unsupported) / len(predictions) if predictions else None
    figures = _figures(errors)
    issues = []
    if not predictions:
        issues.append("nothing can be withheld beside the envelope and the neighbours of mode changes")
    elif figures is None:
        issues.append("none of the withheld points could be predicted")
    if fraction is not None and fraction > policy.max_unsupported_fraction:
        issues.append(f"unsupported fraction {fraction:.4g} exceeds {policy.max_unsupported_fraction:.4g}")
    if figures is not None and figures["p95"] > policy.max_p95_relative_error:
        issues.append(f"p95 of the relative error {figures['p95']:.4g} exceeds {policy.max_p95_relative_error:.4g}")
    return {
        "status": "not_assessed" if not predictions else "failed" if issues else "passed",
        "selected_count": len(predictions),
        "predicted_count": len(errors),
        "unsupported_count": len(unsupported),
        "unsupported_fraction": fraction,
        "boundary_unsupported_count": sum(bool(entry["boundary_axes"]) for entry in unsupported),
        "absolute_relative_error": figures,
        "bias_definition": "mean((predicted_ms - measured_ms) / measured_ms)",
        "issues": issues,
    }


def _figures(errors: NDArray[np.float64]) -> dict[str, float] | None:
    # Bit for bit the same wherever it is computed again, which library functions do not promise.
    if not len(errors):
        return None
    absolute = np.sort(np.abs(errors)).tolist()
    return {
        "p50": _quantile(absolute, 0.5),
        "p95": _quantile(absolute, 0.95),
        "max": absolute[-1],
        "bias": float(np.add.accumulate(errors)[-1]) / len(errors),
    }


def _quantile(ascending: Sequence[float], fraction: float) -> float:
    place = (len(ascending) - 1) * fraction
    lower, upper = ascending[math.floor(place)], ascending[math.ceil(place)]
    return lower + (upper - lower) * (place - math.floor(place))


def require_reproduced(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Compare a saved report with a new assessment of the same inputs, and its files with their references.

    Parameters
    ----------
    saved: the report that was written.
    current: one that was made now, elsewhere.
    where: the file of the saved report, for messages.

    Raises
    ------
    EvidenceError: a result differs, or a file of the saved assessment or its source changed.
    """
    for name in _REPRODUCED:
        if saved.get(name) != current.get(name):
            raise EvidenceError(
                f"{where}: {name} differs from what its evidence gives now; keep it, and assess in a fresh directory",
                where,
            )
    references = {**saved["artifacts"], **saved["artifacts"]["source"]}
    for name, reference in references.items():
        if name != "source":
            verify_evidence(reference)
