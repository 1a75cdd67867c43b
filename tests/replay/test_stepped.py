"""A replay that is driven from outside: the same simulation, and requests that come and go by hand."""

import pytest

from fpmsdk import replay_trace
from fpmsdk.errors import ConfigError, ReplayError, RequestNeverFitsError, TraceError
from fpmsdk.replay.stepped import SteppedReplay
from fpmsdk.replay.stepped_rank import SteppedRank
from tests.replay.test_run_stream import CASES, trace_of

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
DRIVEN = {
    name: options for name, options in CASES.items() if not {"concurrency", "max_sim_time_ms", "sla"} & options.keys()
}
del DRIVEN["faster"]
COLUMNS = (
    "arrival_ms",
    "first_admit_ms",
    "first_token_ms",
    "last_token_ms",
    "end_ms",
    "reused_tokens",
    "worker",
    "status",
)


def drained(replay):
    steps = []
    while not replay.drained:
        steps.append(replay.step())
    return steps


def events_of(steps):
    return [(step.at_ms, event.kind, event.request_id) for step in steps for event in step.events]


@pytest.mark.parametrize("case", DRIVEN)
def test_a_driven_replay_is_the_replay(case):
    trace = trace_of(f"driven {case}", count=150)
    whole = replay_trace(trace, **DRIVEN[case])
    replay = SteppedReplay(block_tokens=8, **DRIVEN[case])
    for row, name in enumerate(trace.request_ids.tolist()):
        replay.submit(
            name,
            int(trace.prompt_tokens[row]),
            int(trace.output_tokens[row]),
            at_ms=float(trace.arrival_ms[row]),
            priority=int(trace.priority[row]),
            hash_ids=trace.hash_ids[trace.hash_offsets[row] : trace.hash_offsets[row + 1]].tolist(),
        )
    steps = drained(replay)
    outcomes = {event.request_id: event.outcome for step in steps for event in step.events if event.kind == "ended"}
    expected = whole.requests.select(["request_id", *COLUMNS]).to_pylist()
    for row in expected:
        found = outcomes[row.pop("request_id")]
        assert {name: found[name] for name in COLUMNS} == row | {
            "worker": row["worker"] if row["worker"] is not None else -1
        }
    assert [step.at_ms for step in steps] == sorted({step.at_ms for step in steps})  # one moment a step
    assert sum(len(step.passes) for step in steps) == whole.passes.num_rows
    tokens = sum(event.tokens for step in steps for event in step.events if event.kind == "emitted")
    assert tokens == sum(whole.requests["output_tokens"].to_pylist())
    assert sum(event.kind == "admitted" for step in steps for event in step.events) == whole.admissions.num_rows
    assert sum(event.kind == "preempted" for step in steps for event in step.events) == whole.preemptions.num_rows


def test_requests_may_be_submitted_under_way_and_names_used_again():
    replay = SteppedReplay(timing=FIXED)
    replay.submit("a", 8, 1, at_ms=3.0)
    assert (replay.now_ms, replay.next_event_ms, replay.drained) == (0.0, 3.0, False)
    assert events_of(drained(replay)) == [
        (3.0, "arrived", "a"),
        (3.0, "admitted", "a"),
        (13.0, "emitted", "a"),
        (13.0, "ended", "a"),
    ]
    replay.submit("a", 8, 1, at_ms=5.0)  # that has passed: now
    assert events_of(drained(replay))[-1] == (23.0, "ended", "a")
    assert replay.next_event_ms is None
    assert replay.step().events == []


def cancelled(replay, name):
    replay.cancel(name)
    steps = drained(replay)
    ends = [event for step in steps for event in step.events if event.kind == "ended"]
    return [(event.at_ms, event.request_id, event.outcome["status"], event.outcome["output_tokens"]) for event in ends]


def test_a_request_is_canceled_before_it_arrives():
    replay = SteppedReplay(timing=FIXED)
    replay.submit("a", 8, 3, at_ms=5.0)
    assert cancelled(replay, "a") == [(5.0, "a", "canceled", 0)]


def test_a_request_is_canceled_while_it_waits():
    replay = SteppedReplay(timing=FIXED, launch={"engine": {"max_num_seqs": 1}})
    for name in "ab":
        replay.submit(name, 8, 3)
    replay.step()
    # The pass under way is of the other one, but the rank is in it.
    assert cancelled(replay, "b") == [(10.0, "b", "canceled", 0), (12.0, "a", "completed", 3)]


def test_a_request_is_canceled_when_its_pass_has_ended():
    replay = SteppedReplay(timing=FIXED)
    replay.submit("a", 8, 3)
    replay.step()
    assert cancelled(replay, "a") == [(10.0, "a", "canceled", 1)]


def test_who_completes_in_the_pass_under_way_is_not_canceled():
    replay = SteppedReplay(timing=FIXED)
    replay.submit("a", 8, 1)
    replay.step()
    assert cancelled(replay, "a") == [(10.0, "a", "completed", 1)]


