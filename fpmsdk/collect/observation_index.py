"""Observations of a whole configuration: every phase, every rank, one set of resources.

Only files are read; nothing that an observer brought along is executed, and no verdict of its own is believed.
Source: collector.md section 8.5 (import), onboarding.md section 6.3.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fpmsdk.collect.instrumentation import (
    OBSERVATION_SCHEMA,
    InstrumentationBundle,
    contained_file,
    load_instrumentation,
)
from fpmsdk.collect.observation import checked_record, same
from fpmsdk.collect.observation_geometry import checked_geometry
from fpmsdk.collect.observation_ranks import Collected, add_capacity, add_rank, agree
from fpmsdk.collect.probe_launch import expected_ranks, launched_settings, phases_of
from fpmsdk.collect.runtime_settings import cache_dtype, check_one_engine
from fpmsdk.collect.topology import Topology
from fpmsdk.config.profile import Resources
from fpmsdk.config.systems import HOW_TO_GET_DATA, default_systems_root
from fpmsdk.documents.canonical import canonical_bytes, read_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.documents.strict import faults
from fpmsdk.errors import EvidenceError, FpmSdkError, OnboardError
from fpmsdk.perfdb import open_root
from fpmsdk.perfdb.hardware import SystemSpec

INDEX_SCHEMA = "aisimulate-runtime-observations/v1"
LAUNCH_SCHEMA = "aisimulate-runtime-probe-launch/v1"
_SCOPE = (
    "Memory of the whole worker, with every component that it loaded. The digest of the model's configuration says "
    "nothing of the weights; checked observations are no run of their own."
)
_PROVENANCE = (
    "Checked observations of the shared pool of cache blocks: the smallest capacity of all phases and ranks, with "
    "padding counted and reserved blocks left out."
)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a configuration's observations amount to: `resources` of a profile, or diagnostics of why there are none.

    `status` is `complete` or `incomplete`.
    """

    status: str
    resources: dict[str, Any] | None
    diagnostics: list[str]
    provenance: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """The plain JSON object."""
        return {
            "status": self.status,
            "resources": self.resources,
            "diagnostics": self.diagnostics,
            "provenance": self.provenance,
        }


