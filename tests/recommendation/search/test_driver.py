"""The loop of a search: results are told in the order of suggestion, whatever becomes of candidates and when."""

import random
import threading
import time
from concurrent.futures import Future

import pytest

from fpmsdk.recommendation.candidate import Outcome
from fpmsdk.recommendation.executors import CandidateTimeoutError, WorkerLostError, open_workers
from fpmsdk.recommendation.search.driver import Driver
from fpmsdk.recommendation.search.points import Points
from fpmsdk.recommendation.search.rounds import Rounds
from fpmsdk.recommendation.shards import Shard
from tests.recommendation.search.spaces import Kept, Optimizer, branch, distance, done, points, search

SPACE = [branch({"a": {"choices": [1, 2, 3, 4, 5]}}, gpus=(1, 2)), branch({"a": {"choices": [1, 4]}}, gpus=(1,))]


class Shuffled:
    """Evaluations that end in an order drawn by chance, in another thread."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __call__(self, suggestion):
        future = Future()
        outcome = Outcome("feasible", metrics={"worth": distance(suggestion)})
        threading.Timer(self.rng.random() / 100, future.set_result, [outcome]).start()
        return future


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_neither_speed_nor_number_of_workers_changes_the_result(capacity):
    _, expected = search(SPACE, Optimizer("random"))
    kept = Kept([])
    _, found = search(SPACE, Optimizer("random"), evaluate=Shuffled(capacity), capacity=capacity, keeper=kept)
    assert found.results == expected.results
    assert sorted(kept.indices) == list(range(12))


def test_what_comes_first_is_kept_first():
    second = threading.Event()

    def evaluate(suggestion):
        future = Future()
        outcome = Outcome("feasible", metrics={"worth": 0.0})
        if suggestion.index == 0:
            threading.Thread(target=lambda: (second.wait(10), future.set_result(outcome))).start()
            return future
        return done(outcome)

    class Seen(Kept):
        def add(self, results):
            super().add(results)
            if len(self.indices) >= 5:
                second.set()

    kept = Seen([])
    _, sweep = search(SPACE, Optimizer("grid"), evaluate=evaluate, keeper=kept)
    assert kept.indices.index(0) >= 5
    assert [suggestion.index for suggestion, _ in sweep.results] == list(range(12))


FAILURES = [
    (CandidateTimeoutError(3.0), ("timed_out", "runtime_timeout"), "did not end within 3 s"),
    (WorkerLostError("its worker died 3 times (SIGKILL)"), ("resource_limited", "resource_limit"), "memory runs out"),
]


@pytest.mark.parametrize(("fault", "status", "reason"), FAILURES)
def test_a_candidate_that_uses_up_its_worker_has_a_status_and_the_search_goes_on(fault, status, reason):
    def evaluate(suggestion):
        future = Future()
        if suggestion.index == 3:
            future.set_exception(fault)
        else:
            future.set_result(Outcome("infeasible", "kv_capacity", "no"))
        return future

    _, sweep = search(SPACE, Optimizer("grid"), evaluate=evaluate, used_gpus=lambda suggestion: 7)
    outcome = sweep.results[3][1]
    assert (outcome.status, outcome.reason_category) == status
    assert reason in outcome.reason
    assert outcome.used_gpus == 7
    assert len(sweep.results) == 12


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_what_came_before_the_end_is_kept(raised):
    def evaluate(suggestion):
        if suggestion.index == 8:
            raise raised
        return done(Outcome("infeasible", "kv_capacity", "no"))

    kept = Kept([])
    with pytest.raises(raised):
        search(SPACE, Optimizer("grid", parallelism=2), evaluate=evaluate, keeper=kept, capacity=2)
    assert set(range(8)) >= set(kept.indices) >= set(range(4))


def test_known_outcomes_are_not_evaluated_again():
    _, expected = search(SPACE, Optimizer("random"))
    known = {suggestion.index: outcome for suggestion, outcome in expected.results if suggestion.index % 3}
    evaluated = []

    def evaluate(suggestion):
        evaluated.append(suggestion.index)
        return done(Outcome("feasible", metrics={"worth": distance(suggestion)}))

    _, sweep = search(SPACE, Optimizer("random"), evaluate=evaluate, known=lambda each: known.get(each.index))
    assert sweep.results == expected.results
    assert evaluated == [0, 3, 6, 9]


def test_the_parts_of_a_search_are_the_whole():
    _, whole = search(SPACE, Optimizer("random"))
    parts = [search(SPACE, Optimizer("random"), shard=Shard(number, 3))[1].results for number in (1, 2, 3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert sorted((result for part in parts for result in part), key=lambda result: result[0].index) == whole.results


def test_no_candidate_is_begun_after_the_time_budget():
    def evaluate(suggestion):
        time.sleep(0.05)
        return done(Outcome("infeasible", "kv_capacity", "no"))

    _, sweep = search(SPACE, Optimizer("grid", parallelism=1), evaluate=evaluate, time_budget_seconds=0.12)
    assert sweep.end == "time_budget"
    assert 1 <= len(sweep.results) < 12
    assert points(sweep) == points(search(SPACE, Optimizer("grid", parallelism=1))[1])[: len(sweep.results)]


def test_a_search_that_ends_within_its_time_is_complete():
    assert search(SPACE, Optimizer("grid"), time_budget_seconds=60.0)[1].end == "complete"


def test_a_search_is_stopped_at_an_outcome():
    _, sweep = search(SPACE, Optimizer("grid", parallelism=1), capacity=1, stop_at=lambda outcome: True)
    assert sweep.end == "stopped"
    assert len(sweep.results) < 12


def test_a_batch_that_learns_waits_for_the_results_before_it():
    class Learner:
        waits = True
        repetitions = 0

        def __init__(self):
            self.told, self.asked = 0, []

        def suggest(self, count):
            self.asked.append(self.told)
            first = 2 * len(self.asked) - 2
            return [Points(SPACE[0]).at(0, first + step) for step in range(2)] if self.told < 4 else []

        def tell(self, sample, values):
            self.told += 1

    learner = Learner()
    driver = Driver(
        Rounds([learner], max_trials=None, batch=2),
        Shuffled(3),
        values=lambda outcome: None,
        keeper=Kept([]),
        capacity=4,
        used_gpus=lambda suggestion: 1,
    )
    assert len(driver.run().results) == 4
    assert learner.asked == [0, 2, 4]


def test_a_real_executor_drives_it():
    with open_workers("threads", 2) as workers:
        _, sweep = search(
            SPACE,
            Optimizer("grid"),
            evaluate=lambda suggestion: workers.executor.submit(
                Outcome, "feasible", metrics={"worth": distance(suggestion)}
            ),
        )
    best = max(sweep.results, key=lambda result: result[1].metrics["worth"])
    assert best[0].sample.knobs == (("a", 4),)
