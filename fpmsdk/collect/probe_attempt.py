"""One attempt to probe one configuration: its phases one after the other, and what is kept of each.

Source: collector.md section 8.4.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.executor import CellExecutor, CellLaunch, ExecutorFactory
from fpmsdk.collect.instrumentation import (
    InstrumentationBundle,
    contained_file,
    freeze_instrumentation,
    load_instrumentation,
)
from fpmsdk.collect.observation_files import file_reference, keep_phase_files
from fpmsdk.collect.observer_staging import (
    CONTEXT_FILE,
    PROBE_SAMPLING,
    launch_context,
    require_same_context,
    stage_observers,
)
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.probe_plan import probe_deployment, probe_plan
from fpmsdk.collect.render import CONTRACT, MANIFEST, REQUEST, RUN_SCRIPT, STARTUP, node_layout, render_cell
from fpmsdk.documents.canonical import digest, read_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import CollectionError, EvidenceError, FpmSdkError

logger = logging.getLogger(__name__)

_ENDED = ("completed", "failed", "preview")
Save = Callable[[], None]


def attempt_folder(root: Path, kind: str, configuration: str, attempt_id: str) -> Path:
    """`attempts/<slug>/<id>` or `previews/<slug>/<id>`.

    >>> attempt_folder(Path("/p"), "previews", "tp 1", "a1").as_posix()
    '/p/previews/tp-1-4785d5ad/a1'
    """
    plain = "".join(char if (char.isalnum() and char.isascii()) or char in "_-" else "-" for char in configuration)
    return root / kind / f"{plain[:40]}-{digest(configuration)[:8]}" / attempt_id


def run_attempt(
    root: Path,
    plan: CollectionPlan,
    bundle: InstrumentationBundle,
    entry: dict[str, Any],
    executor: ExecutorFactory | None,
    save: Save,
) -> dict[str, Any]:
    """Render every phase of a configuration, and launch it unless this is a preview.

    Parameters
    ----------
    root: the output folder of the probe.
    plan: as `probe_plan` makes it.
    bundle: the observers.
    entry: the configuration's part of the index; a launched attempt is added to it.
    executor: makes what runs a cell; None is a preview.
    save: writes the index.

    Returns
    -------
    The result: `status`, `attempt_id`, `minimum_gpus`, `launch`, `phases`, `diagnostics`.

    Raises
    ------
    KeyboardInterrupt: after the running phase was salvaged and cleaned up.
    """
    observation = plan.runtime_observation
    assert observation is not None
    attempt_id = uuid.uuid4().hex
    folder = attempt_folder(
        root, "previews" if executor is None else "attempts", observation["configuration"], attempt_id
    )
    folder.mkdir(parents=True)
    frozen = freeze_instrumentation(bundle, folder / "instrumentation")
    attempt: dict[str, Any] = {
        "attempt_id": attempt_id,
        "status": "running",
        "started_at": datetime.now(UTC).isoformat(),
        "bundle": {"manifest": frozen.manifest_path.relative_to(root).as_posix(), "sha256": frozen.sha256},
        "phases": {},
    }
    result: dict[str, Any] = {
        "status": "preview" if executor is None else "completed",
        "attempt_id": attempt_id,
        "minimum_gpus": plan.cells[0].topology.gpus,
        "launch": observation["launch"],
        "phases": attempt["phases"],
        "diagnostics": [],
    }
    if executor is not None:
        entry["attempts"].append(attempt)
        entry["active_attempt_id"] = attempt_id
        save()
    try:
        for cell in plan.cells:
            (folder / cell.workload_kind).mkdir()
            _run_phase(root, plan, cell, frozen, folder / cell.workload_kind, attempt, result, executor, save)
    except KeyboardInterrupt:
        result["status"] = "interrupted"
        raise
    finally:
        attempt["status"] = result["status"]
        attempt["completed_at"] = datetime.now(UTC).isoformat()
        if executor is not None:
            save()
    return copy.deepcopy(result)


def _run_phase(
    root: Path,
    plan: CollectionPlan,
    cell: Cell,
    bundle: InstrumentationBundle,
    folder: Path,
    attempt: dict[str, Any],
    result: dict[str, Any],
    executor: ExecutorFactory | None,
    save: Save,
) -> None:
    phase: dict[str, Any] = {"status": "running", "artifacts": []}
    attempt["phases"][cell.workload_kind] = phase
    resource: CellExecutor | None = None

    def failed(what: str, fault: BaseException, **told: Any) -> None:
        phase.update(told)
        result["status"] = "failed"
        result["diagnostics"].append(f"{cell.workload_kind}{what}: {fault}")

    try:
        observation = plan.runtime_observation
        assert observation is not None
        launch = render_cell(plan, cell, folder, probe_deployment(observation["launch"]), smoke=True)
        context = launch_context(
            cell,
            observation["launch"],
            configuration=observation["configuration"],
            attempt_id=attempt["attempt_id"],
            bundle_sha256=bundle.sha256,
            sampling=PROBE_SAMPLING,
        )
        staged = stage_observers(folder, bundle, context)
        phase["launch_manifest"] = file_reference(root, folder / CONTEXT_FILE)
        phase["resource_manifest"] = resource_reference(root, plan, cell, folder)
        phase["generator_request"] = str(folder / REQUEST)
        if executor is None:
            phase["status"] = "preview"
        else:
            # Known before any work: whoever finds this knows what may be left behind, and that it is ours.
            save()
            resource = executor(launch)
            _launch(resource, launch, staged, attempt["attempt_id"])
            phase["status"] = "completed"
    except KeyboardInterrupt:
        phase["status"] = "interrupted"
        _salvage(resource)
        raise
    except (FpmSdkError, OSError) as fault:
        failed("", fault, status="failed", error=str(fault), error_type=type(fault).__name__)
        _salvage(resource)
    finally:
        if resource is not None:
            try:
                resource.cleanup()
            except (FpmSdkError, OSError) as fault:
                failed(" cleanup", fault, status="cleanup_failed", cleanup_error=str(fault))
        try:
            phase["artifacts"] = keep_phase_files(root, folder)
        except (FpmSdkError, OSError) as fault:
            failed(" evidence", fault, status="failed", capture_error=str(fault))
        if executor is not None:
            save()


def _launch(resource: CellExecutor, launch: CellLaunch, staged: list[Path], attempt_id: str) -> None:
    # Names follow from the launch, so that an engine of an earlier process would be taken for this one's.
    resource.cleanup()
    resource.apply()
    units = resource.wait_ready(launch.num_nodes)
    resource.stage(units, [*(launch.folder / name for name in (RUN_SCRIPT, CONTRACT, STARTUP)), *staged])
    resource.prepare_attempt(
        units,
        cell_id=launch.cell.cell_id,
        plan_sha256=launch.plan.sha256,
        attempt_id=attempt_id,
        expected_backend_version=launch.plan.backend_version,
    )
    resource.execute(units)
    resource.collect(units, require_benchmark=False)


def _salvage(resource: CellExecutor | None) -> None:
    if resource is None:
        return
    try:
        resource.collect(resource.pods(), require_benchmark=False)
    except (FpmSdkError, OSError) as fault:
        logger.warning("results of a probe were not salvaged completely: %s", fault)


def resource_reference(root: Path, plan: CollectionPlan, cell: Cell, folder: Path) -> dict[str, Any]:
    """The manifest of what a phase reserves, with the labels by which it is known to be this probe's.

    Raises
    ------
    EvidenceError: an object of the manifest has other labels.
    """
    import yaml

    place = contained_file(root, (folder / MANIFEST).relative_to(root).as_posix())
    ownership = {
        "aiconfigurator.nvidia.com/owned-by": "fpm-forward-collector",
        "aiconfigurator.nvidia.com/plan": plan.sha256[:16],
        "aiconfigurator.nvidia.com/cell": cell.cell_id,
    }
    resources = []
    for document in yaml.safe_load_all(place.read_text(encoding="utf-8")):
        metadata = document.get("metadata") or {}
        labels = metadata.get("labels") or {}
        if any(labels.get(name) != value for name, value in ownership.items()):
            raise EvidenceError(f"{place}: {document.get('kind')} is not labelled as this probe's", str(place))
        resources.append([document["kind"], metadata.get("namespace"), metadata["name"]])
    return {**file_reference(root, place), "ownership": ownership, "resources": resources}


def is_reusable(root: Path, attempt: dict[str, Any], bundle: InstrumentationBundle, plan: CollectionPlan) -> bool:
    """Whether a saved attempt is complete, with the same observers and its evidence as it was recorded.

    Raises
    ------
    EvidenceError: it was complete, and its evidence does not hold any more.
    """
    if attempt.get("status") != "completed" or attempt.get("bundle", {}).get("sha256") != bundle.sha256:
        return False
    if set(attempt.get("phases", {})) != {cell.workload_kind for cell in plan.cells}:
        raise EvidenceError(f"attempt {attempt.get('attempt_id')}: not the phases of the role; probe afresh")
    for phase in attempt["phases"].values():
        for reference in (phase["launch_manifest"], *phase["artifacts"]):
            _verified(root, reference)
    return True


def clean_up_attempt(
    root: Path, configuration: str, attempt: dict[str, Any], facts: dict[str, Any], executor: ExecutorFactory
) -> None:
    """End what an interrupted attempt left behind, once its saved files prove that it is this probe's.

    Raises
    ------
    EvidenceError: the saved files do not prove it; nothing was ended.
    CollectionError: what was left behind could not be ended.
    """
    attempt_id = attempt["attempt_id"]
    folder = attempt_folder(root, "attempts", configuration, attempt_id)
    manifest = contained_file(root, attempt["bundle"]["manifest"])
    bundle = load_instrumentation(manifest)
    if manifest != folder / "instrumentation" / "manifest.json" or bundle.sha256 != attempt["bundle"]["sha256"]:
        raise EvidenceError(f"{manifest}: not the observers of attempt {attempt_id}", str(manifest))
    plan = probe_plan(configuration, facts, bundle)
    owned = []
    for cell in plan.cells:
        phase = attempt["phases"].get(cell.workload_kind, {"status": "failed"})
        if phase["status"] in _ENDED or "resource_manifest" not in phase:
            continue  # nothing was launched, or it was cleaned up
        place = folder / cell.workload_kind
        expected = launch_context(
            cell,
            facts,
            configuration=configuration,
            attempt_id=attempt_id,
            bundle_sha256=bundle.sha256,
            sampling=PROBE_SAMPLING,
        )
        context = _verified(root, phase["launch_manifest"])
        require_same_context(read_document(context), expected, context)
        if phase["resource_manifest"] != resource_reference(root, plan, cell, place):
            raise EvidenceError(f"{place / MANIFEST}: not what attempt {attempt_id} reserved", str(place / MANIFEST))
        owned.append((cell, phase, place))
    for cell, phase, place in owned:
        resource = executor(CellLaunch(plan, cell, place, *node_layout(plan, cell)))
        _salvage(resource)
        try:
            resource.cleanup()
        except OSError as fault:
            raise CollectionError(f"{place}: what the attempt left behind could not be ended: {fault}") from None
        phase["recovery_artifacts"] = keep_phase_files(root, place)


def _verified(root: Path, reference: dict[str, Any]) -> Path:
    place = contained_file(root, reference["path"])
    if file_meta(place)["sha256"] != reference["sha256"]:
        raise EvidenceError(f"{place}: evidence was changed since it was recorded; probe afresh", str(place))
    return place
