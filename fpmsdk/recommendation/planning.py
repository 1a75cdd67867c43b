"""From a configuration to the plan of its search.

Source: predict-recommend.md sections 6 to 8.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from fpmsdk.recommendation.branches import Branch, Space
from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.config import RecommendConfig
from fpmsdk.recommendation.evaluate import evaluate_document
from fpmsdk.recommendation.inputs import inputs_of
from fpmsdk.recommendation.objectives import Objective
from fpmsdk.recommendation.plan import Plan
from fpmsdk.recommendation.search.choice import choose
from fpmsdk.recommendation.search.points import Points
from fpmsdk.recommendation.shards import WHOLE, Shard
from fpmsdk.recommendation.space import build_branches, materialise


def plan_search(
    config: RecommendConfig, *, shard: Shard = WHOLE, capacity: int = 1, recorded: str | None = None
) -> Plan:
    """The search that a configuration asks for.

    Parameters
    ----------
    config: the file.
    shard: the part that is searched here.
    capacity: how many candidates are evaluated at once, for the estimate of the time.
    recorded: name of the strategy that a sweep which is continued was begun with.

    Raises
    ------
    OnboardError: no deployment is possible, or the algorithm cannot search this space.
    EvidenceError: a file that is read is missing.
    """
    space = build_branches(config)
    goal = config.optimization
    objective = Objective(goal.target, goal.strict_sla, goal.constraints.min_goodput_rps)
    concrete = functools.partial(materialise, config)

    def seconds_each() -> float:
        if recorded is not None:  # the clock decided once
            return 0.0 if recorded == "grid" else math.inf
        return seconds_of_one(space, objective, concrete) / capacity

    strategy = choose(config.optimizer, space.branches, seconds_each, sharded=shard != WHOLE)
    inputs = inputs_of(config.template(branch.mode) for branch in space.branches)
    notes = (*space.warnings, *([strategy.note] if strategy.note else []))
    return Plan(config.document, config.optimizer, space, strategy, objective, concrete, inputs, shard, notes)


def seconds_of_one(space: Space, objective: Objective, concrete: Callable[[Branch, Sample], dict[str, Any]]) -> float:
    """About how long one candidate takes in s: the mean over the branches of their first one, tables in memory."""
    taken = []
    for branch in space.branches:
        document = concrete(branch, Points(branch).first())
        evaluate_document(document, objective.to_json())  # loads what the next one finds loaded
        begun = time.perf_counter()
        evaluate_document(document, objective.to_json())
        taken.append(time.perf_counter() - begun)
    return sum(taken) / len(taken)
