"""Assess a serving run: its records beside the prediction, its evidence beside the recipe.

Missing evidence leaves the result incomplete, a contradiction or a deviation beyond the policy fails it.
Source: onboarding.md section 8.5 (assess).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence, verify_evidence
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.policy import ServingPolicy
from fpmsdk.onboard.serving_evidence import (
    check_execution,
    check_receipt,
    check_server_tokens,
    check_workers,
)
from fpmsdk.onboard.serving_findings import Findings
from fpmsdk.onboard.serving_forward import forward_result
from fpmsdk.onboard.serving_recipe import SCHEMA, checked_recipe
from fpmsdk.onboard.serving_samples import check_dispatch, latency_metric, matched_samples, throughput_metric

RECEIPT = "benchmark-execution.json"
_RECORDS, _SUMMARY = "profile_export.jsonl", "profile_export_aiperf.json"


def assess_serving(
    recipe_path: Path,
    *,
    prediction_report: Path,
    execution_evidence: Path,
    forward_evidence: Path | None = None,
    policy: ServingPolicy | None = None,
) -> dict[str, Any]:
    """The assessment of the run that a recipe has led to. Reads alone.

    Parameters
    ----------
    recipe_path: `recipe.json`, with `benchmark-execution.json` beside it.
    prediction_report: the ordinary prediction that the recipe was prepared with.
    execution_evidence: what was observed of the server, in the form of the recipe's template.
    forward_evidence: timed forward passes; None when there are none.
    policy: limits; None for those of the recipe.

    Returns
    -------
    `status` passed, failed or incomplete; `metrics`, `samples`, `forward`, `missing_evidence`, `failures`.

    Raises
    ------
    OnboardError, EvidenceError: the recipe is not ready, or a file of it changed.
    """
    recipe = checked_recipe(recipe_path)
    limits = policy or ServingPolicy.model_validate(recipe["policy"])
    findings = Findings()
    report: dict[str, Any] = {
        "schema_version": SCHEMA,
        "recipe": file_evidence(recipe_path),
        "scope": recipe["scope"],
        "timing_subset": recipe["timing_subset"],
        "matched_workload": recipe["matched_workload"],
        "policy": limits.model_dump(mode="json"),
        "inputs": [],
        "samples": [],
        "metrics": {},
    }
    with findings.unavailable("the prediction, the observed execution or the benchmark receipt"):
        inputs = (prediction_report, execution_evidence, recipe_path.with_name(RECEIPT))
        report["inputs"] = [file_evidence(path) for path in inputs]
        observed, receipt = read_document(execution_evidence), read_document(inputs[2])
        findings.expect(recipe["prediction_report"], report["inputs"][0], "the prediction report")
        for name, document in (("the observed execution", observed), ("the benchmark receipt", receipt)):
            findings.expect(report["recipe"], document.get("recipe"), f"the recipe of {name}")
        check_receipt(recipe, receipt, findings)
        findings.sources(observed.get("sources"), "the observed execution")
        check_workers(recipe, receipt, observed.get("observed_execution") or {}, findings)
        check_server_tokens(recipe_path, recipe, receipt, findings)
        check_execution(recipe, observed, findings)
        report["samples"] = _samples(recipe, receipt, limits, findings)
    report["metrics"] = _metrics(report["samples"], recipe["request_count"], limits)
    report["forward"] = forward_result(forward_evidence, recipe_path, recipe, limits.max_latency_p95_relative_error)
    report["missing_evidence"], report["failures"] = findings.missing, findings.failures
    report["status"] = _status(report)
    return report


def check_serving_report(path: Path) -> dict[str, Any]:
    """A saved assessment that comes out the same from its evidence.

    Raises
    ------
    EvidenceError: an input changed, or the assessment comes out differently.
    OnboardError: it is no assessment.
    """
    saved = read_document(path)
    try:
        for reference in (saved["recipe"], *saved["inputs"]):
            verify_evidence(reference)
        forward = saved["forward"].get("evidence")
        if forward is not None:
            verify_evidence(forward)
        fresh = assess_serving(
            Path(saved["recipe"]["path"]),
            prediction_report=Path(saved["inputs"][0]["path"]),
            execution_evidence=Path(saved["inputs"][1]["path"]),
            forward_evidence=None if forward is None else Path(forward["path"]),
            policy=ServingPolicy.model_validate(saved["policy"]),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as fault:
        raise OnboardError(f"{path}: no assessment of a serving run: {fault}", str(path)) from None
    if fresh != saved:
        raise EvidenceError(f"{path}: its evidence gives another assessment than it states; assess anew", str(path))
    return fresh


def _samples(
    recipe: Mapping[str, Any], receipt: Mapping[str, Any], limits: ServingPolicy, findings: Findings
) -> list[dict[str, Any]]:
    artifacts = receipt.get("artifacts") or []
    summary = _one_artifact(artifacts, _SUMMARY, findings)
    if summary is not None:
        _check_summary(json.loads(summary), recipe["request_count"], findings)
    records = _one_artifact(artifacts, _RECORDS, findings)
    matched = recipe["matched_workload"]
    play = read_document(recipe["benchmark_trace"]["path"])
    tokens = read_document(matched["tokenization"]["path"])["requests"]
    prediction = read_document(matched["prediction_report"]["path"])
    measured = [json.loads(line) for line in (records or "").splitlines() if line.strip()]
    predicted = prediction.get("per_request") or []
    for name, count in (("predicted", len(predicted)), ("measured", len(measured))):
        if count != recipe["request_count"]:
            findings.missing.append(f"{count} of {recipe['request_count']} requests were {name}")
    lengths = [entry["input_length"] for entry in tokens]
    samples = matched_samples(measured, predicted, play, lengths, findings)
    if len(samples) == recipe["request_count"]:
        check_dispatch(samples, play, limits.max_dispatch_delay_ms, limits.max_dispatch_delay_fraction, findings)
    return samples


def _one_artifact(artifacts: list[Mapping[str, Any]], name: str, findings: Findings) -> str | None:
    found = [artifact for artifact in artifacts if Path(artifact.get("path", "")).name == name]
    if len(found) != 1:
        findings.missing.append(f"one {name} of the benchmark is needed, the receipt names {len(found)}")
        return None
    before = len(findings.missing) + len(findings.failures)
    findings.sources(found, name)
    if len(findings.missing) + len(findings.failures) > before:
        return None
    return Path(found[0]["path"]).read_text()


def _check_summary(summary: Mapping[str, Any], request_count: int, findings: Findings) -> None:
    if summary.get("was_cancelled") is not False or summary.get("is_complete") is False:
        findings.missing.append("the benchmark does not report a complete run that nobody cancelled")
    findings.expect(
        request_count, (summary.get("request_count") or {}).get("avg"), "requests in the benchmark's summary"
    )
    findings.expect(
        0, (summary.get("error_request_count") or {}).get("avg", 0), "failed requests in the benchmark's summary"
    )


def _metrics(samples: list[dict[str, Any]], request_count: int, limits: ServingPolicy) -> dict[str, Any]:
    return {
        **{name: latency_metric(samples, name, limits.max_latency_p95_relative_error) for name in ("ttft", "tpot")},
        "output_throughput": throughput_metric(samples, request_count, limits.max_throughput_relative_error),
    }


def _status(report: Mapping[str, Any]) -> str:
    statuses = {metric["status"] for metric in report["metrics"].values()}
    if report["failures"] or "failed" in statuses or report["forward"]["status"] == "failed":
        return "failed"
    if report["missing_evidence"] or statuses != {"passed"} or report["forward"]["status"] == "incomplete":
        return "incomplete"
    return "passed"
