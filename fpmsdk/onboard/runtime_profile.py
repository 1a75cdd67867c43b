"""Whether an imported profile still rests on its observations, and what a collection inherits from them.

The draft may differ from the evidence in one figure alone, the capacity of the cache, and then says so itself.
Source: onboarding.md section 6.4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.observation_index import Observed, read_index, validate_observations
from fpmsdk.config.profile import DeploymentProfile
from fpmsdk.documents.canonical import pretty_bytes
from fpmsdk.documents.evidence import verify_evidence
from fpmsdk.documents.strict import checked
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.checkpoint import Checkpoint
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.launch import PRECISION_FIELDS, resolve_launch
from fpmsdk.onboard.observed_profile import linear_resources
from fpmsdk.onboard.provenance import PROBE_SCHEMA, finalization_manifest, json_object, probe_manifest
from fpmsdk.onboard.request import SupportRequest, request_id
from fpmsdk.onboard.request_sections import DEFAULT_PREFILL_CAPTURE, ROLE_GRAPH_FIELDS

CAPACITY = "runtime_memory.kv_cache_bytes"
OVERRIDE_SOURCE = "user override; assumption, not a runtime measurement"
LAUNCH_FILE, MODEL_CONFIG_FILE = "launch.json", "model-config.json"
METADATA_FIELDS = ("architecture", "context_length", "num_experts")
_PROBE_AGAIN = "a compatible fresh probe is required"


def verify_runtime_profile(request: SupportRequest) -> Observed | None:
    """Verify an imported profile from its raw evidence on; nothing to do for a profile that no probe observed.

    Parameters
    ----------
    request: a draft or a finalised request.

    Returns
    -------
    What the observations amount to; None without a probe.

    Raises
    ------
    EvidenceError: a file of the evidence is gone, linked or changed, or no longer validates.
    OnboardError: the draft was edited beyond what the evidence covers; says what to do.
    """
    manifest = probe_manifest(request)
    if manifest is None:
        return None
    index = _verified_sources(manifest)
    label = manifest["configuration"]
    launch = recorded_launch(index, label)
    observed = validate_observations(index, {label: launch})[label]
    if observed.resources is None:
        raise EvidenceError(f"{index}: the observations do not validate: {'; '.join(observed.diagnostics)}", str(index))
    if request_launch(request, launch) != launch:
        raise OnboardError(f"draft_request: settings of the runtime differ from those that were probed; {_PROBE_AGAIN}")
    _compare_resources(request, manifest, observed.resources)
    metadata = {name: getattr(request.fpm_profile, name) for name in METADATA_FIELDS}
    if metadata != manifest["model_metadata"]:
        raise OnboardError(
            f"fpm_profile: model metadata {metadata} differ from {manifest['model_metadata']} of the probe; "
            f"{_PROBE_AGAIN}",
            "fpm_profile",
        )
    return observed


def recorded_launch(index: Path, label: str) -> dict[str, Any]:
    """The launch facts that an index of observations has for a configuration.

    Raises
    ------
    EvidenceError: it has none.
    """
    entry = read_index(index)["configurations"].get(label)
    if not isinstance(entry, dict) or not isinstance(entry.get("launch"), dict):
        raise EvidenceError(f"{index}: no launch of {label!r}", str(index))
    launch: dict[str, Any] = entry["launch"]
    return launch


def verify_checkpoint_launch(state: Checkpoint, label: str, checkpoint: Path) -> None:
    """The inputs of an imported draft still describe the launch that was probed.

    Raises
    ------
    OnboardError: they do not, or the draft is no request.
    """
    request = checked(SupportRequest, state.configurations[label].draft_request, "draft_request")
    manifest = probe_manifest(request)
    if manifest is None:
        return
    launch = resolve_launch(state, label, checkpoint).facts
    if launch != recorded_launch(Path(manifest["observations_index"]), manifest["configuration"]):
        raise OnboardError(f"{label}: inputs of the runtime have changed since the probe; {_PROBE_AGAIN}")


def runtime_collection_inputs(
    request: SupportRequest, deployment: CollectionDeployment | None
) -> tuple[list[str], CollectionDeployment | None]:
    """What a collection takes over from a probe: collector arguments and deployment options.

    Without a probe this is nothing and `deployment` as it was given, and nothing is verified.

    Raises
    ------
    OnboardError: `deployment` differs from the one that was probed, or `verify_runtime_profile` refuses the profile.
    """
    manifest = probe_manifest(request)
    if manifest is None:
        return [], deployment
    observed = verify_runtime_profile(request)
    assert observed is not None
    probed = checked(CollectionDeployment, observed.provenance["launch"]["deployment"], "launch.deployment")
    if deployment is not None and deployment.identity() != probed.identity():
        raise OnboardError(
            f"collection deployment {deployment.identity()} differs from {probed.identity()} of the runtime probe; "
            "give the same options, or probe the other deployment"
        )
    folder = Path(manifest["observations_index"]).parent
    return [
        "--fpm-runtime-instrumentation",
        str(folder / observed.provenance["instrumentation"]["manifest"]),
        "--fpm-runtime-launch",
        str(folder / LAUNCH_FILE),
        "--fpm-runtime-configuration",
        manifest["configuration"],
    ], probed


def request_launch(request: SupportRequest, launch: Mapping[str, Any]) -> dict[str, Any]:
    """Launch facts with everything replaced that a request decides; a request of the same launch changes nothing."""
    facts = copy.deepcopy(dict(launch))
    facts.pop("worker_type", None)
    if request.worker_type is not None:
        facts["worker_type"] = request.worker_type
    facts["identity"] = request.identity.model_dump(mode="json", exclude_none=True)
    tensor, data, moe_tensor, expert = request.topology_sizes()
    facts["topology"] |= {"tp": tensor, "dp": data, "moe_tp": moe_tensor, "moe_ep": expert}
    deployment = _deployment(request)
    facts["precision"] = {
        "kvcache_quant_mode" if name == "kv_cache_dtype" else name: getattr(deployment, name)
        for name in PRECISION_FIELDS
    }
    limits, collection = request.scheduler_limits(), request.collection
    explicit = DEFAULT_PREFILL_CAPTURE if collection.prefill_cudagraph_policy == "explicit" else None
    facts["collection"] |= {
        "max_model_len": request.search.context_length,
        "max_num_batched_tokens": limits["max_batched_tokens"],
        "max_num_seqs": limits["max_sequences"],
        "gpu_memory_utilization": collection.memory_fraction,
        "prefill_cudagraph_policy": collection.prefill_cudagraph_policy,
        "max_prefill_cudagraph_size": collection.max_prefill_cudagraph_size or explicit,
    }
    for name in ROLE_GRAPH_FIELDS:
        facts["collection"].pop(name, None)
        if (value := getattr(collection, name)) is not None:
            facts["collection"][name] = value
    return facts


def resource_values(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Resources without the texts that say where they come from."""
    values = copy.deepcopy(dict(resources))
    values.pop("provenance", None)
    if isinstance(values.get("runtime_memory"), dict):
        values["runtime_memory"].pop("provenance", None)
    return values


