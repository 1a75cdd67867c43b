"""Memory evidence of separately collected phases, bound to their plans, attempts and checkpoints.

A phase may be collected under changes that a person has reviewed; the review names every change exactly.
Source: onboarding.md section 6.5.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.instrumentation import InstrumentationBundle, contained_file, load_instrumentation
from fpmsdk.collect.observation_index import Observed, validate_observation_phase
from fpmsdk.collect.observed_campaign import check_observed_plan
from fpmsdk.collect.paths import PLAN
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.repeatability_plan import read_deployment, read_source
from fpmsdk.documents.canonical import canonical_bytes, read_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import EvidenceError, FpmSdkError, OnboardError
from fpmsdk.onboard.collection_controls import collection_controls
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.runtime_profile import resource_values, verify_runtime_profile

CHECKPOINT_SCHEMA = "aic-fpm-collector-checkpoint-v3"
_HARDWARE = ("gpu", "device_name", "sm")
_SCOPE = "memory alone; a review of collection controls says nothing of timings or of what was measured"
_POLICY = (
    "the reviewed changes exactly; model, precision, settings and geometry as accepted; every phase and rank with at "
    "least the accepted capacity"
)


class _BoundPlan(NamedTuple):
    place: Path
    plan: CollectionPlan
    cell: Cell
    bundle: InstrumentationBundle
    review: dict[str, Any]

    @property
    def observation(self) -> dict[str, Any]:
        found = self.plan.runtime_observation
        assert found is not None
        return found


def checkpoint_observations(path: Path, checkpoint: Mapping[str, Any]) -> Path:
    """The index of observations that a campaign's checkpoint names; relative ones start at its folder.

    Raises
    ------
    EvidenceError: it names none, or no regular file is there.
    """
    named = checkpoint.get("runtime_observations")
    if not isinstance(named, str) or not named.strip():
        raise EvidenceError(f"{path}: the campaign recorded no runtime observations", str(path))
    index = path.resolve().parent / named
    file_meta(index)
    return index.resolve()


def phase_review(request: SupportRequest, binding: Mapping[str, Any]) -> dict[str, Any]:
    """What a review of a bound phase has to say, without its `rationale`; nothing is qualified by asking.

    Parameters
    ----------
    request: with an imported profile.
    binding: `phase` and `plan{path, sha256}`.

    Raises
    ------
    OnboardError, EvidenceError: the plan differs in what no review can allow, or does not hold.
    """
    return _bound_plan(request, binding, _accepted(request)).review


def verify_phase_plans(request: SupportRequest, bindings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Check the plans of all phases of a role before anything was collected; says nothing of memory.

    Raises
    ------
    OnboardError: phases are missing or repeated, a plan differs, or a change has no exact review.
    """
    bound = _bound_plans(request, bindings, _accepted(request))
    return {
        "status": "verified",
        "scope": "frozen plans and reviewed changes; evidence of running engines is still needed",
        "phases": {
            binding["phase"]: {
                "plan": copy.deepcopy(binding["plan"]),
                "configuration": one.observation["configuration"],
                "review": copy.deepcopy(binding.get("review")),
            }
            for binding, one in bound
        },
    }