def test_a_prompt_on_its_way_to_a_decode_worker_is_canceled_when_it_is_there():
    replay = SteppedReplay(
        timing=FIXED,
        prefill_timing=FIXED,
        launch={"engine": {"worker_type": "decode"}},
        prefill_launch={"engine": {"worker_type": "prefill"}},
        handoff_latency_ms=4.0,
        scheduler_rules="simulator",
    )
    replay.submit("a", 8, 3)
    replay.step()
    assert [event.kind for event in replay.step().events] == ["source_held", "destination_reserved"]
    assert cancelled(replay, "a") == [(14.0, "a", "canceled", 0)]


def test_what_a_canceled_request_held_is_free():
    launch = {"engine": {"num_gpu_blocks": 5, "block_size": 4, "enable_prefix_caching": False}}
    replay = SteppedReplay(timing=FIXED, launch=launch)
    for name in "ab":
        replay.submit(name, 12, 2)  # one at a time has room
    replay.step()
    replay.cancel("a")
    ends = [event for step in drained(replay) for event in step.events if event.kind == "ended"]
    assert [(event.request_id, event.at_ms) for event in ends] == [("a", 10.0), ("b", 21.0)]


def test_a_step_says_who_waits_for_ever_and_may_be_canceled():
    launch = {"engine": {"num_gpu_blocks": 10, "block_size": 4}}
    replay = SteppedReplay(timing=FIXED, launch=launch, scheduler_rules="simulator")
    replay.submit("huge", 38, 4)
    with pytest.raises(RequestNeverFitsError, match="request 'huge' can never be scheduled again"):
        drained(replay)
    assert [end[1:3] for end in cancelled(replay, "huge")] == [("huge", "canceled")]


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        (lambda replay: replay.cancel("x"), TraceError, "request 'x' is not active"),
        (lambda replay: replay.submit("a", 8, 1), TraceError, "request 'a' is already active"),
        (lambda replay: replay.submit("b", 0, 1), TraceError, r"prompt_tokens\[0\] is 0"),
        (lambda replay: replay.submit("b", 8, 1, at_ms=float("nan")), ConfigError, "at_ms is nan"),
        (lambda replay: replay.submit("b", 8, 1, dp_rank=7), ConfigError, "dp_rank 7 is out of range"),
        (lambda replay: replay.submit("b", 999, 1, hash_ids=[1]), TraceError, "give a hash id for every block"),
    ],
)
def test_what_cannot_be_is_refused(act, error, said):
    replay = SteppedReplay(timing=FIXED)
    replay.submit("a", 8, 1)
    with pytest.raises(error, match=said):
        act(replay)


RANK = {"timing": FIXED, "launch": {"engine": {"block_size": 4, "num_gpu_blocks": 20, "max_num_batched_tokens": 16}}}


def test_a_rank_is_driven_pass_by_pass():
    rank = SteppedRank(block_tokens=4, **RANK)
    assert rank.submit("a", 12, 2, hash_ids=[1, 2, 3]) is None
    assert rank.submit("b", 12, 1, hash_ids=[1, 2, 9]) is None
    first = rank.execute_pass(100.0)
    # The second finds two blocks of the first, which is published already.
    assert (first.end_ms, first.tokens, first.admissions) == (110.0, {"a": 12, "b": 4}, {"a": 0, "b": 8})
    assert first.fpm["num_prefill_requests"] == 2
    done = rank.complete_pass(first, 115.0)  # a group with a slower rank
    assert (done.end_ms, done.tokens, done.completed, done.rejected) == (115.0, {"a": 1, "b": 1}, ["b"], [])
    assert [change for _, change in done.kv_events] == [1, 1, 1, 1]
    second = rank.execute_pass(115.0)
    assert (second.end_ms, second.fpm["num_decode_requests"]) == (116.0, 1)
    assert rank.complete_pass(second, 116.0).completed == ["a"]
    assert not rank.has_work


def test_a_rank_tells_refusals_and_lets_go_of_the_canceled():
    rank = SteppedRank(**RANK)
    assert "needs more than the 19 usable KV blocks" in rank.submit("huge", 100, 1)
    simulated = SteppedRank(**RANK, scheduler_rules="simulator")
    assert simulated.submit("huge", 100, 1) is None  # found out at the head of the queue
    assert simulated.complete_pass(simulated.execute_pass(0.0), 0.0).rejected == ["huge"]
    rank.submit("a", 8, 1)
    rank.cancel("a")
    assert not rank.has_work
    for number in range(200):  # more than there were indices at first
        rank.submit(f"r{number}", 8, 1)
    assert len(rank.execute_pass(0.0).tokens) == 2


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda rank, running: rank.submit("b", 8, 1), "submit within a pass"),
        (lambda rank, running: rank.cancel("a"), "cancel within a pass"),
        (lambda rank, running: rank.execute_pass(9.0), "execute_pass within a pass"),
        (lambda rank, running: rank.complete_pass(running, 9.0), "the pass is not done before 10.0"),
        (lambda rank, running: rank.complete_pass(None, 10.0), "not under way"),
    ],
)
def test_a_rank_in_a_pass_takes_no_command(act, said):
    rank = SteppedRank(**RANK)
    rank.submit("a", 8, 1)
    running = rank.execute_pass(0.0)
    with pytest.raises(ReplayError, match=said):
        act(rank, running)
