"""The quality of a collection as a finalised request carries it: recomputed from raw evidence, never believed.

Quality is no accuracy: the marker says which gates a collection passed, and `accuracy` stays `not_assessed`.
Source: onboarding.md section 7 (collection_quality).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence, verify_evidence
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.collection_gates import (
    assess_repeats,
    execution_gate,
    overall,
    repeatability_status,
    run_holdout,
    select_repeats,
)
from fpmsdk.onboard.collection_source import CollectionSource, verify_source
from fpmsdk.onboard.holdout import require_reproduced
from fpmsdk.onboard.policy import ValidationPolicy, load_policy
from fpmsdk.onboard.provenance import UNASSESSED
from fpmsdk.onboard.request import SupportRequest, load_request, request_id
from fpmsdk.onboard.validate_collection import SCHEMA

_GATES = ("point_validity", "execution", "repeatability", "interpolation")


class CheckedReport(NamedTuple):
    """A report whose every gate was recomputed, with what it is about."""

    report: dict[str, Any]
    request: SupportRequest
    source: CollectionSource
    frozen: dict[str, Any]


def check_collection_report(path: str | os.PathLike[str], policy: ValidationPolicy | None = None) -> CheckedReport:
    """Recompute all gates of a `collection-validation.json` from the evidence that it names.

    Parameters
    ----------
    path: the report.
    policy: must ask for the same repetitions and holdout as that of the report; None takes the latter.

    Raises
    ------
    OnboardError: no such report, or another policy.
    EvidenceError: evidence changed, or gives another status than the report says; names what.
    CollectionError: raw artifacts do not validate any more.

    Source: onboarding.md section 7.
    """
    where = os.fspath(path)
    report = _read(where)
    saved_policy = load_policy(_verified(report["policy"]))
    policy = policy or saved_policy
    if (saved_policy.repeatability, saved_policy.interpolation) != (policy.repeatability, policy.interpolation):
        raise OnboardError(
            f"{where}: was assessed under another policy of repeatability or interpolation; assess it again",
            where,
        )
    inputs = report["inputs"]
    request = load_request(_verified(inputs["request"]))
    for name in ("support_plan", "collection_plan", "checkpoint"):
        _verified(inputs[name])
    source = verify_source(request, Path(inputs["collection_directory"]))
    _require(list(source.formal_data) == inputs["formal_data"], where, "the formal data changed")
    selection = read_document(_verified(report["selection"]))
    frozen = select_repeats(source, policy, selection.get("observation_evidence_version", 1))
    _require(selection == frozen, where, "the runtime evidence or the selection of repeats changed")
    gates = report["gates"]
    _require(gates["point_validity"]["status"] == "passed", where, "point_validity is not what the artifacts give")
    _require(gates["execution"] == execution_gate(frozen), where, "execution is not what the artifacts give")
    _check_interpolation(gates["interpolation"], request, source, frozen, policy, where)
    _check_repeatability(gates["repeatability"], policy, frozen, where)
    status = overall(gate["status"] for gate in gates.values())
    _require(report["status"] == status, where, f"status must be {status}, as its gates give")
    return CheckedReport(report, request, source, frozen)


def _read(path: str) -> dict[str, Any]:
    report = read_document(path)
    if not isinstance(report, dict) or report.get("schema_version") != SCHEMA:
        raise OnboardError(f"{path}: no {SCHEMA} document; give the report of validate-collection", path)
    gates = report.get("gates")
    if not isinstance(gates, dict) or set(gates) != set(_GATES):
        raise OnboardError(f"{path}: gates must be {', '.join(_GATES)}", path)
    if missing := [name for name in ("policy", "inputs", "selection", "status") if name not in report]:
        raise OnboardError(f"{path}: lacks {', '.join(missing)}", path)
    return report


def _verified(reference: Mapping[str, Any]) -> str:
    verify_evidence(reference)
    return str(reference["path"])


def _require(holds: bool, where: str, reason: str) -> None:
    if not holds:
        raise EvidenceError(f"{where}: {reason}; keep it, and assess again in a fresh directory", where)


def _check_interpolation(
    gate: Mapping[str, Any],
    request: SupportRequest,
    source: CollectionSource,
    frozen: Mapping[str, Any],
    policy: ValidationPolicy,
    where: str,
) -> None:
    if "report" not in gate:
        _require(gate["status"] == "incomplete", where, "interpolation has no holdout")
        return
    path = _verified(gate["report"])
    with tempfile.TemporaryDirectory(prefix="fpmsdk-holdout-") as temporary:
        current = run_holdout(request, source, frozen, Path(temporary) / "holdout", policy)
    require_reproduced(read_document(path), current, path)
    _require(gate["status"] == current["status"], where, "interpolation is not what the table gives")


def _check_repeatability(
    gate: Mapping[str, Any], policy: ValidationPolicy, frozen: Mapping[str, Any], where: str
) -> None:
    if "directory" not in gate:
        _require(gate["status"] == "incomplete", where, "repeatability has no measurements")
        return
    assessment = assess_repeats(Path(gate["directory"]), policy, frozen)
    _require(
        read_document(_verified(gate["assessment"])) == assessment
        and gate["status"] == repeatability_status(assessment, policy),
        where,
        "repeatability is not what its launches give",
    )


def collection_quality(
    request: SupportRequest,
    folder: Path,
    *,
    source_request_id: str,
    source_plan_sha256: str,
    report: str | os.PathLike[str] | None,
) -> dict[str, Any]:
    """The marker that a finalisation of a collection carries.

    Parameters
    ----------
    request: that was collected.
    folder: its plan folder, absolute.
    source_request_id, source_plan_sha256: of the finalisation.
    report: a `collection-validation.json` of exactly this collection; None leaves it unassessed.

    Returns
    -------
    `{status, accuracy, report, policy, gates}`; without a report status and accuracy are `not_assessed`.

    Raises
    ------
    EvidenceError: the report is of another collection, stale or contradicted by its evidence.

    Source: onboarding.md section 7.
    """
    if report is None:
        return dict(UNASSESSED)
    path = os.path.abspath(os.path.expanduser(report))
    reference = file_evidence(path)
    # Whose report it is comes first: a foreign one is not followed into its own evidence.
    inputs = _read(path)["inputs"]
    is_same = load_request(_verified(inputs["request"])) == request
    is_here = Path(inputs["collection_directory"]).resolve() == folder
    _require(is_same and is_here, path, f"is not of the collection in {folder}")
    checked = check_collection_report(path)
    _require(
        (request_id(request), checked.source.plan.sha256) == (source_request_id, source_plan_sha256),
        path,
        "is not of the finalised plan",
    )
    verify_evidence(reference)
    return {
        "status": checked.report["status"],
        "accuracy": "not_assessed",
        "report": reference,
        "policy": checked.report["policy"],
        "gates": {name: gate["status"] for name, gate in checked.report["gates"].items()},
    }


def verify_finalized_quality(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The marker of a finalisation, recomputed from its evidence.

    Parameters
    ----------
    manifest: `finalization.json`, or the same from the provenance of the memory.

    Returns
    -------
    The marker; None for a finalisation from before there was one, which stays unassessed.

    Raises
    ------
    OnboardError: no such marker.
    EvidenceError: the marker is not what its evidence gives now.

    Source: onboarding.md section 7.
    """
    if "collection_quality" not in manifest:
        return None
    quality = manifest["collection_quality"]
    if not isinstance(quality, dict):
        raise OnboardError(f"collection_quality: expected an object, found {quality!r}", "collection_quality")
    reference = quality.get("report")
    expected = dict(UNASSESSED)
    if reference is not None:
        folder = Path(manifest["source_directory"]).resolve()
        expected = collection_quality(
            load_request(folder / "request.yaml"),
            folder,
            source_request_id=manifest["source_request_id"],
            source_plan_sha256=manifest["source_collection_plan_sha256"],
            report=_verified(reference),
        )
    if quality != expected:
        raise EvidenceError(
            "collection_quality: is not what its evidence gives now; finalise again with a fresh report",
            "collection_quality",
        )
    return expected
