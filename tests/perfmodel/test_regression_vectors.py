"""Numbers of the public peer for every regression, and of the specification for the linear one."""

import math

import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk.metrics import decode_frame
from tests.vectors import load_vectors

CASES = [
    "linear_default",
    "linear_1024",
    "linear_3_axes",
    "linear_signed",
    "error_threshold",
    "spline_adaptive",
    "spline_1024",
    "spline_periodic",
]
IDENTITY = {"model": "m", "system": "s", "backend": "vllm", "estimation_mode": "fpm_regression"}


def build(worker_type="decode", features=None, **regression):
    estimator = {"fpm_regression": regression} | ({"features": features} if features else {})
    return ForwardPassPerfModel.best_available(IDENTITY | {"worker_type": worker_type, "estimator_config": estimator})


def decode(requests, kv_tokens, wall_ms=0.0, **lists):
    scheduled = {"num_decode_requests": requests, "sum_decode_kv_tokens": kv_tokens} | lists
    return {"wall_time": wall_ms / 1000.0, "scheduled_requests": scheduled}


@pytest.mark.parametrize("name", CASES)
def test_every_prediction_on_real_frames_equals_the_peer_bit_for_bit(name):
    case = load_vectors("regression_peer")["cases"][name]
    model = ForwardPassPerfModel.best_available(case["config"])
    predictions = []
    for frame in sample.eval_frames()[: len(case["predictions"])]:
        metrics = decode_frame(frame)
        predictions.append(model.estimate_forward_pass_time_ms(metrics))
        model.tune_with_fpms(metrics)
    assert predictions == case["predictions"]
    assert model.regression_store_diagnostics() == case["stores"]
    diagnostics = model.diagnostics()
    assert {key: diagnostics[key] for key in case["diagnostics"] if key != "provenance"} == {
        key: value for key, value in case["diagnostics"].items() if key != "provenance"
    }


@pytest.mark.parametrize("name", ["linear_1024", "spline_adaptive"])
def test_one_batch_learns_exactly_what_single_calls_learn(name):
    case = load_vectors("regression_peer")["cases"][name]
    frames = sample.eval_frames()[:1500]
    singly, at_once = (ForwardPassPerfModel.best_available(case["config"]) for _ in range(2))
    for frame in frames:
        singly.tune_with_fpms(frame)
    at_once.tune_with_fpms(FpmBatch.from_frames(frames))
    batch = FpmBatch.from_frames(sample.eval_frames()[1500:3000])
    assert singly.estimate_many(batch).tobytes() == at_once.estimate_many(batch).tobytes()
    assert singly.regression_store_diagnostics() == at_once.regression_store_diagnostics()


def test_statistics_follow_additions_and_removals():
    # Vector 1: the plane through (0, 0, 1), (2, 0, 5), (4, 0, 9), then without the first row.
    model = build(sampling={"bins_per_axis": [1, 1], "max_observations": 2}, min_observations=1)
    state = model._estimator.pure_decode.arrays
    for kv_tokens, wall_ms in ((0, 1.0), (2, 5.0)):
        model.tune_with_fpms(decode(1, kv_tokens, wall_ms))
    assert state["mean"].tolist() == [1.0, 1.0, 3.0]
    assert state["scatter"].tolist() == [[2.0, 0.0, 4.0], [0.0, 0.0, 0.0], [4.0, 0.0, 8.0]]
    model.tune_with_fpms(decode(1, 4, 9.0))
    assert state["mean"].tolist() == [3.0, 1.0, 7.0]
    assert state["scatter"].tolist() == [[2.0, 0.0, 4.0], [0.0, 0.0, 0.0], [4.0, 0.0, 8.0]]


def test_a_negative_slope_is_left_out_of_the_fit():
    # Vector 2: y = 20 - 2 kv + 3 (requests - 1) + 3.
    model = build()
    for kv_tokens in range(3):
        for extra in range(3):
            model.tune_with_fpms(decode(extra + 1, kv_tokens, 20.0 - 2.0 * kv_tokens + 3.0 * (extra + 1)))
    assert model.estimate_forward_pass_time_ms(decode(5, 100)) == pytest.approx(33.0, rel=1e-12)


def test_a_store_answers_from_min_observations_on():
    # Vector 3.
    model = build()
    for i in range(20):
        requests, kv_tokens = i % 7 + 1, ((3 * i) % 11 + 1) * 100
        model.tune_with_fpms(decode(requests, kv_tokens, 5.0 + 2.0 * requests + 0.03 * kv_tokens))
        if i == 3:
            assert model.estimate_forward_pass_time_ms(decode(3, 500)) is None
        if i == 4:
            assert model.estimate_forward_pass_time_ms(decode(3, 500)) == pytest.approx(26.0, rel=1e-12)
    assert model.estimate_forward_pass_time_ms(decode(100, 100_000)) == pytest.approx(3205.0, rel=1e-12)
    assert model.estimate_forward_pass_time_ms(decode(7, 5)) == pytest.approx(19.15, rel=1e-12)
    assert model.estimate_forward_pass_time_ms({}) == 0.0


