"""Rules of the columnar trace: order, sessions, shared blocks, selection, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace


def test_rows_are_served_in_arrival_order_and_equal_times_in_row_order():
    trace = Trace.from_arrays([7.0, 3.0, 7.0, 3.0], [1, 2, 3, 4], [1, 1, 1, 1])
    assert trace.prompt_tokens.tolist() == [2, 4, 1, 3]
    assert trace.request_ids.tolist() == ["request_2", "request_4", "request_1", "request_3"]


def test_turns_of_a_session_follow_one_another_and_only_the_first_has_an_arrival():
    trace = Trace.from_arrays(
        [9.0, 4.0, 50.0, 1.0],
        [10, 20, 30, 40],
        [1, 1, 1, 1],
        session_ids=["late", "early", "early", "single"],
        delay_ms=[0.0, 0.0, 2.5, 0.0],
    )
    assert trace.session_ids.tolist() == ["single", "early", "late"]
    assert trace.prompt_tokens.tolist() == [40, 20, 30, 10]
    assert trace.session_index.tolist() == [0, 1, 1, 2]
    assert trace.turn_index.tolist() == [0, 0, 1, 0]
    assert trace.delay_ms.tolist() == [0.0, 0.0, 2.5, 0.0]
    assert trace.arrival_ms[[0, 1, 3]].tolist() == [1.0, 4.0, 9.0]
    assert np.isnan(trace.arrival_ms[2])


def test_the_arrival_of_a_later_turn_is_ignored():
    trace = Trace.from_arrays([0.0, np.nan], [1, 1], [1, 1], session_ids=["s", "s"], delay_ms=[0.0, 1.0])
    assert trace.turn_index.tolist() == [0, 1]


def test_hash_ids_become_dense_in_order_of_first_appearance():
    trace = Trace.from_arrays([5.0, 0.0], [8, 12], [1, 1], hash_ids=[[2**64 - 1, 7], [7, 3, 2**64 - 1]], block_tokens=4)
    assert trace.hash_offsets.tolist() == [0, 3, 5]
    assert trace.hash_ids.tolist() == [1, 2, 0, 0, 1]


def test_blocks_past_the_end_of_the_prompt_are_dropped():
    trace = Trace.from_arrays([0.0], [5], [1], hash_ids=[[1, 2, 3, 4]], block_tokens=4)
    assert trace.hash_ids.tolist() == [0, 1]


def test_a_row_may_have_no_hash_ids_beside_rows_that_have_some():
    trace = Trace.from_arrays([0.0, 1.0], [5, 4], [1, 1], hash_ids=[[], [9]], block_tokens=4)
    assert trace.hash_offsets.tolist() == [0, 0, 1]


def test_a_trace_without_hash_ids_shares_nothing():
    trace = Trace.from_arrays([0.0, 1.0], [5, 4], [1, 1])
    assert trace.hash_offsets.tolist() == [0, 0, 0]
    assert trace.hash_ids.tolist() == []


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"arrival_ms": [], "prompt_tokens": [], "output_tokens": []}, "", "no requests"),
        ({"prompt_tokens": [4, 0]}, "prompt_tokens", r"prompt_tokens\[1\] is 0"),
        ({"prompt_tokens": [4, 2**31]}, "prompt_tokens", r"prompt_tokens\[1\] is 2147483648"),
        ({"prompt_tokens": [4.0, 4.0]}, "prompt_tokens", "dtype float64"),
        ({"prompt_tokens": [True, True]}, "prompt_tokens", "dtype bool"),
        ({"prompt_tokens": [[4, 4]]}, "prompt_tokens", r"shape \(1, 2\)"),
        ({"output_tokens": [1, -1]}, "output_tokens", r"output_tokens\[1\] is -1"),
        ({"output_tokens": [1]}, "output_tokens", r"shape \(1,\)"),
        ({"arrival_ms": [0.0, float("nan")]}, "arrival_ms", r"arrival_ms\[1\] is nan"),
        ({"arrival_ms": [0.0, float("inf")]}, "arrival_ms", r"arrival_ms\[1\] is inf"),
        ({"arrival_ms": [0.0, -1.0]}, "arrival_ms", r"arrival_ms\[1\] is -1"),
        ({"arrival_ms": [0.0]}, "arrival_ms", r"shape \(1,\)"),
        ({"request_ids": ["a", "a"]}, "request_ids", 'duplicate request id "a" in rows 0 and 1'),
        ({"request_ids": ["a", ""]}, "request_ids", r"request_ids\[1\] is ''"),
        ({"request_ids": ["a"]}, "request_ids", "1 entries"),
        ({"priority": [0, 2**31]}, "priority", r"priority\[1\] is 2147483648"),
        ({"session_ids": ["s"]}, "session_ids", "1 entries"),
        ({"delay_ms": [0.0, 3.0]}, "delay_ms", "first turn"),
        ({"delay_ms": [0.0, -3.0], "session_ids": ["s", "s"]}, "delay_ms", r"delay_ms\[1\] is -3"),
        ({"hash_ids": [[1], []], "block_tokens": 3}, "hash_ids", "cover 3"),
        ({"hash_ids": [[-1], []]}, "hash_ids", "unsigned 64-bit"),
        ({"hash_ids": [[1]]}, "hash_ids", "1 rows"),
        *(
            ({"arrival_ms": column}, "arrival_ms", "dtype")
            for column in (
                np.array([1, 2], "m8[s]"),
                np.array([1, 2], "M8[s]"),
                ["1", "2"],
                [False, True],
                [1j, 2j],
                [10**400, 0],
                [None, 1.0],
            )
        ),
        ({"arrival_ms": [[0.0], [1.0, 2.0]]}, "arrival_ms", "no|not a column"),
        ({"prompt_tokens": [[4], [4, 4]]}, "prompt_tokens", "not a column"),
        ({"prompt_tokens": 4}, "prompt_tokens", r"shape \(\)"),
        ({"priority": [[0], [0, 1]]}, "priority", "not a column"),
        *(
            ({"hash_ids": rows}, "hash_ids", said)
            for rows, said in (
                ([[1.0], []], "holds a float"),
                ([["1"], []], "holds a str"),
                ([[True], []], "holds a bool"),
                ([[None], []], "holds a NoneType"),
                (["ab", []], "holds a str"),
                ([None, None], "not a list of lists"),
                (5, "not a list of lists"),
                ([np.array([-1]), []], "unsigned 64-bit"),
                ([[2**64], []], "unsigned 64-bit"),
            )
        ),
        ({"session_ids": [["s"], ["t"]]}, "session_ids", r"session_ids\[0\] is \['s'\]"),
        ({"session_ids": [1, 2]}, "session_ids", r"session_ids\[0\] is 1"),
        ({"session_ids": 5}, "session_ids", "session_ids has 5"),
        ({"session_ids": "st"}, "session_ids", "session_ids has 'st'"),
        ({"request_ids": 5}, "request_ids", "request_ids has 5"),
    ],
)
def test_a_malformed_column_is_refused_by_name(changes, field, said):
    columns = {"arrival_ms": [0.0, 1.0], "prompt_tokens": [4, 4], "output_tokens": [1, 1]} | changes
    with pytest.raises(TraceError, match=said) as refused:
        Trace.from_arrays(**columns)
    assert refused.value.field == field


def test_head_keeps_the_first_rows_with_their_times_and_blocks():
    trace = Trace.from_arrays([3.0, 1.0, 2.0], [4, 8, 4], [1, 1, 1], hash_ids=[[5], [5, 6], [6]], block_tokens=4)
    head = trace.head(2)
    assert head.arrival_ms.tolist() == [1.0, 2.0]
    assert head.hash_offsets.tolist() == [0, 2, 3]
    assert head.hash_ids.tolist() == [0, 1, 1]
    assert len(trace.head(10)) == 3
    with pytest.raises(TraceError, match="selects no requests"):
        trace.head(0)


def test_between_takes_whole_sessions_that_start_inside_on_a_new_clock():
    trace = Trace.from_arrays(
        [0.0, 10.0, 0.0, 20.0, 30.0],
        [1, 2, 3, 4, 5],
        [1, 1, 1, 1, 1],
        session_ids=["a", "b", "b", "c", "d"],
        delay_ms=[0.0, 0.0, 7.0, 0.0, 0.0],
    )
    window = trace.between(10.0, 30.0)
    assert window.prompt_tokens.tolist() == [2, 3, 4]
    assert window.session_ids.tolist() == ["b", "c"]
    assert window.session_index.tolist() == [0, 0, 1]
    assert window.arrival_ms[[0, 2]].tolist() == [0.0, 10.0]
    with pytest.raises(TraceError, match=r"between 31 and 40 ms.*0\.0 to 30\.0"):
        trace.between(31, 40)


def test_summary_counts_the_demand():
    trace = Trace.from_arrays(
        [0.0, 500.0, 1000.0], [8, 4, 6], [2, 0, 4], hash_ids=[[1, 2], [1], [3, 4]], block_tokens=4
    )
    assert trace.summary() == {
        "num_requests": 3,
        "num_sessions": 3,
        "arrival_span_ms": 1000.0,
        "arrival_rate_rps": 2.0,
        "total_prompt_tokens": 18,
        "mean_prompt_tokens": 6.0,
        "max_prompt_tokens": 8,
        "total_output_tokens": 6,
        "mean_output_tokens": 2.0,
        "max_output_tokens": 4,
        "zero_output_requests": 1,
        "num_prompt_blocks": 5,
        "num_distinct_prompt_blocks": 4,
    }


def test_simultaneous_arrivals_have_no_rate():
    assert Trace.from_arrays([4.0, 4.0], [1, 1], [1, 1]).summary()["arrival_rate_rps"] is None


ROWS = st.lists(
    st.tuples(
        st.floats(0, 1e9),
        st.integers(1, 40),
        st.sampled_from("abcd"),
        st.lists(st.integers(0, 6), min_size=10),
    ),
    min_size=1,
    max_size=30,
)


@given(ROWS)
def test_order_sessions_and_blocks_hold_for_any_rows(rows):
    arrivals, prompts, sessions, hashes = zip(*rows, strict=True)
    delays = [0.0 if sessions.index(name) == row else 1.0 for row, name in enumerate(sessions)]
    ids = [str(row) for row in range(len(rows))]
    trace = Trace.from_arrays(
        arrivals,
        prompts,
        [1] * len(rows),
        request_ids=ids,
        session_ids=sessions,
        delay_ms=delays,
        hash_ids=hashes,
        block_tokens=4,
    )
    assert sorted(trace.request_ids.tolist()) == sorted(ids)
    first = trace.turn_index == 0
    assert (np.diff(trace.arrival_ms[first]) >= 0).all()
    assert (np.isnan(trace.arrival_ms) == ~first).all()
    assert (np.diff(trace.session_index) >= 0).all()
    dense_of = {}
    for position, row in enumerate(map(int, trace.request_ids)):
        assert trace.prompt_tokens[position] == prompts[row]
        blocks = trace.hash_ids[trace.hash_offsets[position] : trace.hash_offsets[position + 1]].tolist()
        assert len(blocks) == -(-prompts[row] // 4)
        for source, dense in zip(hashes[row], blocks, strict=False):
            assert dense_of.setdefault(source, dense) == dense
    assert sorted(dense_of.values()) == list(range(len(dense_of)))
