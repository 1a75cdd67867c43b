"""Observations of a campaign under an accepted probe: the same launch, observed again, every attempt kept.

Source: collector.md sections 0 and 8.4 (formal collection), onboarding.md sections 6.4 and 6.5.
"""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.deployment_inputs import SECTION, deployment_digest
from fpmsdk.collect.executor import CellLaunch
from fpmsdk.collect.instrumentation import (
    MANIFEST_FILE,
    InstrumentationBundle,
    contained_file,
    freeze_instrumentation,
    load_instrumentation,
)
from fpmsdk.collect.observation_files import file_reference, keep_phase_files
from fpmsdk.collect.observation_index import INDEX_SCHEMA, read_index
from fpmsdk.collect.observer_staging import CONTEXT_FILE, launch_context, require_same_context, stage_observers
from fpmsdk.collect.options import CollectorOptions
from fpmsdk.collect.paths import campaign_root, checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.probe_launch import normalized_launch, phases_of
from fpmsdk.collect.probe_plan import probe_deployment, probe_plan
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import EvidenceError, OnboardError

INDEX_FILE, FOLDER = "runtime-observations.json", "runtime-observations"
_OPTIONS = (
    "vllm_max_model_len",
    "global_warmup_iterations",
    "gpu_memory_utilization",
    "executor",
    "slurm_container_image",
    "slurm_container_mounts",
    "slurm_cpus_per_task",
    "slurm_cpu_bind",
    "worker_type",
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
)
_POLICY = ("policy_id", "generator_overrides", "expected_markers", "aic_fields")


