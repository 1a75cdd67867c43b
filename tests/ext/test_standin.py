"""Passes for which a timing model raises are given to a stand-in (predict-recommend.md section 5.4)."""

import pytest

from fpmsdk._ext.pricing import PassPricer, PythonTiming, price_pass
from fpmsdk._ext.standin import StandInTiming


class Provider:
    """Prices decode alone."""

    def predict_prefill_ms(self, *_):
        raise LookupError("no prefill")

    def predict_decode_ms(self, *_):
        return 1.0


def pricer(stand_in, compose=False):
    return PassPricer(StandInTiming(PythonTiming(Provider()), stand_in), compose, 1.0, 1.0)


def test_a_priced_pass_never_reaches_the_stand_in():
    def never(*_):
        raise AssertionError

    assert price_pass(pricer(never), num_decode=2, sum_decode_tokens=9) == (0.0, 1.0, False)


def test_a_stand_in_is_told_the_totals_of_the_pass_and_why_there_is_no_price():
    told = []

    def stand_in(error, *work):
        told.append((str(error), work))
        return 7.0, 0.0

    work = {"num_prefill": 2, "sum_prefill_end_tokens": 11, "sum_prefill_past_tokens": 4}
    assert price_pass(pricer(stand_in), **work) == (7.0, 0.0, False)
    # 7 tokens of two requests: a mean would have lost one.
    assert told == [("no prefill", (2, 7, 4, 0, 0))]


def test_what_a_stand_in_raises_ends_the_replay():
    def stand_in(error, *_):
        raise error

    with pytest.raises(LookupError, match="no prefill"):
        price_pass(pricer(stand_in), num_prefill=1, sum_prefill_end_tokens=3)


@pytest.mark.parametrize("answer", [None, (1.0,), ("a", "b")])
def test_a_stand_in_that_answers_with_no_two_latencies_ends_the_replay(answer):
    with pytest.raises((TypeError, ValueError)):
        price_pass(pricer(lambda *_: answer), num_prefill=1, sum_prefill_end_tokens=3)
