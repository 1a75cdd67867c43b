"""Prices of passes: timing models, composition, scaling, rounding and what is refused."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk._ext.pricing import (
    FixedTiming,
    FpmTiming,
    PassPricer,
    PolynomialTiming,
    PythonTiming,
    modeled_duration,
    price_pass,
)
from fpmsdk.config import normalize_config
from fpmsdk.errors import TimingError
from fpmsdk.perfmodel.regression import build_regression

PREFILL = {"num_prefill": 2, "sum_prefill_end_tokens": 13}
DECODE = {"num_decode": 2, "sum_decode_tokens": 20, "kv_capacity_tokens": 40}


def price(timing, compose=True, speedups=(1.0, 1.0), **shape):
    return price_pass(PassPricer(timing, compose, *speedups), **shape)


# Scaling and rounding


@pytest.mark.parametrize(("raw_ms", "speedup", "ms"), [(12.0, 3.0, 4.0), (12.0, 0.0, 12.0), (0.0, 3.0, 0.0)])
def test_a_speedup_divides_and_zero_means_unscaled(raw_ms, speedup, ms):  # U21
    assert modeled_duration(raw_ms, speedup) == ms


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("field", ["raw_ms", "speedup"])
def test_a_duration_needs_finite_values_that_are_not_negative(bad, field):  # U21
    with pytest.raises(TimingError, match=f"{field} is {bad}"):
        modeled_duration(*((bad, 1.0) if field == "raw_ms" else (1.0, bad)))


@given(st.floats(0, 900))
def test_durations_are_whole_nanoseconds_rounded_from_exact_products(ms):
    nanoseconds = round(Fraction(ms / 1000) * 10**9)  # nearest, ties to even
    assert modeled_duration(ms, 0.0) == nanoseconds / 1e9 * 1e3


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        (4624.8709869, 4624.870986999999),
        # Exact halves of a nanosecond go to the even neighbour.
        (0.9765625, 0.976562),
        (2.9296875, 2.929688),
    ],
)
def test_whole_seconds_and_ties(ms, expected):
    assert modeled_duration(ms, 0.0) == expected


def test_decode_is_divided_by_both_ratios():
    timing = FixedTiming(10.0, 1.0)
    assert price(timing, speedups=(2.0, 5.0), **PREFILL, **DECODE) == (5.0, 0.1, False)


# Built-in timing


def test_fixed_timing_charges_a_constant_per_part():
    timing = FixedTiming(10.0, 1.0)
    assert price(timing, **PREFILL) == (10.0, 0.0, False)
    assert price(timing, **DECODE) == (0.0, 1.0, False)
    assert price(timing) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("shape", "prefill_ms"),
    [
        ({"num_prefill": 1, "sum_prefill_end_tokens": 4}, 16.56216),
        ({"num_prefill": 2, "sum_prefill_end_tokens": 13}, 16.683682),  # 2 x 6, not 13
        ({"num_prefill": 1, "sum_prefill_end_tokens": 12, "sum_prefill_past_tokens": 8}, 16.56216),
    ],
)
def test_polynomial_prefill_counts_new_tokens_by_floored_means(shape, prefill_ms):
    assert price(PolynomialTiming(), **shape)[0] == pytest.approx(prefill_ms, abs=1e-9)


def test_polynomial_decode_follows_the_share_of_the_cache_in_use():
    # Vector polynomial_mixed: the second token of the first request, 5 of 40 tokens in use.
    shape = {"num_decode": 1, "kv_capacity_tokens": 40}
    assert price(PolynomialTiming(), sum_decode_tokens=5, **shape)[1] == pytest.approx(12.089063, abs=1e-9)
    over, full = (price(PolynomialTiming(), sum_decode_tokens=tokens, **shape)[1] for tokens in (400, 40))
    assert over == full


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_fixed_timing_refuses_unusable_constants(bad):
    with pytest.raises(TimingError, match="decode_ms"):
        FixedTiming(1.0, bad)


# Timing written in Python


class Provider:
    def __init__(self, prefill=3.0, decode=2.0, mixed=None):
        self.answers = {"prefill": prefill, "decode": decode, "mixed": mixed}
        self.asked = []

    def answer(self, kind, *coordinates):
        self.asked.append((kind, *coordinates))
        answer = self.answers[kind]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def predict_prefill_ms(self, batch, mean_isl, mean_prefix):
        return self.answer("prefill", batch, mean_isl, mean_prefix)

    def predict_decode_ms(self, batch, active_kv_tokens, mean_context, total_kv_tokens):
        return self.answer("decode", batch, active_kv_tokens, mean_context, total_kv_tokens)


class ComposingProvider(Provider):
    def predict_mixed_pass_ms(self, prefill, decode):
        return self.answer("mixed", prefill, decode)


def test_a_python_object_is_asked_by_batch_and_means():
    provider = Provider()
    assert price(PythonTiming(provider), **PREFILL, **DECODE) == (3.0, 2.0, False)
    assert provider.asked == [("prefill", 2, 6, 0), ("decode", 2, 20, 10, 40)]


def test_a_python_object_may_price_a_mixed_pass_as_one():
    provider = ComposingProvider(mixed=(7.0, 0.5))
    assert price(PythonTiming(provider), **PREFILL, **DECODE) == (7.0, 0.5, True)
    assert provider.asked == [("mixed", (2, 6, 0), (2, 20, 10, 40))]
    assert price(PythonTiming(provider), **PREFILL) == (3.0, 0.0, False)
    assert price(PythonTiming(provider), compose=False, **PREFILL, **DECODE) == (3.0, 2.0, False)


def test_declining_to_price_a_mixed_pass_prices_it_apart_and_is_counted():
    pricer = PassPricer(PythonTiming(ComposingProvider(mixed=None)), True, 1.0, 1.0)
    assert price_pass(pricer, **PREFILL, **DECODE) == (3.0, 2.0, False)
    assert (pricer.num_composed, pricer.num_fallback) == (0, 1)


def test_answers_are_remembered_by_coordinates_the_latest_1024():
    provider = Provider()
    pricer = PassPricer(PythonTiming(provider), True, 1.0, 1.0)
    for tokens in [*range(1, 1026), 1025, 1]:
        price_pass(pricer, num_prefill=1, sum_prefill_end_tokens=tokens)
    assert len(provider.asked) == 1025 + 1  # 1 was the oldest of 1,025 and had to be asked again


def test_an_exception_of_a_python_object_comes_out_as_it_is_and_is_not_remembered():
    provider = Provider(prefill=KeyError("no such table"))
    timing = PythonTiming(provider)
    for _ in range(2):
        with pytest.raises(KeyError, match="no such table"):
            price(timing, **PREFILL)
    assert len(provider.asked) == 2


@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ({"prefill": math.nan}, "prefill"),
        ({"prefill": math.inf}, "prefill"),
        ({"decode": math.nan}, "decode"),
        ({"decode": -0.5}, "decode"),
    ],
)
def test_an_unusable_latency_is_an_error_that_names_it(answers, part):
    with pytest.raises(TimingError, match=f"returned a {part} latency of {answers[part]} ms for a pass of 2 prefill"):
        price(PythonTiming(Provider(**answers)), **PREFILL, **DECODE)


@pytest.mark.parametrize("speedup", [1.0, 0.0, 1e-300])
@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_finite_latency_too_long_to_be_counted_is_an_error_not_zero(part, speedup):
    ms = 1e305 if speedup != 1e-300 else 1.0
    answers = {"prefill": 1e-300, "decode": 1e-300} | {part: ms}
    for timing in (PythonTiming(Provider(**answers)), FixedTiming(answers["prefill"], answers["decode"])):
        with pytest.raises(TimingError, match="too long"):
            price(timing, speedups=(speedup, 1.0), **PREFILL, **DECODE)
    with pytest.raises(TimingError, match="too long"):
        modeled_duration(ms, speedup)


@pytest.mark.parametrize("ratios", [(1e308, 1e308), (1e-308, 1e-308)])
def test_ratios_whose_product_is_lost_are_refused(ratios):
    with pytest.raises(TimingError, match="speedup_ratio"):
        PassPricer(FixedTiming(1.0, 1.0), True, *ratios)


@pytest.mark.parametrize("wrong", [None, "3.0", "fast", [1.0, 2.0], object(), 10**400])
@pytest.mark.parametrize("part", ["prefill", "decode", "mixed"])
def test_an_answer_that_is_no_latency_is_an_error_that_names_the_method(part, wrong):
    if part == "mixed":
        wrong = (1.0, wrong)
    timing = PythonTiming((ComposingProvider if part == "mixed" else Provider)(**{part: wrong}))
    for _ in range(2):  # and it is not remembered
        with pytest.raises(TimingError, match=f"predict_{part}\\w*_ms returned "):
            price(timing, **PREFILL, **DECODE)


@pytest.mark.parametrize("wrong", [5.0, (1.0,), (1.0, 2.0, 3.0)])
def test_a_mixed_answer_has_two_parts(wrong):
    with pytest.raises(TimingError, match="predict_mixed_pass_ms returned .*, not two latencies in ms, or None"):
        price(PythonTiming(ComposingProvider(mixed=wrong)), **PREFILL, **DECODE)


def test_a_negative_prefill_latency_counts_as_zero():
    assert price(PythonTiming(Provider(prefill=-3.0)), **PREFILL) == (0.0, 0.0, False)


def test_an_object_without_the_methods_is_refused():
    with pytest.raises(TimingError, match="object has no method predict_prefill_ms"):
        PythonTiming(object())


# A tuned model


def tuned(frames):
    regression = build_regression(normalize_config(sample.MODEL | {"estimation_mode": "fpm_regression"}))
    regression.learn_from(FpmBatch.from_frames(frames).columns)
    return regression


@pytest.fixture(scope="module")
def model():
    built = ForwardPassPerfModel.best_available(sample.MODEL | {"estimation_mode": "fpm_regression"})
    built.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[:3000]))
    return built


@pytest.fixture(scope="module")
def timing():
    return FpmTiming(tuned(sample.train_frames()[:3000]).serving)


def iteration(prefill=(0, 0, 0), decode=(0, 0)):
    return {
        "scheduled_requests": {
            "num_prefill_requests": prefill[0],
            "sum_prefill_tokens": prefill[1],
            "sum_prefill_kv_tokens": prefill[2],
            "num_decode_requests": decode[0],
            "sum_decode_kv_tokens": decode[1],
        }
    }


CAPACITY = {"kv_capacity_tokens": 12_800}


def test_a_mixed_pass_is_one_iteration_of_the_model(model, timing):
    # Decode requests know 700 tokens, of which 697 are computed.
    shape = {"num_prefill": 2, "sum_prefill_end_tokens": 1100, "sum_prefill_past_tokens": 600}
    prefill_ms, decode_ms, composed = price(timing, num_decode=3, sum_decode_tokens=700, **shape, **CAPACITY)
    expected = model.estimate_forward_pass_time_ms(iteration((2, 500, 600), (3, 697)))
    assert (prefill_ms, decode_ms, composed) == (pytest.approx(expected, abs=1e-6), 0.0, True)


def test_pure_passes_are_pure_iterations(model, timing):
    # The totals of the pass, as telemetry counts them: not three prompts of the mean length.
    prefill_ms = price(timing, num_prefill=3, sum_prefill_end_tokens=1100, sum_prefill_past_tokens=600, **CAPACITY)[0]
    assert prefill_ms == pytest.approx(model.estimate_forward_pass_time_ms(iteration((3, 500, 600))), abs=1e-6)
    decode_ms = price(timing, num_decode=3, sum_decode_tokens=700, **CAPACITY)[1]
    assert decode_ms == pytest.approx(model.estimate_forward_pass_time_ms(iteration(decode=(3, 697))), abs=1e-6)


def test_decode_tokens_are_limited_by_the_capacity(timing):
    full, over = (
        price(timing, num_decode=3, sum_decode_tokens=tokens, kv_capacity_tokens=600)[1] for tokens in (603, 900)
    )
    assert full == over


def test_separate_pricing_never_composes(timing):
    shape = {"num_prefill": 1, "sum_prefill_end_tokens": 500}
    parts = price(timing, compose=False, num_decode=3, sum_decode_tokens=700, **shape, **CAPACITY)
    assert parts[0] == price(timing, **shape, **CAPACITY)[0]
    assert parts[1] == price(timing, num_decode=3, sum_decode_tokens=700, **CAPACITY)[1]
    assert not parts[2]


def pure_frames():
    batch = FpmBatch.from_frames(sample.train_frames()[:3000])
    mixed = (batch.num_prefill_requests > 0) & (batch.num_decode_requests > 0)
    return [frame for frame, is_mixed in zip(sample.train_frames(), mixed, strict=False) if not is_mixed]


def test_without_mixed_experience_a_mixed_pass_is_priced_apart_and_counted():
    pricer = PassPricer(FpmTiming(tuned(pure_frames()).serving), True, 1.0, 1.0)
    shape = {"num_prefill": 1, "sum_prefill_end_tokens": 500, "num_decode": 3, "sum_decode_tokens": 700}
    prefill_ms, decode_ms, composed = price_pass(pricer, **shape, **CAPACITY)
    assert prefill_ms > 0 and decode_ms > 0 and not composed
    assert (pricer.num_composed, pricer.num_fallback) == (0, 1)


def test_an_untuned_model_says_what_it_is_not_ready_for():
    with pytest.raises(TimingError, match=r"not ready to price a pass of 2 prefill requests \(13 new tokens after 0\)"):
        price(FpmTiming(tuned([]).serving), **PREFILL)


def test_sums_beyond_the_telemetry_contract_are_refused(timing):
    with pytest.raises(TimingError, match="token sums above 4294967295"):
        price(timing, num_decode=1, sum_decode_tokens=2**33, kv_capacity_tokens=2**40)
