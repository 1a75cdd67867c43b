"""Whether one request of the full context fits into the cache that a profile leaves. Source: onboarding.md section 5.

Planning arithmetic on one rank; the serving engine has the last word.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.config.profile import DeploymentProfile
from fpmsdk.errors import ConfigError, OnboardError
from fpmsdk.launch.cache_budget import estimate_cache_budget
from fpmsdk.onboard.request import SupportRequest

_RESOURCES = "fpm_profile.deployments.resources"
# What tells of groups and their peak has no meaning for a declared rate.
_GROUPED_ONLY = ("cache_layout", "cache_groups", "request_peak_cache_bytes")


def admitted_resources(request: SupportRequest, capacity_bytes: int) -> dict[str, Any]:
    """The cache budget of the request's deployment, once a request of the full context was seen to fit into it.

    Parameters
    ----------
    request: with a profile.
    capacity_bytes: memory of one GPU.

    Returns
    -------
    The `resources` of a plan; `memory_source: pending` and nothing else while the memory is not known.

    Raises
    ------
    OnboardError: the context does not fit, nothing is left for the cache, or the architecture of a profile with grouped
        or observed memory cannot be verified on its checkpoint.
    """
    deployment = request.profile_deployment()
    assert deployment is not None
    resources = deployment.resources
    if resources.memory_source == "pending":
        return {"memory_source": "pending", "simulation_ready": False}
    is_declared_rate = resources.memory_source == "declared" and resources.cache_layout == "linear"
    try:
        budget = _budget(request, deployment, capacity_bytes, verified=not is_declared_rate)
    except ConfigError as fault:
        raise OnboardError(str(fault), fault.path) from None
    _require_fit(request, deployment, budget)
    if is_declared_rate:
        for name in _GROUPED_ONLY:
            del budget[name]
        # Such plans have always told of reserved bytes, of which a profile has none.
        budget["memory_breakdown"]["reserved_bytes"] = 0
    return budget | {"kvcache_quant_mode": deployment.kv_cache_dtype}


def _budget(
    request: SupportRequest, deployment: DeploymentProfile, capacity_bytes: int, *, verified: bool
) -> dict[str, Any]:
    limits = request.scheduler_limits()
    config = request.pricing_identity(deployment)
    budget = {
        "total_gpu_capacity_bytes": capacity_bytes,
        "memory_fraction_kind": "of_total",
        "memory_fraction_value": request.collection.memory_fraction,
        "max_num_tokens": limits["max_batched_tokens"],
        "max_batch_size": limits["max_sequences"],
        "context_length": request.search.context_length,
    }
    if verified:
        from fpmsdk.perfmodel.model import ForwardPassPerfModel  # reads the checkpoint's config.json

        return ForwardPassPerfModel.estimate_cache_budget(config, budget)
    return estimate_cache_budget(config | {"nextn": 0, "speculation": None}, budget)


def _require_fit(request: SupportRequest, deployment: DeploymentProfile, budget: dict[str, Any]) -> None:
    resources, context = deployment.resources, request.search.context_length
    if resources.cache_layout == "grouped":
        needed, found, unit = budget["request_peak_cache_bytes"], budget["total_kv_size_bytes"], "bytes"
    else:
        # A running engine has room for exactly what it reported; a declaration leaves room for the next token.
        needed = context if resources.memory_source == "runtime" else context + 1
        found, unit = budget["total_kv_size_tokens"], "tokens"
    if found < needed:
        raise OnboardError(
            f"{_RESOURCES}: insufficient KV capacity for search.context_length {context}: one request needs {needed} "
            f"{unit} of one rank's cache, the {resources.memory_source} memory leaves {found}; lower the context, or "
            "raise collection.gpu_memory_utilization or the sizes of the topology",
            _RESOURCES,
        )
