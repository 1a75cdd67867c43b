"""Sessions that branch: several turns wait for one, one waits for several, and a session ends with its last turn."""

import numpy as np
import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import TraceError

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
LAUNCH = {"engine": {"block_size": 4, "num_gpu_blocks": 400, "enable_prefix_caching": False, "timing_model": FIXED}}


def session(*turns, **columns):
    """A session of (output tokens, delay, awaits) a turn."""
    outputs, delays, awaits = zip(*turns, strict=True)
    n = len(turns)
    defaults = {"session_ids": ["s"] * n, "delay_ms": delays, "awaits": awaits}
    return Trace.from_arrays([0.0] * n, [4] * n, outputs, **defaults | columns)


def arrivals(trace, **options):
    report = replay_trace(trace, launch=LAUNCH, scheduler_rules="simulator", **options)
    return report.requests["arrival_ms"].to_pylist()


# A first turn of 10 ms; two branches from it, of 10 and 10 + 20 ms; and a last turn that waits for both.
FORK_AND_JOIN = [(1, 0, []), (1, 5, [1]), (21, 2, [2]), (1, 3, [1, 2])]


def test_turns_that_wait_for_the_same_one_run_side_by_side_and_a_turn_waits_for_all_it_awaits():
    first, left, right, joined = arrivals(session(*FORK_AND_JOIN), num_workers=4)
    assert (first, left, right) == (0.0, 15.0, 12.0)
    assert joined == 12.0 + 10.0 + 20.0 + 3.0


def test_a_turn_that_names_none_waits_for_the_one_before_it():
    assert arrivals(session((1, 0, []), (1, 5, []), (1, 5, [2]), (1, 5, []))) == [0.0, 15.0, 15.0, 30.0]


def test_speed_up_divides_the_delays_of_branches():
    assert arrivals(session(*FORK_AND_JOIN), num_workers=4, arrival_speedup_ratio=2.0)[1:3] == [12.5, 11.0]


def test_in_a_closed_loop_the_next_session_starts_when_the_last_turn_of_a_branching_one_has_ended():
    names = ["s"] * 3 + ["t"]
    trace = session((1, 0, []), (1, 0, [1]), (31, 0, [2]), (1, 0, []), session_ids=names)
    assert arrivals(trace, num_workers=4, concurrency=1) == [0.0, 10.0, 10.0, 50.0]
    assert arrivals(trace, num_workers=4) == [0.0, 10.0, 10.0, 0.0]


def test_selecting_keeps_what_turns_wait_for():
    trace = session((1, 0, []), (1, 5, [1]), (1, 2, [2]), (1, 0, []), session_ids=["s", "s", "s", "t"])
    head = trace.head(3)
    assert (head.awaits_offsets.tolist(), head.awaits.tolist()) == ([0, 0, 1, 2], [1, 2])
    assert arrivals(head, num_workers=2) == [0.0, 15.0, 12.0]


def test_sessions_keep_their_branches_when_they_are_put_into_order():
    trace = Trace.from_arrays(
        [9.0, 0.0, 9.0, 9.0],
        [4] * 4,
        [1] * 4,
        session_ids=["late", "early", "late", "late"],
        awaits=[[], [], [], [2]],
    )
    assert trace.turn_index.tolist() == [0, 0, 1, 2]
    assert np.diff(trace.awaits_offsets).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("awaits", "said"),
    [
        ([[1], [], [], []], r"awaits\[0\] is \[1\]; give 1 to 0"),
        ([[], [0], [], []], r"awaits\[1\] is \[0\]; give 1 to 1"),
        ([[], [], [3], []], r"awaits\[2\] is \[3\]; give 1 to 2"),
        ([[], [True], [], []], r"awaits\[1\]"),
        ([[], []], "awaits has 2 rows; give 4"),
    ],
)
def test_a_turn_waits_for_turns_of_its_session_before_it(awaits, said):
    with pytest.raises(TraceError, match=said) as refused:
        session(*[(1, 0, row) for row in ([], [], [], [])], awaits=awaits)
    assert refused.value.field == "awaits"
