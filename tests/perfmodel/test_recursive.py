"""The recursive fit: what it learns, what it shrugs off, and what it says of itself."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.perfmodel.recursive_layouts import RECURSIVE_STORE
from tests.perfmodel.streams import decode_batch, latency_ms, random_work, regression_model


def recursive(worker_type="decode", min_observations=5, **settings):
    return regression_model(worker_type, min_observations, kind="recursive", recursive=settings)


def tuned(count=2000, noise=0.0, **settings):
    model = recursive(**settings)
    requests, kv_tokens = random_work(count)
    factor = np.exp(noise * np.random.default_rng(1).standard_normal(count))
    model.tune_with_fpms(decode_batch(requests, kv_tokens, factor * latency_ms(requests, kv_tokens)))
    return model


def answers(model, requests, kv_tokens):
    return model.estimate_many(decode_batch(requests, kv_tokens))


def details(model):
    (store,) = model.regression_store_diagnostics()
    return store


REQUESTS, KV_TOKENS = random_work(200, seed=2)
TRUTH_MS = latency_ms(REQUESTS, KV_TOKENS)


def test_it_finds_the_latencies_behind_clean_observations():
    assert answers(tuned(), REQUESTS, KV_TOKENS) == pytest.approx(TRUTH_MS, rel=2e-3)


def test_noise_averages_out():
    error = np.abs(answers(tuned(noise=0.1, level_gain=0.02), REQUESTS, KV_TOKENS) / TRUTH_MS - 1.0)
    assert error.mean() < 0.02


def test_it_answers_from_the_configured_number_of_observations_on():
    model = recursive(min_observations=3)
    for known in range(3):
        assert model.estimate_forward_pass_time_ms(decode(4, 100)) is None, known
        model.tune_with_fpms(decode(4, 100, 8.0))
    assert model.estimate_forward_pass_time_ms(decode(4, 100)) == pytest.approx(8.0)


def test_it_may_wait_for_more_observations_than_a_sampler_retains():
    assert tuned(count=99, min_observations=100).estimate_forward_pass_time_ms(decode(4, 100)) is None
    assert tuned(count=100, min_observations=100).estimate_forward_pass_time_ms(decode(4, 100)) is not None


def decode(requests, kv_tokens, wall_time_ms=0.0):
    scheduled = {"num_decode_requests": requests, "sum_decode_kv_tokens": kv_tokens}
    return {"wall_time": wall_time_ms / 1000.0, "scheduled_requests": scheduled}


@pytest.mark.parametrize("factor", [10.0, 100.0, 1e9, 0.1, 1e-9])
def test_one_stalled_iteration_moves_answers_by_no_more_than_bound_times_gain(factor):
    model = tuned()
    model.tune_with_fpms(decode(8, 4000, factor * latency_ms(8, 4000)))
    assert np.abs(np.log(answers(model, REQUESTS, KV_TOKENS) / TRUTH_MS)).max() < 0.5 * 0.15 + 0.01


@pytest.mark.parametrize("share", [0.003, 0.02])
def test_recomputes_that_are_labelled_decode_do_not_throw_it_off(share):
    count = 5000
    requests, kv_tokens = random_work(count)
    slow = np.random.default_rng(3).random(count) < share
    model = recursive()
    model.tune_with_fpms(decode_batch(requests, kv_tokens, np.where(slow, 10.0, 1.0) * latency_ms(requests, kv_tokens)))
    assert np.abs(answers(model, REQUESTS, KV_TOKENS) / TRUTH_MS - 1.0).mean() < 0.05


@pytest.mark.parametrize("factor", [2.0, 0.5, 20.0])
def test_a_lasting_change_of_speed_is_followed(factor):
    model = tuned()
    requests, kv_tokens = random_work(60, seed=4)
    model.tune_with_fpms(decode_batch(requests, kv_tokens, factor * latency_ms(requests, kv_tokens)))
    assert answers(model, REQUESTS, KV_TOKENS) == pytest.approx(factor * TRUTH_MS, rel=0.05)


def test_a_false_start_is_forgotten():
    model = recursive()
    model.tune_with_fpms([[decode(8, 4000, 1e-3)], [decode(4, 100, 1e5)]])
    requests, kv_tokens = random_work(2000, seed=4)
    model.tune_with_fpms(decode_batch(requests, kv_tokens, latency_ms(requests, kv_tokens)))
    assert np.abs(answers(model, REQUESTS, KV_TOKENS) / TRUTH_MS - 1.0).mean() < 0.05


def test_collinear_work_is_answered_within_its_line():
    model = recursive()
    requests = np.random.default_rng(5).integers(1, 65, 3000)
    model.tune_with_fpms(decode_batch(requests, 512 * requests, latency_ms(requests, 512 * requests)))
    line = np.arange(1, 65)
    assert answers(model, line, 512 * line) == pytest.approx(latency_ms(line, 512 * line), rel=0.01)


def test_what_a_constant_phase_does_not_determine_stays_as_it_was():
    model = tuned()
    model.tune_with_fpms(decode_batch(np.full(100_000, 16), 16_000, latency_ms(16, 16_000)))
    assert answers(model, REQUESTS, KV_TOKENS) == pytest.approx(TRUTH_MS, rel=2e-3)
    assert np.linalg.cond(model._estimator.pure_decode.arrays["information"]) >= 1.0


def test_idle_iterations_change_nothing():
    model = tuned()
    before = {name: array.copy() for name, array in model._estimator.pure_decode.arrays.items()}
    model.tune_with_fpms(decode_batch(np.zeros(10_000), 0, 5.0))
    after = model._estimator.pure_decode.arrays
    assert all((after[name] == array).all() for name, array in before.items())


@given(
    st.lists(
        st.tuples(
            st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1), st.floats(1e-300, 1e300, allow_subnormal=False)
        ),
        min_size=5,
        max_size=60,
    )
)
def test_no_stream_makes_it_answer_anything_but_a_finite_latency(rows):
    model = recursive()
    requests, kv_tokens, times = zip(*rows, strict=True)
    model.tune_with_fpms(decode_batch(np.array(requests), np.array(kv_tokens), np.array(times)))
    found = answers(model, np.array([1, 64, 2**32 - 1]), np.array([0, 4096, 2**32 - 1]))
    assert (np.isfinite(found) & (found >= 1e-6)).all()
    RECURSIVE_STORE.check(model._estimator.pure_decode.arrays)


@pytest.mark.parametrize("count", [300_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_it_stays_accurate_through_drift_outliers_and_constant_phases(count):
    model, numbers = recursive(), np.random.default_rng(6)
    requests, kv_tokens = random_work(100_000, seed=7)
    for start in range(0, count, 100_000):
        drift = np.exp(0.3 * np.sin(2.0 * math.pi * (start + np.arange(100_000)) / 250_000))
        stalled = np.where(numbers.random(100_000) < 0.005, 10.0, 1.0)
        if start // 100_000 % 3 == 2:
            requests[:], kv_tokens[:] = 16, 16_000
        else:
            requests, kv_tokens = random_work(100_000, seed=start)
        noise = np.exp(0.05 * numbers.standard_normal(100_000))
        model.tune_with_fpms(
            decode_batch(requests, kv_tokens, drift * stalled * noise * latency_ms(requests, kv_tokens))
        )
        assert np.abs(answers(model, REQUESTS, KV_TOKENS) / (drift[-1] * TRUTH_MS) - 1.0).mean() < 0.15, start


def test_the_drift_says_how_much_slower_the_engine_has_become():
    model = tuned(forgetting=0.99999)
    assert details(model)["drift"] == pytest.approx(1.0, abs=0.01)
    requests, kv_tokens = random_work(6, seed=4)
    model.tune_with_fpms(decode_batch(requests, kv_tokens, 1.2 * latency_ms(requests, kv_tokens)))
    assert details(model)["drift"] == pytest.approx(1.2, abs=0.05)


def test_the_expected_error_is_that_of_the_noise():
    model = tuned(noise=0.1)
    assert 0.06 < details(model)["mean_error"] < 0.13  # mean of |N(0, 0.1)| is 0.08, and the level follows some of it
    assert model.explain(decode(16, 16_000))["expected_error"] == pytest.approx(details(model)["mean_error"], rel=0.05)


def test_an_answer_beyond_what_was_learned_says_so():
    model = recursive()
    requests = np.random.default_rng(5).integers(1, 9, 300)
    model.tune_with_fpms(decode_batch(requests, 512 * requests, latency_ms(requests, 512 * requests)))
    inside, outside = model.explain(decode(8, 4096)), model.explain(decode(8, 4_000_000))
    assert inside["in_domain"] and not outside["in_domain"]
    assert outside["expected_error"] > inside["expected_error"]


def test_many_observations_do_not_make_an_answer_far_beyond_them_sure():
    # Thousands of batches of up to eight requests; a hundred times as many are another matter.
    model = recursive()
    numbers = np.random.default_rng(5)
    requests = numbers.integers(1, 9, 5000)
    noise = np.exp(numbers.normal(0.0, 0.05, 5000))
    model.tune_with_fpms(decode_batch(requests, 512 * requests, noise * latency_ms(requests, 512 * requests)))
    near, beyond, far = (model.explain(decode(count, 512 * count))["expected_error"] for count in (4, 80, 800))
    assert near < 1.2 * details(model)["mean_error"]
    assert beyond > 2.0 * near
    assert far > beyond


def test_an_explanation_names_the_store_and_repeats_the_estimate():
    model = tuned()
    explained = model.explain(decode(16, 16_000))
    assert explained["store"] == "pure_decode"
    assert explained["latency_ms"] == model.estimate_forward_pass_time_ms(decode(16, 16_000))


def test_without_work_or_without_a_fit_there_is_no_error_to_expect():
    assert recursive().explain(decode(1, 10))["expected_error"] is None
    assert recursive().explain(decode(1, 10))["latency_ms"] is None
    idle = tuned().explain(decode(0, 0))
    assert (idle["latency_ms"], idle["store"], idle["expected_error"], idle["in_domain"]) == (0.0, None, None, True)


def test_tokens_count_over_all_ranks_and_attention_by_the_rank_with_most():
    model = recursive("aggregated", min_observations=1)
    prefill = {"num_prefill_requests": 1, "sum_prefill_tokens": 100}
    alone = [{"scheduled_requests": prefill, "wall_time": 0.01}]
    # Twice the tokens and the same attention of the slowest rank.
    both = [*alone, {"scheduled_requests": prefill}]
    model.tune_with_fpms([alone, both])
    coefficients = model._estimator.pure_prefill.arrays["information"]
    per_token = coefficients[0, 1] / coefficients[0, 0]
    per_pair = coefficients[0, 2] / coefficients[0, 0]
    assert per_token == pytest.approx(150.0, rel=1e-3)
    assert per_pair == pytest.approx(100 * 100 / 2 + 50, rel=1e-3)


def test_learning_one_by_one_or_all_at_once_is_the_same():
    requests, kv_tokens = random_work(50)
    batch = decode_batch(requests, kv_tokens, latency_ms(requests, kv_tokens))
    whole, pieces = recursive(), recursive()
    whole.tune_with_fpms(batch)
    for i in range(50):
        pieces.tune_with_fpms(batch[i : i + 1])
    assert answers(whole, REQUESTS, KV_TOKENS).tolist() == answers(pieces, REQUESTS, KV_TOKENS).tolist()
