"""Single forward passes that were timed in serving, beside what the table says of the same passes; optional evidence.

Source: onboarding.md section 8.5 (assess).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import FpmSdkError
from fpmsdk.onboard.serving_findings import Findings
from fpmsdk.onboard.serving_samples import latency_metric, relative_error
from fpmsdk.perfmodel.model import ForwardPassPerfModel
from fpmsdk.prediction.compile import timing_config
from fpmsdk.prediction.config import read_config

_PHASES = {
    "prefill": ("num_prefill_requests", "num_decode_requests"),
    "decode": ("num_decode_requests", "num_prefill_requests"),
}


def forward_result(
    evidence: str | os.PathLike[str] | None,
    recipe_path: str | os.PathLike[str],
    recipe: Mapping[str, Any],
    limit: float,
) -> dict[str, Any]:
    """The comparison of both phases; `unavailable` without evidence.

    Parameters
    ----------
    evidence: `{recipe, sources, samples{prefill|decode: [{unit, measured_ms, scheduled_requests}]}}`, or None.
    limit: largest 95th percentile of the relative error.
    """
    if evidence is None:
        return {"status": "unavailable", "issue": "no forward passes were timed in serving"}
    findings = Findings()
    phases: dict[str, Any] = {}
    with findings.unavailable("the forward evidence"):
        document = read_document(evidence)
        findings.sources(document.get("sources"), "the forward evidence")
        findings.expect(file_evidence(recipe_path), document.get("recipe"), "the recipe of the forward evidence")
        config = timing_config(read_config(recipe["prediction_config"]["path"]))
        model = ForwardPassPerfModel.best_available(config)
        try:
            phases = {
                phase: _phase(phase, document.get("samples", {}).get(phase) or [], model, limit, findings)
                for phase in _PHASES
            }
        finally:
            model.close()
        if all(phase["status"] == "unavailable" for phase in phases.values()):
            findings.missing.append("the forward evidence holds no sample")
    statuses = {phase["status"] for phase in phases.values()}
    failed = bool(findings.failures) or "failed" in statuses
    return {
        "status": "failed" if failed else "incomplete" if findings.missing or "incomplete" in statuses else "passed",
        "phases": phases,
        "missing_evidence": findings.missing,
        "failures": findings.failures,
        "evidence": file_evidence(evidence) if os.path.isfile(evidence) else None,
    }


def _phase(
    phase: str, rows: Sequence[Mapping[str, Any]], model: ForwardPassPerfModel, limit: float, findings: Findings
) -> dict[str, Any]:
    if not rows:
        return {"status": "unavailable", "sample_count": 0, "issue": f"no {phase} pass was timed"}
    samples, unsupported = [], []
    for row in rows:
        try:
            predicted_ms = _predicted_ms(phase, row, model)
            error = relative_error(predicted_ms, row["measured_ms"])
            samples.append({**row, "predicted_ms": predicted_ms, "forward_relative_error": error})
        except (FpmSdkError, ValueError, TypeError, KeyError) as fault:
            unsupported.append({"scheduled_requests": row.get("scheduled_requests"), "reason": str(fault)})
    if unsupported:
        findings.missing.append(f"{len(unsupported)} {phase} passes could not be compared")
    return {**latency_metric(samples, "forward", limit), "samples": samples, "unsupported": unsupported}


def _predicted_ms(phase: str, row: Mapping[str, Any], model: ForwardPassPerfModel) -> float:
    scheduled = row["scheduled_requests"]
    own, other = _PHASES[phase]
    if row["unit"] != "ms" or scheduled.get(own, 0) < 1 or scheduled.get(other, 0) != 0:
        raise ValueError(f"expected a pure {phase} pass in ms, found {row['unit']!r} and {scheduled}")
    predicted_ms = model.estimate_forward_pass_time_ms({"scheduled_requests": scheduled})
    if predicted_ms is None:
        raise ValueError("the model is not ready")
    return predicted_ms
