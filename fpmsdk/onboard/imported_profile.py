"""What a profile with observed memory asks of the collection that uses it: acceptance before, the same engine after.

Source: onboarding.md sections 5 (collection gate 2 and 5) and 6.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fpmsdk.collect.instrumentation import contained_file
from fpmsdk.collect.observation_index import Observed, active_attempt, read_index, validate_observations
from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from fpmsdk.onboard.checkpoint import load_checkpoint
from fpmsdk.onboard.checkpoint_report import checkpoint_report, verified_draft
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.runtime_profile import resource_values, verify_runtime_profile

_CAPACITY = "kv_cache_bytes"
# What must not differ between the accepted probe and the collection.
_SETTINGS = ("bundle_sha256", "runtime", "runtime_settings")


def require_accepted(request: SupportRequest) -> None:
    """Refuse a request with an imported profile that is not the accepted draft of its session.

    A request without one needs no acceptance here.

    Raises
    ------
    OnboardError: the session has no such configuration, it is not accepted, or its draft is another one.
    """
    manifest = probe_manifest(request)
    if manifest is None:
        return
    path, label = Path(manifest["checkpoint"]), manifest["configuration"]
    state = load_checkpoint(path)
    standing = checkpoint_report(state, path)["configurations"].get(label)
    if standing is None or not standing["profile_accepted"]:
        raise OnboardError(
            f"{path}: configuration {label!r} with the imported profile is not accepted; review it, then run "
            f"`fpmsdk onboard checkpoint` with --accept-profile {label}",
            str(path),
        )
    if verified_draft(state, label, path) != request:
        raise OnboardError(
            f"{path}: the accepted draft of {label!r} is another request than the one to be collected; accept this "
            "one, or plan the accepted one",
            str(path),
        )


def verify_collection_observations(
    request: SupportRequest, index: Path, checkpoint: dict[str, Any], *, bound_of: SupportRequest | None = None
) -> dict[str, Any]:
    """Compare what a formal campaign observed with the accepted probe.

    Parameters
    ----------
    request: with an imported profile.
    index: `observations.json` of the campaign.
    checkpoint: the campaign's checkpoint document.
    bound_of: a revision whose capacity is what must have been observed at least; None is the request itself.

    Returns
    -------
    The observations with `compatibility`: the accepted and the observed capacity, in bytes, and both indexes.

    Raises
    ------
    CollectionError: the observations are incomplete, of other attempts, or of another engine than was accepted.
    EvidenceError: a file of the evidence is gone or changed.
    """
    manifest, accepted = probe_manifest(request), verify_runtime_profile(request)
    assert manifest is not None and accepted is not None
    label = manifest["configuration"]
    observed = validate_observations(index, {label: accepted.provenance["launch"]})[label]
    if observed.resources is None:
        raise CollectionError(f"{index}: the observations are incomplete: {'; '.join(observed.diagnostics)}")
    _require_attempts(index, label, checkpoint)
    for name in _SETTINGS:
        if accepted.provenance[name] != observed.provenance[name]:
            raise CollectionError(f"{index}: {name} differs from the accepted probe; review a fresh probe")
    if _group_geometry(accepted) != _group_geometry(observed):
        raise CollectionError(
            f"{index}: the geometry of the cache differs from the accepted probe; review a fresh probe"
        )
    bound, capacity = _capacities(bound_of or request, accepted, observed, index)
    return observed.document() | {
        "compatibility": {
            "status": "compatible",
            "accepted_capacity_bytes": bound,
            "observed_capacity_bytes": capacity,
            "policy": "same engine, settings and geometry; at least the accepted capacity",
            "source_observations_index": manifest["observations_index"],
            "observations_index": str(index),
            "observations_sha256": file_meta(index)["sha256"],
        }
    }


def _require_attempts(index: Path, label: str, checkpoint: dict[str, Any]) -> None:
    """Every collected cell passed in exactly the attempt that was observed."""
    entry = read_index(index)["configurations"][label]
    attempt = active_attempt(entry)
    if checkpoint.get("runtime_observation_attempt_id") != attempt["attempt_id"]:
        raise CollectionError(f"{index}: the observations are of another attempt than the campaign")
    cells = checkpoint.get("cells", {})
    seen = set()
    for phase, saved in attempt["phases"].items():
        launch = read_document(contained_file(index.parent, saved["launch_manifest"]["path"]))
        cell, native = launch.get("cell_id"), launch.get("collector_attempt_id")
        if (saved.get("cell_id"), saved.get("collector_attempt_id")) != (cell, native):
            raise EvidenceError(
                f"{index}: {phase}: the index names another cell or attempt than its launch", str(index)
            )
        collected = cells.get(cell, {})
        if cell in seen or collected.get("status") != "passed" or collected.get("attempt_id") != native:
            raise CollectionError(f"{index}: {phase}: was not observed in the attempt in which cell {cell} passed")
        seen.add(cell)
    if seen != cells.keys():
        raise CollectionError(f"{index}: cells {sorted(cells.keys() - seen)} were collected without observations")


def _group_geometry(observed: Observed) -> list[dict[str, Any]]:
    worker = next(
        artifact["evidence"]
        for artifact in observed.provenance["artifacts"]
        if artifact["evidence"]["kind"] == "worker"
    )
    # Pools are numbered anew by every engine.
    return [{key: value for key, value in group.items() if key != "pool_id"} for group in worker["cache"]["groups"]]


def _capacities(request: SupportRequest, accepted: Observed, observed: Observed, index: Path) -> tuple[int, int]:
    """The accepted and the observed capacity, in bytes, of resources that are otherwise equal."""
    assert accepted.resources is not None and observed.resources is not None
    expected, found = resource_values(accepted.resources), resource_values(observed.resources)
    del expected["runtime_memory"][_CAPACITY]
    capacity = int(found["runtime_memory"].pop(_CAPACITY))
    if expected != found:
        raise CollectionError(f"{index}: layout or settings of the cache differ from the accepted probe")
    deployment = request.profile_deployment()
    assert deployment is not None and deployment.resources.runtime_memory is not None
    bound = deployment.resources.runtime_memory.kv_cache_bytes
    if capacity < bound:
        raise CollectionError(
            f"{index}: the observed capacity of {capacity} bytes is below the accepted {bound}; review new evidence"
        )
    return bound, capacity
