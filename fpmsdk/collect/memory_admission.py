"""Which topologies are known not to fit into GPU memory; everything that is not known may run.

Source: collector.md section 8.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fpmsdk.collect.capability import ModelCapability
from fpmsdk.collect.topology import Topology
from fpmsdk.config.profile import DeploymentProfile
from fpmsdk.config.systems import resolve_systems_paths
from fpmsdk.errors import FpmSdkError, OnboardError
from fpmsdk.opgraph import Deployment, build_graph
from fpmsdk.opgraph.memory import RankMemory, SystemMemory
from fpmsdk.opgraph.model_config import parse_model_config
from fpmsdk.perfdb.roots import open_root

_NATIVE = "aic_native_configured_max_new_tokens"


class Admission(NamedTuple):
    """Decision about one topology, as it stands in a plan."""

    topology: Topology
    disposition: str
    kv_caches: tuple[str, ...]
    document: dict[str, Any]


class _Known(NamedTuple):
    # Bytes of one rank; None while unknown.
    non_kv_bytes: int | None
    capacity_bytes: int | None
    reason: str
    provenance: str | None = None


def admit_topologies(
    topologies: Sequence[Topology],
    capability: ModelCapability,
    *,
    model_path: str,
    system: str,
    prefill_tokens: int,
    gpu_memory_utilization: float | None,
    deployments: Mapping[Topology, DeploymentProfile] | None = None,
) -> tuple[Admission, ...]:
    """Decide about every topology and precision of the cache.

    Parameters
    ----------
    prefill_tokens: most new tokens of one pass.
    gpu_memory_utilization: share of the GPU's memory that the engine may use; None for all of it.
    deployments: records of a profile by topology, which decide where they are given.

    Raises
    ------
    OnboardError: no topology can fit, or the GPU system is unknown.
    """
    admissions = tuple(
        _admission(
            topology,
            capability,
            model_path,
            system,
            prefill_tokens,
            gpu_memory_utilization,
            None if deployments is None else deployments[topology],
        )
        for topology in topologies
    )
    if all(admission.disposition == "rejected" for admission in admissions):
        needed = "; ".join(
            f"{admission.topology.document()} lacks {-min(entry['headroom_bytes'] for entry in estimates)} bytes"
            for admission in admissions
            if (estimates := admission.document["estimates"])
        )
        raise OnboardError(f"no topology fits into the memory of {system}: {needed}; use more GPUs", "max_gpus")
    return admissions


def _admission(
    topology: Topology,
    capability: ModelCapability,
    model_path: str,
    system: str,
    tokens: int,
    share: float | None,
    deployment: DeploymentProfile | None,
) -> Admission:
    estimates = []
    for kv_cache in capability.dtypes.kv_caches:
        known = (
            _of_profile(deployment, system)
            if deployment is not None
            else _native(topology, capability, model_path, system, tokens, kv_cache)
        )
        estimates.append(_estimate(kv_cache, known, share, has_profile=deployment is not None))
    found = {estimate["disposition"] for estimate in estimates}
    disposition = next(name for name in ("admitted", "unknown", "rejected") if name in found)
    reasons = {
        "admitted": "at least one precision of the cache leaves room for it",
        "unknown": "nothing proves that the topology cannot run; the engine decides",
        "rejected": "no precision of the cache leaves room for it",
    }
    envelope: dict[str, Any] = {"max_new_tokens": tokens, "aic_max_num_tokens": tokens, "max_batch_size": 1}
    if deployment is not None:
        envelope = {
            "requested_prefill_tokens": tokens,
            "max_num_tokens": deployment.resources.max_num_tokens,
            "max_batch_size": deployment.resources.max_batch_size,
            "scope": "rank_local",
            "cuda_graph_reservation": "runtime_profiled_separately",
        }
    source = _NATIVE if deployment is None else f"fpm_profile_{deployment.resources.memory_source}"
    document = {
        "topology": topology.document(),
        "disposition": disposition,
        "source": source,
        "activation_envelope": envelope,
        "estimates": estimates,
        "reason": reasons[disposition],
    }
    runnable = tuple(entry["kv_cache_dtype"] for entry in estimates if entry["disposition"] != "rejected")
    return Admission(topology, disposition, runnable, document)


def _estimate(kv_cache: str, known: _Known, share: float | None, *, has_profile: bool) -> dict[str, Any]:
    disposition, headroom, budget = "unknown", None, None
    if known.capacity_bytes is not None:
        budget = math.floor(known.capacity_bytes * (1.0 if share is None else share))
        if known.non_kv_bytes is not None:
            headroom = budget - known.non_kv_bytes
            disposition = "admitted" if headroom > 0 else "rejected"
    estimate: dict[str, Any] = {
        "kv_cache_dtype": kv_cache,
        "disposition": disposition,
        "estimated_non_kv_bytes": known.non_kv_bytes,
        "gpu_capacity_bytes": known.capacity_bytes,
        "headroom_bytes": headroom,
        "reason": known.reason,
    }
    if has_profile:
        estimate["provenance"] = known.provenance
    if share is not None and budget is not None:
        estimate["gpu_memory_budget_bytes"] = budget
    return estimate


def _of_profile(deployment: DeploymentProfile, system: str) -> _Known:
    resources = deployment.resources
    capacity = _capacity_bytes(system)
    if resources.memory_source != "declared":
        return _Known(None, capacity, "the engine sizes its own memory when it starts", resources.provenance)
    declared = sum(value or 0 for value in resources.declared())
    return _Known(declared, capacity, "bytes of one rank that the profile declares", resources.provenance)


def _capacity_bytes(system: str) -> int:
    capacity = next((open_root(root).spec(system).mem_capacity_bytes for root in resolve_systems_paths()), None)
    if capacity is None or capacity <= 0:
        raise OnboardError(
            f"--gpu: the memory of {system} is unknown; set FPMSDK_SYSTEMS_PATH to a systems root that describes it",
            "gpu",
        )
    return capacity


def _native(
    topology: Topology, capability: ModelCapability, model_path: str, system: str, tokens: int, kv_cache: str
) -> _Known:
    """Bytes by the operator graph, where the model has one and the version is measured; an unknown one may run."""
    dtypes = capability.dtypes
    try:
        for place in resolve_systems_paths():
            root = open_root(place)
            version = root.resolve_version(system, "vllm", capability.database_version)
            spec = root.spec(system)
            deployment = Deployment(
                system=system,
                backend="vllm",
                backend_version=version.version,
                sm_version=spec.sm_version,
                tp=topology.tp,
                attention_dp=topology.dp,
                moe_tp_size=topology.moe_tp,
                moe_ep_size=topology.moe_ep,
                gemm_quant_mode=dtypes.gemm,
                moe_quant_mode=dtypes.moe,
                kvcache_quant_mode=kv_cache,
                fmha_quant_mode=dtypes.fmha[kv_cache],
                comm_quant_mode=dtypes.comm,
            )
            evidence = capability.evidence
            model = parse_model_config(model_path, evidence.payload, {"quantization": evidence.sidecar})
            memory = SystemMemory(spec.mem_capacity_bytes or 0, spec.nccl_mem_bytes, spec.other_mem_bytes)
            graph = build_graph(model, deployment, lambda _kind, _table: ())
            rank = RankMemory.of(model, deployment, graph, memory, tokens)
            needed = math.ceil(rank.weights + rank.activations + rank.runtime + rank.comm)
            return _Known(needed, memory.capacity_bytes, "bytes of one rank by the operators of the model")
    except FpmSdkError as fault:
        return _Known(None, None, f"no estimate: {type(fault).__name__}: {fault}")
    return _Known(None, None, "no estimate: no systems root")
