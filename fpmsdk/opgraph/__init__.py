"""From a checkpoint's `config.json` and a deployment to the operators of its forward passes.

Data only: no latency is computed and no performance table is read here. Source: op-level.md section 4.
"""

from fpmsdk.opgraph.deployment import Deployment
from fpmsdk.opgraph.model_config import ModelConfig, read_model_config
from fpmsdk.opgraph.precision import Precision, infer_precision
from fpmsdk.opgraph.spec import EngineSpec, build_graph

__all__ = [
    "Deployment",
    "EngineSpec",
    "ModelConfig",
    "Precision",
    "build_graph",
    "infer_precision",
    "read_model_config",
]