@pytest.mark.parametrize(
    ("capacity", "interval", "accepted", "expected"),
    [
        (4, 1, 9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (4, 5, 11, [5, 8, 11]),
        (64, 4096, 4200, [2080, 4128]),
        (4, None, 300, []),
    ],
)
def test_the_rebuild_clock_counts_additions_and_removals(capacity, interval, accepted, expected):
    # Vector 4. Rows cycle through four corners with noise, so that the statistics never leave a fit undecided.
    model = build(
        sampling={"bins_per_axis": [1, 1], "max_observations": capacity},
        min_observations=4,
        fit={"rebuild_interval": interval},
    )
    mutations = [0]
    for i in range(accepted):
        requests, kv_tokens = 1 + 8 * (i % 2), 100 + 800 * (i // 2 % 2)
        model.tune_with_fpms(decode(requests, kv_tokens, 5.0 + 2.0 * requests + 0.03 * kv_tokens + 0.1 * (37 * i % 11)))
        mutations.append(int(model._estimator.pure_decode.arrays["clock"][1]))
    assert [i for i in range(1, accepted + 1) if mutations[i] == 0] == expected


def lists(requests):
    return {
        "extend_lengths": [e for e, _ in requests],
        "past_kv_lengths": [p for _, p in requests],
    }


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        ("n", 3.0),
        ("logN", math.log1p(3.0)),
        ("n2", 9.0),
        ("E", 4.0),
        ("P", 14.0),
        ("maxE", 2.0),
        ("maxP", 7.0),
        ("minP", 3.0),
        ("P2", 74.0),
        ("F", 21.0),
        ("nE", 12.0),
        ("logF", math.log1p(21.0)),
        ("logP", math.log1p(14.0)),
        ("meanE", 4.0 / 3.0),
        ("meanP", 14.0 / 3.0),
        ("cvE2", 3.0 * 6.0 / 16.0 - 1.0),
        ("cvP2", 13.0 / 98.0),
    ],
)
def test_feature_axes(axis, value):
    # Vector 5: requests (extend, past) = (1, 3), (1, 7) on one rank and (2, 4) on another.
    model = build(fit={"linear": {"feature_axes": [axis]}}, sampling={"axes": ["n"], "bins_per_axis": [1]})
    ranks = [decode(2, 10, 1.0, **lists([(1, 3), (1, 7)])), decode(1, 4, 1.0, **lists([(2, 4)]))]
    model.tune_with_fpms([ranks])
    assert model._estimator.pure_decode.arrays["features"][0, 0] == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("dimensions", "expected"), [(("n", "E", "P"), 125.0), (("n", "E", "P", "maxP"), 146.0)])
def test_signed_slopes_are_recovered(dimensions, expected):
    # Vector 6: x_a = (i * m_a) % k_a + 1, fed through axes that can take these values independently.
    steps, moduli = [5, 7, 11, 13], [17, 19, 23, 29]
    slopes = [1.5, -2.0, 0.25, 3.0]
    model = build(
        fit={
            "linear": {
                "feature_axes": ["n", "maxE", "P", "attention"][: len(dimensions)],
                "non_negative": False,
            }
        },
        sampling={"max_observations": 200},
    )

    def metrics(x, wall_ms=0.0):
        requests = int(x[0])
        extend = [int(x[1])] + [0] * (requests - 1)
        past = [int(x[2])] + [0] * (requests - 1)
        return decode(requests, int(x[3]), wall_ms, extend_lengths=extend, past_kv_lengths=past)

    for i in range(160):
        x = [(i * step) % modulus + 1 for step, modulus in zip(steps, moduli, strict=True)]
        y = 120.0 + sum(slope * v for slope, v in zip(slopes[: len(dimensions)], x, strict=False))
        model.tune_with_fpms(metrics(x, y))
    assert model.estimate_forward_pass_time_ms(metrics([8, 5, 12, 7])) == pytest.approx(expected, rel=1e-9)


def test_an_all_zero_candidate_keeps_the_fit_that_serves():
    # Vector 7.
    model = build()
    for i in range(8):
        model.tune_with_fpms(decode(i + 1, 100, 5.0 + i))
    assert model.estimate_forward_pass_time_ms(decode(4, 100)) == pytest.approx(8.0, rel=1e-12)
    model.tune_with_fpms(decode(1, 100, 1000.0))
    assert model.estimate_forward_pass_time_ms(decode(4, 100)) == pytest.approx(8.0, rel=1e-12)
    assert model.regression_store_diagnostics() == [
        {"workload_kind": "pure_decode", "ready": True, "retained_observations": 9}
    ]


def threshold_model(**policy):
    settings = {
        "kind": "error_threshold",
        "relative_tolerance": 0.0,
        "absolute_tolerance_ms": 1.0,
        "window": 3,
        "trigger": 2,
        "cooldown": 1,
        "startup_observations": 5,
    }
    return build(fit={"linear": {"update_policy": settings | policy}})


def verdicts(model):
    state = model._estimator.pure_decode.arrays
    return state["errors"][: state["clock"][5]].tolist()


def test_an_error_equal_to_the_tolerance_is_not_bad():
    # Vector 11, and: the monitor looks at the prediction before the row is learned.
    model = threshold_model(trigger=3, cooldown=1000)
    for i in range(6):
        model.tune_with_fpms(decode(i + 1, 0, 2.0 * (i + 1)))
    line = model.estimate_forward_pass_time_ms(decode(3, 0))
    for wall_ms in (line + 5.0, line, line + 1.0):
        model.tune_with_fpms(decode(3, 0, wall_ms))
    assert verdicts(model)[0] == 1
    assert verdicts(model)[1] == 0
    assert len(verdicts(model)) == 3


def test_between_fits_the_old_fit_serves():
    model = threshold_model(trigger=2, window=2, cooldown=1)
    for i in range(5):
        model.tune_with_fpms(decode(i + 1, 0, 2.0 * (i + 1)))
    before = model.estimate_forward_pass_time_ms(decode(8, 0))
    model.tune_with_fpms(decode(8, 0, 100.0))
    assert model.estimate_forward_pass_time_ms(decode(8, 0)) == before
    model.tune_with_fpms(decode(8, 0, 100.0))
    assert model.estimate_forward_pass_time_ms(decode(8, 0)) > before
