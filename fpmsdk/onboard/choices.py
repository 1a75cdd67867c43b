"""Choices of a request, apart from its models so that a command line can offer them without loading those.

Source: onboarding.md section 2.
"""

from typing import Literal

GraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
GraphPolicy = Literal["runtime", "explicit"]
ModelKind = Literal["dense", "moe"]
Objective = Literal[
    "throughput",
    "throughput_per_gpu",
    "throughput_per_user",
    "goodput",
    "goodput_per_gpu",
    "ttft",
    "e2e_latency",
    "pareto",
]
WorkerType = Literal["aggregated", "prefill", "decode"]
