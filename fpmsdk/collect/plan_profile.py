"""What a profile decides in a plan: the version label, the limits of the scheduler, and the identity of every cell.

Source: collector.md sections 1.1 and 1.3.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fpmsdk.collect.capability import ModelCapability
from fpmsdk.collect.cells import backend_columns
from fpmsdk.collect.options import CollectorOptions
from fpmsdk.collect.sampling import DEFAULT_MAX_PREFILL_TOKENS
from fpmsdk.collect.settings import AUTO_MODEL_LEN, CollectionSettings
from fpmsdk.collect.topology import Topology
from fpmsdk.config.profile import DeploymentProfile, FpmModelProfile, load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.errors import ConfigError, OnboardError


def read_profile(source: Mapping[str, Any] | str | os.PathLike[str] | None) -> FpmModelProfile | None:
    """The profile of a document or file; None without one.

    Raises
    ------
    OnboardError: no such profile; names the field.
    """
    if source is None:
        return None
    try:
        return load_fpm_profile(source)
    except ConfigError as fault:
        raise OnboardError(f"--fpm-model-profile: {fault}", "model_profile") from None


def profile_version(profile: FpmModelProfile | None, options: CollectorOptions) -> str | None:
    """The version label: what is asked for, else the only one that the profile has for this system.

    Raises
    ------
    OnboardError: the profile is of another model or has several versions, or the label can name no folder.
    """
    label = options.backend_version
    if profile is not None:
        if profile.model != options.model_path:
            raise OnboardError(
                f"model: asked for is {options.model_path!r}, the profile has {profile.model!r}", "model_path"
            )
        versions = {
            deployment.backend_version
            for deployment in profile.deployments
            if (deployment.system, deployment.backend) == (options.system, options.backend)
        }
        if label is None and (len(versions) != 1 or None in versions):
            raise OnboardError(
                f"backend_version: the profile must state one version for {options.system}, found "
                f"{sorted(map(str, versions))}; name one with --fpm-backend-version",
                "backend_version",
            )
        label = label or next(iter(versions))
    if label is not None and (label in ("", ".", "..") or any(char.isspace() or char in "/\\\0" for char in label)):
        raise OnboardError(
            f"--fpm-backend-version: {label!r} cannot name a folder; use a literal version", "backend_version"
        )
    return label


def check_profile(
    profile: FpmModelProfile,
    capability: ModelCapability,
    topologies: Sequence[Topology],
    policy: Mapping[str, Any],
    options: CollectorOptions,
) -> dict[Topology, DeploymentProfile]:
    """The record of the profile for every topology, each of the identity that is going to be measured.

    Raises
    ------
    OnboardError: another architecture, no record, a speculative one, or an identity that differs; names the fields.
    """
    if profile.architecture != capability.architecture:
        raise OnboardError(
            f"architecture: the checkpoint has {capability.architecture!r}, the profile {profile.architecture!r}",
            "architecture",
        )
    settings = options.settings
    role = (settings.worker_type if settings else None) or "aggregated"
    records = {}
    for topology in topologies:
        try:
            record = select_deployment(
                profile,
                {
                    "model": options.model_path,
                    "system": options.system,
                    "backend": options.backend,
                    "backend_version": capability.database_version,
                    "tp": topology.tp,
                    "pp": topology.pp,
                    "attention_dp": topology.dp,
                    "moe_tp_size": topology.moe_tp,
                    "moe_ep_size": topology.moe_ep,
                    "worker_type": role,
                },
            )
        except ConfigError as fault:
            raise OnboardError(str(fault), "model_profile") from None
        if record.execution_profile is not None:
            raise OnboardError(
                f"execution_profile: the record of {topology.document()} is speculative, and only plain decoding is "
                "collected",
                "execution_profile",
            )
        _check_identity(record, capability, topology, policy)
        records[topology] = record
    return records


def _check_identity(
    record: DeploymentProfile, capability: ModelCapability, topology: Topology, policy: Mapping[str, Any]
) -> None:
    dtypes = capability.dtypes
    for kv_cache in dtypes.kv_caches:
        measured = {
            "gemm_quant_mode": dtypes.gemm,
            "moe_quant_mode": dtypes.moe,
            "fmha_quant_mode": dtypes.fmha[kv_cache],
            "comm_quant_mode": dtypes.comm,
            "kv_cache_dtype": kv_cache,
            **{axis: str(size) for axis, size in topology.document().items()},
            **{name: str(value) for name, value in backend_columns(policy["aic_fields"]).items()},
        }
        declared = record.match_identity()
        differing = [name for name, value in measured.items() if declared[name] != value]
        if differing:
            raise OnboardError(
                "the profile has another identity than what is measured: "
                + "; ".join(f"{name}: measured {measured[name]!r}, profile {declared[name]!r}" for name in differing)
                + "; correct the profile, which relabels nothing",
                differing[0],
            )


def profile_settings(
    settings: CollectionSettings, profile: FpmModelProfile, records: Sequence[DeploymentProfile]
) -> CollectionSettings:
    """The settings with context and prefill limit of the profile where none are asked for, all within its envelope.

    Raises
    ------
    OnboardError: a limit exceeds that of a record, or records of one role differ.
    """
    if settings.max_model_len > profile.context_length:
        raise OnboardError(
            f"--fpm-max-model-len: {settings.max_model_len} exceeds the {profile.context_length} tokens of the profile",
            "max_model_len",
        )
    prefill = settings.max_prefill_isl or settings.max_num_batched_tokens
    if prefill is None:
        limits = {record.resources.max_num_tokens for record in records}
        if settings.worker_type == "aggregated":
            if len(limits) > 1:
                raise OnboardError(
                    f"max_num_tokens: the topologies have {sorted(limits)}; set one with --fpm-max-num-batched-tokens",
                    "max_num_batched_tokens",
                )
            prefill = limits.pop()
        else:
            prefill = min(DEFAULT_MAX_PREFILL_TOKENS, *limits)
    length = profile.context_length if settings.max_model_len == AUTO_MODEL_LEN else settings.max_model_len
    resolved = settings.resolved(max_model_len=length, max_prefill_isl=prefill)
    for record in records:
        tokens, seqs = record.resources.max_num_tokens, record.resources.max_batch_size
        resolved.check_limits(profile_tokens=tokens, profile_seqs=seqs)
        asked_tokens = settings.max_num_batched_tokens or prefill
        asked_seqs = max(
            settings.max_decode_batch_size or settings.max_num_seqs or seqs,
            settings.max_prefill_batch_size or settings.max_num_seqs or seqs,
        )
        for name, asked, known in (
            ("max_num_tokens", asked_tokens, tokens),
            ("max_batch_size", asked_seqs, seqs),
        ):
            if asked > known:
                raise OnboardError(
                    f"{name}: {asked} exceeds {known} of the profile's record for "
                    f"{record.sizes}; lower the limit, or observe the memory of the larger one",
                    name,
                )
    return resolved
