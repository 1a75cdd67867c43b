"""Whether a replay validation belongs to a collection and still holds: one of the three gates of a qualification.

Source: onboarding.md section 8.5 (combined validation).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence, verify_evidence
from fpmsdk.documents.yaml_files import read_mapping
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.finalize import verify_finalization
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.plan_documents import REQUEST_FILE
from fpmsdk.onboard.provenance import finalization_manifest
from fpmsdk.onboard.request import SupportRequest, load_request, request_id
from fpmsdk.onboard.validate_fpm import completion_issues, pair_evidence, replay_configuration


def check_replay(
    report_path: str | os.PathLike[str],
    original: SupportRequest,
    collection: Path,
    formal_data: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The gate of a `validation.json` that `validate-fpm` wrote.

    Parameters
    ----------
    original, collection: the request of a collection and its plan folder; the replay may be of its finalisation.
    formal_data: references to the pair of the collection; the replayed one must have the same bytes.

    Returns
    -------
    `status` passed or incomplete, `issues`, and references to the report, trace, configuration, prediction, coverage.

    Raises
    ------
    OnboardError, EvidenceError: it belongs to another collection, or a file changed.
    KeyError: evidence is missing in the report.
    """
    report = read_document(report_path)
    for name in ("collection_plan", "trace", "prediction_config"):
        verify_evidence(report[name])
    folder = Path(report["collection_plan"]["path"]).parent
    request = load_request(folder / REQUEST_FILE)
    check_plan(request, folder)
    if request_id(request) != request_id(original):
        _check_finalised(request, original, collection)
    trace = Path(report["trace"]["path"])
    config_path = report["prediction_config"]["path"]
    if read_mapping(config_path) != replay_configuration(request, folder, trace):
        raise EvidenceError(f"{config_path}: is not the replay of the reviewed deployment", config_path)
    found = pair_evidence(folder)
    if report["collection_id"] != request_id(request) or report["fpm_artifacts"] != found:
        raise EvidenceError(f"{report_path}: the replay is of another collection or table", os.fspath(report_path))
    if _digests(found) != _digests(formal_data):
        raise EvidenceError(f"{report_path}: the replayed table is not that of the collection", os.fspath(report_path))
    prediction, coverage = (report[name] for name in ("prediction_evidence", "coverage_evidence"))
    for reference, stated in ((prediction, "prediction_report"), (coverage, "coverage_report")):
        verify_evidence(reference)
        if reference["path"] != report[stated]:
            raise EvidenceError(f"{report_path}: {stated} is not the file of its evidence", os.fspath(report_path))
    issues = completion_issues(read_document(prediction["path"])) + _coverage_issues(report, coverage)
    return {
        "status": "incomplete" if issues else "passed",
        "issues": issues,
        "report": file_evidence(report_path),
        "trace": report["trace"],
        "prediction_config": report["prediction_config"],
        "prediction_report": prediction,
        "coverage_report": coverage,
    }


def _check_finalised(request: SupportRequest, original: SupportRequest, collection: Path) -> None:
    manifest = finalization_manifest(request)
    if (
        manifest is None
        or manifest.get("source_request_id") != request_id(original)
        or Path(manifest.get("source_directory", "")).resolve() != collection
    ):
        raise OnboardError(
            f"the replay is of the request {request_id(request)}, which is neither that of the collection, "
            f"{request_id(original)}, nor its finalisation"
        )
    verify_finalization(request)


def _coverage_issues(report: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    coverage = read_document(reference["path"])
    queries = coverage["queries"]
    answered = queries["measured"] + queries["interpolated"]
    covered = coverage["status"] == "covered" and queries["unsupported"] == 0 and answered > 0
    if report["prediction_exit_code"] == 0 and covered and report["fpm_query_coverage"] == coverage:
        return []
    return [f"the tables did not answer every query: {queries}"]


def _digests(references: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return sorted((reference["sha256"], reference["size_bytes"]) for reference in references)
