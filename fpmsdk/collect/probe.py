"""Runtime probes: engines are launched as they are meant to serve, and report the cache that they allocated.

A preview renders everything that a launch would use. Every attempt is kept; the newest one is the active one.
Source: collector.md section 8.4, onboarding.md section 6.2.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.cpu_policy import CPU_BIND, CPUS_PER_TASK
from fpmsdk.collect.executor import ExecutorFactory
from fpmsdk.collect.instrumentation import InstrumentationBundle, contained_file, load_instrumentation
from fpmsdk.collect.interrupts import sigterm_interrupts
from fpmsdk.collect.observation_index import INDEX_SCHEMA, read_index
from fpmsdk.collect.observers import bundled_versions
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.probe_attempt import clean_up_attempt, is_reusable, run_attempt
from fpmsdk.collect.probe_plan import probe_plan
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import EvidenceError, FpmSdkError, OnboardError
from fpmsdk.files import DRAFT_PREFIX

PLAN_FILE, INDEX_FILE, LOCK_FILE = "probe-plan.json", "observations.json", ".runtime-probe.lock"
PLAN_SCHEMA = "aisimulate-runtime-probe-plan/v1"
CPU_FIELDS = ("cpus_per_task", "cpu_bind")
_GRAPHS_OF_PREFILL = (
    "explicit capture sizes apply to prefill alone while no serving role is named, so that no memory profile may come "
    "of this that decode can share; name a role, or use the policy runtime"
)


def run_probe(
    launches: Mapping[str, Mapping[str, Any]],
    output: str | os.PathLike[str],
    bundle: InstrumentationBundle,
    *,
    executor: ExecutorFactory | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Preview or run a probe of every configuration; one that fails does not hold up the others.

    Parameters
    ----------
    launches: launch facts by configuration.
    output: a folder that is fresh, or holds this probe.
    bundle: the observers.
    executor: makes what runs a cell; None renders and launches nothing.
    resume: whether complete attempts of an earlier run are reused and interrupted ones are cleaned up.

    Returns
    -------
    `status` (`preview`, `completed`, `partial` or `failed`), `observations_path` (None for a preview) and
    `configurations` by label.

    Raises
    ------
    OnboardError: another folder's content, observations that would be replaced, or another process at work.
    OSError: a file cannot be written.
    KeyboardInterrupt: after the running phase was salvaged and cleaned up.
    """
    root = Path(output).expanduser().resolve()
    if not (root / PLAN_FILE).exists() and not _is_fresh(root):
        raise OnboardError(f"{root}: holds something else than a probe; choose a fresh folder", "--output-dir")
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root / LOCK_FILE, f"the probe in {root}"), sigterm_interrupts():
        index_path = root / INDEX_FILE
        if executor is not None and index_path.exists() and not resume:
            raise OnboardError(
                f"{index_path}: observations exist already; continue them with --resume, or choose a fresh folder",
                "--resume",
            )
        index: dict[str, Any] = (
            read_index(index_path) if index_path.exists() else {"schema_version": INDEX_SCHEMA, "configurations": {}}
        )
        plans, results = _plans(launches, root, index, bundle, resume=resume)
        write_document(
            root / PLAN_FILE,
            {
                "schema_version": PLAN_SCHEMA,
                "configurations": {label: _launch(plan) for label, plan in plans.items()},
                "bundle_sha256": bundle.sha256,
            },
        )

        def save() -> None:
            write_document(index_path, index)

        for label, plan in plans.items():
            facts = _launch(plan)
            entry = index["configurations"].setdefault(label, {"launch": facts, "attempts": []})
            found = None
            if executor is not None:
                found = _taken_over(root, label, plan, entry, bundle, executor)
            results[label] = found or run_attempt(root, plan, bundle, entry, executor, save)
            if _warns_of_graphs(facts):
                results[label]["diagnostics"].append(_GRAPHS_OF_PREFILL)
    num_failed = sum(result["status"] == "failed" for result in results.values())
    status = "preview" if executor is None else "completed"
    if num_failed:
        status = "failed" if num_failed == len(results) else "partial"
    return {
        "status": status,
        "observations_path": None if executor is None else str(root / INDEX_FILE),
        "configurations": results,
    }


def _is_fresh(root: Path) -> bool:
    # A process that was killed before it wrote its plan leaves nothing but these.
    names = [place.name for place in root.iterdir()] if root.exists() else []
    return all(name == LOCK_FILE or name.startswith(DRAFT_PREFIX) for name in names)


