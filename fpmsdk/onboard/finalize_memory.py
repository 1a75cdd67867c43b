"""One set of resources from the memory that every cell of a collection observed.

Source: onboarding.md section 7 (step 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fpmsdk.config.profile import Resources
from fpmsdk.documents.canonical import canonical_bytes
from fpmsdk.documents.strict import checked
from fpmsdk.errors import EvidenceError
from fpmsdk.onboard.observed_profile import linear_resources
from fpmsdk.onboard.provenance import json_object

CAPACITY_POLICY = "minimum observed request-usable rank-local capacity across compatible cells"
_PROSE = (
    "Runtime cache resources resolved from verified collection evidence. The raw records stay in the collection, at "
    "the places and digests that runtime_memory.provenance names."
)


class MergedMemory(NamedTuple):
    """Resources of the deployment as its profile states them, and the cache groups that were measured."""

    resources: dict[str, Any]
    measured_groups: list[dict[str, Any]]


def merged_memory(
    observations: Mapping[str, Mapping[str, Any]], manifest: Mapping[str, Any], *, keeps_linear: bool
) -> tuple[MergedMemory, dict[str, Any]]:
    """The resources that hold for every cell, and the manifest that says where they come from.

    Parameters
    ----------
    observations: resources of each cell by its name, as the collection observed them.
    manifest: the finalisation so far; `cell_observations` and `capacity_policy` are added.
    keeps_linear: whether the profile has a linear cache that a probe has measured; then it stays linear.

    Raises
    ------
    EvidenceError: no cell observed memory, two cells observed different settings, groups or limits, or the groups of a
        profile that must stay linear have no one rate.
    """
    if not observations:
        raise EvidenceError("no cell of the collection has observed its memory; collect with memory observation")
    summaries, compared = [], {}
    capacities = {}
    for name, observed in observations.items():
        resources = checked(Resources, observed, f"the memory observation of {name}")
        if resources.runtime_memory is None or resources.cache_layout != "grouped":
            raise EvidenceError(f"{name}: an observation has grouped runtime memory, found {resources.memory_source}")
        provenance = json_object(resources.runtime_memory.provenance)
        compared[name] = _comparable(observed, provenance, name)
        capacities[name] = resources.runtime_memory.kv_cache_bytes
        summaries.append(_by_reference(observed, provenance))
    first = next(iter(compared))
    for name, facts in compared.items():
        differing = [what for what, value in facts.items() if value != compared[first][what]]
        if differing:
            raise EvidenceError(
                f"{name} and {first} observed different {' and '.join(differing)}; collect every phase with the "
                "intended serving configuration, or each role on its own"
            )
    whole = {
        **manifest,
        "observation_provenance": "source_references",
        "cell_observations": summaries,
        "capacity_policy": CAPACITY_POLICY,
    }
    resources_document = dict(next(iter(observations.values())))
    memory = dict(resources_document["runtime_memory"])
    memory |= {"kv_cache_bytes": min(capacities.values()), "provenance": canonical_bytes(whole).decode()}
    groups = list(resources_document["cache_groups"])
    resources_document |= {"runtime_memory": memory, "provenance": _PROSE}
    if keeps_linear:
        resources_document = _linear(resources_document, groups)
    return MergedMemory(resources_document, groups), whole


def _comparable(observed: Mapping[str, Any], provenance: Mapping[str, Any], name: str) -> dict[str, Any]:
    settings = provenance.get("runtime_settings")
    if not isinstance(settings, dict) or not settings:
        raise EvidenceError(f"{name}: the memory evidence lacks the settings that the engine resolved")
    memory = {
        key: value for key, value in observed["runtime_memory"].items() if key not in ("kv_cache_bytes", "provenance")
    }
    rest = {key: value for key, value in observed.items() if key not in ("runtime_memory", "provenance")}
    return {
        "engine settings (graphs included)": settings,
        "cache groups of the workers": _worker_groups(provenance, name),
        "limits and cache layout": rest | {"runtime_memory": memory},
    }


def _worker_groups(provenance: Mapping[str, Any], name: str) -> Any:
    artifacts: Sequence[Mapping[str, Any]] = provenance.get("artifacts") or ()
    for artifact in artifacts:
        evidence = artifact.get("evidence") or {}
        if evidence.get("kind") == "worker" and evidence["cache"].get("groups"):
            return evidence["cache"]["groups"]
    raise EvidenceError(f"{name}: the memory evidence has no cache groups of a worker")


def _by_reference(observed: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    # The records of every rank and layer stay where they are: a profile names them and does not repeat them.
    artifacts = [
        {key: value for key, value in artifact.items() if key != "evidence"} for artifact in provenance["artifacts"]
    ]
    kept = canonical_bytes({**provenance, "artifacts": artifacts}).decode()
    return {**observed, "runtime_memory": {**observed["runtime_memory"], "provenance": kept}}


def _linear(resources: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    linear = linear_resources(resources)
    if linear is None:
        raise EvidenceError(
            "the accepted profile has a linear cache, and the measured groups have no one rate: they differ in block "
            f"size, have a window, or are no attention: {list(groups)}"
        )
    return linear