def preserve_runtime_overrides(
    previous: Mapping[str, Any], current: Mapping[str, Any], verify_finalized: Callable[[SupportRequest], None]
) -> dict[str, Any]:
    """A changed draft whose probe manifest says of an edited capacity what was observed.

    Parameters
    ----------
    previous, current: the draft as it was saved and as a patch leaves it.
    verify_finalized: verifies a finalised request, which alone may take the place of an imported one.

    Raises
    ------
    OnboardError: the patch takes the evidence out of an imported profile.
    """
    draft = copy.deepcopy(dict(current))
    if not draft.get("fpm_profile"):
        return draft  # the history of the session keeps what is taken away
    before, after = _deployments(previous), _deployments(draft)
    for old, new in zip(before, after, strict=False):
        manifest = json_object(_memory(old).get("provenance", ""))
        if manifest.get("schema_version") != PROBE_SCHEMA:
            continue
        memory = _memory(new)
        kept = json_object(memory.get("provenance", ""))
        if kept.get("schema_version") != PROBE_SCHEMA:
            verify_finalized(_finalization_of(previous, current, manifest))
            return draft
        if kept.get("observations_index") != manifest["observations_index"]:
            verify_runtime_profile(checked(SupportRequest, current, "draft_request"))
            return draft
        observed = manifest["observed_resources"]["runtime_memory"]["kv_cache_bytes"]
        manifest["user_overrides"] = capacity_override(observed, memory.get("kv_cache_bytes"))
        memory["provenance"] = pretty_bytes(manifest).decode()
    return draft


