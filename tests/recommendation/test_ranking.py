"""The order of candidates, the front, and repetitions. Source: predict-recommend.md section 7."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fpmsdk.recommendation.objectives import Objective
from fpmsdk.recommendation.ranking import folded, pareto_front, ranked
from tests.recommendation.made import REPORT, made, pair

LOAD = "traffic.load.concurrency"


def numbers(order):
    return [int(candidate.candidate_id[-6:]) - 1 for candidate in order]


def test_a_higher_score_comes_first_then_fewer_gpus_then_the_text_of_the_configuration():
    candidates = [
        made(0, score=5.0, gpus=2),
        made(1, score=7.0, gpus=4),
        made(2, score=5.0, gpus=1, knobs=[(LOAD, 8)]),
        made(3, score=5.0, gpus=1, knobs=[(LOAD, 4)]),
        made(4, status="infeasible", reason_category="sla_constraint", reason="slow"),
    ]
    assert numbers(ranked(candidates, Objective("throughput"))) == [1, 3, 2, 0]


def test_min_gpus_prefers_fewer_gpus_then_goodput_then_latency():
    figures = "goodput_output_throughput_tok_s", "mean_e2e_latency_ms"
    candidates = [
        made(number, gpus=gpus, score=-float(gpus), metrics=REPORT | dict(zip(figures, values, strict=True)))
        for number, (gpus, *values) in enumerate([(2, 900.0, 5.0), (1, 300.0, 9.0), (1, 400.0, 9.0), (1, 400.0, 8.0)])
    ]
    assert numbers(ranked(candidates, Objective("min_gpus"))) == [3, 2, 1, 0]


def test_the_front_goes_from_the_least_to_the_most_per_user_and_equals_all_stay():
    candidates = [
        pair(0, 10.0, 1.0, knobs=[(LOAD, 1)]),
        pair(1, 5.0, 3.0),
        pair(2, 5.0, 2.0),  # beaten by 1
        pair(3, 10.0, 1.0, knobs=[(LOAD, 2)]),  # equal to 0
        pair(4, 1.0, 9.0),
        pair(5, 10.0, 0.5),  # beaten by 0
    ]
    assert numbers(ranked(candidates, Objective("pareto"))) == [0, 3, 1, 4]


# Few values, so that many are equal.
POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=14)


def beats(one, other):
    return one != other and one[0] >= other[0] and one[1] >= other[1]


@given(POINTS)
def test_the_front_is_exactly_what_no_other_candidate_beats(points):
    candidates = [pair(index, float(first), float(second)) for index, (first, second) in enumerate(points)]
    expected = {index for index, point in enumerate(points) if not any(beats(other, point) for other in points)}
    assert {*numbers(pareto_front(candidates))} == expected


@given(POINTS, st.randoms(use_true_random=False), st.sampled_from(["pareto", "throughput", "min_gpus"]))
def test_the_order_does_not_depend_on_the_order_of_evaluation(points, chance, target):
    objective = Objective(target)
    # every configuration is another one, as in a search
    candidates = [
        pair(index, float(first), float(second), gpus=second + 1, knobs=[(LOAD, index + 1)])
        for index, (first, second) in enumerate(points)
    ]
    order = ranked(candidates, objective)
    chance.shuffle(candidates)
    assert ranked(candidates, objective) == order
    assert folded(ranked(candidates, objective)) == folded(order)


@given(POINTS)
def test_of_two_neighbours_in_the_order_the_first_is_not_worse(points):
    candidates = [made(index, score=float(score), gpus=gpus + 1) for index, (score, gpus) in enumerate(points)]
    order = ranked(candidates, Objective("throughput"))
    assert len(order) == len(points)
    for one, other in pairwise(order):
        assert (one.score, -one.outcome.used_gpus) >= (other.score, -other.outcome.used_gpus)


def test_shares_of_the_cache_that_come_to_the_same_load_are_one_recommendation():
    def share(index, fraction, concurrency, **other):
        load = {"concurrency": concurrency, "capacity_requests": 9, "capacity_tokens": 2400}
        candidate = made(index, score=5.0, kv_load=load, knobs=[("traffic.load.fraction", fraction)], **other)
        traffic = candidate.document["traffic"] | {"load": {"type": "kv_capacity_fraction", "fraction": fraction}}
        return structs.replace(candidate, document=candidate.document | {"traffic": traffic})

    order = [share(0, 0.25, 2), share(1, 0.3, 2), share(2, 0.5, 4), share(3, 0.25, 2, tensor=2)]
    found = [(numbers([entry.candidate])[0], numbers(entry.folded)) for entry in folded(order)]
    assert found == [(0, [1]), (2, []), (3, [])]


@pytest.mark.parametrize("target", ["throughput", "pareto"])
def test_a_large_search_is_ranked_without_comparing_every_pair(target):
    chance = random.Random(7)
    candidates = [pair(index, chance.random(), chance.random()) for index in range(20_000)]
    order = ranked(candidates, Objective(target))
    assert len(order) == 20_000 if target == "throughput" else 1 <= len(order) < 200
