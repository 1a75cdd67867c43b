"""Whether a worker holds one sequence of the longest length: tokens that its cache has, and tokens that it needs.

Source: predict-recommend.md sections 5.3 and 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from pydantic import ValidationError

from fpmsdk.config.profile import DeploymentProfile, FpmModelProfile
from fpmsdk.documents.strict import faults
from fpmsdk.errors import FpmSdkError, InfeasibleMemoryError
from fpmsdk.launch.cache_budget import request_bytes
from fpmsdk.launch.capacity import FRACTION_OF, check_system, derived_capacity
from fpmsdk.prediction.compile.launch import launch_of
from fpmsdk.prediction.compile.timing import canonical_timing, timing_config, timing_of
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.recommendation.domains import Choices, Domain
from fpmsdk.recommendation.parallelism import Sizes
from fpmsdk.recommendation.paths import put, put_sizes

# A cache is smallest where passes are largest and its share of the memory, or its blocks, are smallest.
_LARGEST = ("scheduler.max_batched_tokens", "scheduler.max_sequences")
_SMALLEST = ("kv_cache.block_size", "kv_cache.capacity.memory_fraction")


class Verdict(Struct, frozen=True):
    """Whether a worker is viable.

    rule: what it breaks, in one sentence; None when it is viable.
    needed_tokens, available_tokens: of the cache of one rank, where the rule is about them.
    advice: the nearest change of this worker that would do, such as `tensor 4`.
    """

    rule: str | None = None
    needed_tokens: int | None = None
    available_tokens: int | None = None
    advice: str | None = None


class CacheFilter:
    """Judges the workers of one mode on one backend.

    Parameters
    ----------
    template: configuration of a prediction with that mode and backend.
    domains: of its knobs, by dotted path.
    context_tokens: the longest sequence, where a role has none of its own.
    profile: the measured deployments; None where memory follows from the model's operators.

    Source: predict-recommend.md section 6.3.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        domains: Mapping[str, Domain],
        context_tokens: int,
        profile: FpmModelProfile | None,
    ) -> None:
        self._template = put(template, "engine.context_length", context_tokens)
        self._domains, self._context, self._profile = domains, context_tokens, profile
        self._known: dict[tuple[str, Sizes], Verdict] = {}

    def judge(self, role: str, sizes: Sizes) -> Verdict:
        """Whether a worker of a role holds one sequence of the longest length, at the largest limits searched.

        Parameters
        ----------
        sizes: of the worker; how many there are makes no difference.
        """
        key = role, sizes.shape
        if key not in self._known:
            self._known[key] = self._judge(*key)
        return self._known[key]

    def _judge(self, role: str, sizes: Sizes) -> Verdict:
        context = self._context
        try:
            config = PredictConfig.model_validate(self._tightest(role, sizes))
            context = config.roles[role].context_length or context
            return self._capacity(config, role, sizes, context)
        except ValidationError as error:
            return Verdict(faults(error)[0])
        except InfeasibleMemoryError as fault:
            advice = None if fault.smallest_tp is None else f"tensor {fault.smallest_tp}"
            return Verdict(_one_line(fault), context + 1, 0, advice)
        except FpmSdkError as fault:
            return Verdict(_one_line(fault))

    def _tightest(self, role: str, sizes: Sizes) -> dict[str, Any]:
        """The prediction whose cache is the smallest of all that are searched."""
        document = put_sizes(self._template, role, sizes)
        for names, end in ((_LARGEST, "highest"), (_SMALLEST, "lowest")):
            for name in names:
                path = f"engine.workers.{role}.{name}"
                if (domain := self._domains.get(path)) is not None:
                    document = put(document, path, getattr(domain, end))
        return document

    def _capacity(self, config: PredictConfig, role: str, sizes: Sizes, context: int) -> Verdict:
        deployment = None
        if self._profile is not None:
            deployment = _deployment(self._profile, config, role, sizes)
            if deployment is None:
                return Verdict(f"the profile has no deployment of {role} workers with {sizes}")
            if fault := self._envelope_fault(deployment, role) or _cache_fault(deployment, config, role):
                return Verdict(fault)
            deployment.resources.require_memory()
        timing = timing_of(config, role)
        if _needs_tables(timing):
            check_system(canonical_timing(timing))
        launch = launch_of(config, role)
        engine = launch["engine"]
        if "num_gpu_blocks" in engine:
            tokens = engine["num_gpu_blocks"] * engine["block_size"]
        else:
            memory = {name: launch[name] for name in _MEMORY if name in launch}
            canonical = canonical_timing(timing_config(config, role))
            # With blocks of one token, blocks are tokens.
            found = derived_capacity(canonical, engine | {"block_size": 1}, memory)
            if "kv_cache_capacity_bytes" in found:
                assert deployment is not None
                needed = request_bytes(deployment.resources, context, engine["max_num_batched_tokens"])
                return _bytes_verdict(found["kv_cache_capacity_bytes"], needed, context)
            tokens = found["num_gpu_blocks"]
        if tokens > context:
            return Verdict()
        return Verdict(
            f"the cache of one rank holds {tokens} tokens, and one sequence of context_length {context} needs more",
            context + 1,
            tokens,
            f"context_length {tokens - 1}" if tokens > 1 else None,
        )

    def _envelope_fault(self, deployment: DeploymentProfile, role: str) -> str | None:
        """Which searched limit of the scheduler a profile does not answer for."""
        resources = deployment.resources
        advice = "leave it out to take it from the profile"
        for name, bound in (
            ("max_batched_tokens", resources.max_num_tokens),
            ("max_sequences", resources.max_batch_size),
        ):
            domain = self._domains.get(f"engine.workers.{role}.scheduler.{name}") or Choices((bound,))
            ends = (domain.lowest, domain.highest)
            found = str(ends[1]) if domain.count == 1 else f"{ends[0]} to {ends[1]}"
            if resources.runtime_memory is not None and ends != (bound, bound):
                return f"scheduler.{name} must be the {bound} that memory was measured with, found {found}; {advice}"
            if domain.highest > bound:
                return f"scheduler.{name} may be at most the {bound} of the profile, found {found}; {advice}"
        return None


