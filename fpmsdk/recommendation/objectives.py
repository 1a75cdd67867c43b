"""What a search is for: the value of a report under each target, and the constraints that rule a candidate out.

Takes the figures of one replay; comparing candidates is in `ranking.py`.
Source: predict-recommend.md section 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from fpmsdk.recommendation.candidate import FAILED, FEASIBLE, INFEASIBLE, Outcome

MIN_GPUS, PARETO = "min_gpus", "pareto"
# Objectives of a Pareto search, in the order in which they are written; the first one is the printed score.
PARETO_OBJECTIVES = ("throughput_per_gpu", "throughput_per_user")

_MS_PER_HOUR = 3.6e6
# Figure of each target, and whether it is divided by the GPUs.
_RATES = {
    "throughput": ("output_throughput_tok_s", False),
    "throughput_per_gpu": ("output_throughput_tok_s", True),
    "throughput_per_user": ("mean_output_token_throughput_per_user", False),
    "goodput": ("goodput_output_throughput_tok_s", False),
    "goodput_per_gpu": ("goodput_output_throughput_tok_s", True),
}
# Figure of each minimised target, and the count of what it is a mean of.
_LATENCIES = {
    "ttft": ("mean_ttft_ms", "num_ttft_samples"),
    "e2e_latency": ("mean_e2e_latency_ms", "num_e2e_latency_samples"),
}
# Mean that strict bounds hold for, and the count of what it is a mean of.
_BOUNDED = {
    "ttft_ms": _LATENCIES["ttft"],
    "itl_ms": ("mean_tpot_ms", "num_tpot_samples"),
    "e2e_ms": _LATENCIES["e2e_latency"],
}

# Figures that the order of candidates needs besides the objective.
_RANKED_BY = {MIN_GPUS: ("goodput_output_throughput_tok_s", "mean_e2e_latency_ms")}

TARGETS = (*_RATES, *_LATENCIES, MIN_GPUS, PARETO)

Report = Mapping[str, Any]


class MetricsFault(ValueError):
    """A figure that an objective needs is missing or not finite."""


class Objective(Struct, frozen=True):
    """What candidates are compared by, and which of them are ruled out.

    target: one of `TARGETS`.
    strict_sla: whether the means have to hold the bounds of the SLA; always so for `min_gpus`.
    min_goodput_rps: requests per s that have to hold the SLA; None for no such bound.

    >>> Objective("ttft").values({"mean_ttft_ms": 12.0, "num_ttft_samples": 3}, used_gpus=1)
    {'ttft': 12.0}
    """

    target: str
    strict_sla: bool = False
    min_goodput_rps: float | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"optimization.target: found {self.target!r}, accepted are {', '.join(TARGETS)}")

    def to_json(self) -> dict[str, Any]:
        """The objective as a JSON object."""
        return structs.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Objective:
        """The objective that a JSON object holds."""
        return cls(**value)

    @property
    def names(self) -> tuple[str, ...]:
        """What is compared: the target, or the objectives of a Pareto search."""
        return PARETO_OBJECTIVES if self.target == PARETO else (self.target,)

    def values(self, report: Report, used_gpus: int) -> dict[str, float]:
        """Value of each objective, as it is and not negated.

        Parameters
        ----------
        report: figures of a replay with a completed request.
        used_gpus: of all workers.

        Raises
        ------
        MetricsFault: a figure is missing or not finite.
        """
        return {name: _value(name, report, used_gpus) for name in self.names}

    def signed(self, outcome: Outcome) -> tuple[float, ...] | None:
        """Values of an outcome of which more is better; None unless it is feasible.

        >>> outcome = Outcome("feasible", metrics={"mean_ttft_ms": 12.0, "num_ttft_samples": 3}, used_gpus=1)
        >>> Objective("ttft").signed(outcome)
        (-12.0,)
        """
        if outcome.status != FEASIBLE:
            return None
        values = self.values(outcome.metrics, outcome.used_gpus)
        return tuple(-value if _is_minimised(name) else value for name, value in values.items())

    def scored(self, outcome: Outcome) -> tuple[float | None, dict[str, float] | None]:
        """Score of an outcome, and the objectives by name of a Pareto search; None where there is none."""
        signed = self.signed(outcome)
        if signed is None:
            return None, None
        objectives = self.values(outcome.metrics, outcome.used_gpus) if self.target == PARETO else None
        return signed[0], objectives

    def verdict(
        self, report: Report, used_gpus: int, sla: Mapping[str, float | None]
    ) -> tuple[str, str | None, str | None]:
        """Status, category and reason of a candidate whose replay ended with a report.

        Parameters
        ----------
        report: figures of the replay.
        used_gpus: of all workers.
        sla: bounds in ms by name, `ttft_ms`, `itl_ms` and `e2e_ms`.

        >>> report = {"completed_requests": 2, "mean_ttft_ms": 12.0, "num_ttft_samples": 2}
        >>> Objective("ttft", strict_sla=True).verdict(report, 1, {"ttft_ms": 10.0})
        ('infeasible', 'sla_constraint', 'mean_ttft_ms 12 is over sla.ttft_ms 10')
        """
        if not report.get("completed_requests"):
            return INFEASIBLE, "no_samples", "no request completed"
        try:
            if (self.strict_sla or self.target == MIN_GPUS) and (broken := _broken_bounds(report, sla)):
                return INFEASIBLE, "sla_constraint", "; ".join(broken)
            if self.min_goodput_rps is not None:
                goodput_rps = _figure(report, "goodput_request_throughput_rps")
                if goodput_rps < self.min_goodput_rps:
                    reason = f"goodput_request_throughput_rps {goodput_rps:g} is under min_goodput_rps"
                    return INFEASIBLE, "load_constraint", f"{reason} {self.min_goodput_rps:g}"
            for name in self.names:
                if name in _LATENCIES and not _figure(report, _LATENCIES[name][1]):
                    return INFEASIBLE, "no_samples", f"{_LATENCIES[name][1]} is 0, so that {name} has no value"
            self.values(report, used_gpus)
            for name in _RANKED_BY.get(self.target, ()):
                _figure(report, name)
        except MetricsFault as fault:
            return FAILED, "invalid_metrics", str(fault)
        return FEASIBLE, None, None


def _is_minimised(name: str) -> bool:
    return name in _LATENCIES or name == MIN_GPUS


def _value(name: str, report: Report, used_gpus: int) -> float:
    if name == MIN_GPUS:
        return float(used_gpus)
    if name in _LATENCIES:
        return _figure(report, _LATENCIES[name][0])
    figure, per_gpu = _RATES[name]
    rate = _figure(report, figure)
    if not per_gpu:
        return rate
    gpus = _average_gpus(report)
    return rate / gpus if gpus > 0 else 0.0


def _average_gpus(report: Report) -> float:
    """GPUs that were there on average over the run; 0 where that is not known."""
    gpu_hours, duration_ms = report.get("gpu_hours") or 0.0, report.get("duration_ms") or 0.0
    return gpu_hours / (duration_ms / _MS_PER_HOUR) if gpu_hours > 0 and duration_ms > 0 else 0.0


def _figure(report: Report, name: str) -> float:
    value = report.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise MetricsFault(f"{name}: the report has {value!r}, a finite number is needed")
    return float(value)


def _broken_bounds(report: Report, sla: Mapping[str, float | None]) -> list[str]:
    """What breaks strict bounds, which are inclusive."""
    broken = []
    for name, (mean, count) in _BOUNDED.items():
        bound = sla.get(name)
        if bound is None:
            continue
        if not _figure(report, count):
            broken.append(f"{count} is 0, so that sla.{name} is not shown to hold")
        elif (value := _figure(report, mean)) > bound:
            broken.append(f"{mean} {value:g} is over sla.{name} {bound:g}")
    return broken
