"""Search the deployments that serve a workload best: every candidate is a prediction, scored and ranked.

Names load on first use: a process that evaluates candidates loads nothing of what chooses and ranks them.
Source: predict-recommend.md sections 6 to 10.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "Options": "fpmsdk.recommendation.run",
    "Recommendation": "fpmsdk.recommendation.run",
    "explain": "fpmsdk.recommendation.api",
    "merge": "fpmsdk.recommendation.api",
    "planned": "fpmsdk.recommendation.api",
    "recommend": "fpmsdk.recommendation.api",
}

__all__ = ["Options", "Recommendation", "explain", "merge", "planned", "recommend"]

if TYPE_CHECKING:
    from fpmsdk.recommendation.api import explain, merge, planned, recommend
    from fpmsdk.recommendation.run import Options, Recommendation


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fpmsdk.recommendation' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
