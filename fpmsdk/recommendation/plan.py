"""A search before it begins: the space, the algorithm, what is wanted, and everything that decides the result.

Source: predict-recommend.md sections 6 to 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from fpmsdk.recommendation.branches import Branch, Space
from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.inputs import Inputs
from fpmsdk.recommendation.objectives import MIN_GPUS, Objective
from fpmsdk.recommendation.search.choice import Optimizer, Strategy, rounds_of
from fpmsdk.recommendation.search.rounds import Rounds, Suggestion
from fpmsdk.recommendation.shards import WHOLE, Shard
from fpmsdk.version import __version__

# Settings that change how long a sweep takes or when it is given up, never what a candidate is worth.
_UNDECIDING = ("time_budget_seconds", "candidate_timeout_seconds")


class Limits(Struct, frozen=True):
    """What a search may use of the host: section `execution.resources`.

    workers: candidates evaluated at once; None for all cores but one.
    memory_bytes: address space of a worker process; None for no limit.
    start_seconds: until a worker is ready.
    """

    workers: int | None = None
    memory_bytes: int | None = None
    start_seconds: float = 60.0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Limits:
        """The limits that a configuration states.

        >>> Limits.of({"execution": {"resources": {"cpu_limit": 3, "memory_limit_gb": "auto"}}})
        Limits(workers=3, memory_bytes=None, start_seconds=60.0)
        """
        resources = (document.get("execution") or {}).get("resources") or {}
        workers, memory_gb = resources.get("cpu_limit"), resources.get("memory_limit_gb")
        return cls(
            workers if isinstance(workers, int) else None,
            int(memory_gb * 2**30) if isinstance(memory_gb, int | float) else None,
            resources.get("initialization_timeout_seconds", 60.0),
        )


class Plan(Struct, frozen=True, dict=True):
    """One search.

    document: the configuration, as read.
    optimizer: its section `optimizer`.
    space: branches of legal deployments, and those that were left out with their reasons.
    strategy: how it is searched.
    objective: what candidates are compared by.
    materialise: the concrete configuration of a point of a branch.
    inputs: what else is read, with digests.
    shard: the part that is searched here.
    notes: what the user should know before it begins, one line each.
    """

    document: Mapping[str, Any]
    optimizer: Optimizer
    space: Space
    strategy: Strategy
    objective: Objective
    materialise: Callable[[Branch, Sample], dict[str, Any]]
    inputs: Inputs
    shard: Shard = WHOLE
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def head(self) -> dict[str, Any]:
        """What has to be the same where a sweep is continued or merged; `shard` tells the parts apart."""
        config = dict(self.document)
        optimizer = config.get("optimizer") or {}
        config["optimizer"] = {name: value for name, value in optimizer.items() if name not in _UNDECIDING}
        return {
            "version": __version__,
            "config": config,
            "inputs": self.inputs,
            "strategy": {"name": self.strategy.name, "implementation": self.strategy.implementation},
            "shard": str(self.shard),
        }

    @property
    def planned(self) -> int | None:
        """How many candidates this part has; None where that is not known."""
        whole = self.strategy.planned
        return None if whole is None else len(range(self.shard.number - 1, whole, self.shard.count))

    def rounds(self) -> Rounds:
        """What is suggested, from the beginning."""
        return rounds_of(
            self.strategy,
            self.space.branches,
            seed=self.optimizer.seed,
            objectives=len(self.objective.names),
            cheapest_first=self.objective.target == MIN_GPUS,
        )

    def concrete(self, suggestion: Suggestion) -> dict[str, Any]:
        """The configuration of a candidate."""
        return self.materialise(self.space.branches[suggestion.branch], suggestion.sample)

    def used_gpus(self, suggestion: Suggestion) -> int:
        """GPUs of all workers of a candidate."""
        return self.space.branches[suggestion.branch].arms[suggestion.sample.arm].gpus

    def fingerprint(self, suggestion: Suggestion) -> str:
        """The identity of a candidate."""
        sample = suggestion.sample
        return sample.fingerprint(self.space.branches[suggestion.branch].arms[sample.arm].parallelism)
