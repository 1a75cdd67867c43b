"""How a replay names the sessions of a trace in its report."""

from fpmsdk.replay.run import replay_trace
from fpmsdk.replay.trace import Trace

LAUNCH = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}}}


def test_turns_name_their_session_and_a_request_of_its_own_names_none():
    trace = Trace.from_arrays(
        [0.0, 0.0, 1.0], [8, 8, 8], [1, 1, 1], session_ids=["s", "s", "t"], delay_ms=[0.0, 5.0, 0.0]
    )
    table = replay_trace(trace, launch=LAUNCH).requests
    assert table["session_id"].to_pylist() == ["s", "s", None]
    assert table["turn_index"].to_pylist() == [0, 1, 0]
