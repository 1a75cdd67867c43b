"""What a search is for, and what it may cost: sections `optimization` and `optimizer`.

Source: predict-recommend.md sections 2.6, 7 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.errors import OnboardError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, strict=False)]
Rate = Annotated[float, Field(gt=0, strict=False)]

Target = Literal[
    "throughput",
    "throughput_per_gpu",
    "throughput_per_user",
    "goodput",
    "goodput_per_gpu",
    "ttft",
    "e2e_latency",
    "min_gpus",
    "pareto",
]
_NEED_BOUNDS = ("goodput", "goodput_per_gpu", "min_gpus")


class Constraints(StrictDocument):
    """What every candidate keeps to: GPUs of all its workers, and goodput in requests/s."""

    min_candidate_gpus: Positive | None = None
    max_candidate_gpus: Positive = 32
    min_goodput_rps: Rate | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_candidate_gpus is not None and self.min_candidate_gpus > self.max_candidate_gpus:
            raise ValueError(
                f"min_candidate_gpus {self.min_candidate_gpus} is above max_candidate_gpus {self.max_candidate_gpus}"
            )
        return self


class Optimization(StrictDocument):
    """What is sought.

    target: what candidates are ranked by.
    strict_sla: whether a candidate is only feasible within the bounds of `evaluation.sla`.
    hardware: the system, where `engine.hardware` is `auto`.

    Source: predict-recommend.md sections 2.6 and 7.
    """

    target: Target = "throughput"
    strict_sla: bool = False
    hardware: Annotated[str, Field(min_length=1)] | None = None
    constraints: Constraints = Constraints()

    @model_validator(mode="after")
    def _goodput_bound(self) -> Self:
        if self.constraints.min_goodput_rps is not None and self.target != "min_gpus":
            raise ValueError(f"constraints.min_goodput_rps belongs to target min_gpus, found target {self.target}")
        return self


class Optimizer(StrictDocument):
    """How candidates are chosen, and for how long.

    algorithm: `auto` searches the whole space where it is small enough.
    max_trials: candidates at most.
    parallelism: candidates that are suggested at once, before what became of them is known.
    candidate_timeout_seconds: after which a candidate is given up.
    seed: of what is drawn by chance.
    time_budget_seconds: after which no candidate is begun.

    Source: predict-recommend.md sections 2.6 and 8.
    """

    algorithm: Literal["auto", "grid", "random", "optuna", "bayesian"] = "auto"
    max_trials: Positive = 320
    parallelism: Positive = 16
    candidate_timeout_seconds: Seconds = 600.0
    seed: Annotated[int, Field(ge=0)] = 42
    time_budget_seconds: Seconds | None = None


def check_goal(document: Mapping[str, Any], optimization: Optimization, template: Mapping[str, Any]) -> None:
    """Check a goal against the rest of the configuration.

    Parameters
    ----------
    document: of the search, as read.
    template: of one of its predictions, checked.

    Raises
    ------
    OnboardError: bounds are missing, or the traffic is not what the goal can be decided on.
    """
    target = optimization.target
    bounds = (template.get("evaluation") or {}).get("sla") or {}
    if not any(value is not None for value in bounds.values()):
        for asked, what in ((optimization.strict_sla, "strict_sla"), (target in _NEED_BOUNDS, f"target: {target}")):
            if asked:
                raise OnboardError(
                    f"optimization.{what}: needs a bound; add evaluation: {{sla: {{ttft_ms: 500, itl_ms: 50}}}}",
                    f"optimization.{what.split(':')[0]}",
                )
    engine = document["engine"]
    if engine.get("hardware") != "auto" and optimization.hardware not in (None, engine.get("hardware")):
        raise OnboardError(
            f"optimization.hardware: found {optimization.hardware!r}, but engine.hardware is {engine['hardware']!r}; "
            "leave one out, or set engine.hardware: auto",
            "optimization.hardware",
        )
    _check_context(template)
    if target == "min_gpus":
        _check_fewest(document, optimization)


def _check_context(template: Mapping[str, Any]) -> None:
    """Each role of a pair holds what it is given of a synthetic request."""
    source = template["traffic"]["source"]
    if template["engine"]["mode"] != "disaggregated" or source.get("type") != "synthetic":
        return
    prompt, output = source.get("input_tokens", 1024), source.get("output_tokens", 128)
    for role, needed in (("prefill", prompt + 1), ("decode", prompt + output)):
        context = template["engine"]["workers"][role].get("context_length")
        if context is not None and context < needed:
            path = f"engine.workers.{role}.context_length"
            raise OnboardError(
                f"{path}: found {context}, a request of {prompt} input and {output} output tokens needs {needed}", path
            )


def _check_fewest(document: Mapping[str, Any], optimization: Optimization) -> None:
    traffic = document.get("traffic")
    what = "optimization.target: min_gpus needs synthetic requests at one fixed concurrency or rate"
    if not traffic or traffic["source"].get("type") != "synthetic":
        raise OnboardError(f"{what}; state traffic.source: {{type: synthetic, ...}}", "optimization.target")
    load, path = traffic["load"], "optimization.constraints.min_goodput_rps"
    name = {"concurrency": "concurrency", "poisson": "requests_per_second", "constant_rate": "requests_per_second"}
    value = load.get(name.get(load.get("type"), ""), 10)
    if load.get("type") not in name or isinstance(value, Mapping):
        raise OnboardError(f"{what}; found load {dict(load)!r}", "optimization.target")
    least = optimization.constraints.min_goodput_rps
    if load["type"] == "concurrency":
        return
    if least is None:
        raise OnboardError(f"{path}: missing; min_gpus at a rate needs it, at most {value}", path)
    if least > value:
        raise OnboardError(f"{path}: found {least}, which is above the rate {value} of the traffic", path)
