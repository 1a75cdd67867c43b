"""Whether a worker holds one sequence of the longest length: tokens that its cache has, and tokens that it needs.

Source: predict-recommend.md sections 5.3 and 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpmsdk.config.profile import DeploymentProfile, FpmModelProfile
from fpmsdk.errors import FpmSdkError, InfeasibleMemoryError
from fpmsdk.launch.cache_budget import request_bytes
from fpmsdk.launch.capacity import FRACTION_OF, derived_capacity
from fpmsdk.launch.fields import BLOCK_SIZES
from fpmsdk.perfmodel.model import ForwardPassPerfModel
from fpmsdk.recommendation.domains import Choices, Domain
from fpmsdk.recommendation.parallelism import Sizes

# Settings of the engine that change how much memory the model takes.
_MODEL_FIELDS = (
    "nextn",
    "gemm_quant_mode",
    "moe_quant_mode",
    "fmha_quant_mode",
    "kvcache_quant_mode",
    "comm_quant_mode",
    "attention_backend",
    "moe_backend",
    "enable_eplb",
    "wideep_num_slots",
)


@dataclass(frozen=True)
class Verdict:
    """Whether a worker is viable.

    rule: what it breaks, in one sentence; None when it is viable.
    needed_tokens, available_tokens: of the cache of one rank, where the rule is about them.
    advice: the nearest change of this worker that would do, such as `tensor 4`.
    """

    rule: str | None = None
    needed_tokens: int | None = None
    available_tokens: int | None = None
    advice: str | None = None


@dataclass(frozen=True)
class RoleLimits:
    """What the workers of one role have in common, whatever their sizes.

    worker: its configuration in a prediction.
    domains: of its knobs, by the path below the worker.
    context_tokens: the longest sequence.
    """

    role: str
    worker: Mapping[str, Any]
    domains: Mapping[str, Domain]
    context_tokens: int

    def knob(self, path: str, default: Any) -> Domain:
        """What a knob may be; its default where nothing is said."""
        return self.domains.get(path) or Choices((default,))


class CacheFilter:
    """Judges the workers of one backend.

    Parameters
    ----------
    engine: section `engine` of a prediction with that backend.
    profile: the measured deployments, None where memory is that of a model of the operators.

    Source: predict-recommend.md section 6.3.
    """

    def __init__(self, engine: Mapping[str, Any], profile: FpmModelProfile | None) -> None:
        self._engine, self._profile = engine, profile
        self._backend: str = engine["backend"]
        self._known: dict[tuple[str, Sizes], Verdict] = {}

    def judge(self, limits: RoleLimits, sizes: Sizes) -> Verdict:
        """Whether a worker of a role holds one sequence of the longest length, at the largest limits searched.

        Parameters
        ----------
        sizes: of the worker; how many there are makes no difference.
        """
        key = limits.role, sizes.shape
        if key not in self._known:
            self._known[key] = self._judge(limits, sizes)
        return self._known[key]

    def _judge(self, limits: RoleLimits, sizes: Sizes) -> Verdict:
        deployment = None
        if self._profile is not None:
            deployment = self._deployment(self._profile, limits, sizes)
            if deployment is None:
                return Verdict(f"the profile has no deployment of {limits.role} workers with {sizes.shape}")
            if fault := _envelope_fault(deployment, limits) or self._cache_fault(deployment, limits):
                return Verdict(fault)
        try:
            return self._capacity(limits, sizes, deployment)
        except InfeasibleMemoryError as fault:
            advice = None if fault.smallest_tp is None else f"tensor {fault.smallest_tp}"
            return Verdict(str(fault), limits.context_tokens, 0, advice)
        except FpmSdkError as fault:
            return Verdict(" ".join(str(fault).split()))

    def _capacity(self, limits: RoleLimits, sizes: Sizes, deployment: DeploymentProfile | None) -> Verdict:
        if deployment is not None:
            deployment.resources.require_memory()
        tokens = _fixed_tokens(limits, self._backend)
        if tokens is None:
            found = self._derived(limits, sizes, deployment)
            if "kv_cache_capacity_bytes" in found:
                assert deployment is not None
                return _bytes_verdict(found["kv_cache_capacity_bytes"], deployment, limits)
            tokens = found["num_gpu_blocks"]
        if tokens > limits.context_tokens:
            return Verdict()
        return Verdict(
            f"the cache of one rank holds {tokens} tokens, more than the {limits.context_tokens} of one sequence of "
            "context_length are needed",
            limits.context_tokens + 1,
            tokens,
            f"context_length {tokens - 1}" if tokens > 1 else None,
        )

    def _derived(self, limits: RoleLimits, sizes: Sizes, deployment: DeploymentProfile | None) -> dict[str, Any]:
        resources = None if deployment is None else deployment.resources
        name, default = FRACTION_OF[self._backend]
        tokens = limits.knob("scheduler.max_batched_tokens", resources.max_num_tokens if resources else 8192)
        sequences = limits.knob("scheduler.max_sequences", resources.max_batch_size if resources else 256)
        scheduler = {
            "max_num_batched_tokens": tokens.highest,
            "max_num_seqs": sequences.highest,
            "max_model_len": limits.context_tokens,
            "block_size": 1,  # so that blocks are tokens
        }
        memory = {name: limits.knob("kv_cache.capacity.memory_fraction", default).lowest}
        if graphs := _capacity_of(limits.worker).get("cuda_graph_reserved_bytes"):
            memory["cuda_graph_reserved_bytes"] = graphs
        config = ForwardPassPerfModel.normalize_config(self._identity(limits, sizes))
        return derived_capacity(config, scheduler, memory)

    def _identity(self, limits: RoleLimits, sizes: Sizes) -> dict[str, Any]:
        """The deployment as far as its memory depends on it: whatever prices its passes, they take as much."""
        timing = limits.worker.get("timing") or {}
        given = {name: self._engine.get(name) for name in _MODEL_FIELDS}
        given |= {name: timing[name] for name in _MODEL_FIELDS if timing.get(name) is not None}
        context = limits.worker.get("parallelism") or {}
        roots = timing.get("systems_paths") or self._engine.get("systems_paths")
        experts = sizes.moe_tensor * sizes.moe_expert > 1
        given |= {
            "model": self._engine["model"],
            "system": limits.worker.get("hardware") or self._engine["hardware"],
            "backend": self._backend,
            "backend_version": self._engine.get("backend_version"),
            "worker_type": limits.role,
            "tp": sizes.tensor,
            "pp": sizes.pipeline,
            "attention_dp": sizes.attention_data,
            "moe_tp_size": sizes.moe_tensor if experts else None,
            "moe_ep_size": sizes.moe_expert if experts else None,
            "cp_size": context.get("prefill_context"),
            "dcp": context.get("decode_context"),
            "systems_paths": [roots] if isinstance(roots, str) else roots,
            "fpm_profile": None if self._profile is None else self._engine["fpm_profile"],
        }
        return {name: value for name, value in given.items() if value is not None}

    def _deployment(self, profile: FpmModelProfile, limits: RoleLimits, sizes: Sizes) -> DeploymentProfile | None:
        system = limits.worker.get("hardware") or self._engine["hardware"]
        asked = (sizes.tensor, sizes.pipeline, sizes.attention_data, sizes.moe_tensor, sizes.moe_expert, 1)
        for deployment in profile.deployments:
            where = (deployment.system, deployment.backend_version)
            same = where == (system, self._engine.get("backend_version")) and deployment.sizes == asked
            if same and deployment.worker_type in (None, limits.role):
                return deployment
        return None

    def _cache_fault(self, deployment: DeploymentProfile, limits: RoleLimits) -> str | None:
        """What a profile forbids of the cache."""
        resources, cache = deployment.resources, limits.worker.get("kv_cache") or {}
        fixed = _capacity_of(limits.worker).get("type") == "fixed"
        if resources.runtime_memory is not None and fixed:
            return "the memory of the profile is measured: leave kv_cache.capacity type fixed out"
        if resources.cache_layout != "grouped":
            return None
        rules = (
            (limits.role != "aggregated", "serves aggregated deployments only"),
            (cache.get("prefix_caching", True), "needs kv_cache.prefix_caching: false"),
            (fixed, "takes no kv_cache.capacity of type fixed"),
            (cache.get("bytes_per_token", "auto") != "auto", "takes no kv_cache.bytes_per_token"),
            (self._engine.get("nextn") or self._engine.get("speculation"), "takes no speculation"),
        )
        return next((f"the grouped cache of the profile {rule}" for broken, rule in rules if broken), None)


def _envelope_fault(deployment: DeploymentProfile, limits: RoleLimits) -> str | None:
    """Which searched limit of the scheduler a profile does not answer for."""
    resources = deployment.resources
    for name, bound in (("max_batched_tokens", resources.max_num_tokens), ("max_sequences", resources.max_batch_size)):
        domain = limits.knob(f"scheduler.{name}", bound)
        if resources.runtime_memory is not None and (domain.lowest, domain.highest) != (bound, bound):
            return (
                f"scheduler.{name} must be the {bound} that memory was measured with, found {_span(domain)}; leave it "
                "out to take it from the profile"
            )
        if domain.highest > bound:
            return (
                f"scheduler.{name} may be at most the {bound} of the profile, found {_span(domain)}; leave it out to "
                "take it from the profile"
            )
    return None


def _span(domain: Domain) -> str:
    return str(domain.highest) if domain.count == 1 else f"{domain.lowest} to {domain.highest}"


def _capacity_of(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    return (worker.get("kv_cache") or {}).get("capacity") or {}


def _fixed_tokens(limits: RoleLimits, backend: str) -> int | None:
    """Tokens of a cache of stated size, at its smallest; None where the size follows from memory."""
    capacity = _capacity_of(limits.worker)
    if capacity.get("type", "default") != "fixed":
        return None
    block_tokens = int(limits.knob("kv_cache.block_size", BLOCK_SIZES[backend]).lowest)
    if capacity.get("blocks") is not None:
        return int(capacity["blocks"]) * block_tokens
    block_bytes = block_tokens * int((limits.worker.get("kv_cache") or {})["bytes_per_token"])
    return int(capacity["bytes"]) // block_bytes * block_tokens


def _bytes_verdict(available: int, deployment: DeploymentProfile, limits: RoleLimits) -> Verdict:
    resources = deployment.resources
    chunk = int(limits.knob("scheduler.max_batched_tokens", resources.max_num_tokens).highest)
    needed = request_bytes(resources, limits.context_tokens, chunk)
    if available >= needed:
        return Verdict()
    return Verdict(
        f"the cache of one rank has {available} bytes, one sequence of {limits.context_tokens} tokens takes up to "
        f"{needed}"
    )
