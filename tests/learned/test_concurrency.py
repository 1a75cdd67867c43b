"""Estimates of a frozen model while another thread tunes it: every answer is that of some prefix of the serial run."""

import sys
import threading

import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from tests.learned.recorded import artifact_bytes

NUM_CALLS = 150
CALL_SIZE = 4


@pytest.fixture(autouse=True)
def switch_threads_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def new_model():
    return ForwardPassPerfModel.from_learned(artifact_bytes("main").decode())


def test_every_concurrent_answer_is_that_of_a_prefix():
    frames = sample.train_frames()
    calls = [FpmBatch.from_frames(frames[i * CALL_SIZE : (i + 1) * CALL_SIZE]) for i in range(NUM_CALLS)]
    queries = FpmBatch.from_frames(sample.eval_frames()[100:164])
    serial = new_model()
    allowed = {serial.estimate_many(queries).tobytes()}
    for call in calls:
        serial.tune_with_fpms(call)
        allowed.add(serial.estimate_many(queries).tobytes())
    assert len(allowed) > 50

    model, found, done = new_model(), [], threading.Event()

    def ask():
        while not done.is_set():
            found.append(model.estimate_many(queries).tobytes())

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for thread in askers:
        thread.start()
    for call in calls:
        model.tune_with_fpms(call)
    done.set()
    for thread in askers:
        thread.join()
    assert set(found) <= allowed
    assert model.estimate_many(queries).tobytes() == serial.estimate_many(queries).tobytes()