_MEMORY = (*(name for name, _ in FRACTION_OF.values()), "cuda_graph_reserved_bytes")


def _deployment(profile: FpmModelProfile, config: PredictConfig, role: str, sizes: Sizes) -> DeploymentProfile | None:
    where = (config.roles[role].hardware or config.engine.hardware, config.engine.backend_version)
    asked = (sizes.tensor, sizes.pipeline, sizes.attention_data, sizes.moe_tensor, sizes.moe_expert, 1)
    for deployment in profile.deployments:
        same = (deployment.system, deployment.backend_version) == where and deployment.sizes == asked
        if same and deployment.worker_type in (None, role):
            return deployment
    return None


def _cache_fault(deployment: DeploymentProfile, config: PredictConfig, role: str) -> str | None:
    """What a profile forbids of the cache."""
    resources, cache = deployment.resources, config.roles[role].kv_cache
    fixed = cache.capacity.type == "fixed"
    if resources.runtime_memory is not None and fixed:
        return "the memory of the profile is measured; leave kv_cache.capacity of type fixed out"
    if resources.cache_layout != "grouped":
        return None
    rules = (
        (role != "aggregated", "serves aggregated deployments only"),
        (cache.prefix_caching, "needs kv_cache.prefix_caching: false"),
        (fixed, "takes no kv_cache.capacity of type fixed"),
        (cache.bytes_per_token != "auto", "takes no kv_cache.bytes_per_token"),
        (config.engine.nextn > 0 or config.engine.speculation is not None, "takes no speculation"),
    )
    return next((f"the grouped cache of the profile {rule}" for broken, rule in rules if broken), None)


def _needs_tables(timing: Mapping[str, Any]) -> bool:
    """Whether passes are priced from tables of a systems root."""
    estimators = timing.get("estimator_config") or {}
    learned = timing.get("estimation_mode") in ("fpm_regression", "fpm_learned")
    return "type" not in timing and not learned and estimators.get("state_snapshot") is None


def _bytes_verdict(available: int, needed: int, context: int) -> Verdict:
    if available >= needed:
        return Verdict()
    return Verdict(
        f"the cache of one rank has {available} bytes, one sequence of context_length {context} takes up to {needed}"
    )


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split())
