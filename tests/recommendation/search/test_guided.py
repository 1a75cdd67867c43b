"""A search that learns, by Optuna: `make test-dask` has it."""

import random
import threading
from concurrent.futures import Future

import pytest

from fpmsdk.recommendation.candidate import Outcome
from tests.recommendation.search.spaces import Optimizer, branch, distance, points, search

pytestmark = [pytest.mark.dask, pytest.mark.slow]

WIDE = branch({"a": {"choices": list(range(20))}, "b": {"choices": list(range(20))}}, gpus=(1, 2, 4))


def best(sweep):
    return max(outcome.metrics["worth"] for _, outcome in sweep.results)


@pytest.mark.parametrize("algorithm", ["optuna", "bayesian", "auto"])
def test_a_learned_search_finds_better_than_chance(algorithm):
    strategy, learned = search([WIDE], Optimizer(algorithm, max_trials=80))
    _, drawn = search([WIDE], Optimizer("random", max_trials=80))
    assert "guided" in strategy.name
    assert strategy.implementation.startswith("optuna ")
    assert best(learned) > best(drawn)


@pytest.mark.parametrize("objectives", [1, 2])
def test_no_trial_is_spent_twice_and_repetitions_are_counted(objectives):
    small = branch({"a": {"choices": [1, 2, 3, 4]}}, gpus=(1, 2, 4))
    _, sweep = search([small], Optimizer("optuna", max_trials=12), objectives=objectives)
    assert len({repr(point) for point in points(sweep)}) == len(points(sweep)) == 12
    assert sweep.repetitions > 0


def test_an_exhausted_space_ends():
    small = branch({"a": {"choices": [1, 2]}}, gpus=(1,))
    _, sweep = search([small], Optimizer("optuna", max_trials=50))
    assert len(sweep.results) == 2


@pytest.mark.parametrize("capacity", [1, 5])
def test_neither_speed_nor_workers_change_what_is_learned(capacity):
    rng = random.Random(capacity)

    def evaluate(suggestion):
        future = Future()
        worth = None if suggestion.index % 7 == 3 else distance(suggestion)
        outcome = (
            Outcome("feasible", metrics={"worth": worth})
            if worth is not None
            else Outcome("infeasible", "sla_constraint", "slow")
        )
        threading.Timer(rng.random() / 200, future.set_result, [outcome]).start()
        return future

    _, sweep = search([WIDE, WIDE], Optimizer("optuna", max_trials=60), evaluate=evaluate, capacity=capacity)
    assert points(sweep) == points(search([WIDE, WIDE], Optimizer("optuna", max_trials=60), evaluate=evaluate)[1])


def test_knobs_of_every_kind_are_searched():
    kinds = {
        "a": {"range": {"min": 0.25, "max": 0.75}},
        "b": {"range": {"min": 0.001, "max": 1.0, "scale": "log"}},
        "c": {"range": {"min": 1, "max": 4096, "scale": "log"}},
        "d": {"range": {"min": 0.1, "max": 0.5, "step": 0.1}},
        "e": {"choices": [64, 16, 32]},
    }
    _, sweep = search([branch(kinds)], Optimizer("optuna", max_trials=40))
    assert len({repr(point) for point in points(sweep)}) == 40
    for _, _, knobs in points(sweep):
        assert 0.25 <= knobs["a"] <= 0.75 and 0.001 <= knobs["b"] <= 1.0 and 1 <= knobs["c"] <= 4096
        assert knobs["d"] in (0.1, 0.2, 0.3, 0.4, 0.5) and knobs["e"] in (16, 32, 64)


def test_the_level_of_its_messages_stays_as_it_was():
    import optuna

    before = optuna.logging.get_verbosity()
    search([WIDE], Optimizer("optuna", max_trials=4))
    assert optuna.logging.get_verbosity() == before
