"""What a configuration asks of the simulation: requests, and per role the engine launch and what prices its passes.

Source: predict-recommend.md sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fpmsdk.errors import ConfigError
from fpmsdk.prediction.compile.launch import launch_of
from fpmsdk.prediction.compile.shape import check_shapes
from fpmsdk.prediction.compile.snapshot import restored_config
from fpmsdk.prediction.compile.timing import timing_config, timing_of
from fpmsdk.prediction.config import PredictConfig

__all__ = ["ReplayInputs", "RoleInputs", "compile_config", "replay_options", "timing_config", "timing_of"]


class RoleInputs(Struct, frozen=True):
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


class ReplayInputs(Struct, frozen=True):
    """The workers by role, and the options of a replay that depend neither on them nor on the requests."""

    roles: Mapping[str, RoleInputs]
    options: Mapping[str, Any]


def compile_config(config: PredictConfig) -> ReplayInputs:
    """The simulation that a configuration describes; nothing is read but the model's own configuration.

    Raises
    ------
    ConfigError: the profile does not support the deployment, sizes do not divide the model, or a saved model is of
        another deployment.
    StateSnapshotError: a saved model is missing or damaged.
    """
    check_shapes(config)
    roles = {role: _role(config, role) for role in config.roles}
    return ReplayInputs(roles, replay_options(config))


def replay_options(config: PredictConfig) -> dict[str, Any]:
    """Options of the replay that depend neither on the workers nor on the requests."""
    bounds = config.evaluation.sla
    return {
        "scheduler_rules": config.execution.scheduler_rules,
        "mixed_pass_pricing": config.execution.mixed_pass_pricing,
        "sla": None if bounds is None or not bounds.is_bound else bounds.model_dump(),
    }


def _role(config: PredictConfig, role: str) -> RoleInputs:
    worker = config.roles[role]
    timing = timing_of(config, role)
    if timing.get("estimation_mode") == "fpm_learned" and config.execution.mixed_pass_pricing == "separate":
        raise ConfigError(
            "execution.mixed_pass_pricing separate prices each part of a mixed pass for itself, and fpm_learned prices "
            "whole passes; use composed",
            "execution.mixed_pass_pricing",
        )
    if (timing.get("estimator_config") or {}).get("state_snapshot") is not None:
        timing = restored_config(timing, role)
    capacity_config = None
    if worker.kv_cache.num_blocks is None:
        capacity_config = timing if "type" not in timing else timing_config(config, role)
    return RoleInputs(launch_of(config, role), timing, capacity_config, worker.parallelism.replicas)
