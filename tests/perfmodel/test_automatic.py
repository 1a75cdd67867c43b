"""The choice among fits: judged by what each would have answered, per workload kind, never looking ahead."""

import numpy as np
import pytest

from tests.perfmodel.streams import decode_batch, latency_ms, random_work, regression_model

CANDIDATES = ["standardized_nnls", "recursive"]


def automatic(candidates=CANDIDATES, worker_type="decode", **settings):
    return regression_model(worker_type, kind="automatic", automatic={"candidates": list(candidates)} | settings)


def alone(kind):
    return regression_model(kind=kind)


def drifting(count, seed=0):
    """Latencies that wander: what keeps a long memory of equal weights is left behind."""
    requests, kv_tokens = random_work(count, seed)
    speed = np.exp(0.4 * np.sin(np.arange(count) / 40.0))
    return decode_batch(requests, kv_tokens, speed * latency_ms(requests, kv_tokens))


def steady(count, seed=0):
    """Latencies that do not, and that jump from one iteration to the next: a level that follows them is misled."""
    requests, kv_tokens = random_work(count, seed)
    noise = np.where(np.arange(count) % 2 == 0, 0.9, 1.1)
    return decode_batch(requests, kv_tokens, noise * latency_ms(requests, kv_tokens))


def details(model):
    (store,) = model.regression_store_diagnostics()
    return store


@pytest.mark.parametrize("stream, better", [(drifting, "recursive"), (steady, "standardized_nnls")])
@pytest.mark.parametrize("candidates", [CANDIDATES, CANDIDATES[::-1]])
def test_the_candidate_with_the_smaller_error_serves(stream, better, candidates):
    model = automatic(candidates)
    model.tune_with_fpms(stream(400))
    found = details(model)
    assert found["selected"] == better
    assert min(found["mean_errors"], key=found["mean_errors"].get) == better


def test_it_answers_exactly_what_the_selected_candidate_would_alone():
    model, other = automatic(), alone("recursive")
    for one in (model, other):
        one.tune_with_fpms(drifting(400))
    queries = decode_batch(*random_work(50, seed=3))
    assert model.estimate_many(queries).tolist() == other.estimate_many(queries).tolist()


def test_a_choice_depends_on_earlier_observations_only():
    model = automatic()
    batch = drifting(400)
    seen = []
    for i in range(len(batch)):
        seen.append(model.estimate_many(batch[i : i + 1])[0])
        model.tune_with_fpms(batch[i : i + 1])
    # The same past and another future.
    again = automatic()
    again.tune_with_fpms(batch[:300])
    again.tune_with_fpms(steady(1))
    once_more = automatic()
    once_more.tune_with_fpms(batch[:300])
    assert once_more.estimate_many(batch[300:301])[0] == seen[300]


def test_the_errors_are_those_of_the_answers_before_each_observation():
    model, candidate = automatic(error_forgetting=0.999999), alone("recursive")
    batch, errors = drifting(200), []
    for i in range(len(batch)):
        answer = candidate.estimate_many(batch[i : i + 1])[0]
        if np.isfinite(answer):
            errors.append(min(abs(answer / (batch.wall_time_s[i] * 1000.0) - 1.0), 1.0))
        candidate.tune_with_fpms(batch[i : i + 1])
    model.tune_with_fpms(batch)
    assert details(model)["mean_errors"]["recursive"] == pytest.approx(np.mean(errors), rel=1e-9)


def test_no_candidate_is_left_within_the_margin_or_before_the_warmup():
    for settings in ({"margin": 0.999}, {"warmup": 100_000}):
        model = automatic(**settings)
        model.tune_with_fpms(drifting(400))
        assert details(model)["selected"] == "standardized_nnls", settings


def test_every_workload_kind_chooses_for_itself():
    model = automatic(worker_type="aggregated")
    model.tune_with_fpms(drifting(400))
    kinds = {store["workload_kind"]: store for store in model.regression_store_diagnostics()}
    assert kinds["pure_decode"]["selected"] == "recursive"
    assert kinds["pure_prefill"]["selected"] == "standardized_nnls"
    assert set(kinds["pure_prefill"]["mean_errors"].values()) == {None}


def test_while_the_selected_candidate_cannot_answer_another_one_does():
    # Observations without any variation: the linear fit has no axis to explain them with, the recursive one answers.
    model = automatic()
    model.tune_with_fpms(decode_batch(np.full(8, 4), 100, 7.0))
    (answer,) = model.estimate_many(decode_batch(np.array([4]), 100))
    assert answer == pytest.approx(7.0)
    assert details(model)["ready"] and details(model)["selected"] == "recursive"


def test_the_expected_error_is_that_of_the_candidate_that_serves():
    model = automatic()
    query = {"scheduled_requests": {"num_decode_requests": 4, "sum_decode_kv_tokens": 4000}}
    model.tune_with_fpms(drifting(400))
    assert 0.0 < model.explain(query)["expected_error"] < 0.2
    linear = automatic(margin=0.999)
    linear.tune_with_fpms(drifting(400))
    assert linear.explain(query)["expected_error"] is None
