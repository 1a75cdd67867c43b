"""Grid and random search: what is covered, in which order, and what a seed decides."""

from collections import Counter

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.search.points import Points
from fpmsdk.recommendation.search.sampling import StratifiedRandom
from tests.recommendation.search.spaces import Optimizer, branch, points, search

SMALL = {"a": {"choices": [256, 512]}, "b": {"choices": [8, 2, 4]}}
CONTINUOUS = {"a": {"range": {"min": 0.5, "max": 0.9}}}


def test_a_grid_has_every_candidate_in_an_order_of_its_own():
    strategy, sweep = search([branch(SMALL, gpus=(1, 2))], Optimizer("grid"))
    assert (strategy.name, sweep.end) == ("grid", "complete")
    assert points(sweep) == [(0, arm, {"a": a, "b": b}) for arm in (0, 1) for a in (256, 512) for b in (8, 2, 4)]


def test_a_branch_without_knobs_is_its_arms():
    _, sweep = search([branch({}, gpus=(1, 2))], Optimizer("grid"))
    assert points(sweep) == [(0, 0, {}), (0, 1, {})]


@pytest.mark.parametrize("max_trials", [18, 100])
def test_random_covers_a_finite_space_exactly_once(max_trials):
    _, sweep = search([branch(SMALL)], Optimizer("random", max_trials))
    _, grid = search([branch(SMALL)], Optimizer("grid"))
    assert sorted(map(repr, points(sweep))) == sorted(map(repr, points(grid)))
    assert points(sweep) != points(grid)


def test_random_takes_from_every_arm_in_turn():
    _, sweep = search([branch(SMALL, gpus=(1, 2, 4))], Optimizer("random", 9))
    arms = [arm for _, arm, _ in points(sweep)]
    assert [sorted(arms[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_an_exhausted_arm_leaves_its_turn_to_the_others():
    sampler = StratifiedRandom(Points(branch({"a": {"choices": [1, 2]}}, gpus=(1, 2))), 0)
    for sample in sampler.suggest(1):
        other = Points(branch({"a": {"choices": [1, 2]}}, gpus=(1, 2))).at(sample.arm, 0)
        sampler.exclude(other)
        sampler.exclude(Points(branch({"a": {"choices": [1, 2]}}, gpus=(1, 2))).at(sample.arm, 1))
    assert {sample.arm for sample in sampler.suggest(10)} == {1 - sample.arm}


def test_a_search_for_few_gpus_begins_with_few():
    _, sweep = search([branch({}, gpus=(8, 1, 4, 2))], Optimizer("random", 4), cheapest_first=True)
    assert [arm for _, arm, _ in points(sweep)] == [1, 3, 2, 0]


def test_the_seed_decides_and_nothing_else():
    space = [branch(CONTINUOUS | SMALL)]
    first, again, other = (points(search(space, Optimizer("random", 30, seed=seed))[1]) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_branches_draw_differently():
    _, sweep = search(
        [branch(CONTINUOUS, gpus=(1,)), branch(CONTINUOUS, gpus=(1,), seed_offset=1)], Optimizer("random", 8)
    )
    drawn = {0: [], 1: []}
    for number, _, knobs in points(sweep):
        drawn[number].append(knobs["a"])
    assert not set(drawn[0]) & set(drawn[1])


def test_a_log_scale_draws_small_values_as_often_as_large_ones():
    space = branch({"a": {"range": {"min": 1, "max": 10_000, "scale": "log"}}}, gpus=(1,))
    _, sweep = search([space], Optimizer("random", 300))
    decades = Counter(len(str(knobs["a"])) for _, _, knobs in points(sweep))
    # 9 one-digit values in all, each drawn without replacement; three equal decades above them
    assert decades[1] == 9
    assert all(60 <= decades[digits] <= 140 for digits in (3, 4))


def test_a_continuous_space_never_ends_before_its_trials():
    _, sweep = search([branch(CONTINUOUS)], Optimizer("random", 50))
    assert len({repr(point) for point in points(sweep)}) == 50


def test_a_continuous_knob_with_one_value_ends():
    space = branch({"a": {"range": {"min": 0.5, "max": 0.5}}}, gpus=(1,))
    assert points(search([space], Optimizer("random", 50))[1]) == [(0, 0, {"a": 0.5})]


REFUSED = [
    (branch(CONTINUOUS), Optimizer("grid"), "algorithm: grid needs knobs that can be counted; a has a float range"),
    (branch(SMALL), Optimizer("grid", 17), "the grid has 18 candidates, found 17 trials; set max_trials: 18"),
]


@pytest.mark.parametrize(("space", "optimizer", "message"), REFUSED)
def test_a_grid_that_cannot_be_searched_whole_is_refused(space, optimizer, message):
    with pytest.raises(OnboardError, match=message):
        search([space], optimizer)


def test_every_branch_needs_a_trial():
    with pytest.raises(OnboardError, match=r"max_trials: found 1, but the search has 2 deployment modes"):
        search([branch(SMALL), branch(SMALL)], Optimizer("random", 1))
