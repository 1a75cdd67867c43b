"""Replay a recorded trace on a finished collection: does its table answer every query? Says nothing of accuracy.

Source: onboarding.md section 8.4, fpm-interpolation.md section 8.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.documents.strict import checked
from fpmsdk.documents.yaml_files import read_mapping, write_yaml
from fpmsdk.errors import EvidenceError, FpmSdkError, OnboardError
from fpmsdk.files import whole_file
from fpmsdk.onboard.outputs import require_apart
from fpmsdk.onboard.pilot import PILOT, is_single_role
from fpmsdk.onboard.plan import plan_lock
from fpmsdk.onboard.plan_check import check_plan, plan_folder
from fpmsdk.onboard.plan_documents import PLAN_FILE
from fpmsdk.onboard.request import SupportRequest, load_request, request_id
from fpmsdk.prediction import PredictConfig, Prediction, predict
from fpmsdk.prediction.output import COVERAGE, REPORT, prepare_output

CONFIG_FILE, REPORT_FILE, PREDICTION_FOLDER = "predict.yaml", "validation.json", "prediction"
_OPTION = "--validation-output-dir"
_PAIR = "fpm_forward_perf.*"
_SUFFIXES = (".json", ".jsonl")
FAILED = 1


def validate_fpm(
    request_file: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    trace: str | os.PathLike[str],
    validation_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> tuple[dict[str, Any], int]:
    """Replay every play of a Weka file, one at a time from a cold cache, and keep what the tables answered.

    Parameters
    ----------
    request_file: the request of the collection, aggregated, with memory declared or finalised.
    output_dir: its plan folder.
    trace: a `.json` or `.jsonl` file of Weka plays.
    validation_dir: where `predict.yaml`, `validation.json` and `prediction/` go, apart from all inputs.
    overwrite: whether it may hold an earlier validation, which is replaced.

    Returns
    -------
    The content of `validation.json`, with `status` covered or incomplete, and the exit code: 0 when covered, else
    that of the prediction or 1.

    Raises
    ------
    OnboardError: the request, the plan, the trace or the output cannot be used. Nothing is written then.
    ConfigError, TraceError: the deployment or the trace is refused by the replay.

    Source: onboarding.md section 8.4.
    """
    request, folder = load_request(request_file), plan_folder(Path(output_dir))
    source, place = Path(trace).expanduser().resolve(), Path(validation_dir).expanduser()
    if source.suffix.lower() not in _SUFFIXES or not source.is_file():
        raise OnboardError(f"--trace {source}: expected an existing Weka file, .json or .jsonl", "--trace")
    if place.is_symlink():
        raise OnboardError(f"{_OPTION} {place}: is a symbolic link; name the directory itself", _OPTION)
    place = place.resolve()
    require_apart(place, [request_file, folder, source], _OPTION)
    with plan_lock(folder):
        check_plan(request, folder)
        document = replay_configuration(request, folder, source)
    config = checked(PredictConfig, document, str(folder / f"predict/{PILOT}.yaml"))
    _prepare(place, overwrite)
    prediction_file = place / CONFIG_FILE
    with whole_file(prediction_file) as file:
        file.write(write_yaml(document))
    report = _opening(request, folder, source, place)
    write_document(place / REPORT_FILE, report)
    try:
        prediction = predict(config, place / PREDICTION_FOLDER, capture_per_request=True, overwrite=overwrite)
    except KeyboardInterrupt:
        write_document(place / REPORT_FILE, report | {"issues": ["the replay was interrupted"]})
        raise
    except FpmSdkError as fault:
        write_document(place / REPORT_FILE, report | {"issues": [f"the replay was refused: {fault}"]})
        raise
    report |= _outcome(prediction, place)
    issues = _issues(prediction) + _changes(report, folder, source)
    with plan_lock(folder):
        try:
            check_plan(request, folder)
        except OnboardError as fault:
            issues.append(f"the plan changed during the validation: {fault}")
    report |= {"issues": issues, "status": "incomplete" if issues else "covered"}
    write_document(place / REPORT_FILE, report)
    return report, (prediction.exit_code or FAILED) if issues else 0


def replay_configuration(request: SupportRequest, folder: Path, trace: Path) -> dict[str, Any]:
    """The pilot configuration of a plan with its traffic replaced by a trace, priced strictly by direct lookups.

    Raises
    ------
    OnboardError: the request is of a single role, its memory is pending, or the pilot serves another model.
    """
    if is_single_role(request):
        raise OnboardError(
            f"worker_type {request.worker_type}: only aggregated serving can be replayed; validate-collection covers "
            "one role, and a replay of both needs an accepted prefill and decode worker",
            "worker_type",
        )
    deployment = request.profile_deployment()
    if deployment is None:
        raise OnboardError("fpm_profile: a replay needs the profile of the collection; plan with one", "fpm_profile")
    if deployment.resources.memory_source == "pending":
        raise OnboardError(
            "fpm_profile: the memory of the deployment is pending; finalize the collection, or declare it",
            "fpm_profile",
        )
    document = read_mapping(folder / f"predict/{PILOT}.yaml")
    engine = document["engine"]
    if engine["model"] != request.identity.model or engine["mode"] != "aggregated":
        raise OnboardError(f"predict/{PILOT}.yaml: is not the aggregated deployment of the request", "engine.model")
    source = {"type": "trace", "paths": [str(trace)], "format": "weka", "nested_timestamp_basis": "absolute"}
    document["traffic"] = {"source": source, "load": {"type": "trace_timestamps", "agentic_lanes": 1}}
    document["evaluation"] = {}
    timing = engine["workers"]["aggregated"]["timing"]
    timing |= {"estimation_mode": "fpm_interpolation", "fallback_policy": "deny"}
    estimators = timing.setdefault("estimator_config", {})
    estimators["fpm_interpolation"] = {
        **estimators.get("fpm_interpolation", {}),
        "method": "direct",
        "collect_coverage": True,
    }
    return document


def pair_evidence(folder: Path) -> list[dict[str, Any]]:
    """References to every table and sidecar of a plan folder."""
    return [file_evidence(path) for path in sorted((folder / "systems/data").rglob(_PAIR)) if path.is_file()]


def _prepare(place: Path, overwrite: bool) -> None:
    for name in (CONFIG_FILE, REPORT_FILE, PREDICTION_FOLDER):
        if (place / name).is_symlink():
            raise EvidenceError(f"{place / name}: is a symbolic link; remove it", str(place / name))
    prepare_output(place, overwrite=overwrite)
    for name in (CONFIG_FILE, REPORT_FILE):
        (place / name).unlink(missing_ok=True)
    prepare_output(place / PREDICTION_FOLDER, overwrite=overwrite)


def _opening(request: SupportRequest, folder: Path, trace: Path, place: Path) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "status": "incomplete",
        "accuracy": "not_assessed",
        "collection_id": request_id(request),
        "collection_plan": file_evidence(folder / PLAN_FILE),
        "collection_schema_version": read_document(folder / PLAN_FILE)["schema_version"],
        "trace": file_evidence(trace),
        "fpm_artifacts": pair_evidence(folder),
        "scope": {
            "replay": "cold_aggregated",
            "agentic_lanes": 1,
            "nested_timestamp_basis": "absolute",
            "cache": "hbm_only",
            "speculation": "disabled",
            "model_projection": request.identity.model,
            "selected_corpus": "complete_local_file",
        },
        "prediction_config": file_evidence(place / CONFIG_FILE),
        "prediction_report": str(place / PREDICTION_FOLDER / REPORT),
        "coverage_report": str(place / PREDICTION_FOLDER / COVERAGE),
        "issues": ["the replay has not ended"],
    }


def _outcome(prediction: Prediction, place: Path) -> dict[str, Any]:
    folder = place / PREDICTION_FOLDER
    outcome: dict[str, Any] = {
        "prediction_exit_code": prediction.exit_code,
        "fpm_query_coverage": prediction.coverage,
    }
    for name, file in (("prediction_evidence", REPORT), ("coverage_evidence", COVERAGE)):
        if (folder / file).is_file():
            outcome[name] = file_evidence(folder / file)
    if prediction.report is not None:
        outcome["agentic_graph"] = prediction.report["agentic_graph"]
    return outcome


def _issues(prediction: Prediction) -> list[str]:
    issues = []
    if prediction.report is None:
        issues.append(f"the replay failed with exit code {prediction.exit_code}: {prediction.error}")
    else:
        issues += completion_issues(prediction.report)
    if prediction.coverage is None or prediction.coverage["status"] != "covered":
        issues.append("the tables do not answer every query; fpm-coverage.json lists the missing points")
    return issues


def completion_issues(report: Mapping[str, Any]) -> list[str]:
    """What keeps a replay of plays from being complete: requests and plays that did not end as recorded.

    >>> graph = {"node_count": 1, "play_count": 1}
    >>> completion_issues({"agentic_graph": graph, "completed_requests": 1, "per_request": []})
    ['0 of 1 requests are recorded', 'not every play has settled']
    """
    graph = report.get("agentic_graph") or {}
    count = graph.get("node_count", 0)
    if type(count) is not int or count < 1:
        return ["the replay reports no requests of plays"]
    issues = []
    if report.get("completed_requests") != count:
        issues.append(f"{report.get('completed_requests')} of {count} requests completed")
    records = report.get("per_request") or []
    if len(records) != count:
        issues.append(f"{len(records)} of {count} requests are recorded")
    if any(
        record.get("terminal_status") != "completed"
        or record.get("output_length") != record.get("requested_output_length")
        for record in records
    ):
        issues.append("a request failed or ended before its recorded output")
    outcomes = report.get("agentic_play_outcomes") or []
    settled = [
        outcome for outcome in outcomes if outcome["status"] == "completed" and outcome["settled_at_ms"] is not None
    ]
    if not outcomes or len(settled) != graph.get("play_count"):
        issues.append("not every play has settled")
    return issues


def _changes(report: Mapping[str, Any], folder: Path, trace: Path) -> list[str]:
    changed = []
    if file_evidence(trace) != report["trace"]:
        changed.append("the trace changed during the validation")
    if pair_evidence(folder) != report["fpm_artifacts"]:
        changed.append("the tables changed during the validation")
    return changed