def verify_phase_bindings(request: SupportRequest, bindings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Check what was observed in every phase of a role against the accepted profile.

    Parameters
    ----------
    request: with an imported profile.
    bindings: for each phase once `{phase, plan{path, sha256}, checkpoint{path, sha256}, observations{path, sha256},
        attempt_id, collector_attempt_id, review?}`; the plan's digest is the plan's own, the others are of bytes.

    Returns
    -------
    `status`, `resources` with the smallest capacity, `phases`, `inputs` (every file it rests on) and `compatibility`.

    Raises
    ------
    OnboardError, EvidenceError: the evidence of a phase does not hold, or differs from what was accepted; names the
        phase.
    """
    accepted = _accepted(request)
    manifest = probe_manifest(request)
    assert manifest is not None
    bound = _bound_plans(request, bindings, accepted)
    deployment = request.profile_deployment()
    assert deployment is not None and deployment.resources.runtime_memory is not None
    least_bytes = deployment.resources.runtime_memory.kv_cache_bytes
    inputs = [*_files_of(Path(manifest["observations_index"]), accepted), *manifest["source_artifacts"]]
    phases = {}
    for binding, one in bound:
        try:
            observed, index, differences = _bound_phase(binding, one, accepted, least_bytes)
        except (FpmSdkError, OSError, KeyError, TypeError, AttributeError, StopIteration) as fault:
            raise EvidenceError(f"{binding['phase']}: {_told(fault)}") from None
        phases[binding["phase"]] = {
            **observed.document(),
            "binding": copy.deepcopy(dict(binding)),
            "compatibility": {"status": "compatible", "runtime_settings_differences": differences},
        }
        inputs += _files_of(index, observed)
        config = Path(one.observation["launch"]["model_config"]["path"])
        sources = one.observation["launch"]["model_config"].get("source_files", {})
        places = [one.place, one.place.parent / "generator-overrides.json", Path(binding["checkpoint"]["path"])]
        places += [one.bundle.manifest_path, *(one.bundle.root / name for name in one.bundle.files)]
        inputs += [_reference(place) for place in places]
        # A hub's snapshot links to its blobs; the bytes are what counts.
        inputs += [
            {"path": str(place), "sha256": file_meta(place.resolve())["sha256"]}
            for place in (config, *(config.parent / name for name in sources))
        ]
    resources = copy.deepcopy(next(iter(phases.values()))["resources"])
    capacity = min(phase["resources"]["runtime_memory"]["kv_cache_bytes"] for phase in phases.values())
    provenance = {
        "source": "bound_collection_phases",
        "phases": {name: phase["provenance"] for name, phase in phases.items()},
    }
    resources["runtime_memory"] |= {"kv_cache_bytes": capacity, "provenance": json.dumps(provenance, sort_keys=True)}
    return {
        "status": "complete",
        "resources": resources,
        "phases": phases,
        "inputs": list({reference["path"]: reference for reference in inputs}.values()),
        "compatibility": {
            "status": "compatible",
            "scope": _SCOPE,
            "accepted_capacity_bytes": least_bytes,
            "observed_capacity_bytes": capacity,
            "source_observations_index": manifest["observations_index"],
            "policy": _POLICY,
        },
    }


def _told(fault: Exception) -> str:
    if isinstance(fault, FpmSdkError | OSError):
        return str(fault)
    return f"malformed evidence: {type(fault).__name__} {fault}"


def _accepted(request: SupportRequest) -> Observed:
    observed = verify_runtime_profile(request)
    if observed is None:
        raise OnboardError("fpm_profile: no probe observed its memory; import observations first", "fpm_profile")
    return observed


def _reference(place: Path) -> dict[str, str]:
    return {"path": str(place), "sha256": file_meta(place)["sha256"]}


def _bound_plans(
    request: SupportRequest, bindings: Sequence[Mapping[str, Any]], accepted: Observed
) -> list[tuple[Mapping[str, Any], _BoundPlan]]:
    phases = [binding["phase"] for binding in bindings]
    if sorted(phases) != sorted(request.collection_phases):
        expected = ", ".join(request.collection_phases)
        raise OnboardError(f"bindings: expected each of {expected} once, found {', '.join(phases) or 'none'}")
    bound = []
    for binding in bindings:
        try:
            one = _bound_plan(request, binding, accepted)
        except (FpmSdkError, OSError, KeyError, TypeError, AttributeError) as fault:
            raise EvidenceError(f"{binding['phase']}: {_told(fault)}") from None
        review = binding.get("review")
        if one.review["changes"] or review is not None:
            stated = dict(review) if isinstance(review, Mapping) else {}
            rationale = stated.pop("rationale", None)
            if not isinstance(rationale, str) or not rationale.strip() or stated != one.review:
                raise OnboardError(
                    f"{binding['phase']}: review: changes need a review that names them exactly and gives a rationale: "
                    f"{json.dumps(one.review, sort_keys=True)}",
                    "review",
                )
        bound.append((binding, one))
    return bound


def _bound_plan(request: SupportRequest, binding: Mapping[str, Any], accepted: Observed) -> _BoundPlan:
    place = Path(binding["plan"]["path"]).absolute()
    if place.name != PLAN:
        raise OnboardError(f"{place}: a binding names the archived {PLAN}", str(place))
    file_meta(place)  # no link
    plan = read_source(place.parent)
    if plan.sha256 != binding["plan"]["sha256"]:
        raise EvidenceError(f"{place}: is plan {plan.sha256}, bound is {binding['plan']['sha256']}", str(place))
    observation = plan.runtime_observation
    if observation is None:
        raise OnboardError(f"{place}: was not collected with observers; plan it under the accepted probe", str(place))
    launch, probed = observation["launch"], accepted.provenance["launch"]
    differing = differences(_immutable(probed), _immutable(launch))
    if differing:
        raise OnboardError(f"{place}: differs from the probe in what no review can allow: {json.dumps(differing)}")
    phase = binding["phase"]
    cells = [cell for cell in plan.cells if cell.workload_kind == phase]
    if phase not in request.collection_phases or len(cells) != 1:
        raise OnboardError(f"{place}: expected one cell of {phase}, found {len(cells)}", str(place))
    bundle = _plan_bundle(place, observation)
    deployment = read_deployment(plan, place.parent)
    compared_cells, compared_deployment, controls = collection_controls(plan.cells, deployment)
    check_observed_plan(plan, bundle, compared_deployment, launch=launch, cells=compared_cells)
    before = {
        "bundle_sha256": accepted.provenance["bundle_sha256"],
        "runtime": accepted.provenance["runtime"],
        "deployment": probed["deployment"],
        "identity": probed["identity"],
    }
    now = {
        "bundle_sha256": bundle.sha256,
        "runtime": bundle.runtime,
        "deployment": launch["deployment"],
        "identity": launch["identity"],
    }
    changes = sorted([*differences(before, now), *controls], key=lambda change: str(change["field"]))
    review = {
        "accepted_bundle_sha256": accepted.provenance["bundle_sha256"],
        "collection_bundle_sha256": bundle.sha256,
        "collector_revision": plan.document["aic_revision"],
        "generator_config_sha256": plan.document["generator_config_sha256"],
        "changes": changes,
    }
    return _BoundPlan(place, plan, cells[0], bundle, review)


def _plan_bundle(place: Path, observation: Mapping[str, Any]) -> InstrumentationBundle:
    # The campaign froze its own copy for its one attempt.
    for manifest in sorted(place.parent.glob("runtime-observations/*/instrumentation/manifest.json")):
        bundle = load_instrumentation(manifest)
        if bundle.sha256 == observation["bundle_sha256"]:
            return bundle
    if isinstance(observation["manifest"], str):
        bundle = load_instrumentation(observation["manifest"])
        if bundle.sha256 == observation["bundle_sha256"]:
            return bundle
    raise EvidenceError(f"{place.parent}: the observers that the plan froze are gone; restore them", str(place.parent))


def _immutable(launch: Mapping[str, Any]) -> dict[str, Any]:
    # Paths and places may change and are reviewed; what is launched may not.
    kept = copy.deepcopy(dict(launch))
    kept.pop("deployment")
    kept["identity"].pop("aisimulate_revision", None)
    kept["model_config"].pop("path")
    kept["model_config"].setdefault("source_files", {})
    return kept


def differences(accepted: Any, collection: Any, field: str = "") -> list[dict[str, Any]]:
    """Every leaf in which two JSON values differ, by its path; an absent one is `{"missing": true}`.

    >>> differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
    [{'field': '/b/c', 'accepted': 2, 'collection': 3}]
    """
    if canonical_bytes(accepted) == canonical_bytes(collection):
        return []
    if not isinstance(accepted, dict) or not isinstance(collection, dict):
        return [{"field": field, "accepted": accepted, "collection": collection}]
    missing = {"missing": True}
    found = []
    for name in sorted(accepted.keys() | collection.keys()):
        found += differences(accepted.get(name, missing), collection.get(name, missing), f"{field}/{name}")
    return found


def _bound_phase(
    binding: Mapping[str, Any], one: _BoundPlan, accepted: Observed, least_bytes: int
) -> tuple[Observed, Path, list[dict[str, Any]]]:
    checkpoint_place, index = (Path(binding[name]["path"]).absolute() for name in ("checkpoint", "observations"))
    for name, place in (("checkpoint", checkpoint_place), ("observations", index)):
        found = file_meta(place)["sha256"]
        if found != binding[name]["sha256"]:
            raise EvidenceError(f"{place}: has sha256 {found}, bound is {binding[name]['sha256']}", str(place))
    if one.place.parent.resolve() not in index.resolve().parents:
        raise EvidenceError(f"{index}: lies outside of the campaign {one.place.parent}", str(index))
    _check_checkpoint(binding, one, checkpoint_place, index)
    label = one.observation["configuration"]
    observed = validate_observation_phase(
        index, label, one.observation["launch"], phase=binding["phase"], attempt_id=binding["attempt_id"]
    )
    if observed.provenance["bundle_sha256"] != one.bundle.sha256:
        raise EvidenceError(f"{index}: observed with other observers than the plan froze", str(index))
    entry = read_document(index)["configurations"][label]
    attempt = next(attempt for attempt in entry["attempts"] if attempt["attempt_id"] == binding["attempt_id"])
    recorded = attempt["phases"][binding["phase"]]
    context = read_document(contained_file(index.parent, recorded["launch_manifest"]["path"]))
    expected = (one.cell.cell_id, binding["collector_attempt_id"])
    for told in (recorded, context):
        if (told.get("cell_id"), told.get("collector_attempt_id")) != expected:
            raise EvidenceError(f"{index}: was observed in another cell or attempt than {expected}", str(index))
    if recorded.get("status") != "passed":
        raise EvidenceError(f"{index}: the observed attempt has status {recorded.get('status')!r}", str(index))
    return observed, index, _compared(accepted, observed, least_bytes)


def _check_checkpoint(binding: Mapping[str, Any], one: _BoundPlan, place: Path, index: Path) -> None:
    checkpoint = read_document(place)
    cells = checkpoint.get("cells", {})
    if (
        checkpoint.get("schema") != CHECKPOINT_SCHEMA
        or checkpoint.get("plan_sha256") != one.plan.sha256
        or checkpoint_observations(place, checkpoint) != index.resolve()
        or checkpoint.get("runtime_observation_attempt_id") != binding["attempt_id"]
        or cells.keys() - {cell.cell_id for cell in one.plan.cells}
    ):
        raise EvidenceError(f"{place}: is not the checkpoint of the bound plan, index and attempt", str(place))
    saved = cells.get(one.cell.cell_id, {})
    attempt = binding["collector_attempt_id"]
    if not isinstance(attempt, str) or not attempt.strip() or saved.get("attempt_id") != attempt:
        raise EvidenceError(f"{place}: cell {one.cell.cell_id} was not collected in attempt {attempt!r}", str(place))
    if saved.get("status") != "passed" or saved.get("cleanup_error"):
        raise EvidenceError(f"{place}: cell {one.cell.cell_id} did not pass cleanly", str(place))


def _compared(accepted: Observed, observed: Observed, least_bytes: int) -> list[dict[str, Any]]:
    before, now = (copy.deepcopy(one.provenance["runtime_settings"]) for one in (accepted, observed))
    differing = differences(before, now, "/runtime_settings")
    # Name or snapshot folder: both were matched with the pinned model already.
    now["model_config"]["model"] = before["model_config"]["model"]
    if now != before:
        raise EvidenceError(f"settings of the engine differ from the accepted probe: {json.dumps(differing)}")
    if _geometry(observed) != _geometry(accepted):
        raise EvidenceError("the groups of the cache differ from the accepted probe")
    for name in _HARDWARE:
        if _worker(observed)["hardware"][name] != _worker(accepted)["hardware"][name]:
            raise EvidenceError(f"hardware.{name} differs from the accepted probe")
    assert accepted.resources is not None and observed.resources is not None
    expected, found = resource_values(accepted.resources), resource_values(observed.resources)
    expected["runtime_memory"].pop("kv_cache_bytes")
    capacity = found["runtime_memory"].pop("kv_cache_bytes")
    if found != expected:
        raise EvidenceError("layout or limits of the cache differ from the accepted probe")
    if capacity < least_bytes:
        raise EvidenceError(f"the observed capacity of {capacity} bytes is below the accepted {least_bytes}")
    return differing


def _worker(observed: Observed) -> dict[str, Any]:
    evidence = (artifact["evidence"] for artifact in observed.provenance["artifacts"])
    found: dict[str, Any] = next(record for record in evidence if record["kind"] == "worker")
    return found


def _geometry(observed: Observed) -> list[dict[str, Any]]:
    groups = _worker(observed)["cache"]["groups"]
    return [{name: value for name, value in group.items() if name != "pool_id"} for group in groups]


def _files_of(index: Path, observed: Observed) -> list[dict[str, str]]:
    names = [
        reference["path"]
        for field in ("artifacts", "launch_artifacts", "runtime_artifacts")
        for reference in observed.provenance[field]
    ]
    instrumentation = observed.provenance["instrumentation"]
    manifest = contained_file(index.parent, instrumentation["manifest"])
    places = [index, *(contained_file(index.parent, name) for name in names), manifest]
    places += [contained_file(manifest.parent, name) for name in instrumentation["files"]]
    return [_reference(place) for place in places]
