"""The launch facts of a configuration in a session: what a probe would start, worked out from inputs and draft.

Names of configurations decide nothing; every fact is stated somewhere, and two statements must agree.
Source: onboarding.md section 6.2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fpmsdk.collect.probe_launch import normalized_launch
from fpmsdk.config.profile import DeploymentProfile, FpmModelProfile, load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.checkpoint import Checkpoint
from fpmsdk.onboard.checkpoint_merge import merge_patch
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.intake import load_model_config
from fpmsdk.onboard.overrides import check_overrides
from fpmsdk.onboard.request_sections import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_NUM_TOKENS,
    REFERENCE_CONTEXT_TOKENS,
    ROLE_GRAPH_FIELDS,
    TOPOLOGY_FIELDS,
    CollectionSection,
    RequestIdentity,
    SearchSection,
)

PRECISION_FIELDS = (
    "gemm_quant_mode",
    "moe_quant_mode",
    "fmha_quant_mode",
    "kv_cache_dtype",
    "comm_quant_mode",
    "moe_backend",
    "attention_backend",
    "enable_wideep",
    "enable_eplb",
)
_SECTIONS: dict[str, type[StrictDocument]] = {
    "identity": RequestIdentity,
    "search": SearchSection,
    "collection": CollectionSection,
}


class ResolvedLaunch(NamedTuple):
    """`request` is the draft completed from inputs, `facts` the normalised launch, `overrides` the checked claims."""

    request: dict[str, Any]
    facts: dict[str, Any]
    overrides: dict[str, Any]


def resolve_launch(
    state: Checkpoint, label: str, checkpoint: Path, deployment: Mapping[str, Any] | None = None
) -> ResolvedLaunch:
    """Work out the launch of one configuration.

    Parameters
    ----------
    state: the session.
    label: the configuration.
    checkpoint: the session's file; a relative path of a model configuration starts at its folder.
    deployment: deployment options of the command, over those that the session has saved.

    Raises
    ------
    OnboardError: a fact is missing, malformed or stated twice with different values; names it.
    ConfigError: the draft's profile is malformed or has no such deployment.
    OSError: the model configuration cannot be read.
    """
    configuration = state.configurations[label]
    inputs = merge_patch(state.inputs, configuration.inputs)
    request = _completed_draft(configuration.draft_request, inputs)
    identity = checked(RequestIdentity, request["identity"], "draft_request.identity")
    profile = _profile(request)
    if profile is None:
        missing = [name for name in (*TOPOLOGY_FIELDS, "context_length") if request["search"].get(name) is None]
        if missing:
            raise OnboardError(
                f"{label}: state {', '.join(missing)} in inputs or draft_request.search; without a profile nothing "
                "else tells them",
                "draft_request.search",
            )
    else:
        request["search"].setdefault("context_length", min(profile.context_length, REFERENCE_CONTEXT_TOKENS))
    search = checked(SearchSection, request["search"], "draft_request.search")
    collection = checked(CollectionSection, request["collection"], "draft_request.collection")
    topology = {
        "tp": search.tensor_parallel,
        "pp": 1,
        "dp": search.attention_data_parallel or 1,
        "moe_tp": search.moe_tensor_parallel or (search.tensor_parallel if identity.model_kind == "moe" else 1),
        "moe_ep": search.moe_expert_parallel or 1,
        "cp": 1,
    }
    selected = None
    if profile is not None:
        profile = _with_version(profile, identity, topology, request.get("worker_type"))
        request["fpm_profile"] = profile.model_dump(mode="json")
        selected = _selected(profile, identity, topology, request.get("worker_type"))
    overrides = check_overrides(inputs.get("resource_overrides"))
    facts = {
        **({"worker_type": request["worker_type"]} if request.get("worker_type") is not None else {}),
        "identity": identity.model_dump(mode="json", exclude_none=True),
        "topology": topology,
        "precision": _precision(selected, overrides, inputs),
        "collection": _collection(search, collection, selected),
        "model_config": _model_config(inputs.get("model_config"), checkpoint.parent),
        "deployment": _deployment(inputs, deployment),
    }
    return ResolvedLaunch(request, normalized_launch(facts, allow_pending_version=True), overrides)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise OnboardError(f"{name}: expected an object, found {value!r}", name)
    return value


def _completed_draft(draft: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    request = copy.deepcopy(dict(draft))
    if "worker_type" in inputs:
        _merge_fact(request, "worker_type", inputs["worker_type"], "draft_request")
    for section, kind in _SECTIONS.items():
        values = _object(request.setdefault(section, {}), f"draft_request.{section}")
        for name in kind.model_fields:
            if name in inputs:
                _merge_fact(values, name, inputs[name], f"draft_request.{section}")
    if not draft:
        # A fresh probe leaves captures to the engine; a draft from before the policy existed means the explicit one.
        request["collection"].setdefault("prefill_cudagraph_policy", "runtime")
    return request


def _merge_fact(values: dict[str, Any], name: str, value: Any, where: str) -> None:
    known = values.get(name)
    if known is not None and known != value:
        raise OnboardError(f"inputs.{name}: {value!r} contradicts {where}.{name}, {known!r}; correct one", name)
    values[name] = value


def _profile(request: Mapping[str, Any]) -> FpmModelProfile | None:
    return load_fpm_profile(_object(request["fpm_profile"], "fpm_profile")) if request.get("fpm_profile") else None


def _with_version(
    profile: FpmModelProfile, identity: RequestIdentity, topology: Mapping[str, int], role: str | None
) -> FpmModelProfile:
    # A session keeps the profile it was made of; the version that a probe found in the image is in its inputs.
    document = profile.model_dump(mode="json")
    for deployment in document["deployments"]:
        place = (deployment["system"], deployment["backend"], deployment.get("worker_type") or "aggregated")
        if (
            deployment.get("backend_version") is None
            and identity.framework_version is not None
            and place == (identity.gpu, identity.framework, role or "aggregated")
            and all(deployment[axis] == size for axis, size in topology.items())
        ):
            deployment["backend_version"] = identity.framework_version
    return load_fpm_profile(document)


def _selected(
    profile: FpmModelProfile, identity: RequestIdentity, topology: Mapping[str, int], role: str | None
) -> DeploymentProfile:
    return select_deployment(
        profile,
        {
            "model": identity.model,
            "system": identity.gpu,
            "backend": identity.framework,
            "backend_version": identity.framework_version,
            "tp": topology["tp"],
            "pp": 1,
            "attention_dp": topology["dp"],
            "moe_tp_size": topology["moe_tp"],
            "moe_ep_size": topology["moe_ep"],
            "worker_type": role or "aggregated",
        },
    )


def _precision(
    selected: DeploymentProfile | None, overrides: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    stated = {name: value for name, value in overrides.items() if name in PRECISION_FIELDS}
    own = _object(inputs.get("precision", {}), "inputs.precision")
    if unknown := sorted(own.keys() - set(PRECISION_FIELDS)):
        raise OnboardError(
            f"inputs.precision: unknown are {', '.join(unknown)}; accepted are {', '.join(PRECISION_FIELDS)}",
            "inputs.precision",
        )
    for name, value in own.items():
        if stated.setdefault(name, value) != value:
            raise OnboardError(
                f"inputs.precision.{name}: {value!r} contradicts resource_overrides, {stated[name]!r}; correct one",
                f"inputs.precision.{name}",
            )
    precision = {} if selected is None else {name: getattr(selected, name) for name in PRECISION_FIELDS}
    for name, value in stated.items():
        if precision.setdefault(name, value) != value:
            raise OnboardError(
                f"inputs.precision.{name}: {value!r} contradicts the draft profile, {precision[name]!r}; edit the "
                "draft before it is probed",
                f"inputs.precision.{name}",
            )
    precision.setdefault("comm_quant_mode", "half")
    if "kv_cache_dtype" in precision:
        precision["kvcache_quant_mode"] = precision.pop("kv_cache_dtype")
    return precision


def _collection(
    search: SearchSection, collection: CollectionSection, selected: DeploymentProfile | None
) -> dict[str, Any]:
    tokens, sequences = collection.max_num_tokens, collection.max_batch_size
    if selected is not None:
        tokens = tokens or selected.resources.max_num_tokens
        sequences = sequences or selected.resources.max_batch_size
    tokens, sequences = tokens or DEFAULT_MAX_NUM_TOKENS, sequences or DEFAULT_MAX_BATCH_SIZE
    if tokens < sequences:
        raise OnboardError(
            f"collection: max_num_tokens {tokens} must be at least max_batch_size {sequences}",
            "collection.max_num_tokens",
        )
    return {
        "max_model_len": search.context_length,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": sequences,
        "gpu_memory_utilization": collection.memory_fraction,
        "prefill_cudagraph_policy": collection.prefill_cudagraph_policy,
        "max_prefill_cudagraph_size": collection.max_prefill_cudagraph_size,
        **{name: value for name in ROLE_GRAPH_FIELDS if (value := getattr(collection, name)) is not None},
    }


def _model_config(stated: Any, folder: Path) -> dict[str, Any]:
    told = {"path": stated} if isinstance(stated, str) else _object(stated, "inputs.model_config")
    if not isinstance(told.get("path"), str) or not told["path"]:
        raise OnboardError("inputs.model_config.path: expected the path of config.json", "inputs.model_config.path")
    config = load_model_config((folder / Path(told["path"]).expanduser()).absolute())
    path, sources = config.path, config.source_files
    found: dict[str, Any] = {"path": str(path), "sha256": config.sha256}
    if sources:
        found["source_files"] = dict(sources)
    for name, value in (("sha256", found["sha256"]), ("source_files", sources)):
        if told.get(name, value) not in (value, None):
            raise OnboardError(
                f"inputs.model_config.{name}: {path} has {value!r}, stated is {told[name]!r}; restore the file, or "
                "correct the input",
                f"inputs.model_config.{name}",
            )
    return found


def _deployment(inputs: Mapping[str, Any], over: Mapping[str, Any] | None) -> dict[str, Any]:
    saved = _object(inputs.get("collection_deployment", {}), "inputs.collection_deployment")
    over = over or {}
    if over.get("executor", saved.get("executor")) != saved.get("executor"):
        # Another executor takes other options; the image is the one thing that all of them run.
        saved = {name: value for name, value in saved.items() if name == "image"}
    return checked(CollectionDeployment, {**saved, **over}, "collection_deployment").document()
