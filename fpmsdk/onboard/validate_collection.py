"""`validate-collection`: whether a published collection is good enough to be relied on, gate by gate.

Assesses what is on disk; launches repetitions only when told to. The collection itself is never changed.
Source: onboarding.md section 8.2.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.collect.executor import ExecutorFactory
from fpmsdk.collect.repeatability_plan import PLAN_FILE
from fpmsdk.collect.repeatability_run import repeat_campaign
from fpmsdk.collect.run import chosen_executor
from fpmsdk.documents.canonical import pretty_bytes, read_document, write_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.files import sha256, write_directory
from fpmsdk.onboard.collection_gates import (
    assess_repeats,
    execution_gate,
    overall,
    repeat_policy,
    repeatability_status,
    run_holdout,
    select_repeats,
)
from fpmsdk.onboard.collection_source import CollectionSource, verify_source
from fpmsdk.onboard.holdout import REPORT_FILE as HOLDOUT_REPORT
from fpmsdk.onboard.holdout import require_reproduced
from fpmsdk.onboard.outputs import fresh_directory
from fpmsdk.onboard.policy import ValidationPolicy, load_policy
from fpmsdk.onboard.request import SupportRequest, load_request

REPORT_FILE = "collection-validation.json"
SCHEMA = "aisimulate-collection-validation/v1"
POLICY_FILE = "policy.json"
_CAMPAIGN_FILE = "campaign.json"
_SELECTION_FILE = "repeatability-selection.json"
_ASSESSMENT_FILE = "repeatability-assessment.json"
_LOCK_FILE = ".validation.lock"
_OUTPUT = "--validation-output-dir"


@dataclass(frozen=True, kw_only=True)
class CollectionValidation:
    """What is asked of a validation.

    Parameters
    ----------
    config: the request file that was collected, from before any finalisation.
    folder: its plan folder.
    output: of the assessment, apart from everything it reads.
    policy: a policy file; None is that of a resumed assessment, else the defaults.
    execute: launch the repetitions with the deployment of the source.
    resume: go on with the assessment in `output`.
    retry_failed: launch failed samples again within their budget.
    repeats: directory of an earlier repetition to judge instead of a new one.
    executors: the executor of a name, for the one that the collection ran on.
    """

    config: Path
    folder: Path
    output: Path
    policy: Path | None = None
    execute: bool = False
    resume: bool = False
    retry_failed: bool = False
    repeats: Path | None = None
    executors: Callable[[str], ExecutorFactory] = chosen_executor

    def __post_init__(self) -> None:
        if self.retry_failed and not (self.execute and self.resume):
            raise OnboardError("--retry-failed: needs --execute and --resume", "--retry-failed")
        if self.repeats is not None and (self.execute or self.resume):
            raise OnboardError(
                "--repeatability-dir: judges an earlier repetition in a fresh output; leave out --execute and --resume",
                "--repeatability-dir",
            )

    @property
    def passes_incomplete(self) -> bool:
        """Whether an incomplete assessment is all that was asked for."""
        return not self.execute and self.repeats is None


def validate_collection(validation: CollectionValidation) -> dict[str, Any]:
    """Assess a collection and write `collection-validation.json`.

    Parameters
    ----------
    validation: what is asked for.

    Returns
    -------
    The report: `status` passed, failed or incomplete, with the gates `point_validity`, `execution`, `repeatability` and
    `interpolation`. It says nothing of serving accuracy.

    Raises
    ------
    OnboardError: inputs do not fit, or the output is neither fresh nor the assessment to go on with.
    EvidenceError: the collection, or what was assessed before, changed.
    CollectionError: raw artifacts do not validate, or a sample has used up its attempts.

    Source: onboarding.md section 8.2.
    """
    request = load_request(validation.config)
    folder, output = validation.folder.expanduser().resolve(), validation.output.expanduser()
    repeats = None if validation.repeats is None else validation.repeats.expanduser().resolve()
    policy_path = validation.policy or (output / POLICY_FILE if validation.resume else None)
    policy = load_policy(policy_path)
    source = verify_source(request, folder)
    previous = output / _SELECTION_FILE if validation.resume else None if repeats is None else repeats / PLAN_FILE
    frozen = select_repeats(source, policy, 2 if previous is None else _evidence_version(previous))
    inputs = _inputs(validation.config, source)
    begun = {
        POLICY_FILE: policy.document(),
        _CAMPAIGN_FILE: inputs,
        _SELECTION_FILE: frozen,
    }
    if validation.resume:
        output = output.resolve()
        _require_same(output, begun)
        report = _initial(output, begun)
    else:
        report = _begin(
            output, begun, [path for path in (folder, validation.config, validation.policy, repeats) if path]
        )
        output = output.resolve()
    with exclusive(output / _LOCK_FILE, f"the assessment in {output}"):
        run = _Assessment(request, source, policy, frozen, output, report)
        run.interpolation()
        repeats = repeats or output / "repeatability"
        if validation.execute:
            _repeat(validation, source, frozen, policy, repeats)
        if repeats.exists():
            run.repeatability(repeats)
        run.save()
    return report


def _repeat(
    validation: CollectionValidation,
    source: CollectionSource,
    frozen: Mapping[str, Any],
    policy: ValidationPolicy,
    repeats: Path,
) -> None:
    repeat_campaign(
        source.plan,
        campaign_root=source.campaign,
        checkpoint=source.checkpoint,
        output_dir=repeats,
        executor=validation.executors(source.plan.executor),
        policy=repeat_policy(policy),
        resume=validation.resume and repeats.exists(),
        retry_failed=validation.retry_failed and repeats.exists(),
        evidence_version=frozen.get("observation_evidence_version", 1),
    )


def exit_code(validation: CollectionValidation, report: Mapping[str, Any]) -> int:
    """0 when the collection passed, or when it was only to be looked at and nothing failed; else 1.

    >>> exit_code(CollectionValidation(config=Path("r"), folder=Path("p"), output=Path("o")), {"status": "incomplete"})
    0
    """
    status = report["status"]
    return 0 if status == "passed" or (status == "incomplete" and validation.passes_incomplete) else 1


def _evidence_version(selection: Path) -> int:
    try:
        document = read_document(selection)
    except FileNotFoundError:
        raise OnboardError(f"{selection}: missing; there is no assessment to go on with", str(selection)) from None
    version: int = document.get("observation_evidence_version", 1)
    return version


def _inputs(config: Path, source: CollectionSource) -> dict[str, Any]:
    return {
        "request": file_evidence(config.expanduser().resolve()),
        "collection_directory": str(source.folder),
        "support_plan": file_evidence(source.folder / "support-plan.json"),
        "collection_plan": file_evidence(source.campaign / "collection-plan.json"),
        "checkpoint": file_evidence(source.checkpoint),
        "formal_data": list(source.formal_data),
    }


def _begin(output: Path, begun: Mapping[str, Any], sources: list[Path]) -> dict[str, Any]:
    # Appears whole, so that whatever is interrupted later can be resumed.
    place = fresh_directory(output, sources, _OUTPUT)
    report = _initial(place, begun)
    place.rmdir()
    contents = {name: pretty_bytes(document) for name, document in {**begun, REPORT_FILE: report}.items()}
    write_directory(place, contents)
    return report


def _initial(output: Path, begun: Mapping[str, Any]) -> dict[str, Any]:
    def reference(name: str) -> dict[str, Any]:
        content = pretty_bytes(begun[name])
        return {"path": str(output / name), "sha256": sha256(content), "size_bytes": len(content)}

    return {
        "schema_version": SCHEMA,
        "status": "incomplete",
        "accuracy": "not_assessed",
        "policy": reference(POLICY_FILE),
        "inputs": begun[_CAMPAIGN_FILE],
        "selection": reference(_SELECTION_FILE),
        "gates": {
            "point_validity": {"status": "passed"},
            "execution": execution_gate(begun[_SELECTION_FILE]),
            "repeatability": {"status": "incomplete", "issues": ["comparable repetitions are not there yet"]},
            "interpolation": {"status": "incomplete"},
        },
    }


def _require_same(output: Path, begun: Mapping[str, Any]) -> None:
    what = {
        POLICY_FILE: "the policy",
        _CAMPAIGN_FILE: "the collection or the request",
        _SELECTION_FILE: "the runtime evidence or the selection of repeats",
    }
    for name, document in begun.items():
        try:
            saved = (output / name).read_bytes()
        except FileNotFoundError:
            raise OnboardError(f"{output / name}: missing; there is no assessment to go on with", _OUTPUT) from None
        if saved != pretty_bytes(document):
            raise EvidenceError(
                f"{output / name}: {what[name]} changed since the assessment began; assess in a fresh directory",
                str(output / name),
            )


class _Assessment:
    """An assessment under way; its report is on disk after every gate."""

    def __init__(
        self,
        request: SupportRequest,
        source: CollectionSource,
        policy: ValidationPolicy,
        frozen: dict[str, Any],
        output: Path,
        report: dict[str, Any],
    ) -> None:
        self._request, self._source, self._policy, self._frozen = request, source, policy, frozen
        self._output, self._report = output, report

    def save(self) -> None:
        """Write the report with the status that its gates give."""
        gates = self._report["gates"]
        self._report["status"] = overall(gate["status"] for gate in gates.values())
        write_document(self._output / REPORT_FILE, self._report)

    def interpolation(self) -> None:
        """Assess the holdout, or reproduce the one that is there."""
        folder = self._output / "holdout"
        path = folder / HOLDOUT_REPORT
        if path.exists():
            with tempfile.TemporaryDirectory(prefix="fpmsdk-holdout-") as temporary:
                report = self._holdout(Path(temporary) / "holdout")
            require_reproduced(read_document(path), report, str(path))
        else:
            if folder.exists():
                shutil.rmtree(folder)  # an interrupted holdout has no report, and nothing refers to it
            report = self._holdout(folder)
        self._report["gates"]["interpolation"] = {"status": report["status"], "report": file_evidence(path)}
        self.save()

    def _holdout(self, folder: Path) -> dict[str, Any]:
        return run_holdout(self._request, self._source, self._frozen, folder, self._policy)

    def repeatability(self, directory: Path) -> None:
        """Judge the repetition in a directory."""
        assessment = assess_repeats(directory, self._policy, self._frozen)
        path = self._output / _ASSESSMENT_FILE
        write_document(path, assessment)
        self._report["gates"]["repeatability"] = {
            "status": repeatability_status(assessment, self._policy),
            "directory": str(directory),
            "assessment": file_evidence(path),
        }
