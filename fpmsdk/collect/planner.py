"""From what is asked for and what the model says to a frozen plan: the matrix of cells.

Source: collector.md sections 1.1 to 1.8.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fpmsdk.collect.capability import NATIVE_TEMPLATE, ModelCapability, resolve_capability
from fpmsdk.collect.cells import PLAIN_EXECUTION, POINT_SOURCE, Cell, backend_columns, cell_id
from fpmsdk.collect.deployment_inputs import OFF, SECTION, deployment_digest, with_warm_up
from fpmsdk.collect.memory_admission import Admission, admit_topologies
from fpmsdk.collect.model_evidence import load_model_evidence
from fpmsdk.collect.options import CollectorOptions
from fpmsdk.collect.plan import SCHEMA_NAME, SCHEMA_VERSION, CollectionPlan, plan_digest
from fpmsdk.collect.plan_profile import check_profile, profile_settings, profile_version, read_profile
from fpmsdk.collect.points import PHASES
from fpmsdk.collect.revision import source_revision
from fpmsdk.collect.settings import CollectionSettings
from fpmsdk.collect.topology import Topology, candidate_topologies
from fpmsdk.config.profile import FpmModelProfile
from fpmsdk.errors import MissingCapabilityError, OnboardError

logger = logging.getLogger(__name__)

# The engine version whose memory the collector's own observer understands.
MEMORY_OBSERVER_VERSION = "0.27.0"


def build_plan(
    options: CollectorOptions,
    *,
    profile: Mapping[str, Any] | None = None,
    runtime_observation: Mapping[str, Any] | None = None,
) -> CollectionPlan:
    """Plan a campaign; nothing is written and nothing is started.

    Parameters
    ----------
    options: result of `parse_arguments`.
    profile: the profile as a document; by default that of `options.model_profile`.
    runtime_observation: `{manifest, bundle_sha256, launch, configuration}` of an accepted probe.

    Raises
    ------
    OnboardError: what is asked for contradicts the model, the profile or itself.
    MissingCapabilityError: without a version label, or for a model that needs adapters of its engine.
    """
    settings = options.settings
    if settings is None:
        raise OnboardError("a campaign that repeats another one takes over its plan", "repeatability")
    known = read_profile(profile if profile is not None else options.model_profile)
    label = profile_version(known, options)
    if label is None:
        raise MissingCapabilityError(
            "--fpm-backend-version or --fpm-model-profile is needed: this release plans with the checkpoint's own "
            "precision and consults no timing tables"
        )
    capability = resolve_capability(
        load_model_evidence(options.model_path, options.model_config),
        database_version=label,
        weight_quantizations=settings.weight_quantizations,
        kv_cache_dtypes=settings.kv_cache_dtypes,
        architecture=options.model_architecture,
    )
    _check_execution(settings, capability, options.deployment)
    candidates = candidate_topologies(
        is_moe=capability.is_moe,
        max_gpus=settings.max_gpus,
        gpu_counts=settings.gpu_counts,
        parallel_presets=settings.parallel_presets,
        parallel_axes=settings.parallel_axes,
        sizes=settings.sizes,
        allow_pure_tp=capability.allow_pure_tp,
    )
    policy = _policy(settings)
    deployments = None
    if known is not None:
        deployments = check_profile(known, capability, candidates, policy, options)
        settings = profile_settings(settings, known, tuple(deployments.values()))
    admissions = admit_topologies(
        candidates,
        capability,
        model_path=options.model_path,
        system=options.system,
        prefill_tokens=settings.sampling.max_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        deployments=deployments,
    )
    document = _document(options, settings, capability, policy, admissions)
    runtime_version = options.runtime_backend_version
    if runtime_observation is not None:
        document["runtime_observation"] = dict(runtime_observation)
        observed = runtime_observation["launch"]["identity"]
        runtime_version = (
            runtime_version or observed.get("runtime_framework_version") or observed.get("framework_version")
        )
    if known is not None:
        document["fpm_profile"] = known.model_dump(mode="json")
    memory = _memory_policy(known, runtime_version, runtime_observation)
    if memory is not None:
        document["runtime_memory_policy"] = memory
    if runtime_version is not None:
        document["runtime_backend_version"] = _literal(runtime_version)
    document["backend_version"] = label
    document["sha256"] = plan_digest(document)
    return CollectionPlan.from_document(document)


def _literal(version: str) -> str:
    if not version.strip() or version != version.strip():
        raise OnboardError(f"--fpm-runtime-backend-version: expected a version, found {version!r}")
    return version


def _check_execution(settings: CollectionSettings, capability: ModelCapability, deployment: Mapping[str, Any]) -> None:
    if settings.enforce_eager:
        raise OnboardError("--fpm-enforce-eager: only for models that are measured without graphs", "enforce_eager")
    if settings.decoder_replay:
        raise OnboardError("--fpm-decoder-replay: only for DeepSeek-V4.1", "decoder_replay")
    if settings.worker_type is None and settings.max_prefill_cudagraph_size is not None:
        logger.warning(
            "explicit capture sizes apply to prefill alone; name a role with --fpm-worker-type for all phases"
        )
    if capability.template_id != NATIVE_TEMPLATE:
        return
    switch = "DYN_BENCH_PREFILL_REAL_SEED"
    for entry in with_warm_up(deployment)[SECTION]["extra_env"]:
        if entry["name"] == switch and entry["value"].lower() in OFF:
            raise OnboardError(
                f"{switch}={entry['value']}: cached prefill of this cache layout ({', '.join(capability.markers)}) "
                "needs real prefixes; remove the override",
                f"{SECTION}.extra_env",
            )


def _policy(settings: CollectionSettings) -> dict[str, Any]:
    moe, eplb = settings.moe_backend, settings.enable_eplb
    if settings.enable_wideep == "true":
        raise OnboardError("--fpm-enable-wideep: vLLM has none; use false", "enable_wideep")
    if settings.attention_backend != "auto":
        raise OnboardError(
            "--fpm-attention-backend: only auto is measured on vLLM, because no other choice can be verified",
            "attention_backend",
        )
    arguments: list[str] = []
    markers: dict[str, str] = {}
    asked = {}
    if moe != "auto":
        asked["moe_backend"] = moe
        arguments += ["--kernel-config", json.dumps({"moe_backend": moe})]
        markers["config.engine_args.kernel_config.moe_backend"] = moe
    if eplb == "true":
        asked["enable_eplb"] = eplb
        arguments.append("--enable-eplb")
        markers["config.engine_args.enable_eplb"] = "True"
    name = "-".join(f"{field}={value}" for field, value in sorted(asked.items()))
    return {
        "policy_id": f"explicit-{name}" if asked else "baseline_auto",
        "generator_overrides": {"params": {"agg": {"extra_cli_args": arguments}}} if arguments else {},
        "expected_markers": markers,
        "aic_fields": {
            "moe_backend": None if moe == "auto" else moe,
            "attention_backend": None,
            "enable_wideep": False,
            "enable_eplb": eplb == "true",
        },
        "admission_reason": "explicitly pinned backend identity"
        if asked
        else "AIC automatic baseline for the selected model/backend",
    }


def _memory_policy(
    profile: FpmModelProfile | None, version: str | None, observation: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if observation is not None:
        return {
            "source": "runtime_instrumentation",
            "observation": "enabled",
            "selected_vllm_version": version,
            "bundle_sha256": observation["bundle_sha256"],
            "async_scheduling": False,
        }
    pending = profile is not None and any(
        deployment.resources.memory_source == "pending" for deployment in profile.deployments
    )
    if not pending:
        return None
    observed = version == MEMORY_OBSERVER_VERSION
    return {
        "source": "vllm_initialization",
        "supported_vllm_version": MEMORY_OBSERVER_VERSION,
        "selected_vllm_version": version,
        "observation": "enabled" if observed else "unavailable_for_runtime",
        "evidence_schema_version": 1,
        "async_scheduling": False if observed else None,
    }


def _document(
    options: CollectorOptions,
    settings: CollectionSettings,
    capability: ModelCapability,
    policy: dict[str, Any],
    admissions: tuple[Admission, ...],
) -> dict[str, Any]:
    runnable = [admission for admission in admissions if admission.disposition != "rejected"]
    cells = [
        _cell(options, capability, policy, phase, admission.topology, kv_cache)
        for phase in settings.phases
        for admission in runnable
        for kv_cache in admission.kv_caches
    ]
    points = settings.benchmark_points
    sampling = settings.sampling.document()
    found = [admission.disposition for admission in admissions]
    return {
        "schema_name": SCHEMA_NAME,
        "schema_version": SCHEMA_VERSION,
        "backend": options.backend,
        "model_path": options.model_path,
        "system": options.system,
        "aic_revision": source_revision(),
        "generator_config_sha256": deployment_digest(options.deployment),
        "options": settings.document(),
        "capability": capability.document(),
        "dtype_profile": capability.dtypes.document(),
        "point_generation": {
            "owner": "dynamo.vllm.instrumented_scheduler.InstrumentedScheduler",
            "method": "native_self_benchmark",
            "source": "native_auto_grid" if points is None else "frozen_explicit_manifest",
            "manifest_sha256": None if points is None else points["sha256"],
            "coordinates": ["batch_size", "total_prefill_tokens", "total_kv_read_tokens"],
            "partition_policy": "balanced_v1",
            "point_admission": "dynamo_live_scheduler",
            "precondition": "vllm_engine_initialized",
            "prefill_sampling": sampling,
            "planned_point_count": None if points is None else sum(len(points["payload"][phase]) for phase in PHASES),
        },
        "topologies": [
            {**admission.topology.document(), "strategy": admission.topology.strategy(capability.is_moe)}
            for admission in runnable
        ],
        "topology_memory_admission": [admission.document for admission in admissions],
        "backend_policies": [policy],
        "cells": [cell.document() for cell in cells],
        "counts": {
            "candidate_topologies": len(admissions),
            "topologies": len(runnable),
            "memory_rejected_topologies": found.count("rejected"),
            "memory_unknown_topologies": found.count("unknown"),
            "backend_policies": 1,
            "cells": len(cells),
            "prefill_cudagraph_capture_sizes": sampling["cudagraph_capture_size_count"],
            "prefill_new_token_axis_points": sampling["new_token_axis_point_count"],
            "points": "runtime-determined",
        },
    }


def _cell(
    options: CollectorOptions,
    capability: ModelCapability,
    policy: dict[str, Any],
    phase: str,
    topology: Topology,
    kv_cache: str,
) -> Cell:
    dtypes = capability.dtypes
    name = cell_id(
        backend=options.backend,
        model_path=options.model_path,
        system=options.system,
        phase=phase,
        topology=topology,
        weight_quantization=dtypes.gemm,
        kv_cache_dtype=kv_cache,
        backend_columns=backend_columns(policy["aic_fields"]),
    )
    return Cell(
        cell_id=name,
        workload_kind=phase,
        topology=topology,
        parallel_strategy=topology.strategy(capability.is_moe),
        weight_quantization=dtypes.gemm,
        kv_cache_dtype=kv_cache,
        resolved_dtypes={
            "gemm_quant_mode": dtypes.gemm,
            "moe_quant_mode": dtypes.moe,
            "fmha_quant_mode": dtypes.fmha[kv_cache],
            "comm_quant_mode": dtypes.comm,
            "kvcache_quant_mode": kv_cache,
            "fmha_resolution": dtypes.fmha_resolution[kv_cache],
        },
        backend_policy=policy,
        execution_identity=PLAIN_EXECUTION,
        input_text_sha256="",
        point_source=POINT_SOURCE,
    )
