"""The models and sized workers of a compiled configuration.

Source: predict-recommend.md section 4 (steps 4 and 5), engine-and-replay.md sections 1.5 and 1.6.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from fpmsdk.errors import ConfigError, TimingError
from fpmsdk.launch import EngineLaunchConfig
from fpmsdk.launch.capacity import MEMORY_INPUTS, capacity_of_estimate, memory_estimate
from fpmsdk.prediction.compile import ReplayInputs, RoleInputs
from fpmsdk.prediction.compile.timing import canonical_timing
from fpmsdk.prediction.unready import reason_of_unready

if TYPE_CHECKING:
    from fpmsdk.perfmodel.model import ForwardPassPerfModel


class ModelCache(Struct):
    """Models by canonical configuration, shared by predictions of one process; safe to use from several threads.

    A model that counts coverage is built anew for every prediction: its counters are of that run alone.
    """

    _models: dict[bytes, ForwardPassPerfModel] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, config: Mapping[str, Any]) -> ForwardPassPerfModel:
        """The model of a configuration.

        Raises
        ------
        TimingError: it cannot price a pass; says why and what to do.
        """
        interpolation = (config.get("estimator_config") or {}).get("fpm_interpolation") or {}
        if interpolation.get("collect_coverage"):
            return _ready(config)
        key = msgspec.json.encode(config, order="deterministic")
        with self._lock:
            if key not in self._models:
                self._models[key] = _ready(config)
            return self._models[key]


class SizedRole(Struct, frozen=True):
    """One kind of worker, ready to be replayed.

    Attributes
    ----------
    model: what prices the passes; None for a formula.
    timing: the `timing` argument of a replay.
    memory: how the memory of one rank is shared out, where it decided the size of the cache.
    """

    launch: EngineLaunchConfig
    model: ForwardPassPerfModel | None
    timing: Any
    num_workers: int
    memory: Mapping[str, Any] | None = None

    @property
    def kv_tokens(self) -> int:
        """Tokens in the caches of all workers of a linear layout."""
        engine = self.launch.engine
        return engine.num_gpu_blocks * engine.block_size * self.launch.dp_size * self.num_workers


def sized_roles(inputs: ReplayInputs, models: ModelCache) -> dict[str, SizedRole]:
    """Every role with its model, and a cache as large as its memory leaves room for.

    Raises
    ------
    TimingError: a model cannot price a pass.
    ConfigError: launch and timing contradict each other; every contradiction is told.
    InfeasibleMemoryError: nothing is left for the cache.
    """
    return {name: _sized(name, role, models) for name, role in inputs.roles.items()}


def _sized(name: str, role: RoleInputs, models: ModelCache) -> SizedRole:
    model = models.get(role.timing) if role.is_estimated else None
    launch, memory = dict(role.launch), None
    if role.capacity_config is not None:
        canonical = canonical_timing(role.capacity_config)
        given = {key: launch[key] for key in MEMORY_INPUTS if key in launch}
        memory = memory_estimate(canonical, launch["engine"], given)
        if canonical["fpm_profile"] is None:
            launch["engine"] = launch["engine"] | capacity_of_estimate(memory, canonical, launch["engine"])
    config = EngineLaunchConfig.from_mapping(launch)
    if model is not None:
        config = model.sized_launch(config)
        mismatches = model.engine_launch_mismatches(config.to_dict())
        if mismatches:
            raise ConfigError(
                f"engine.workers.{name}: the model does not fit the deployment: {'; '.join(mismatches)}",
                f"engine.workers.{name}",
            )
    return SizedRole(config, model, role.timing if model is None else model, role.num_workers, memory)


def _ready(config: Mapping[str, Any]) -> ForwardPassPerfModel:
    from fpmsdk.perfmodel.model import ForwardPassPerfModel  # formulas do without

    model = ForwardPassPerfModel.best_available(dict(config))
    reason = reason_of_unready(model)
    if reason is not None:
        raise TimingError(reason)
    return model