def read_index(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The index of observations at a path.

    Raises
    ------
    OnboardError: a symbolic link, no JSON, or no such index; names the file.
    """
    index = read_document(path)
    if (
        not isinstance(index, dict)
        or index.get("schema_version") != INDEX_SCHEMA
        or not isinstance(index.get("configurations"), dict)
    ):
        raise OnboardError(f"{path}: no {INDEX_SCHEMA} index with configurations", os.fspath(path))
    return index


def validate_observations(
    index_path: str | os.PathLike[str], launches: Mapping[str, Mapping[str, Any]]
) -> dict[str, Observed]:
    """Check the active attempt of every configuration on its own; one that fails does not touch the others.

    Parameters
    ----------
    index_path: `observations.json`; artifacts are named relative to its folder.
    launches: the reviewed launch facts by configuration; those in the index must equal them.

    Raises
    ------
    OnboardError: the index itself is unreadable, or no configuration is asked for.
    """
    place = Path(index_path).absolute()
    index = read_index(place)
    if not launches:
        raise OnboardError("observations: name at least one configuration", "configuration")
    results = {}
    for label, launch in launches.items():
        try:
            saved = index["configurations"].get(label)
            if saved is None:
                raise EvidenceError("the index has no observations of it; probe it first")
            results[label] = _observed(place, label, saved, launch, None, None)
        except (FpmSdkError, OSError, ValidationError, TypeError, KeyError, AttributeError, IndexError) as fault:
            # Whatever shape the evidence of one configuration has, it is its own diagnostic.
            results[label] = Observed(
                "incomplete", None, [f"{label}: {_told(fault)}"], {"observations_index": str(place)}
            )
    return results


def validate_observation_phase(
    index_path: str | os.PathLike[str], configuration: str, launch: Mapping[str, Any], *, phase: str, attempt_id: str
) -> Observed:
    """Check one phase of a configuration's active attempt; says nothing of the other phases.

    Raises
    ------
    EvidenceError: the evidence does not hold; names what.
    OnboardError: the index is unreadable.
    """
    place = Path(index_path).absolute()
    saved = read_index(place)["configurations"].get(configuration)
    if saved is None:
        raise EvidenceError(f"{place}: no observations of {configuration!r}", str(place))
    return _observed(place, configuration, saved, launch, phase, attempt_id)


def active_attempt(saved: Any) -> dict[str, Any]:
    """The attempt of a configuration that its index names as the active one.

    Raises
    ------
    EvidenceError: attempts are missing, not distinct, or none is the active one.
    """
    attempts = saved.get("attempts") if isinstance(saved, dict) else None
    if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
        raise EvidenceError("attempts: expected a list of attempts")
    names = [attempt.get("attempt_id") for attempt in attempts]
    if any(not isinstance(name, str) or not name.strip() for name in names) or len(set(names)) < len(names):
        raise EvidenceError(f"attempts: every attempt has an attempt_id of its own, found {names!r}")
    if saved.get("active_attempt_id") not in names:
        raise EvidenceError(f"active_attempt_id: {saved.get('active_attempt_id')!r} is none of {names}")
    found: dict[str, Any] = attempts[names.index(saved["active_attempt_id"])]
    return found


def described_system(system: str) -> SystemSpec:
    """The description of a system in the systems root.

    Raises
    ------
    OnboardError: there is no systems root.
    UnknownSystemError: it does not describe the system.
    """
    root = default_systems_root()
    if root is None:
        raise OnboardError(f"no hardware description of {system!r}: {HOW_TO_GET_DATA}", "FPMSDK_SYSTEMS_PATH")
    return open_root(root).spec(system)


def _told(fault: Exception) -> str:
    if isinstance(fault, ValidationError):
        return "; ".join(faults(fault))
    if isinstance(fault, FpmSdkError | OSError):
        return str(fault)
    return f"malformed evidence: {type(fault).__name__} {fault}"


def _observed(
    index_path: Path, label: str, saved: Any, launch: Mapping[str, Any], phase: str | None, attempt_id: str | None
) -> Observed:
    root = index_path.parent
    attempt = active_attempt(saved)
    same(saved.get("launch"), launch, "launch")
    if attempt_id is not None:
        same(attempt["attempt_id"], attempt_id, "active_attempt_id")
    bundle = _bundle(root, attempt, launch["identity"].get("runtime_framework_version"))
    phases = attempt.get("phases")
    required = phases_of(launch.get("worker_type"))
    recorded = set(phases) if isinstance(phases, dict) else set()
    if phase is None and recorded != set(required):
        raise EvidenceError(f"phases: expected {', '.join(required)}, found {sorted(recorded)}")
    if phase is not None and (phase not in required or phase not in recorded or recorded - set(required)):
        raise EvidenceError(f"phases: expected {phase} among {', '.join(required)}, found {sorted(recorded)}")
    binding = {"attempt_id": attempt["attempt_id"], "configuration": label, "bundle_sha256": bundle.sha256}
    collected, sm_version = Collected(), described_system(launch["identity"]["gpu"]).sm_version
    selected = {} if not isinstance(phases, dict) else phases
    for name in required if phase is None else (phase,):
        _add_phase(collected, root, selected[name], launch, bundle, {**binding, "phase": name}, sm_version)
    provenance = _provenance(collected, launch, bundle, binding, root)
    provenance["observations_index"] = {"path": str(index_path), "sha256": file_meta(index_path)["sha256"]}
    return Observed("complete", _resources(collected, launch, provenance), [], provenance)


def _bundle(root: Path, attempt: Mapping[str, Any], version: str | None) -> InstrumentationBundle:
    bundle = load_instrumentation(contained_file(root, attempt["bundle"]["manifest"]), version)
    same(attempt["bundle"].get("sha256"), bundle.sha256, "bundle.sha256")
    if "source_notes" not in bundle.manifest or not bundle.runtime.get("source_files"):
        raise EvidenceError("instrumentation: source_notes and runtime.source_files must say what was audited")
    return bundle


def _verified(root: Path, reference: Any) -> Path:
    if not isinstance(reference, dict):
        raise EvidenceError(f"artifact reference: expected {{path, sha256}}, found {reference!r}")
    place = contained_file(root, reference.get("path"))
    found = file_meta(place)["sha256"]
    if found != reference.get("sha256"):
        raise EvidenceError(
            f"{place}: evidence was changed since it was recorded: expected sha256 {reference.get('sha256')!r}, found "
            f"{found}; restore the file, or probe again",
            str(place),
        )
    return place


def _add_phase(
    collected: Collected,
    root: Path,
    recorded: Mapping[str, Any],
    launch: Mapping[str, Any],
    bundle: InstrumentationBundle,
    binding: Mapping[str, str],
    sm_version: int | None,
) -> None:
    context = read_document(_verified(root, recorded.get("launch_manifest")))
    ranks = expected_ranks(Topology.from_document(launch["topology"]))
    expected = {"schema_version": LAUNCH_SCHEMA, **binding, "launch": launch, "expected_ranks": ranks}
    for name, value in expected.items():
        same(context.get(name), value, f"launch manifest {name}")
    collected.launch_artifacts.append(dict(recorded["launch_manifest"]))
    import_binding = context.get("instrumentation_binding")
    collected.bound_imports.append(import_binding is not None)
    workers: dict[tuple[int, int], Any] = {}
    schedulers: dict[int, Any] = {}
    for path, reference in _artifacts(collected, root, recorded):
        record = read_document(path)
        where = f"{reference['path']}: "
        try:
            config = checked_record(
                record,
                launch=launch,
                bundle=bundle,
                binding=binding,
                import_binding=import_binding,
                sm_version=sm_version,
            )
            add_rank(record, Topology.from_document(launch["topology"]), workers, schedulers)
            if record["kind"] == "worker":
                agree(collected, record, config)
        except EvidenceError as fault:
            raise EvidenceError(where + str(fault), str(path)) from None
        collected.artifacts.append({"path": reference["path"], "sha256": reference["sha256"], "evidence": record})
    missing = [rank for rank in ranks["workers"] if (rank["dp_rank"], rank["tp_rank"]) not in workers]
    missing += [rank for rank in ranks["schedulers"] if rank["dp_rank"] not in schedulers]
    if missing:
        raise EvidenceError(f"{binding['phase']}: no observation of {missing}; every rank must report")
    for (dp, tp), worker in sorted(workers.items()):
        check_one_engine(worker, schedulers[dp])
        groups, pool = checked_geometry(
            worker["cache"], schedulers[dp]["cache"], cache_dtype(worker["resolved_config"])
        )
        add_capacity(collected, worker, groups, pool, {"phase": binding["phase"], "dp_rank": dp, "tp_rank": tp})


def _artifacts(
    collected: Collected, root: Path, recorded: Mapping[str, Any]
) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    references = recorded.get("artifacts")
    if not isinstance(references, list):
        raise EvidenceError("artifacts: expected the list of the phase's artifacts")
    for reference in references:
        path = _verified(root, reference)
        if str(path) in collected.seen:
            raise EvidenceError(f"{path}: listed twice among the artifacts", str(path))
        collected.seen.add(str(path))
        if reference.get("kind") == "observation":
            yield path, reference
        else:
            collected.runtime_artifacts.append(copy.deepcopy(reference))


def _provenance(
    collected: Collected,
    launch: Mapping[str, Any],
    bundle: InstrumentationBundle,
    binding: Mapping[str, str],
    root: Path,
) -> dict[str, Any]:
    return {
        "source": "runtime_observations",
        "observation_schema": OBSERVATION_SCHEMA,
        "configuration": binding["configuration"],
        "attempt_id": binding["attempt_id"],
        "bundle_sha256": bundle.sha256,
        "runtime": bundle.runtime,
        "launch": copy.deepcopy(dict(launch)),
        "runtime_settings": collected.settings,
        "rank_capacities": collected.capacities,
        "launch_artifacts": collected.launch_artifacts,
        "artifacts": collected.artifacts,
        "runtime_artifacts": collected.runtime_artifacts,
        "instrumentation": {
            "manifest": bundle.manifest_path.relative_to(root).as_posix(),
            "files": dict(bundle.files),
            "import_binding": "verified" if all(collected.bound_imports) else "unverified_legacy",
        },
        **({"not_established": collected.not_established} if collected.not_established else {}),
        "scope": _SCOPE,
    }


def _resources(collected: Collected, launch: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    settings = launched_settings(launch)
    resources = {
        "cache_layout": "grouped",
        "cache_groups": collected.groups,
        "max_num_tokens": settings.max_num_batched_tokens,
        "max_batch_size": settings.max_num_seqs,
        "runtime_memory": {
            "kv_cache_bytes": min(capacity["kv_cache_bytes"] for capacity in collected.capacities),
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "max_model_len": settings.max_model_len,
            "provenance": canonical_bytes(provenance).decode(),
        },
        "provenance": _PROVENANCE,
    }
    Resources.model_validate(resources)
    return resources
