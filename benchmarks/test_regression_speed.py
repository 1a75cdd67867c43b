"""Time of one estimate and one tuning step of a regression model, by form of the input. Run by `make bench`."""

from itertools import cycle

import msgspec
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk.metrics import decode_frame


@pytest.fixture(scope="module")
def frames():
    return sample.train_frames()


@pytest.fixture
def model(frames):
    tuned = ForwardPassPerfModel.best_available(sample.MODEL)
    tuned.tune_with_fpms(FpmBatch.from_frames(frames))
    return tuned


FORMS = {"dict": msgspec.msgpack.decode, "message": decode_frame, "encoded": bytes}


@pytest.mark.parametrize("form", FORMS)
def test_estimate(benchmark, model, frames, form):
    inputs = cycle([FORMS[form](frame) for frame in frames[1000:3000]])
    benchmark(lambda: model.estimate_forward_pass_time_ms(next(inputs)))


def test_estimate_columns(benchmark, model, frames):
    batch = FpmBatch.from_frames(frames)
    benchmark(model.estimate_many, batch)


@pytest.mark.parametrize("form", FORMS)
def test_tune_one_by_one(benchmark, model, frames, form):
    inputs = cycle([FORMS[form](frame) for frame in frames[1000:3000]])
    benchmark(lambda: model.tune_with_fpms(next(inputs)))


def test_tune_columns(benchmark, model, frames):
    batch = FpmBatch.from_frames(frames)
    benchmark(model.tune_with_fpms, batch)


def test_read_frames_into_columns(benchmark, frames):
    benchmark(FpmBatch.from_frames, frames)


def test_diagnostics(benchmark, model):
    benchmark(model.diagnostics)
