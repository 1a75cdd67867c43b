"""What a request says of the evidence behind its memory: the manifests in the provenance of `runtime_memory`.

Reading only; whether the evidence still holds is verified by `runtime_profile` and `finalized`.
Source: onboarding.md sections 6.3 and 7.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.config.jsontext import JsonFault, read_json
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.request import SupportRequest

PROBE_SCHEMA = "aisimulate-onboarding-runtime-probe/v1"
FINALIZATION_SCHEMA = "aisimulate-onboarding-finalization/v1"
UNASSESSED = {"status": "not_assessed", "accuracy": "not_assessed"}

_WHERE = "fpm_profile.deployments.resources.runtime_memory.provenance"
_PROBE_TEXTS = ("checkpoint", "configuration", "observations_index")
_PROBE_OBJECTS = ("observed_resources", "model_metadata", "user_overrides")


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a provenance text holds; empty when the text is prose.

    >>> json_object('{"method": "probe"}'), json_object("measured by hand")
    ({'method': 'probe'}, {})
    """
    try:
        value = read_json(text)
    except JsonFault:
        return {}
    return value if isinstance(value, dict) else {}


def probe_manifest(request: SupportRequest) -> dict[str, Any] | None:
    """The manifest of the runtime probe that observed this request's memory; None when none did.

    Raises
    ------
    OnboardError: the provenance says it is such a manifest and lacks a part of it.
    """
    value = _memory_provenance(request)
    if value.get("schema_version") != PROBE_SCHEMA:
        return None
    artifacts = value.get("source_artifacts")
    faults = [name for name in _PROBE_TEXTS if not isinstance(value.get(name), str) or not value[name]]
    faults += [name for name in _PROBE_OBJECTS if not isinstance(value.get(name), dict)]
    if not isinstance(artifacts, list) or not all(_is_reference(artifact) for artifact in artifacts):
        faults.append("source_artifacts")
    if faults:
        raise OnboardError(
            f"{_WHERE}: {', '.join(faults)} of the runtime probe are missing or malformed; import the observations "
            "again",
            _WHERE,
        )
    return value


def finalization_manifest(request: SupportRequest) -> dict[str, Any] | None:
    """The manifest of the finalisation that gave this request its memory; None when none did.

    Raises
    ------
    OnboardError: the manifest is of an unknown form, or its collection quality is not that of the profile.
    """
    value = _memory_provenance(request)
    if value.get("schema_version") != FINALIZATION_SCHEMA:
        return None
    if value.get("observation_provenance", "source_references") != "source_references":
        raise OnboardError(
            f"{_WHERE}: observation_provenance must be 'source_references', found {value['observation_provenance']!r}",
            _WHERE,
        )
    assert request.fpm_profile is not None
    in_profile = json_object(request.fpm_profile.provenance).get("collection_quality")
    quality = value.get("collection_quality")
    # Manifests from before the marker have none; their profiles have none or say so.
    if quality != in_profile and (quality is not None or in_profile != UNASSESSED):
        raise OnboardError(
            "fpm_profile.provenance: collection_quality differs from that of the finalisation; finalise again",
            "fpm_profile.provenance",
        )
    return value


def _memory_provenance(request: SupportRequest) -> dict[str, Any]:
    deployment = request.profile_deployment()
    memory = None if deployment is None else deployment.resources.runtime_memory
    return {} if memory is None else json_object(memory.provenance)


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("path", "sha256"))
