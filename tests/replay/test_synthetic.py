"""Synthetic workloads and arrivals: deterministic, as the peer's runner draws them, and no option without effect."""

import math
import random

import numpy as np
import pytest

from fpmsdk import replay_trace
from fpmsdk.errors import TraceError
from fpmsdk.replay.arrivals import arrival_portions_ms, arrival_times_ms
from fpmsdk.replay.trace import Trace


def test_a_constant_interval_counts_from_zero():  # U23
    assert arrival_times_ms(4, arrival_interval_ms=100).tolist() == [0.0, 100.0, 200.0, 300.0]


def test_constant_gaps_are_added_up_as_the_peer_does():
    # Recorded from the peer at 60 requests per s; 6 * (1000 / 60) is 100.0.
    times = arrival_times_ms(9, arrival_interval_ms=1000 / 60)
    assert times[5:].tolist() == [83.33333333333334, 100.00000000000001, 116.66666666666669, 133.33333333333334]
    portions = arrival_portions_ms(9, 2, arrival_interval_ms=1000 / 60)
    assert np.concatenate(list(portions)).tolist() == times.tolist()


def test_without_rate_and_interval_all_arrive_at_once():  # U23
    assert arrival_times_ms(3).tolist() == [0.0, 0.0, 0.0]


def test_poisson_gaps_are_those_of_the_peers_runner():
    # Recorded from the peer: one seeded generator of the standard library, gaps added up from 0.0.
    assert arrival_times_ms(4, request_rate=10.0).tolist() == [
        0.0,
        102.0060287274801,
        104.53891263175399,
        136.70131903925054,
    ]
    assert arrival_times_ms(3, request_rate=10.0, arrival_seed=7).tolist() == [
        0.0,
        39.13148442348042,
        55.48333012402824,
    ]


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, 1e-320, True, "5"])  # U23
def test_a_rate_is_positive_and_has_a_finite_reciprocal(rate):
    with pytest.raises(TraceError, match="request_rate is") as refused:
        arrival_times_ms(3, request_rate=rate)
    assert refused.value.field == "request_rate"


def test_new_arrivals_leave_everything_else_as_it_was():
    trace = Trace.from_arrays([0.0, 4.0, 9.0], [4, 5, 6], [1, 2, 3], session_ids=["a", "a", "b"], delay_ms=[0, 3, 0])
    slower = trace.with_arrivals(arrival_interval_ms=50)
    assert slower.arrival_ms[[0, 2]].tolist() == [0.0, 50.0]
    assert np.isnan(slower.arrival_ms[1])
    assert slower.delay_ms.tolist() == [0.0, 3.0, 0.0]
    assert slower.prompt_tokens is trace.prompt_tokens


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "request_rate"),
        ({"arrival_seed": 3}, "request_rate"),
        ({"arrival_seed": 3, "arrival_interval_ms": 5.0}, "arrival_seed"),
        ({"request_rate": 3, "arrival_interval_ms": 5.0}, "request_rate"),
        ({"request_rate": 3, "arrival_seed": -1}, "arrival_seed"),
        ({"arrival_interval_ms": -1.0}, "arrival_interval_ms"),
    ],
)
def test_arrival_options_that_contradict_are_refused(options, field):
    with pytest.raises(TraceError) as refused:
        Trace.from_arrays([0.0], [4], [1]).with_arrivals(**options)
    assert refused.value.field == field


def test_lengths_are_fixed_or_drawn_as_the_peers_runner_does():
    assert Trace.synthetic(2, 100, 7).prompt_tokens.tolist() == [100, 100]
    drawn = Trace.synthetic(4, 100, 10, random_range_ratio=0.5, random_seed=3)
    assert drawn.prompt_tokens.tolist() == [65, 87, 84, 58]  # recorded from the peer
    assert drawn.output_tokens.tolist() == [7, 9, 8, 10]