def with_cpu_policy(
    label: str, deployment: Mapping[str, Any], output: str | os.PathLike[str], *, resume: bool
) -> dict[str, Any]:
    """Deployment options with the CPU policy of a Slurm probe: what is stated, else what was frozen, else the default.

    A probe that was frozen without a policy stays without one.

    Raises
    ------
    EvidenceError: the frozen policy is not that of the archived launches.
    OnboardError: no such index.
    """
    resolved = copy.deepcopy(dict(deployment))
    if resolved.get("executor") != "slurm":
        return resolved
    root = Path(output).expanduser().resolve()
    index_path = root / INDEX_FILE
    saved = read_index(index_path)["configurations"].get(label) if resume and index_path.exists() else None
    if saved is None:
        for name, default in zip(CPU_FIELDS, (CPUS_PER_TASK, CPU_BIND), strict=True):
            if resolved.get(name) is None:
                resolved[name] = default
        return resolved
    frozen = saved["launch"]["deployment"]
    inherited = {name: frozen[name] for name in CPU_FIELDS if resolved.get(name) is None and name in frozen}
    if inherited:
        phases = saved["attempts"][-1]["phases"].values() if saved.get("attempts") else ()
        references = [phase["launch_manifest"] for phase in phases if "launch_manifest" in phase]
        for reference in references:
            place = contained_file(root, reference["path"])
            is_archived = file_meta(place)["sha256"] == reference["sha256"]
            if not is_archived or read_document(place).get("launch") != saved["launch"]:
                raise EvidenceError(f"{place}: is not the launch whose CPU policy was frozen; probe afresh", str(place))
        if not references:
            raise EvidenceError(f"{index_path}: no archived launch confirms the frozen CPU policy", str(index_path))
    return resolved | inherited


def selected_bundle(
    manifest: str | os.PathLike[str] | None, launches: Mapping[str, Mapping[str, Any]]
) -> InstrumentationBundle | None:
    """The observers that a manifest declares, else those that come with this package for the version of the engine.

    Parameters
    ----------
    manifest: given by the user; None selects by version.
    launches: launch facts by configuration.

    Returns
    -------
    The bundle; None when none is given and an engine version is not known yet.

    Raises
    ------
    OnboardError: the manifest breaks a rule; or none is given and the versions are several, or one that no observers
        come with.
    """
    if manifest is not None:
        return load_instrumentation(manifest)
    versions = {
        launch["identity"].get("runtime_framework_version") or launch["identity"].get("framework_version")
        for launch in launches.values()
    }
    if None in versions:
        return None
    bundled = bundled_versions()
    if unknown := sorted(versions - bundled.keys()):
        raise OnboardError(
            f"--instrumentation: no observers come with this release for vLLM {', '.join(unknown)}, only for "
            f"{', '.join(bundled)}; give the manifest of observers that were written for it",
            "--instrumentation",
        )
    if len(versions) > 1:
        raise OnboardError(
            f"--instrumentation: the engines are vLLM {', '.join(sorted(versions))}, and a probe has the observers of "
            "one version; probe them one after the other (--configuration)",
            "--instrumentation",
        )
    version = versions.pop()
    return load_instrumentation(bundled[version], version)


def _launch(plan: CollectionPlan) -> dict[str, Any]:
    observation = plan.runtime_observation
    assert observation is not None
    launch: dict[str, Any] = observation["launch"]
    return launch


def _plans(
    launches: Mapping[str, Mapping[str, Any]],
    root: Path,
    index: Mapping[str, Any],
    bundle: InstrumentationBundle,
    *,
    resume: bool,
) -> tuple[dict[str, CollectionPlan], dict[str, dict[str, Any]]]:
    plans, results = {}, {}
    for label, facts in launches.items():
        try:
            deployment = with_cpu_policy(label, facts["deployment"], root, resume=resume)
            plan = probe_plan(label, {**facts, "deployment": deployment}, bundle)
            known = index["configurations"].get(label)
            if known is not None and known["launch"] != _launch(plan):
                raise OnboardError(f"{label}: the launch differs from the one in {root}; choose a fresh folder")
            plans[label] = plan
        except (FpmSdkError, OSError) as fault:
            results[label] = {"status": "failed", "diagnostics": [str(fault)]}
    return plans, results


def _taken_over(
    root: Path,
    label: str,
    plan: CollectionPlan,
    entry: dict[str, Any],
    bundle: InstrumentationBundle,
    executor: ExecutorFactory,
) -> dict[str, Any] | None:
    """The result of a complete former attempt, or the reason why there can be no new one; None for a new one."""
    attempts = entry["attempts"]
    diagnostics: list[str] = []
    if attempts:
        try:
            if is_reusable(root, attempts[-1], bundle, plan):
                return {
                    "status": "completed",
                    "resumed": True,
                    "attempt_id": attempts[-1]["attempt_id"],
                    "minimum_gpus": plan.cells[0].topology.gpus,
                    "launch": _launch(plan),
                    "phases": copy.deepcopy(attempts[-1]["phases"]),
                    "diagnostics": [],
                }
        except (FpmSdkError, OSError, KeyError, TypeError) as fault:
            diagnostics.append(f"the former attempt cannot be reused: {fault}")
    if plan.executor == "slurm" and plan.options.get("slurm_cpus_per_task") is None:
        diagnostics.append("this probe was frozen without a CPU policy, so that nothing new is launched for it")
        return {"status": "failed", "diagnostics": diagnostics}
    if attempts:
        try:
            clean_up_attempt(root, label, attempts[-1], _launch(plan), executor)
        except (FpmSdkError, OSError, KeyError, TypeError) as fault:
            diagnostics.append(f"the former attempt was not cleaned up: {fault}")
            return {"status": "failed", "diagnostics": diagnostics}
    return None


def _warns_of_graphs(launch: Mapping[str, Any]) -> bool:
    collection = launch["collection"]
    explicit = collection["prefill_cudagraph_policy"] == "explicit" and not collection["enforce_eager"]
    return explicit and launch.get("worker_type") is None
