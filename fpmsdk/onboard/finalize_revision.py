"""A revision of a request that lowers its cache capacity to what its own collection observed, and nothing else.

Source: onboarding.md section 7 (--memory-config).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from fpmsdk.documents.canonical import canonical_bytes
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.runtime_profile import verify_runtime_profile

_OPTION = "--memory-config"
_SAME_PROBE = ("checkpoint", "configuration", "model_metadata")
_REFERENCES = ("artifacts", "launch_artifacts", "runtime_artifacts")


def verify_revision(original: SupportRequest, revised: SupportRequest, observed: Mapping[str, Any]) -> None:
    """Verify that a revision is the original with the smaller capacity of these observations.

    Parameters
    ----------
    original, revised: both with a profile whose memory was observed.
    observed: what the formal collection observed: `resources` and `provenance`.

    Raises
    ------
    OnboardError: the revision changes anything else, does not lower the capacity, or overrides it by hand.
    EvidenceError: its capacity, or the attempts it comes from, are not those of the collection.
    """
    before, after = (_deployment_memory(request) for request in (original, revised))
    if _without_memory(revised, original) != original.document():
        raise OnboardError(
            f"{_OPTION}: changes more than the cache capacity; only kv_cache_bytes may be lower", _OPTION
        )
    if after.kv_cache_bytes >= before.kv_cache_bytes:
        raise OnboardError(
            f"{_OPTION}: kv_cache_bytes {after.kv_cache_bytes} must be lower than the accepted {before.kv_cache_bytes}",
            _OPTION,
        )
    source, own = probe_manifest(original), probe_manifest(revised)
    if source is None or own is None or own["user_overrides"]:
        raise OnboardError(f"{_OPTION}: must be imported from the observations of this collection, unedited", _OPTION)
    if differing := [name for name in _SAME_PROBE if own[name] != source[name]]:
        raise OnboardError(f"{_OPTION}: is of another session: {', '.join(differing)} differ", _OPTION)
    minimum = observed["resources"]["runtime_memory"]["kv_cache_bytes"]
    if after.kv_cache_bytes != minimum:
        raise EvidenceError(f"{_OPTION}: kv_cache_bytes {after.kv_cache_bytes} is not the observed minimum {minimum}")
    verified = verify_runtime_profile(revised)
    assert verified is not None
    if _attempts(verified.provenance) != _attempts(observed["provenance"]):
        raise EvidenceError(f"{_OPTION}: does not come from the attempts of this collection; import its observations")


def _deployment_memory(request: SupportRequest) -> Any:
    deployment = request.profile_deployment()
    memory = None if deployment is None else deployment.resources.runtime_memory
    if memory is None:
        raise OnboardError(f"{_OPTION}: both requests need a profile whose memory was observed", _OPTION)
    return memory


def _without_memory(revised: SupportRequest, original: SupportRequest) -> dict[str, Any]:
    """The revision with the capacity and the provenance texts of the original."""
    selected = original.profile_deployment()
    assert selected is not None and original.fpm_profile is not None
    document = copy.deepcopy(revised.document())
    profile, place = document["fpm_profile"], original.fpm_profile.deployments.index(selected)
    resources, accepted = profile["deployments"][place]["resources"], selected.resources.model_dump(mode="json")
    profile["provenance"] = original.fpm_profile.provenance
    resources["provenance"] = accepted["provenance"]
    for name in ("kv_cache_bytes", "provenance"):
        resources["runtime_memory"][name] = accepted["runtime_memory"][name]
    return document


def _attempts(provenance: Mapping[str, Any]) -> dict[str, Any]:
    # An import moves bytes to another place: paths may differ, attempts, contents and digests may not.
    kept = {name: value for name, value in provenance.items() if name != "observations_index"}
    for name in _REFERENCES:
        entries = [{key: value for key, value in reference.items() if key != "path"} for reference in kept[name]]
        kept[name] = sorted(entries, key=canonical_bytes)
    kept["instrumentation"] = {key: value for key, value in kept["instrumentation"].items() if key != "manifest"}
    return kept
