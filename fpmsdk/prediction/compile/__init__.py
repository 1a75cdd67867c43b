"""What a configuration asks of the simulation: requests, and per role the engine launch and what prices its passes.

Source: predict-recommend.md sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpmsdk.prediction.compile.launch import launch_of
from fpmsdk.prediction.compile.shape import check_shapes
from fpmsdk.prediction.compile.timing import timing_config, timing_of
from fpmsdk.prediction.config import PredictConfig

__all__ = ["ReplayInputs", "RoleInputs", "compile_config", "timing_config", "timing_of"]


@dataclass(frozen=True)
class RoleInputs:
    """One kind of worker.

    Attributes
    ----------
    launch: of one worker, without the cache that follows from its memory.
    timing: the canonical configuration of the estimator, or `{type: fixed | polynomial, ...}`.
    capacity_config: the canonical configuration that sizes the cache; None where blocks are given.
    num_workers: replicas.
    """

    launch: Mapping[str, Any]
    timing: Mapping[str, Any]
    capacity_config: Mapping[str, Any] | None
    num_workers: int

    @property
    def is_estimated(self) -> bool:
        """Whether an estimator prices the passes."""
        return "type" not in self.timing


@dataclass(frozen=True)
class ReplayInputs:
    """The workers by role, and the options of a replay that depend neither on them nor on the requests."""

    roles: Mapping[str, RoleInputs]
    options: Mapping[str, Any]


def compile_config(config: PredictConfig) -> ReplayInputs:
    """The simulation that a configuration describes; nothing is read but the model's own configuration.

    Raises
    ------
    ConfigError: the profile does not support the deployment, or sizes do not divide the model.
    """
    check_shapes(config)
    roles = {role: _role(config, role) for role in config.roles}
    bounds = config.evaluation.sla
    options = {
        "scheduler_rules": config.execution.scheduler_rules,
        "mixed_pass_pricing": config.execution.mixed_pass_pricing,
        "sla": None if bounds is None or not bounds.is_bound else bounds.model_dump(),
    }
    return ReplayInputs(roles, options)


def _role(config: PredictConfig, role: str) -> RoleInputs:
    worker = config.roles[role]
    timing = timing_of(config, role)
    sized = worker.kv_cache.num_blocks is not None
    capacity_config = None if sized else timing_config(config, role)
    return RoleInputs(launch_of(config, role), timing, capacity_config, worker.parallelism.replicas)
