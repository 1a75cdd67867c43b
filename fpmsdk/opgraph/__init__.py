"""From a checkpoint's `config.json` and a deployment to the operators of its forward passes.

Data only: no latency is computed and no performance table is read here. Names load on first use: whoever only reads a
checkpoint's configuration loads no operators. Source: op-level.md section 4.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "Deployment": "fpmsdk.opgraph.deployment",
    "EngineSpec": "fpmsdk.opgraph.spec",
    "ModelConfig": "fpmsdk.opgraph.model_config",
    "Precision": "fpmsdk.opgraph.precision",
    "build_graph": "fpmsdk.opgraph.spec",
    "infer_precision": "fpmsdk.opgraph.precision",
    "read_model_config": "fpmsdk.opgraph.model_config",
}

__all__ = [
    "Deployment",
    "EngineSpec",
    "ModelConfig",
    "Precision",
    "build_graph",
    "infer_precision",
    "read_model_config",
]

if TYPE_CHECKING:
    from fpmsdk.opgraph.deployment import Deployment
    from fpmsdk.opgraph.model_config import ModelConfig, read_model_config
    from fpmsdk.opgraph.precision import Precision, infer_precision
    from fpmsdk.opgraph.spec import EngineSpec, build_graph


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fpmsdk.opgraph' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