def test_sessions_have_turns_with_delays_and_only_sessions_arrive():
    trace = Trace.synthetic(2, 8, 3, turns_per_session=2, inter_turn_delay_ms=5.0, arrival_interval_ms=20.0)
    assert trace.session_ids.tolist() == ["session-0", "session-1"]
    assert trace.turn_index.tolist() == [0, 1, 0, 1]
    assert trace.delay_ms.tolist() == [0.0, 5.0, 0.0, 5.0]
    assert trace.arrival_ms[[0, 2]].tolist() == [0.0, 20.0]


ENGINE = {
    "block_size": 4,
    "num_gpu_blocks": 400,
    "max_num_batched_tokens": 64,
    "timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1},
}


def reused(trace, **options):
    report = replay_trace(trace, launch={"engine": ENGINE}, scheduler_rules="simulator", concurrency=1, **options)
    return report.requests["reused_tokens"].to_pylist()


@pytest.mark.parametrize(("cached", "hit"), [(8, 8), (10, 8), (3, 0), (16, 12)])
def test_a_cached_prefix_is_missed_first_and_then_hit_in_whole_blocks(cached, hit):
    assert reused(Trace.synthetic(3, 16, 2, cached_prefix_tokens=cached)) == [0, hit, hit]


@pytest.mark.parametrize(("ratio", "hit"), [(0.5, 8), (0.6, 8), (0.625, 12), (1.0, 12)])
def test_a_session_shares_the_leading_blocks_of_its_group(ratio, hit):
    trace = Trace.synthetic(
        6, 16, 2, turns_per_session=2, shared_prefix_ratio=ratio, num_prefix_groups=2, block_tokens=4, random_seed=1
    )
    generator = random.Random(1)
    groups = [generator.randrange(2) for _ in range(6)]
    first_of_group = {group: groups.index(group) for group in groups}
    expected = [0 if turn == 0 and first_of_group[groups[s]] == s else hit for s in range(6) for turn in range(2)]
    assert reused(trace) == expected


def test_where_nothing_is_shared_there_are_no_blocks():
    assert len(Trace.synthetic(2, 4096, 1).hash_ids) == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"request_count": 0}, "request_count"),
        ({"request_count": True}, "request_count"),
        ({"input_tokens": 0}, "input_tokens"),
        ({"output_tokens": -1}, "output_tokens"),
        ({"turns_per_session": 0}, "turns_per_session"),
        ({"inter_turn_delay_ms": 5.0}, "inter_turn_delay_ms"),
        ({"inter_turn_delay_ms": -5.0, "turns_per_session": 2}, "inter_turn_delay_ms"),
        ({"random_range_ratio": 1.5}, "random_range_ratio"),
        ({"random_range_ratio": 0.001}, "random_range_ratio"),
        ({"random_seed": 5}, "random_seed"),
        ({"arrival_seed": 5}, "arrival_seed"),
        ({"cached_prefix_tokens": 17}, "cached_prefix_tokens"),
        ({"cached_prefix_tokens": 8, "shared_prefix_ratio": 0.5, "num_prefix_groups": 1}, "cached_prefix_tokens"),
        ({"cached_prefix_tokens": 8, "block_tokens": 4}, "block_tokens"),
        ({"shared_prefix_ratio": 0.5}, "num_prefix_groups"),
        ({"num_prefix_groups": 2}, "shared_prefix_ratio"),
        ({"shared_prefix_ratio": 1.5, "num_prefix_groups": 2}, "shared_prefix_ratio"),
        ({"block_tokens": 4}, "block_tokens"),
        ({"block_tokens": 0, "shared_prefix_ratio": 0.5, "num_prefix_groups": 2}, "block_tokens"),
    ],
)
def test_an_option_out_of_range_or_without_effect_is_refused(options, field):
    with pytest.raises(TraceError) as refused:
        Trace.synthetic(**({"request_count": 2, "input_tokens": 16, "output_tokens": 2} | options))
    assert refused.value.field == field