class CampaignObservations:
    """Stages the observers of a campaign, and keeps what they wrote of every attempt; an `ObservationArchive`.

    Parameters
    ----------
    plan: with a `runtime_observation`.
    bundle: the observers, with the digest that the plan froze.
    artifact_root, checkpoint_dir, smoke: of the campaign.

    Raises
    ------
    EvidenceError: other observers than the plan froze.
    """

    def __init__(
        self,
        plan: CollectionPlan,
        bundle: InstrumentationBundle,
        *,
        artifact_root: str | os.PathLike[str],
        checkpoint_dir: str | os.PathLike[str],
        smoke: bool,
    ) -> None:
        observation = plan.runtime_observation
        assert observation is not None
        if bundle.sha256 != observation["bundle_sha256"]:
            raise EvidenceError(
                f"{bundle.manifest_path}: not the frozen observers {observation['bundle_sha256']}; restore them",
                str(bundle.manifest_path),
            )
        self._plan = plan
        self._bundle = bundle
        self._observation = observation
        self._root = campaign_root(Path(artifact_root).expanduser().resolve(), plan.sha256, smoke=smoke)
        self._checkpoint = checkpoint_path(Path(checkpoint_dir).expanduser().resolve(), smoke=smoke)

    def staged_files(self, launch: CellLaunch, attempt_id: str) -> Sequence[Path]:
        """The context of an attempt, its observers and the importer."""
        frozen = self._frozen()
        return stage_observers(launch.folder, frozen, self._context(launch.cell, attempt_id))

    def record(self, cell: Cell, entry: Mapping[str, Any], folder: Path) -> str:
        """Keep the evidence of an attempt before the cell can be run again; the path of the index.

        Raises
        ------
        EvidenceError: the context is not that of the attempt, or evidence that was kept has changed.
        OSError: a file cannot be written; the index is as it was.
        """
        index_path = self._root / INDEX_FILE
        index = read_index(index_path) if index_path.exists() else self._new_index()
        attempt = self._attempt(index, index_path)
        history = attempt["phase_attempts"].setdefault(cell.workload_kind, [])
        phase = self._kept(history, cell, entry)
        if phase is None:
            phase = self._keep(cell, entry, folder)
            history.append(phase)
        attempt["phases"][cell.workload_kind] = phase
        required = phases_of(self._observation["launch"].get("worker_type"))
        captured = set(attempt["phases"]) == set(required) and all(
            one["status"] == "passed" for one in attempt["phases"].values()
        )
        attempt["status"] = "captured" if captured else "incomplete"
        write_document(index_path, index)
        return str(index_path)

    def _parent(self) -> str:
        # One attempt of the probe spans all cells of a campaign, also after a resumption.
        parent = read_document(self._checkpoint).get("runtime_observation_attempt_id")
        if not isinstance(parent, str) or not parent:
            raise EvidenceError(f"{self._checkpoint}: names no runtime_observation_attempt_id", str(self._checkpoint))
        return parent

    def _frozen(self) -> InstrumentationBundle:
        folder = self._root / FOLDER / self._parent() / "instrumentation"
        if not folder.exists():
            return freeze_instrumentation(self._bundle, folder)
        frozen = load_instrumentation(folder / MANIFEST_FILE)
        if frozen.sha256 != self._bundle.sha256:
            raise EvidenceError(f"{folder}: the frozen observers were changed; restore them", str(folder))
        return frozen

    def _context(self, cell: Cell, attempt_id: str) -> dict[str, Any]:
        context = launch_context(
            cell,
            self._observation["launch"],
            configuration=self._observation["configuration"],
            attempt_id=self._parent(),
            bundle_sha256=self._bundle.sha256,
            sampling=None,
        )
        return {**context, "collector_attempt_id": attempt_id, "cell_id": cell.cell_id}

    def _new_index(self) -> dict[str, Any]:
        parent = self._parent()
        manifest = (Path(FOLDER) / parent / "instrumentation" / MANIFEST_FILE).as_posix()
        attempt = {
            "attempt_id": parent,
            "status": "incomplete",
            "bundle": {"manifest": manifest, "sha256": self._bundle.sha256},
            "phases": {},
            "phase_attempts": {},
        }
        entry = {"launch": self._observation["launch"], "active_attempt_id": parent, "attempts": [attempt]}
        return {"schema_version": INDEX_SCHEMA, "configurations": {self._observation["configuration"]: entry}}

    def _attempt(self, index: Mapping[str, Any], index_path: Path) -> dict[str, Any]:
        entry = index["configurations"].get(self._observation["configuration"], {})
        attempts = entry.get("attempts") or [{}]
        attempt: dict[str, Any] = attempts[-1]
        parent = self._parent()
        if (
            entry.get("launch") != self._observation["launch"]
            or entry.get("active_attempt_id") != parent
            or attempt.get("attempt_id") != parent
            or attempt["bundle"]["sha256"] != self._bundle.sha256
        ):
            raise EvidenceError(f"{index_path}: is of another attempt or launch than the campaign", str(index_path))
        return attempt

    def _kept(self, history: list[dict[str, Any]], cell: Cell, entry: Mapping[str, Any]) -> dict[str, Any] | None:
        phase: dict[str, Any]
        for phase in reversed(history):
            passed = phase["status"] == "passed" and entry["status"] == "passed"
            if passed and phase["collector_attempt_id"] == entry["attempt_id"]:
                for reference in (phase["launch_manifest"], *phase["artifacts"]):
                    place = contained_file(self._root, reference["path"])
                    if file_meta(place)["sha256"] != reference["sha256"]:
                        raise EvidenceError(f"{place}: evidence was changed since it was recorded", str(place))
                self._require_context(contained_file(self._root, phase["launch_manifest"]["path"]), cell, entry)
                return phase
        return None

    def _require_context(self, place: Path, cell: Cell, entry: Mapping[str, Any]) -> None:
        require_same_context(read_document(place), self._context(cell, entry["attempt_id"]), place)

    def _keep(self, cell: Cell, entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        context = folder / CONTEXT_FILE
        if context.is_file():
            self._require_context(context, cell, entry)
        elif entry["status"] == "passed":
            raise EvidenceError(f"{context}: is missing, though the attempt has passed", str(context))
        target = self._root / FOLDER / self._parent() / cell.workload_kind / entry["attempt_id"]
        if target.exists():
            # Copied by a process that was killed before the index told of it; it stays, and is not relied on.
            target = target.with_name(f"{target.name}-{uuid.uuid4().hex}")
        phase: dict[str, Any] = {
            "status": entry["status"],
            "collector_attempt_id": entry["attempt_id"],
            "cell_id": cell.cell_id,
            "artifacts": keep_phase_files(self._root, folder, target),
        }
        if context.is_file():
            phase["launch_manifest"] = file_reference(self._root, target / CONTEXT_FILE)
        return phase


def requested_observation(options: CollectorOptions) -> dict[str, Any] | None:
    """The `runtime_observation` of a plan that collector options ask for; None when they ask for none.

    Raises
    ------
    OnboardError: the manifest or the launch facts break a rule. OSError: a file cannot be read.
    """
    if options.runtime_instrumentation is None or options.runtime_launch is None:
        return None
    bundle = load_instrumentation(options.runtime_instrumentation)
    return {
        "manifest": str(bundle.manifest_path),
        "bundle_sha256": bundle.sha256,
        "launch": normalized_launch(read_document(options.runtime_launch)),
        "configuration": options.runtime_configuration,
    }


def observation_archive(options: CollectorOptions, plan: CollectionPlan) -> CampaignObservations | None:
    """What keeps the observations of a campaign, after its plan was compared with the probe; None without observers.

    Raises
    ------
    OnboardError: the plan launches something else than the probe did.
    EvidenceError: other observers than the plan froze.
    """
    observation = plan.runtime_observation
    if observation is None or options.runtime_instrumentation is None:
        return None
    bundle = load_instrumentation(options.runtime_instrumentation)
    check_observed_plan(plan, bundle, options.deployment, launch=observation["launch"])
    return CampaignObservations(
        plan, bundle, artifact_root=options.artifact_root, checkpoint_dir=options.checkpoint_dir, smoke=options.smoke
    )


def check_observed_plan(
    plan: CollectionPlan,
    bundle: InstrumentationBundle,
    deployment: Mapping[str, Any],
    *,
    launch: Mapping[str, Any],
    cells: Sequence[Cell] | None = None,
) -> None:
    """A plan launches what a probe launched: same model, topology, precision, limits, graphs and place.

    Parameters
    ----------
    plan: with a profile.
    bundle: the observers it runs with.
    deployment: its deployment inputs.
    launch: the normalised launch facts.
    cells: its cells as they are to be compared; by default as they are.

    Raises
    ------
    OnboardError: a difference; names it with both values.
    """
    expected = probe_plan("collection", launch, bundle)
    identity = launch["identity"]
    _same("model", plan.model_path, identity["model"])
    _same("system", plan.system, identity["gpu"])
    _same("backend", plan.backend, identity["framework"])
    _same("version label", plan.label, identity["framework_version"])
    _same("model revision", None if plan.profile is None else plan.profile.model_revision, identity["model_revision"])
    required = phases_of(launch.get("worker_type"))
    cells = plan.cells if cells is None else cells
    for cell in cells:
        if cell.workload_kind not in required:
            raise OnboardError(f"{cell.cell_id}: phase {cell.workload_kind} is not of the probed role {required}")
        _check_cell(cell, expected.cells[0])
    options, wanted = plan.options, expected.options
    for name in _OPTIONS:
        _same(name, options.get(name), wanted.get(name))
    _same("enforce_eager", options.get("enforce_eager", False), wanted["enforce_eager"])
    sampling, probed = options["prefill_sampling"], wanted["prefill_sampling"]
    for name in ("cudagraph_policy", "max_cudagraph_capture_size", "cudagraph_capture_sizes"):
        _same(f"prefill_sampling.{name}", sampling.get(name), probed.get(name))
    limits = (launch["collection"]["max_num_batched_tokens"], launch["collection"]["max_num_seqs"])
    for phase in {cell.workload_kind for cell in cells}:
        _same(f"scheduler limits of {phase}", _limits(plan, phase), limits)
    found, asked = copy.deepcopy(dict(deployment)), probe_deployment(launch)
    if plan.executor != "kubernetes":
        for inputs in (found, asked):
            inputs.get(SECTION, {}).pop("k8s_image", None)  # an option of the plan itself, or of no meaning
    _same("deployment inputs", deployment_digest(found), deployment_digest(asked))


def _same(name: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise OnboardError(
            f"{name}: the collection has {found!r}, the probe had {expected!r}; plan it as it was probed"
        )


def _check_cell(cell: Cell, expected: Cell) -> None:
    _same("topology", cell.topology.document(), expected.topology.document())
    for name in ("gemm", "fmha", "comm", "kvcache"):
        field = f"{name}_quant_mode"
        _same(field, cell.resolved_dtypes[field], expected.resolved_dtypes[field])
    # A dense model has no experts, and its cells may say so.
    if cell.resolved_dtypes["moe_quant_mode"] is not None:
        field = "moe_quant_mode"
        _same(field, cell.resolved_dtypes[field], expected.resolved_dtypes[field])
    for name in _POLICY:
        _same(f"backend_policy.{name}", cell.backend_policy[name], expected.backend_policy[name])


def _limits(plan: CollectionPlan, phase: str) -> tuple[int | None, int | None]:
    options = plan.options
    record = plan.deployment(plan.cells[0].topology)
    tokens, seqs = options.get("max_num_batched_tokens"), options.get("max_num_seqs")
    if record is not None:
        tokens, seqs = tokens or record.resources.max_num_tokens, seqs or record.resources.max_batch_size
    if phase == "decode":
        return tokens, options.get("max_decode_batch_size") or seqs
    sampling = options["prefill_sampling"]
    return sampling["max_total_prefill_tokens"], sampling["max_batch_size"] or seqs
