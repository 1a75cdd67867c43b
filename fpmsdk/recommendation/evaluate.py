"""One candidate from its configuration to its outcome, in whatever process a search runs it.

Models and traces are read once a process. What is wrong with a candidate is an outcome, never an exception.
Source: predict-recommend.md sections 6.5 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fpmsdk.documents.strict import checked
from fpmsdk.errors import (
    FpmNoCellError,
    FpmNotCollectedError,
    FpmSdkError,
    InfeasibleMemoryError,
    MissingCapabilityError,
    UnsupportedModelError,
)
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.deployment import ModelCache
from fpmsdk.prediction.kv_load import NoCapacityError
from fpmsdk.prediction.simulate import Simulation, TraceCache, simulate
from fpmsdk.recommendation.candidate import FAILED, INFEASIBLE, RESOURCE_LIMITED, UNCOVERED, UNSUPPORTED, Outcome
from fpmsdk.recommendation.objectives import Objective

# Figures of the host that simulates, which the next run has others of.
_OF_THE_HOST = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s")
# What a deployment lacks as a whole, rather than at a point.
_NO_DATA = (FpmNoCellError, FpmNotCollectedError, UnsupportedModelError, MissingCapabilityError)
_ROLES = {"aggregated": ("aggregated",), "disaggregated": ("prefill", "decode")}

_models = ModelCache()
_traces = TraceCache()


def evaluate_document(document: Mapping[str, Any], objective: Mapping[str, Any]) -> Outcome:
    """What becomes of a candidate.

    Parameters
    ----------
    document: its concrete configuration of a prediction.
    objective: what it is wanted for, as `Objective.to_json` writes it.

    Returns
    -------
    An outcome with a reason on one line, whatever went wrong. Any number of threads may call; the result depends on
    the arguments and the files they name alone.

    Source: predict-recommend.md section 6.5.
    """
    gpus = used_gpus(document)
    try:
        config = checked(PredictConfig, document, "candidate")
        simulation = simulate(config, models=_models, traces=_traces)
        return _judged(simulation, config, Objective.from_json(objective), gpus)
    except (InfeasibleMemoryError, NoCapacityError) as fault:
        return _without_figures(INFEASIBLE, "kv_capacity", fault, gpus)
    except _NO_DATA as fault:
        return _without_figures(UNSUPPORTED, "backend_topology", fault, gpus)
    except FpmSdkError as fault:
        return _without_figures(FAILED, "candidate_materialization", fault, gpus)
    except MemoryError as fault:
        return _without_figures(RESOURCE_LIMITED, "resource_limit", fault, gpus)
    except Exception as fault:
        return _without_figures(FAILED, "unknown", fault, gpus)


def used_gpus(document: Mapping[str, Any]) -> int:
    """GPUs of all workers of a configuration.

    >>> used_gpus({"engine": {"workers": {"aggregated": {"parallelism": {"replicas": 2, "tensor": 4}}}}})
    8
    """
    engine = document.get("engine", {})
    workers = engine.get("workers", {})
    gpus = 0
    for role in _ROLES.get(engine.get("mode", "aggregated"), ()):
        sizes = workers.get(role, {}).get("parallelism", {})
        width = (sizes.get(name, 1) for name in ("tensor", "pipeline", "attention_data", "prefill_context"))
        gpus += sizes.get("replicas", 1) * math.prod(size or 1 for size in width)
    return gpus


def _judged(simulation: Simulation, config: PredictConfig, objective: Objective, gpus: int) -> Outcome:
    kept: dict[str, Any] = {
        "used_gpus": gpus,
        "kv_load": simulation.kv_load,
        "coverage": None if simulation.coverage is None else dict(simulation.coverage),
        "provenance": {role: dict(source) for role, source in simulation.provenance.items()},
    }
    if simulation.status == "uncovered":
        return Outcome(UNCOVERED, "fpm_uncovered", _one_line(simulation.error), **kept)
    if simulation.status == "failed" or simulation.report is None:
        return Outcome(FAILED, "replay_runtime", _one_line(simulation.error), **kept)
    metrics = {name: value for name, value in simulation.report.items() if _is_figure(name, value)}
    if unusable := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
        figures = ", ".join(f"{name} is {metrics[name]}" for name in unusable)
        return Outcome(FAILED, "invalid_metrics", f"the report has figures that are not finite: {figures}", **kept)
    bounds = config.evaluation.sla
    sla = {} if bounds is None else bounds.model_dump()
    status, category, reason = objective.verdict(metrics, gpus, sla)
    return Outcome(status, category, reason, metrics=metrics, **kept)


def _is_figure(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and name not in _OF_THE_HOST


def _without_figures(status: str, category: str, fault: BaseException, gpus: int) -> Outcome:
    text = _one_line(str(fault))
    # What we did not raise on purpose says little without its kind.
    reason = text if isinstance(fault, FpmSdkError) else f"{type(fault).__name__}: {text}"
    return Outcome(status, category, reason, used_gpus=gpus)


def _one_line(text: str | None) -> str:
    return " ".join((text or "no reason was given").split())
