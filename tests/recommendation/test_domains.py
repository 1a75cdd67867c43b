"""What a knob may be, and how its values are numbered and drawn."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.domains import INTEGER, NUMBER, TEXT, Choices, FloatRange, IntegerRange, parse_domain


@pytest.mark.parametrize(
    ("value", "kind", "values"),
    [
        (8, INTEGER, [8]),
        (1, NUMBER, [1.0]),
        ("vllm", TEXT, ["vllm"]),
        ({"choices": [512, 256]}, INTEGER, [512, 256]),
        ({"choices": [0.5, 1]}, NUMBER, [0.5, 1.0]),
        ({"range": {"min": 1, "max": 6, "step": 2}}, INTEGER, [1, 3, 5]),
        ({"range": {"min": 4, "max": 4, "step": 1}}, INTEGER, [4]),
        ({"range": {"min": 2, "max": 5, "scale": "log"}}, INTEGER, [2, 3, 4, 5]),
        ({"range": {"min": 0.1, "max": 0.7, "step": 0.2}}, NUMBER, [0.1, 0.3, 0.5, 0.7]),
        ({"range": {"min": 0.9, "max": 0.9}}, NUMBER, [0.9]),
    ],
)
def test_a_finite_domain_has_its_values_in_order(value, kind, values):
    domain = parse_domain(value, "knob", kind)
    assert domain.count == len(values)
    assert [domain.at(index) for index in range(domain.count)] == values
    assert (domain.lowest, domain.highest) == (min(values), max(values))


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_range_of_numbers_without_step_cannot_be_counted(scale):
    domain = parse_domain({"range": {"min": 0.5, "max": 0.9, "scale": scale}}, "knob", NUMBER)
    assert (domain.count, domain.extremes(), domain.logarithmic) == (None, (0.5, 0.9), scale == "log")


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("8", INTEGER, "knob: found '8', accepted is an integer; remove the quotes"),
        (True, INTEGER, "knob: found True, accepted is an integer"),
        (8.0, INTEGER, "knob: found 8.0, accepted is an integer"),
        (float("inf"), NUMBER, "knob: found inf, accepted is a number"),
        ("", TEXT, "knob: found '', accepted is text"),
        ({"choices": []}, INTEGER, "knob.choices: found [], accepted is a list of at least one value"),
        ({"choices": [1, 2, 1]}, INTEGER, "knob.choices[2]: 1 is listed twice; leave one out"),
        ({"choices": [1, "2"]}, INTEGER, "knob.choices[1]: found '2', accepted is an integer; remove the quotes"),
        ({"choices": [1], "range": {}}, INTEGER, "{choices: [...]} or {range: {min, max, step, scale}}"),
        ({"range": [1, 2]}, INTEGER, "knob.range: found [1, 2], accepted is a mapping of min, max, step, scale"),
        ({"range": {"min": 1}}, INTEGER, "knob.range.max: missing; a range needs min and max"),
        ({"range": {"min": 1, "max": 2, "by": 1}}, INTEGER, "knob.range.by: unknown field; known are min, max"),
        ({"range": {"min": 1, "max": 4}}, INTEGER, "needs a step; add step: 1"),
        ({"range": {"min": 1, "max": 4, "step": 0}}, INTEGER, "knob.range.step: found 0, accepted is a step above 0"),
        ({"range": {"min": 4, "max": 1, "step": 1}}, INTEGER, "knob.range: min 4 is above max 1"),
        ({"range": {"min": 0, "max": 4, "scale": "log"}}, INTEGER, "accepted on a log scale is a min above 0"),
        ({"range": {"min": 1, "max": 4, "step": 1, "scale": "log"}}, INTEGER, "a log scale has no step"),
        ({"range": {"min": 1, "max": 4, "scale": "cubic"}}, INTEGER, "found 'cubic', accepted are linear and log"),
        ({"range": {"min": 1, "max": 4}}, TEXT, "a range is one of numbers; give choices"),
    ],
)
def test_a_malformed_domain_is_refused_with_its_place_and_what_is_accepted(value, kind, message):
    with pytest.raises(OnboardError) as caught:
        parse_domain(value, "knob", kind)
    assert message in str(caught.value)


seeds = st.integers(0, 2**32).map(random.Random)
integers = st.builds(
    lambda low, span, step, log: IntegerRange(low, low + span, 1 if log else step, log),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 10**4),
    st.booleans(),
)
numbers = st.builds(
    lambda low, span, log: FloatRange(low, low + span, None, log),
    st.floats(1e-6, 1e6),
    st.floats(1e-3, 1e6),
    st.booleans(),
)
stepped = st.builds(
    lambda low, steps, step: FloatRange(low / 1000, (low + steps * step) / 1000, step / 1000),
    st.integers(0, 10**4),
    st.integers(0, 500),
    st.integers(1, 10**3),
)
choices = st.lists(st.integers(1, 10**6), min_size=1, max_size=8, unique=True).map(lambda items: Choices(tuple(items)))


@given(st.one_of(integers, stepped, choices), seeds)
def test_what_is_drawn_of_a_finite_domain_is_one_of_its_values(domain, rng):
    drawn = domain.draw(rng)
    assert domain.lowest <= drawn <= domain.highest
    position = domain.values.index(drawn) if isinstance(domain, Choices) else round((drawn - domain.min) / domain.step)
    assert domain.at(position) == drawn


@given(numbers, seeds)
def test_what_is_drawn_of_a_continuous_range_is_within_it(domain, rng):
    assert domain.min <= domain.draw(rng) <= domain.max


@given(stepped)
def test_a_stepped_range_reaches_its_end_exactly(domain):
    assert domain.at(domain.count - 1) == domain.max


@pytest.mark.parametrize("domain", [IntegerRange(1, 1023, 1, True), FloatRange(1.0, 1024.0, None, True)])
def test_a_log_scale_draws_small_values_as_often_as_large_ones(domain):
    rng = random.Random(7)
    low = sum(domain.draw(rng) < 32 for _ in range(4000))
    assert 1800 < low < 2200  # 32 is the middle of 1 to 1024 on that scale
