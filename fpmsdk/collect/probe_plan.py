"""The plan of a runtime probe: engines of a launch that measure next to nothing and report their cache.

Source: collector.md section 8.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fpmsdk.collect.capability import declared_precision
from fpmsdk.collect.cells import PLAIN_EXECUTION, Cell
from fpmsdk.collect.deployment_inputs import read_inputs
from fpmsdk.collect.instrumentation import InstrumentationBundle
from fpmsdk.collect.model_evidence import load_model_evidence
from fpmsdk.collect.observer_staging import model_config_files
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.probe_launch import GRAPH_REQUEST_FIELDS, normalized_launch, phases_of
from fpmsdk.collect.sampling import prefill_sampling
from fpmsdk.collect.topology import Topology
from fpmsdk.documents.canonical import digest
from fpmsdk.errors import OnboardError

_SAMPLES = {
    "prefill": {
        "--prefill-max-new-token-samples": "2",
        "--prefill-max-kv-read-token-samples": "2",
        "--prefix-max-batch-size-samples": "2",
    },
    "decode": {"--decode-max-kv-read-token-samples": "2", "--decode-max-batch-size-samples": "2"},
}

_CPU_POLICY = ("cpus_per_task", "cpu_bind")


def probe_plan(configuration: str, facts: Mapping[str, Any], bundle: InstrumentationBundle) -> CollectionPlan:
    """What a probe launches for one configuration: a cell for each phase of its role.

    Its document holds what launch files are rendered from; it is no plan of a campaign, and none is read from it.

    Parameters
    ----------
    configuration: the label of the configuration.
    facts: launch facts.
    bundle: the observers.

    Raises
    ------
    OnboardError: the facts contradict the model, the observers or what can be launched; names the fact.
    EvidenceError: the model's configuration is not the recorded one.
    """
    launch = normalized_launch(facts)
    identity, precision = launch["identity"], launch["precision"]
    version = bundle.manifest["runtime"]["version"]
    asked = identity.get("runtime_framework_version")
    if asked is not None and asked != version:
        raise OnboardError(
            f"instrumentation: is written for vLLM {version}, the engine is {asked}; give the manifest of that version",
            "--instrumentation",
        )
    model_config_files(launch["model_config"])
    evidence = load_model_evidence(identity["model"], launch["model_config"]["path"])
    is_moe = identity["model_kind"] == "moe"
    declared = declared_precision(evidence, evidence.architecture(), is_moe)
    for name, native in (("gemm_quant_mode", declared.gemm), ("moe_quant_mode", declared.moe)):
        if precision[name] != native:
            raise OnboardError(
                f"precision.{name}: {precision[name]!r} is not the checkpoint's own {native!r}, and nothing is "
                "converted for a probe",
                f"precision.{name}",
            )
    if precision["attention_backend"] != "auto":
        raise OnboardError("precision.attention_backend: only auto can be launched", "precision.attention_backend")
    topology = Topology.from_document(launch["topology"])
    plan_sha256 = digest({"launch": launch, "bundle_sha256": bundle.sha256})
    cells = tuple(
        Cell(
            cell_id=f"probe-{digest({'configuration': configuration, 'phase': phase, 'plan': plan_sha256})[:20]}",
            workload_kind=phase,
            topology=topology,
            parallel_strategy=topology.strategy(is_moe),
            weight_quantization=precision["gemm_quant_mode"],
            kv_cache_dtype=precision["kvcache_quant_mode"],
            resolved_dtypes={
                **{f"{name}_quant_mode": precision[f"{name}_quant_mode"] for name in ("gemm", "moe", "fmha", "comm")},
                "kvcache_quant_mode": precision["kvcache_quant_mode"],
                "fmha_resolution": "runtime_probe_requested",
            },
            backend_policy=_policy(precision),
            execution_identity=PLAIN_EXECUTION,
            input_text_sha256="",
        )
        for phase in phases_of(launch.get("worker_type"))
    )
    document = {
        "backend": identity["framework"],
        "model_path": identity["model"],
        "system": identity["gpu"],
        "options": _options(launch),
        "capability": {
            "architecture": evidence.architecture(),
            "is_moe": is_moe,
            "aic_database_version": identity["framework_version"],
            "model_config": evidence.document(),
        },
        "runtime_memory_policy": {
            "source": "runtime_instrumentation",
            "observation": "enabled",
            "selected_vllm_version": version,
            "bundle_sha256": bundle.sha256,
            "async_scheduling": False,
        },
        "runtime_observation": {
            "manifest": str(bundle.manifest_path),
            "bundle_sha256": bundle.sha256,
            "launch": launch,
            "configuration": configuration,
        },
        "runtime_backend_version": version,
        "backend_version": identity["framework_version"],
        "probe_sampling": _SAMPLES,
        "topologies": [topology.document()],
        "cells": [cell.document() for cell in cells],
        "sha256": plan_sha256,
    }
    return CollectionPlan(json.loads(json.dumps(document)), cells)


def probe_deployment(launch: Mapping[str, Any]) -> dict[str, Any]:
    """The deployment inputs of a launch, as a campaign of the same options has them."""
    deployment = launch["deployment"]
    return read_inputs(
        None,
        (f"K8sConfig.k8s_image={json.dumps(deployment['image'])}",),
        namespace=deployment.get("namespace"),
        model_cache=deployment.get("model_cache"),
        transport=deployment.get("transport"),
        image_pull_secret=deployment.get("image_pull_secret"),
    )


def _policy(precision: Mapping[str, Any]) -> dict[str, Any]:
    backend = precision["moe_backend"]
    asked = backend != "auto"
    arguments = ["--kernel-config", json.dumps({"moe_backend": backend})]
    return {
        "policy_id": f"explicit-moe_backend={backend}" if asked else "baseline_auto",
        "generator_overrides": {"params": {"agg": {"extra_cli_args": arguments}}} if asked else {},
        "expected_markers": {"config.engine_args.kernel_config.moe_backend": backend} if asked else {},
        "aic_fields": {
            "moe_backend": backend if asked else None,
            "attention_backend": None,
            "enable_wideep": precision["enable_wideep"],
            "enable_eplb": precision["enable_eplb"],
        },
        "admission_reason": "runtime probe",
    }


def _options(launch: Mapping[str, Any]) -> dict[str, Any]:
    collection, deployment = launch["collection"], launch["deployment"]
    sampling = prefill_sampling(
        collection["max_num_batched_tokens"],
        max_batch_size=collection["max_num_seqs"],
        policy=collection["prefill_cudagraph_policy"],
        max_capture=collection["max_prefill_cudagraph_size"],
    )
    return {
        "global_warmup_iterations": collection["warmup_iterations"],
        "vllm_max_model_len": collection["max_model_len"],
        "max_num_batched_tokens": collection["max_num_batched_tokens"],
        "max_num_seqs": collection["max_num_seqs"],
        "max_decode_batch_size": None,
        "gpu_memory_utilization": collection["gpu_memory_utilization"],
        "enforce_eager": collection["enforce_eager"],
        "prefill_sampling": sampling.document(),
        "executor": deployment["executor"],
        "slurm_container_image": deployment["image"] if deployment["executor"] == "slurm" else "",
        "slurm_container_mounts": deployment["container_mount"],
        **{
            f"slurm_{name}": deployment[name]
            for name in ("cpus_per_task", "cpu_bind")
            if deployment.get(name) is not None
        },
        **{name: collection[name] for name in GRAPH_REQUEST_FIELDS if collection.get(name) is not None},
        **({"worker_type": launch["worker_type"]} if launch.get("worker_type") is not None else {}),
    }
