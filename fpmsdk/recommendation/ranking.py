"""The order of candidates: by score, by GPUs, or the front of those that nothing beats; and which say the same twice.

The order of the arguments never matters: ties end with the text of the configuration.
Source: predict-recommend.md section 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct

from fpmsdk.documents.canonical import canonical_bytes
from fpmsdk.recommendation.candidate import FEASIBLE, Candidate
from fpmsdk.recommendation.concrete import concrete_config
from fpmsdk.recommendation.objectives import MIN_GPUS, PARETO, PARETO_OBJECTIVES, Objective

SIZES = ("replicas", "tensor", "pipeline", "attention_data", "moe_tensor", "moe_expert")


def flat_config(candidate: Candidate) -> dict[str, Any]:
    """What tells a candidate from the others of its search, by dotted path in the configuration of a prediction.

    >>> from fpmsdk.recommendation.candidate import Outcome, Sample
    >>> document = {"engine": {"workers": {"aggregated": {"parallelism": {"tensor": 2}}}}}
    >>> sample = Sample("aggregated", "vllm", 0, (("traffic.load.concurrency", 4),))
    >>> flat = flat_config(Candidate("candidate-000001", sample, document, Outcome("feasible")))
    >>> flat["engine.workers.aggregated.parallelism.tensor"], flat["traffic.load.concurrency"]
    (2, 4)
    """
    sample = candidate.sample
    flat: dict[str, Any] = {"engine.mode": sample.mode, "engine.backend": sample.backend}
    for role, worker in candidate.document.get("engine", {}).get("workers", {}).items():
        sizes = worker.get("parallelism", {})
        flat |= {f"engine.workers.{role}.parallelism.{name}": sizes.get(name, 1) for name in SIZES}
    return flat | dict(sample.knobs)


def ranked(candidates: Iterable[Candidate], objective: Objective) -> list[Candidate]:
    """The feasible candidates, best first; of a Pareto search those that no other one beats.

    Parameters
    ----------
    candidates: in any order; those that are not feasible are left out.
    objective: what they were scored by.

    Source: predict-recommend.md section 7.
    """
    feasible = [candidate for candidate in candidates if candidate.outcome.status == FEASIBLE]
    if objective.target == PARETO:
        return sorted(pareto_front(feasible), key=_front_key)
    return sorted(feasible, key=_fewest_gpus_key if objective.target == MIN_GPUS else _score_key)


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those of which no other is at least as good in both objectives and better in one; equals all stay."""
    by_first = sorted(candidates, key=lambda candidate: _pair(candidate)[0], reverse=True)
    front: list[Candidate] = []
    best = -math.inf
    # All before a group are better in the first objective, so that the group has to be better in the second.
    for _, group in groupby(by_first, key=lambda candidate: _pair(candidate)[0]):
        members = list(group)
        top = max(_pair(candidate)[1] for candidate in members)
        if top > best:
            front += [candidate for candidate in members if _pair(candidate)[1] == top]
            best = top
    return front


class Recommended(Struct, frozen=True):
    """A candidate that is written, and the ones further down that say the same."""

    candidate: Candidate
    folded: tuple[Candidate, ...] = ()


def folded(order: Sequence[Candidate]) -> list[Recommended]:
    """A ranking without repetitions: the first of those whose concrete configurations are the same.

    Shares of the cache that come to the same load are such. Other limits of the scheduler are not, even where all
    figures are equal.

    Parameters
    ----------
    order: best first.
    """
    groups: dict[bytes, list[Candidate]] = {}
    for candidate in order:
        groups.setdefault(canonical_bytes(concrete_config(candidate)), []).append(candidate)
    return [Recommended(first, tuple(rest)) for first, *rest in groups.values()]


def _pair(candidate: Candidate) -> tuple[float, float]:
    assert candidate.objectives is not None
    first, second = (candidate.objectives[name] for name in PARETO_OBJECTIVES)
    return first, second


def _score(candidate: Candidate) -> float:
    assert candidate.score is not None
    return candidate.score


def _score_key(candidate: Candidate) -> tuple[Any, ...]:
    return -_score(candidate), candidate.outcome.used_gpus, _text(candidate)


def _fewest_gpus_key(candidate: Candidate) -> tuple[Any, ...]:
    metrics = candidate.outcome.metrics
    # Every metric is there: a candidate without a completed request is not feasible.
    goodput, latency = metrics["goodput_output_throughput_tok_s"], metrics["mean_e2e_latency_ms"]
    return candidate.outcome.used_gpus, -goodput, latency, _text(candidate)


def _front_key(candidate: Candidate) -> tuple[Any, ...]:
    first, second = _pair(candidate)
    return second, -first, candidate.outcome.used_gpus, _text(candidate)


def _text(candidate: Candidate) -> bytes:
    return canonical_bytes(flat_config(candidate))
