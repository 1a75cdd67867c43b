"""Estimators beside each other: what is counted, that nothing looks ahead, and what stays of a long stream."""

import math

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, errors, sample
from fpmsdk.perfmodel import prequential
from fpmsdk.perfmodel.accuracy import error_by_kind, predict_then_tune
from fpmsdk.perfmodel.prequential import build_estimators, compare_estimators

PREFILL = {"num_prefill_requests": 1, "sum_prefill_tokens": 64}
DECODE = {"num_decode_requests": 2, "sum_decode_kv_tokens": 900}


def rank(wall_ms, *work):
    return {"wall_time": wall_ms / 1000.0, "scheduled_requests": {k: v for part in work for k, v in part.items()}}


class Scripted:
    """Answers from a list, in nanoseconds from another."""

    def __init__(self, predicted, update_ns):
        self.answers = list(zip(predicted, update_ns, strict=True))
        self.learned = []

    def tune_with_fpms(self, batch):
        self.learned.append(len(batch))

    def predict_then_tune(self, batch):
        taken, self.answers = self.answers[: len(batch)], self.answers[len(batch) :]
        predicted, update_ns = zip(*taken, strict=True)
        return np.array(predicted), np.array(update_ns)


def portions(*groups):
    return [FpmBatch.from_dicts(group) for group in groups]


def test_errors_are_summed_by_kind_over_all_portions():
    stream = portions(
        [rank(10.0, DECODE), rank(10.0, DECODE), rank(1.0), rank(20.0, PREFILL)],
        [rank(10.0, DECODE), rank(0.0, DECODE), rank(10.0, DECODE, PREFILL), rank(10.0, DECODE)],
    )
    model = Scripted(
        [math.nan, 11.0, 0.0, math.nan, 8.0, 5.0, 10.0, math.nan], [1000, 3000, -1, 500, 2000, -1, 4000, 2000]
    )
    error = compare_estimators({"scripted": model}, stream)["estimators"]["scripted"]["error"]
    assert error["decode"] == {
        "iterations": 4,
        "cold_start_iterations": 1,
        "not_ready": 2,
        "mape_percent": pytest.approx(15.0),
        "bias_percent": pytest.approx(-5.0),
        "median_error_ms": pytest.approx(1.5),
        "p95_error_ms": pytest.approx(1.95),
        "update_us": pytest.approx(2.0),
    }
    assert error["prefill"] == {
        "iterations": 1,
        "cold_start_iterations": 1,
        "not_ready": 1,
        "mape_percent": None,
        "bias_percent": None,
        "median_error_ms": None,
        "p95_error_ms": None,
        "update_us": pytest.approx(0.5),
    }
    assert (error["mixed"]["mape_percent"], error["mixed"]["cold_start_iterations"]) == (0.0, 0)
    assert error["all"]["iterations"] == 6
    assert (error["all"]["cold_start_iterations"], error["all"]["not_ready"]) == (2, 3)
    assert error["all"]["mape_percent"] == pytest.approx(10.0)
    assert error["all"]["median_error_ms"] == pytest.approx(1.0)


def test_a_stream_without_work_has_no_errors():
    told = compare_estimators({"scripted": Scripted([0.0], [-1])}, portions([rank(1.0)]))
    error = told["estimators"]["scripted"]["error"]["all"]
    assert (error["iterations"], error["mape_percent"], error["update_us"]) == (0, None, None)


def test_every_estimator_learns_from_the_training_stream_first():
    models = {name: Scripted([9.0], [100]) for name in "ab"}
    told = compare_estimators(
        models, portions([rank(10.0, DECODE)]), train=portions([rank(1.0, DECODE)] * 3, [rank(1.0, DECODE)] * 2)
    )
    assert (told["train_iterations"], told["iterations"]) == (5, 1)
    assert [model.learned for model in models.values()] == [[3, 2], [3, 2]]


def test_progress_counts_both_streams():
    seen = []
    compare_estimators(
        {"a": Scripted([9.0] * 2, [100] * 2)},
        portions([rank(10.0, DECODE)] * 2),
        train=portions([rank(1.0, DECODE)] * 3),
        advance=seen.append,
    )
    assert seen == [3, 2]


@pytest.mark.parametrize("name", list(prequential.ESTIMATORS))
def test_each_prediction_is_made_before_its_iteration_is_learned(name):
    frames = sample.eval_frames()[:1500]
    batch = FpmBatch.from_frames(frames)
    singly, at_once = (build_estimators(sample.MODEL, [name])[name] for _ in range(2))
    expected = predict_then_tune(singly, frames)
    predicted, update_ns = at_once.predict_then_tune(batch)
    assert predicted.tobytes() == expected.tobytes()
    assert singly.skipped_iterations() == at_once.skipped_iterations()
    assert singly.regression_store_diagnostics() == at_once.regression_store_diagnostics()
    assert int((update_ns >= 0).sum()) == len(frames) - sum(at_once.skipped_iterations().values())


