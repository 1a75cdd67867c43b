"""The configurations that a plan generates: one example for predict and recommend, or the worker of a single role.

Source: onboarding.md sections 5 (generated configs) and 7 (export per role).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.config.profile import CacheGroup
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.provenance import finalization_manifest, json_object, probe_manifest
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.documents import SourceDocument
from fpmsdk.recommendation.config import RecommendConfig

WORKER_SCHEMA = "aisimulate-onboarding-worker/v1"
PILOT = "pilot"


def is_single_role(request: SupportRequest) -> bool:
    """Whether the request measures prefill or decode alone, so that nothing executable can be exported."""
    return request.worker_type in ("prefill", "decode")


def generated_configurations(request: SupportRequest, folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations of a request by path below its plan folder.

    Parameters
    ----------
    request: with a version label.
    folder: the plan folder, absolute; its `systems` is what the configurations read.

    Returns
    -------
    `predict/pilot.yaml` and `recommend/pilot.yaml`, or `worker.yaml` for a single role.

    Raises
    ------
    OnboardError: the profile and the evidence it rests on contradict each other.
    """
    systems = [str(folder / "systems")]
    engine: dict[str, Any] = {
        "mode": "aggregated",
        "model": request.identity.model,
        "hardware": request.identity.gpu,
        "backend": request.identity.framework,
        "backend_version": request.identity.framework_version,
        "systems_paths": systems,
        "context_length": request.search.context_length,
    }
    if request.fpm_profile is not None:
        engine["fpm_profile"] = request.fpm_profile.model_dump(mode="json")
    worker = _worker(request)
    if is_single_role(request):
        worker["timing"]["systems_paths"] = systems
        workers = {request.worker_type: worker | {"parallelism": request.parallelism()}}
        return {
            "worker.yaml": {
                "schema_version": WORKER_SCHEMA,
                "worker_type": request.worker_type,
                "serving_mode": "disaggregated",
                "engine": engine | {"mode": "disaggregated", "workers": workers},
                "collection": request.collection_settings(),
            }
        }
    example = _example(request)
    prediction = worker | {"parallelism": request.parallelism()}
    recommendation = worker | {"parallelism": {"preset": [request.parallelism()]}}
    predicted = example | {"engine": engine | {"workers": {"aggregated": prediction}}}
    searched = example | {
        "engine": engine | {"workers": {"aggregated": recommendation}},
        "optimization": {
            "target": request.search.objective,
            # What this one worker takes, not what somebody owns.
            "constraints": {"max_candidate_gpus": request.worker_gpus},
        },
        "optimizer": {"algorithm": "random", "max_trials": 1, "parallelism": 1, "seed": request.search.seed},
    }
    # What is written here is what `predict` and `recommend` read.
    SourceDocument(predicted, f"predict/{PILOT}.yaml").checked(PredictConfig)
    RecommendConfig.from_source(SourceDocument(searched, f"recommend/{PILOT}.yaml"))
    return {f"predict/{PILOT}.yaml": predicted, f"recommend/{PILOT}.yaml": searched}


def _example(request: SupportRequest) -> dict[str, Any]:
    workload = request.workload
    return {
        "traffic": {
            "source": {
                "type": "synthetic",
                "input_tokens": workload.input_tokens,
                "output_tokens": workload.output_tokens,
            },
            "load": {"type": "concurrency", "concurrency": workload.concurrency},
            "stop": {"requests": workload.request_count},
        },
        "evaluation": {"sla": {"ttft_ms": workload.slo.ttft_ms, "itl_ms": workload.slo.tpot_ms}},
    }


def _worker(request: SupportRequest) -> dict[str, Any]:
    timing: dict[str, Any] = {
        "type": "default",
        "estimation_mode": "fpm_interpolation",
        "fallback_policy": "deny",
    }
    worker = {"scheduler": request.scheduler_limits(), "timing": timing}
    cache: dict[str, Any] = {}
    if request.collection.gpu_memory_utilization is not None:
        cache["capacity"] = {"memory_fraction": request.collection.gpu_memory_utilization}
    deployment = request.profile_deployment()
    if deployment is not None:
        timing["estimator_config"] = {"fpm_interpolation": {"method": "direct"}}
        if deployment.resources.cache_layout == "grouped":
            cache["prefix_caching"] = False
        elif (block := measured_block_tokens(request)) is not None:
            cache["block_size"] = block
    if cache:
        worker["kv_cache"] = cache
    return worker


def measured_block_tokens(request: SupportRequest) -> int | None:
    """Block size, in tokens, that was measured for a profile of linear cache; None when nothing was measured.

    A probe always measures groups. A linear profile is one whose groups could be told as a rate, and then they all have
    one block size, which replay must use.

    Raises
    ------
    OnboardError: the measured groups are missing, or are not those of the profile.
    """
    assert request.fpm_profile is not None
    noted = json_object(request.fpm_profile.provenance).get("measured_cache_groups")
    probe = probe_manifest(request)
    if probe is None:
        finalized = finalization_manifest(request)
        if finalized is None or "runtime_probe" not in finalized:
            if noted is not None:
                raise _contradiction("measured_cache_groups are noted, but no runtime probe measured them")
            return None
        groups = _observed_groups(finalized["runtime_probe"])
        if not isinstance(noted, list) or _geometry(groups) != _geometry(_groups(noted)):
            raise _contradiction("measured_cache_groups differ from what the runtime probe observed")
        _require_rate(request, groups)
    else:
        groups = _observed_groups(probe)
    return groups[0].block_size_tokens if linear_rate(groups) is not None else None


def linear_rate(groups: list[CacheGroup]) -> int | None:
    """Bytes per token of measured groups when a linear cache says the same as they; None otherwise.

    >>> group = CacheGroup(name="a", kind="attention", num_layers=2, block_size_tokens=16, page_size_bytes=1024)
    >>> linear_rate([group, group.model_copy(update={"name": "b"})])
    128
    """
    blocks = {group.block_size_tokens for group in groups}
    if len(blocks) != 1 or any(group.kind != "attention" or group.sliding_window is not None for group in groups):
        return None
    block = blocks.pop()
    rate, rest = divmod(sum(group.page_size_bytes for group in groups), block)
    return rate if block > 1 and not rest else None


def _observed_groups(probe: Any) -> list[CacheGroup]:
    observed = probe.get("observed_resources") if isinstance(probe, Mapping) else None
    groups = observed.get("cache_groups") if isinstance(observed, Mapping) else None
    if not isinstance(groups, list) or not groups:
        raise _contradiction("the runtime probe has no observed cache_groups")
    return _groups(groups)


def _groups(values: list[Any]) -> list[CacheGroup]:
    try:
        return [CacheGroup.model_validate(value) for value in values]
    except ValueError as fault:
        raise _contradiction(f"malformed measured cache groups: {fault}") from None


def _geometry(groups: list[CacheGroup]) -> list[tuple[Any, ...]]:
    # Names and order carry no geometry.
    return sorted(
        (group.kind, group.num_layers, group.block_size_tokens, group.page_size_bytes, group.sliding_window or 0)
        for group in groups
    )


def _require_rate(request: SupportRequest, groups: list[CacheGroup]) -> None:
    deployment = request.profile_deployment()
    assert deployment is not None
    stated = deployment.resources.kv_bytes_per_token
    if (rate := linear_rate(groups)) != stated:
        raise _contradiction(f"kv_bytes_per_token {stated} is not that of the measured groups, {rate}")


def _contradiction(reason: str) -> OnboardError:
    return OnboardError(
        f"fpm_profile: {reason}; use the profile as it was imported or finalised", "fpm_profile.provenance"
    )
