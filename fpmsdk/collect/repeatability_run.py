"""Launches a finished campaign again, as often as was frozen, and keeps every launch: good, slow and failed ones.

A valid measurement is never replaced. What failed stops the repetition, so that nothing is launched into an
uninvestigated fault; resuming says whether to go on. Source: collector.md section 7.4 (run).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.attempt import AttemptContext
from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.checkpoint import Checkpoint
from fpmsdk.collect.executor import ExecutorFactory
from fpmsdk.collect.instrumentation import load_instrumentation
from fpmsdk.collect.measurement_compare import compare_measurements
from fpmsdk.collect.observed_campaign import CampaignObservations
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.recovery import left_behind, recover
from fpmsdk.collect.repeatability_plan import (
    EVIDENCE_VERSION,
    PLAN_FILE,
    RepeatPolicy,
    freeze,
    launch_plan,
    read_deployment,
)
from fpmsdk.collect.repeatability_report import aggregate, summarise
from fpmsdk.collect.repeatability_sample import (
    RECOVERABLE,
    MissingSampleError,
    campaign_folder,
    read_sample,
    sample_folder,
)
from fpmsdk.collect.repeatability_saved import REPORT_FILE, check_saved, read_saved
from fpmsdk.collect.revision import source_revision
from fpmsdk.documents.canonical import digest, write_document
from fpmsdk.documents.evidence import file_evidence, manifest
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import CollectionError, EvidenceError, FpmSdkError, OnboardError
from fpmsdk.files import DRAFT_PREFIX

REPORT_SCHEMA = "aisimulate_fpm_repeatability"
_LOCK_FILE = ".repeatability.lock"
_AGGREGATE = "repeatability-aggregate-"

Attempt = dict[str, Any]


def repeat_campaign(
    source: CollectionPlan,
    *,
    campaign_root: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    executor: ExecutorFactory,
    policy: RepeatPolicy,
    resume: bool = False,
    retry_failed: bool = False,
    evidence_version: int | None = None,
) -> dict[str, Any]:
    """Repeat a campaign, or go on with a repetition.

    Parameters
    ----------
    source: the plan of the finished campaign.
    campaign_root, checkpoint: its folder and its formal checkpoint.
    output_dir: of the repetition, apart from the campaign.
    executor: makes what runs a cell; the caller owns its allocation.
    policy: how much is repeated; the same when a repetition is resumed.
    resume: go on with what is in `output_dir`.
    retry_failed: launch failed samples again within their budget, or repeat their teardown; needs `resume`.
    evidence_version: None keeps the version of a resumed repetition, else 2.

    Returns
    -------
    The report, as written to `repeatability.json`; `status` is passed, incomplete or failed.

    Raises
    ------
    OnboardError: the output does not fit, or another collector version than that of the source would launch.
    EvidenceError: the source or an earlier launch was changed.
    CollectionError: the budget of a sample is used up.

    Source: collector.md section 7.4.
    """
    if retry_failed and not resume:
        raise OnboardError("--retry-failed: needs --resume", "retry_failed")
    campaign, root = Path(campaign_root).expanduser().resolve(), Path(output_dir).expanduser().resolve()
    if campaign == root or campaign in root.parents or root in campaign.parents:
        raise OnboardError(f"{root}: must be apart from the repeated campaign {campaign}; choose another directory")
    deployment = read_deployment(source, campaign)
    # Before the report is written nothing was launched, so that there is nothing to go on with.
    has_begun = resume and (root / REPORT_FILE).exists()
    if resume and not root.is_dir():
        raise OnboardError(f"{root}: there is no repetition to go on with; leave out --resume", "resume")
    if not has_begun and root.exists() and not all(_precedes_report(place.name, resume) for place in root.iterdir()):
        raise OnboardError(f"{root}: is not empty; resume what is there, or choose a fresh directory")
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root / _LOCK_FILE, f"the repetition in {root}"):
        saved = read_saved(root) if has_begun else None
        if evidence_version is None:
            evidence_version = (
                EVIDENCE_VERSION if saved is None else saved.frozen.get("observation_evidence_version", 1)
            )
        frozen = freeze(source, campaign, checkpoint, policy, evidence_version=evidence_version)
        run = _Run(source, root, frozen, policy, executor, deployment)
        if saved is None:
            write_document(root / PLAN_FILE, frozen)
        elif saved.frozen != frozen:
            raise EvidenceError(
                f"{root / PLAN_FILE}: source or policy changed since it was frozen; repeat in a fresh directory",
                str(root / PLAN_FILE),
            )
        else:
            check_saved(source, frozen, saved.report, root)
            run.report = saved.report
        run.save()
        run.go_on(retry_failed)
        return run.report


def _observations(plan: CollectionPlan, directory: Path) -> CampaignObservations | None:
    # A campaign that was observed is observed again, by the same observers.
    if plan.runtime_observation is None:
        return None
    return CampaignObservations(
        plan,
        load_instrumentation(plan.runtime_observation["manifest"]),
        artifact_root=directory / "artifacts",
        checkpoint_dir=directory / "checkpoint",
        smoke=False,
    )


def _precedes_report(name: str, resume: bool) -> bool:
    # What a process may leave that was killed before its first report.
    if name == _LOCK_FILE or name.startswith(DRAFT_PREFIX):
        return True
    return resume and (name == PLAN_FILE or name.startswith(_AGGREGATE))


class _Run:
    """A repetition under way; its report is on disk after every step."""

    def __init__(
        self,
        source: CollectionPlan,
        root: Path,
        frozen: dict[str, Any],
        policy: RepeatPolicy,
        executor: ExecutorFactory,
        deployment: Mapping[str, Any],
    ) -> None:
        self._source, self._root, self._frozen, self._policy = source, root, frozen, policy
        self._executor, self._deployment = executor, deployment
        self.report: dict[str, Any] = {
            "schema_name": REPORT_SCHEMA,
            "schema_version": 2,
            "plan_sha256": frozen["sha256"],
            "source_plan_sha256": source.sha256,
            "output_dir": str(root),
            "policy": frozen["policy"],
            "samples": {
                cell["cell_id"]: [{"sample_index": index + 1, "attempts": []} for index in range(policy.samples)]
                for cell in frozen["cells"]
            },
        }

    def save(self) -> None:
        """Write the report with everything that follows from its attempts.

        The aggregate is named by its content and written first: the report on disk never refers to one that is not.
        """
        self.report |= summarise(self._frozen, self.report["samples"], compare_measurements)
        document = aggregate(self._frozen["sha256"], self.report)
        path = self._root / f"{_AGGREGATE}{digest(document)}.json"
        if not path.exists():
            write_document(path, document)
        self.report["aggregate"] = file_evidence(path)
        write_document(self._root / REPORT_FILE, self.report)

    def go_on(self, retry_failed: bool) -> None:
        """Launch what is missing, until something fails or all is there."""
        if any(cell["execution"]["status"] == "failed" for cell in self._frozen["cells"]):
            return  # stable launches cannot qualify a source that ran something else
        for cell in self._frozen["cells"]:
            plan = launch_plan(self._source, cell, self._policy)
            for slot in self.report["samples"][cell["cell_id"]]:
                if not self._measure(plan, cell, slot, retry_failed):
                    return

    def _measure(self, plan: CollectionPlan, cell: dict[str, Any], slot: dict[str, Any], retry_failed: bool) -> bool:
        # Whether the sample is there, and the next one may be launched.
        if slot["attempts"]:
            previous = slot["attempts"][-1]
            self._settle(plan, cell, previous, retry_failed)
            if previous["status"] == "passed":
                return True
            if previous.get("evidence") or not retry_failed:
                return False
            if len(slot["attempts"]) >= self._policy.max_attempts_per_sample:
                raise CollectionError(
                    f"{previous['directory']}: all {self._policy.max_attempts_per_sample} attempts of this sample are "
                    "used up; they are kept, look into them before repeating elsewhere"
                )
            self._remove_leftovers(plan, previous)
        attempt = self._launch(plan, cell, slot)
        contradicted = (
            self.report["repeatability"]["status"] == "mismatch"
            or self.report["source_qualification"]["status"] == "failed"
        )
        return attempt["status"] == "passed" and not contradicted

    def _settle(self, plan: CollectionPlan, cell: dict[str, Any], attempt: Attempt, retry_failed: bool) -> None:
        # What can still be made of an earlier attempt without launching anything.
        if attempt["status"] != "passed" and not attempt.get("evidence"):
            # The collection may have ended before the report was written.
            try:
                self._record(plan, cell, attempt)
            except MissingSampleError:
                pass
            except FpmSdkError as fault:
                attempt.update(status="failed", failure_kind="validation_failed", error=str(fault))
            self._note_files(attempt)
            self.save()
        if not retry_failed or not attempt.get("evidence"):
            return
        if attempt["status"] == "failed" and attempt.get("failure_kind") == "cleanup_failed":
            self._again(plan, cell, attempt, "cleanup", self._clean_up)
        if attempt["status"] == "failed" and attempt.get("failure_kind") == "postprocessing_failed":
            self._again(plan, cell, attempt, "postprocessing", self._recover)

    def _launch(self, plan: CollectionPlan, cell: dict[str, Any], slot: dict[str, Any]) -> Attempt:
        revision = source_revision()
        if revision != self._source.document["aic_revision"]:
            raise OnboardError(
                f"aic_revision: the source is of {self._source.document['aic_revision']}, this is {revision}; "
                "launch with that one, or collect a new campaign; what was launched can still be assessed"
            )
        relative = sample_folder(cell["cell_id"], slot["sample_index"], len(slot["attempts"]) + 1)
        directory = self._root / relative
        attempt: Attempt = {"directory": relative.as_posix(), "status": "running"}
        slot["attempts"].append(attempt)
        # Known before anything is there: what a killed process leaves always has its entry.
        write_document(self._root / REPORT_FILE, self.report)
        directory.mkdir(parents=True)
        has_run = False
        try:
            outcome = run_campaign(
                plan,
                deployment=self._deployment,
                executor=self._executor,
                artifact_root=directory / "artifacts",
                checkpoint_dir=directory / "checkpoint",
                publish=False,
                observations=_observations(plan, directory),
            )
            has_run = True
            if outcome.errors:
                attempt.update(status="failed", failure_kind="collection_error", errors=outcome.errors)
            self._record(plan, cell, attempt)
        except (KeyboardInterrupt, SystemExit):
            attempt.update(status="interrupted", failure_kind="interrupted")
            raise
        except (FpmSdkError, OSError) as fault:
            kind = "validation_failed" if has_run else "collection_error"
            if isinstance(fault, MissingSampleError):
                kind = "missing_evidence"
            attempt.update(status="failed", failure_kind=kind, error=f"{type(fault).__name__}: {fault}")
        finally:
            self._note_files(attempt)
            self.save()
        return attempt

    def _record(self, plan: CollectionPlan, cell: dict[str, Any], attempt: Attempt) -> None:
        # Take the evidence of an attempt into the report, and its status from it.
        evidence = read_sample(plan, cell, self._root / attempt["directory"])
        self._require_independent(evidence)
        attempt["evidence"] = evidence
        if evidence["execution"]["status"] == "failed":
            reason = "workers were observed to contradict the plan"
            attempt.update(status="failed", failure_kind="validation_failed", error=reason)
        elif evidence["collector_status"] == "cleanup_failed" or evidence["cleanup_error"] is not None:
            attempt.update(status="failed", failure_kind="cleanup_failed", error=evidence["cleanup_error"])
        elif evidence["collector_status"] in RECOVERABLE:
            reason = "a complete measurement is kept; its post-processing is to be repeated, it is not launched again"
            attempt.update(status="failed", failure_kind="postprocessing_failed", error=reason)
        elif not attempt.get("errors"):
            attempt["status"] = "passed"

    def _require_independent(self, evidence: Mapping[str, Any]) -> None:
        cells = self._frozen["cells"]
        earlier = [
            attempt["evidence"]
            for slots in self.report["samples"].values()
            for slot in slots
            for attempt in slot["attempts"]
            if attempt.get("evidence")
        ]
        for name, of_source in (("attempt_id", "source_attempt_id"), ("runtime_run_id", "source_runtime_run_id")):
            used = {cell[of_source] for cell in cells} | {known[name] for known in earlier}
            if evidence[name] in used:
                raise EvidenceError(f"{name} {evidence[name]}: was used by another launch; this one is not independent")

    # --- teardown and post-processing, without a launch ---

    def _again(
        self,
        plan: CollectionPlan,
        cell: dict[str, Any],
        attempt: Attempt,
        what: str,
        work: Callable[[CollectionPlan, Attempt], dict[str, Any]],
    ) -> None:
        trial: dict[str, Any] = {"status": "running"}
        attempt.setdefault(f"{what}_attempts", []).append(trial)
        try:
            facts = work(plan, attempt)
            if read_sample(plan, cell, self._root / attempt["directory"]) != attempt["evidence"]:
                raise EvidenceError(f"{attempt['directory']}: its evidence changed; restore it")
            trial.update(status="passed", **facts)
            is_open = what == "cleanup" and attempt["evidence"]["collector_status"] in RECOVERABLE
            attempt.update({"failure_kind": "postprocessing_failed"} if is_open else {"status": "passed"})
        except (KeyboardInterrupt, SystemExit):
            trial["status"] = "interrupted"
            raise
        except (FpmSdkError, OSError, RuntimeError) as fault:
            trial.update(status="failed", error=f"{type(fault).__name__}: {fault}")
        finally:
            attempt.setdefault(f"{what}_file_history", []).append(attempt.get("files", {}))
            self._note_files(attempt)
            self.save()

    def _clean_up(self, plan: CollectionPlan, attempt: Attempt) -> dict[str, Any]:
        resource = left_behind(self._context(plan, attempt), plan.cells[0])
        if resource is None:
            raise CollectionError(f"{attempt['directory']}: no launch files are left that say what is to be ended")
        resource.cleanup()
        return {}

    def _recover(self, plan: CollectionPlan, attempt: Attempt) -> dict[str, Any]:
        context, cell = self._context(plan, attempt), plan.cells[0]
        trials = attempt.get("cleanup_attempts", [])
        if trials and trials[-1]["status"] == "passed":
            entry = context.checkpoint.entry(cell.cell_id)
            context.checkpoint.put(
                cell.cell_id, {name: value for name, value in entry.items() if name != "cleanup_error"}
            )
        # The checkpoint on disk stays what the launch wrote.
        if not recover(context, cell):
            raise CollectionError(
                f"{attempt['directory']}: the measurement is kept but cannot be validated; look into its artifacts and "
                "its teardown, then resume with --retry-failed"
            )
        return {"artifact_recovery": context.checkpoint.entry(cell.cell_id)["artifact_recovery"]}

    def _remove_leftovers(self, plan: CollectionPlan, attempt: Attempt) -> None:
        # The next attempt starts when nothing of this one runs any more.
        resource = left_behind(self._context(plan, attempt), plan.cells[0])
        if resource is None:
            return
        try:
            resource.cleanup()
        finally:
            attempt.setdefault("cleanup_file_history", []).append(attempt.get("files", {}))
            self._note_files(attempt)
            write_document(self._root / REPORT_FILE, self.report)

    def _context(self, plan: CollectionPlan, attempt: Attempt) -> AttemptContext:
        directory = self._root / attempt["directory"]
        return AttemptContext(
            plan=plan,
            root=campaign_folder(plan, directory),
            deployment=self._deployment,
            executor=self._executor,
            checkpoint=Checkpoint.open(plan, directory / "checkpoint", smoke=False, resume=True),
            errors=[],
            smoke=False,
            resume=True,
        )

    def _note_files(self, attempt: Attempt) -> None:
        attempt["files"] = manifest(self._root / attempt["directory"])