def test_portions_change_nothing():
    batch = FpmBatch.from_frames(sample.eval_frames()[:2000])
    whole, parts = (
        compare_estimators(build_estimators(sample.MODEL, ["spline"]), stream)["estimators"]["spline"]
        for stream in ([batch], [batch[:7], batch[7:900], batch[900:]])
    )
    for kind, row in whole["error"].items():
        assert parts["error"][kind] == pytest.approx(row | {"update_us": parts["error"][kind]["update_us"]})
    assert parts["series"]["iteration"] == whole["series"]["iteration"]
    assert parts["series"]["mape_percent"] == pytest.approx(whole["series"]["mape_percent"])


def test_the_errors_are_those_of_the_recorded_protocol():
    # The figures of the recording's README: tuned on train, then predict and learn on eval.
    told = compare_estimators(
        build_estimators(sample.MODEL, ["linear", "linear-1024", "spline-1024"]),
        [FpmBatch.from_frames(sample.eval_frames())],
        train=[FpmBatch.from_frames(sample.train_frames())],
    )
    rows = {
        name: [round(row["mape_percent"], 2) for row in one["error"].values()]
        for name, one in told["estimators"].items()
    }
    assert rows == {
        "linear": [8.97, 9.66, 5.47, 9.43],
        "linear-1024": [7.93, 9.97, 7.15, 9.81],
        "spline-1024": [7.89, 9.86, 6.98, 9.70],
    }


def test_a_point_of_the_series_is_the_mean_of_its_answers(monkeypatch):
    monkeypatch.setattr(prequential, "SERIES_ANSWERS", 2)
    stream = portions([rank(10.0, DECODE)] * 3, [rank(10.0, DECODE)] * 3)
    model = Scripted([11.0, math.nan, 13.0, 10.0, 14.0, 9.0], [1] * 6)
    told = compare_estimators({"a": model}, stream)["estimators"]["a"]["series"]
    assert told["answers_per_point"] == 2
    assert told["iteration"] == [2, 4]
    assert told["mape_percent"] == pytest.approx([20.0, 20.0])


def test_a_long_series_merges_its_points(monkeypatch):
    monkeypatch.setattr(prequential, "SERIES_ANSWERS", 1)
    monkeypatch.setattr(prequential, "MAX_SERIES_POINTS", 4)
    wall = [10.0 + i for i in range(11)]
    model = Scripted([value * (1.0 + i / 100) for i, value in enumerate(wall)], [1] * 11)
    stream = [FpmBatch.from_dicts([rank(value, DECODE)]) for value in wall]
    told = compare_estimators({"a": model}, stream)["estimators"]["a"]["series"]
    assert told["answers_per_point"] == 4
    assert told["iteration"] == [3, 7]
    assert told["mape_percent"] == pytest.approx([1.5, 5.5])


def test_the_errors_agree_with_those_of_the_tune_command():
    batch = FpmBatch.from_frames(sample.burst_frames())
    model = build_estimators(sample.MODEL, ["linear"])["linear"]
    expected = error_by_kind(model.predict_then_tune(batch)[0], batch)
    told = compare_estimators(build_estimators(sample.MODEL, ["linear"]), [batch])["estimators"]["linear"]["error"]
    for kind, row in expected.items():
        assert told[kind]["mape_percent"] == pytest.approx(row["mape_percent"])
        assert told[kind]["not_ready"] == row["not_ready"]


@pytest.mark.parametrize(
    ("names", "message"),
    [(["nope"], "expected one of 'linear'.*found 'nope'"), (["linear", "linear"], "'linear' is named 2 times")],
)
def test_estimators_are_known_names_each_once(names, message):
    with pytest.raises(errors.ConfigError, match=message):
        build_estimators(sample.MODEL, names)


def test_an_iteration_that_no_estimator_takes_is_named_with_the_estimator():
    models = build_estimators(sample.MODEL | {"worker_type": "decode"}, ["spline"])
    stream = portions([rank(10.0, DECODE)] * 3, [rank(10.0, DECODE), rank(10.0, PREFILL)])
    with pytest.raises(
        errors.MetricsError, match="estimator 'spline', counted from iteration 3: .*iteration 1: decode"
    ):
        compare_estimators(models, stream)


def test_a_model_that_may_not_learn_is_refused(tmp_path):
    model = ForwardPassPerfModel.best_available(sample.MODEL)
    config = model.save_state_snapshot(tmp_path / "saved")
    restored = ForwardPassPerfModel.best_available(config)
    with pytest.raises(errors.TuningRejectedError, match="estimator 'restored': .*on_tune 'reject'"):
        compare_estimators({"restored": restored}, portions([rank(10.0, DECODE)]))


def test_iterations_before_a_refused_one_stay_learned():
    model = ForwardPassPerfModel.best_available(sample.MODEL | {"worker_type": "decode"})
    with pytest.raises(errors.MetricsError, match="iteration 2"):
        model.predict_then_tune(FpmBatch.from_dicts([rank(10.0, DECODE), rank(11.0, DECODE), rank(1.0, PREFILL)]))
    assert model.diagnostics()["retained_observations"] == 2