def capacity_override(observed_bytes: int, value_bytes: Any) -> dict[str, Any]:
    """What a manifest says of a capacity that was edited; empty when it is the observed one.

    >>> capacity_override(1000, 1000)
    {}
    """
    if value_bytes == observed_bytes:
        return {}
    return {CAPACITY: {"observed": observed_bytes, "value": value_bytes, "source": OVERRIDE_SOURCE}}


def _deployment(request: SupportRequest) -> DeploymentProfile:
    deployment = request.profile_deployment()
    assert deployment is not None
    return deployment


def _deployments(draft: Mapping[str, Any]) -> list[dict[str, Any]]:
    profile = draft.get("fpm_profile")
    deployments = profile.get("deployments") if isinstance(profile, dict) else None
    return [entry for entry in deployments if isinstance(entry, dict)] if isinstance(deployments, list) else []


def _memory(deployment: Mapping[str, Any]) -> dict[str, Any]:
    resources = deployment.get("resources")
    memory = resources.get("runtime_memory") if isinstance(resources, dict) else None
    return memory if isinstance(memory, dict) and isinstance(memory.get("provenance"), str) else {}


def _finalization_of(
    previous: Mapping[str, Any], current: Mapping[str, Any], manifest: Mapping[str, Any]
) -> SupportRequest:
    request = checked(SupportRequest, current, "draft_request")
    finalized = finalization_manifest(request) or {}
    source = request_id(checked(SupportRequest, previous, "draft_request"))
    revision = finalized.get("memory_revision")
    same_probe = finalized.get("runtime_probe") == manifest and finalized.get("source_request_id") == source
    if not same_probe and not (isinstance(revision, dict) and revision.get("request_id") == source):
        raise OnboardError(
            "draft_request: the evidence of an imported profile cannot be taken out of it; import a fresh compatible "
            "probe, or use the finalised request of this draft",
            "draft_request.fpm_profile",
        )
    return request


def _verified_sources(manifest: Mapping[str, Any]) -> Path:
    for reference in manifest["source_artifacts"]:
        verify_evidence(reference)
    covered = {reference["path"] for reference in manifest["source_artifacts"]}
    index = Path(manifest["observations_index"])
    for place in (index, index.parent / LAUNCH_FILE, index.parent / MODEL_CONFIG_FILE):
        if str(place) not in covered:
            raise EvidenceError(
                f"{place}: is not among the recorded source_artifacts; import the observations again", str(place)
            )
    return index


def _compare_resources(request: SupportRequest, manifest: Mapping[str, Any], resources: Mapping[str, Any]) -> None:
    expected = resource_values(resources)
    if manifest["observed_resources"] != expected:
        raise EvidenceError("observed_resources of the probe manifest are not those of the evidence; import it again")
    actual = resource_values(_deployment(request).resources.model_dump(mode="json"))
    observed_bytes = expected["runtime_memory"].pop("kv_cache_bytes")
    actual_bytes = actual["runtime_memory"].pop("kv_cache_bytes")
    linear = linear_resources(expected)
    if actual not in (expected, linear):
        raise OnboardError(f"fpm_profile: cache geometry or limits differ from what was observed; {_PROBE_AGAIN}")
    overrides = capacity_override(observed_bytes, actual_bytes)
    if manifest["user_overrides"] != overrides:
        raise OnboardError(
            f"{CAPACITY}: {actual_bytes} was observed as {observed_bytes}; edit it through `fpmsdk onboard checkpoint "
            "--update`, which keeps both"
        )
    if overrides and linear is not None and actual == linear:
        block_bytes = expected["cache_groups"][0]["block_size_tokens"] * linear["kv_bytes_per_token"]
        if actual_bytes % block_bytes:
            raise OnboardError(
                f"{CAPACITY}: {actual_bytes} is no whole number of cache blocks of {block_bytes} bytes, which a linear "
                f"profile needs; the next lower one is {actual_bytes - actual_bytes % block_bytes}",
                CAPACITY,
            )
