"""Judges a repetition anew, with other thresholds if wanted; everything is read again and nothing is launched.

Source: collector.md section 7.4 (reassessment).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from fpmsdk.collect.measurement_compare import compare_measurements
from fpmsdk.collect.repeatability_plan import RepeatPolicy, freeze, read_source, verify_frozen
from fpmsdk.collect.repeatability_report import summarise
from fpmsdk.collect.repeatability_saved import check_saved
from fpmsdk.documents.canonical import digest
from fpmsdk.documents.evidence import manifest, verify_evidence
from fpmsdk.documents.strict import checked
from fpmsdk.errors import EvidenceError, OnboardError


def assess(
    frozen: Mapping[str, Any],
    report: Mapping[str, Any],
    *,
    cv_threshold: float,
    source_agreement_threshold: float | None = None,
) -> dict[str, Any]:
    """The report of a repetition under given thresholds.

    Parameters
    ----------
    frozen, report: the documents of a repetition, whose files are where they were written.
    cv_threshold: accepted sample standard deviation over mean.
    source_agreement_threshold: accepted |median / source - 1|; None keeps that of the frozen plan.

    Returns
    -------
    The report with `assessment`, which names the thresholds and the digest of the assessed report. A report of schema
    1 stays what it said and is incomplete: its measurements were never comparable.

    Raises
    ------
    OnboardError: no such documents, or a threshold out of range.
    EvidenceError: the frozen plan, the source or a launch was changed.

    Source: collector.md section 7.4.
    """
    if report.get("plan_sha256") != frozen.get("sha256"):
        raise EvidenceError("repeatability.json: is not of this frozen plan; give both of one repetition")
    if frozen.get("schema_version") == 1:
        return _as_it_was(frozen, report, cv_threshold)
    if (frozen.get("schema_version"), report.get("schema_version")) != (2, 2):
        raise OnboardError(
            f"schema_version: accepted are 1 and 2 of plan and report, found {frozen.get('schema_version')!r} and "
            f"{report.get('schema_version')!r}"
        )
    policy = verify_frozen(frozen)
    changes = {"cv_threshold": cv_threshold}
    if source_agreement_threshold is not None:
        changes["source_agreement_threshold"] = source_agreement_threshold
    judged = checked(RepeatPolicy, policy.model_dump(mode="json") | changes, "repeatability")
    source = read_source(frozen["source_campaign_dir"])
    version = frozen.get("observation_evidence_version", 1)
    again = freeze(
        source, frozen["source_campaign_dir"], frozen["source_checkpoint"]["path"], policy, evidence_version=version
    )
    if again != frozen:
        raise EvidenceError(
            f"{frozen['source_campaign_dir']}: the repeated campaign changed since the plan was frozen; restore it",
            frozen["source_campaign_dir"],
        )
    check_saved(source, frozen, report, Path(report["output_dir"]).resolve())
    result = deepcopy(dict(report))
    result |= summarise({**frozen, "policy": judged.model_dump(mode="json")}, result["samples"], compare_measurements)
    result["assessment"] = {
        "source_report_sha256": digest(report),
        "cv_threshold": judged.cv_threshold,
        "source_agreement_threshold": judged.source_agreement_threshold,
    }
    return result


def _as_it_was(frozen: Mapping[str, Any], report: Mapping[str, Any], cv_threshold: float) -> dict[str, Any]:
    # A report of schema 1 is shown, never upgraded.
    content = {name: value for name, value in frozen.items() if name != "sha256"}
    if digest(content) != frozen.get("sha256"):
        raise EvidenceError("repeatability-plan.json: changed since it was frozen; restore it")
    verify_evidence(frozen["source_checkpoint"])
    for cell in frozen["cells"]:
        _require_files(Path(frozen["source_campaign_dir"]) / "cells" / cell["cell_id"] / "raw", cell["source_files"])
    output = Path(report["output_dir"]).resolve()
    for slots in report["samples"].values():
        for attempt in (attempt for slot in slots for attempt in slot["attempts"]):
            place = (output / attempt["directory"]).resolve()
            if output not in place.parents:
                raise EvidenceError(f"{place}: an attempt must be inside {output}", str(place))
            _require_files(place, attempt.get("files"))
    return {
        **deepcopy(dict(report)),
        "historical_assessment": {
            name: deepcopy(report[name]) for name in ("status", "repeatability", "execution") if name in report
        },
        "assessment": {
            "source_report_sha256": digest(report),
            "cv_threshold": cv_threshold,
            "reason": "its bounded measurements have no protocol under which they could be compared",
        },
        "status": "incomplete",
        "source_qualification": {"status": "unestablished"},
        "new_population": {"status": "unestablished", "scope": "legacy_diagnostic"},
    }


def _require_files(folder: Path, files: Any) -> None:
    if manifest(folder) != files:
        raise EvidenceError(f"{folder}: files changed since they were recorded; restore them", str(folder))
