"""Forward-pass performance models of LLM inference engines: predict, tune online, replay.

Names load on first use, so that importing the package costs next to nothing: a process that only estimates
never loads pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fpmsdk.version import __version__ as __version__

# Where each public name lives; the whole stable surface of the package.
_HOME = {
    "EngineLaunchConfig": "fpmsdk.launch",
    "ForwardPassPerfModel": "fpmsdk.perfmodel.model",
    "ForwardPassPerfModelConfig": "fpmsdk.config",
    "FpmBatch": "fpmsdk.metrics",
    "ReplayReport": "fpmsdk.replay",
    "Trace": "fpmsdk.replay",
    "config_engine_launch_mismatches": "fpmsdk.launch",
    "inspect_state_snapshot": "fpmsdk.perfmodel.inspection",
    "materialize_engine_launch_config": "fpmsdk.launch",
    "predict": "fpmsdk.prediction.api",
    "recommend": "fpmsdk.recommendation.api",
    "replay_trace": "fpmsdk.replay",
}

__all__ = [
    "EngineLaunchConfig",
    "ForwardPassPerfModel",
    "ForwardPassPerfModelConfig",
    "FpmBatch",
    "ReplayReport",
    "Trace",
    "config_engine_launch_mismatches",
    "errors",
    "inspect_state_snapshot",
    "materialize_engine_launch_config",
    "predict",
    "recommend",
    "replay_trace",
]

if TYPE_CHECKING:
    from fpmsdk import errors
    from fpmsdk.config import ForwardPassPerfModelConfig
    from fpmsdk.launch import (
        EngineLaunchConfig,
        config_engine_launch_mismatches,
        materialize_engine_launch_config,
    )
    from fpmsdk.metrics import FpmBatch
    from fpmsdk.perfmodel.inspection import inspect_state_snapshot
    from fpmsdk.perfmodel.model import ForwardPassPerfModel
    from fpmsdk.prediction.api import predict
    from fpmsdk.recommendation.api import recommend
    from fpmsdk.replay import ReplayReport, Trace, replay_trace


def __getattr__(name: str) -> Any:
    if name == "errors":
        value: Any = import_module("fpmsdk.errors")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'fpmsdk' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
