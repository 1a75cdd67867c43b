"""A repetition on disk: read, and held against its raw artifacts before anything is concluded from it again.

Source: collector.md section 7.4 (run, reassessment).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.repeatability_plan import PLAN_FILE, RepeatPolicy, launch_plan
from fpmsdk.collect.repeatability_sample import RECOVERABLE, read_sample, sample_folder
from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import manifest, verify_evidence
from fpmsdk.errors import EvidenceError, OnboardError

REPORT_FILE = "repeatability.json"
_STATUSES = ("running", "interrupted", "failed", "passed")


class SavedRepetition(NamedTuple):
    """Both documents of a repetition."""

    frozen: dict[str, Any]
    report: dict[str, Any]


def read_saved(root: Path) -> SavedRepetition:
    """Read the frozen plan and the report of a repetition.

    Raises
    ------
    OnboardError: one of them is missing or no object, or they are not of one another.
    """
    documents = []
    for name in (PLAN_FILE, REPORT_FILE):
        try:
            document = read_document(root / name)
        except FileNotFoundError:
            raise OnboardError(f"{root / name}: missing; there is no repetition to go on with", str(root)) from None
        if not isinstance(document, dict):
            raise OnboardError(f"{root / name}: expected an object", str(root / name))
        documents.append(document)
    saved = SavedRepetition(*documents)
    if saved.report.get("plan_sha256") != saved.frozen.get("sha256"):
        raise EvidenceError(
            f"{root / REPORT_FILE}: is the report of plan {saved.report.get('plan_sha256')!r}, {PLAN_FILE} is "
            f"{saved.frozen.get('sha256')!r}; restore both",
            str(root / REPORT_FILE),
        )
    return saved


def check_saved(source: CollectionPlan, frozen: Mapping[str, Any], report: Mapping[str, Any], root: Path) -> None:
    """Verify every attempt of a report against what is on disk.

    Parameters
    ----------
    source: the plan of the repeated campaign.
    frozen: the frozen plan.
    report: of schema 2.
    root: the directory that both are in.

    Raises
    ------
    EvidenceError: files changed, an attempt is not where or what the report says, or a launch is counted twice.
    CollectionError: raw artifacts do not validate.
    """
    where = str(root / REPORT_FILE)

    def require(holds: bool, reason: str) -> None:
        if not holds:
            raise EvidenceError(f"{where}: {reason}; restore it, or repeat in a fresh directory", where)

    require(report.get("schema_version") == 2, "schema_version 1 can be read, it cannot be gone on with")
    if report.get("aggregate"):
        verify_evidence(report["aggregate"])
    require(report.get("output_dir") == str(root), f"output_dir is {report.get('output_dir')!r}")
    require(report.get("policy") == frozen["policy"], "policy is not that of the frozen plan")
    samples = report.get("samples", {})
    require(set(samples) == {cell["cell_id"] for cell in frozen["cells"]}, "samples are of other cells")
    policy = RepeatPolicy.model_validate(frozen["policy"])
    seen: dict[str, set[str]] = {
        "attempt_id": {cell["source_attempt_id"] for cell in frozen["cells"]},
        "runtime_run_id": {cell["source_runtime_run_id"] for cell in frozen["cells"]},
    }
    for cell in frozen["cells"]:
        slots = samples[cell["cell_id"]]
        require(
            [slot.get("sample_index") for slot in slots] == list(range(1, policy.samples + 1)),
            f"samples of {cell['cell_id']} must be numbered 1 to {policy.samples}",
        )
        plan = launch_plan(source, cell, policy)
        for relative, attempt, is_last in _attempts(cell["cell_id"], slots):
            require(attempt.get("directory") == relative.as_posix(), f"an attempt is not in {relative}")
            require(attempt.get("status") in _STATUSES, f"{relative}: unknown status {attempt.get('status')!r}")
            if attempt.get("files") is not None:
                require(manifest(root / relative) == attempt["files"], f"{relative}: files changed")
            if attempt["status"] != "passed" and not attempt.get("evidence"):
                continue
            require(is_last, f"{relative}: a valid measurement was followed by another attempt")
            evidence = read_sample(plan, cell, root / relative)
            require(evidence == attempt.get("evidence"), f"{relative}: evidence changed")
            require(_is_settled(attempt), f"{relative}: passed although teardown or post-processing did not")
            for name, known in seen.items():
                require(evidence[name] not in known, f"{relative}: {name} {evidence[name]} is that of another launch")
                known.add(evidence[name])
        most = max(len(slot["attempts"]) for slot in slots)
        require(most <= policy.max_attempts_per_sample, f"{cell['cell_id']}: {most} attempts exceed the budget")


def _attempts(cell_id: str, slots: list[dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any], bool]]:
    # Each attempt with where it must be, and whether it is the last of its sample.
    for sample, slot in enumerate(slots, start=1):
        for number, attempt in enumerate(slot["attempts"], start=1):
            yield sample_folder(cell_id, sample, number), attempt, number == len(slot["attempts"])


def _is_settled(attempt: Mapping[str, Any]) -> bool:
    if attempt["status"] != "passed":
        return True
    evidence = attempt["evidence"]
    needs_cleanup = evidence["collector_status"] == "cleanup_failed" or evidence["cleanup_error"] is not None
    needs_recovery = evidence["collector_status"] in RECOVERABLE
    return not (needs_cleanup and not _succeeded(attempt, "cleanup_attempts")) and not (
        needs_recovery and not _succeeded(attempt, "postprocessing_attempts")
    )


def _succeeded(attempt: Mapping[str, Any], name: str) -> bool:
    trials = attempt.get(name) or [{}]
    return bool(trials[-1].get("status") == "passed")
