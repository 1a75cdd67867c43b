"""Estimates while another thread tunes: every answer is that of some prefix of the serial tuning run."""

import os
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample

CONFIG = {
    "model": "m",
    "system": "s",
    "backend": "vllm",
    "worker_type": "aggregated",
    "estimation_mode": "fpm_regression",
}
NUM_CALLS = 300
CALL_SIZE = 4


@pytest.fixture(autouse=True)
def switch_threads_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def calls():
    frames = sample.train_frames()
    return [FpmBatch.from_frames(frames[i * CALL_SIZE : (i + 1) * CALL_SIZE]) for i in range(NUM_CALLS)]


@pytest.fixture(scope="module")
def queries():
    return sample.eval_frames()[100:104]


@pytest.fixture(scope="module")
def serial_answers(calls, queries):
    """Per query, the answers after each prefix of the tuning run; per prefix, the bytes of the batch answer."""
    model = ForwardPassPerfModel.best_available(CONFIG)
    batch = FpmBatch.from_frames(queries)
    singles = [[model.estimate_forward_pass_time_ms(query)] for query in queries]
    batches = [model.estimate_many(batch).tobytes()]
    for call in calls:
        model.tune_with_fpms(call)
        for answers, query in zip(singles, queries, strict=True):
            answers.append(model.estimate_forward_pass_time_ms(query))
        batches.append(model.estimate_many(batch).tobytes())
    return singles, batches


def test_every_concurrent_answer_is_that_of_a_prefix(calls, queries, serial_answers):
    singles, batches = serial_answers
    model = ForwardPassPerfModel.best_available(CONFIG)
    batch = FpmBatch.from_frames(queries)
    done = threading.Event()
    failures: list[object] = []

    def estimate(number):
        position = 0
        answers = singles[number]
        while not done.is_set():
            # Answers of one thread never go back: each is found at or after the prefix of the one before.
            answer = model.estimate_forward_pass_time_ms(queries[number])
            try:
                position = answers.index(answer, position)
            except ValueError:
                failures.append((number, position, answer))
                return

    def estimate_batches():
        position = 0
        while not done.is_set():
            try:
                position = batches.index(model.estimate_many(batch).tobytes(), position)
            except ValueError:
                failures.append(("batch", position))
                return

    threads = [threading.Thread(target=estimate, args=(i,)) for i in range(len(queries))]
    threads.append(threading.Thread(target=estimate_batches))
    for thread in threads:
        thread.start()
    for call in calls:
        model.tune_with_fpms(call)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert model.estimate_many(batch).tobytes() == batches[-1]


def test_threads_that_tune_take_turns(calls):
    model = ForwardPassPerfModel.best_available(CONFIG)

    def tune(part):
        for call in part:
            model.tune_with_fpms(call)

    threads = [threading.Thread(target=tune, args=(calls[start::3],)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    learned = sum(int(store.arrays["clock"][3]) for store in model._estimator.stores().values())
    assert learned == int(np.sum(np.concatenate([call.wall_time_s > 0 for call in calls])))


def test_a_timing_model_keeps_what_was_learned_when_it_was_taken(calls):
    from fpmsdk._ext.pricing import PassPricer, price_pass

    model = ForwardPassPerfModel.best_available(CONFIG)
    for call in calls[:150]:
        model.tune_with_fpms(call)
    pricer = PassPricer(model.timing_model(), True, 1.0, 1.0)
    work = {"num_decode": 3, "sum_decode_tokens": 900, "kv_capacity_tokens": 12_800}
    before = price_pass(pricer, **work)
    for call in calls[150:]:
        model.tune_with_fpms(call)
    assert price_pass(pricer, **work) == before
    assert price_pass(PassPricer(model.timing_model(), True, 1.0, 1.0), **work) != before


class Tuning:
    """A rank whose attribute tunes the model that reads it."""

    def __init__(self, model):
        self.model = model

    @property
    def scheduled_requests(self):
        self.model.tune_with_fpms({"wall_time": 0.01, "scheduled_requests": {"num_decode_requests": 1}})
        return {}


def test_reading_metrics_may_tune_the_same_model():
    model = ForwardPassPerfModel.best_available(CONFIG)
    model.tune_with_fpms(Tuning(model))
    assert model.diagnostics()["retained_observations"] > 0


def test_a_fork_while_another_thread_tunes_leaves_a_usable_child(calls):
    model = ForwardPassPerfModel.best_available(CONFIG)
    stop = threading.Event()

    def tune():
        while not stop.is_set():
            for call in calls:
                model.tune_with_fpms(call)

    thread = threading.Thread(target=tune)
    thread.start()
    try:
        for _ in range(10):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
                child = os.fork()
            if child == 0:
                model.tune_with_fpms(calls[0])
                os._exit(0 if model.diagnostics()["retained_observations"] else 1)
            deadline = time.monotonic() + 20.0
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                assert time.monotonic() < deadline, "the child hangs"
                time.sleep(0.005)
    finally:
        stop.set()
        thread.join()
