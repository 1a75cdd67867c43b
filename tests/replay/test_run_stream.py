"""A stream of requests gives what the trace in memory gives, to the bit, with indices that are used again and again."""

import random

import pyarrow.parquet as pq
import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import ConfigError, EmptyResultError, RequestNeverFitsError, TraceError
from fpmsdk.replay import run_stream
from fpmsdk.replay.run_stream import replay_stream
from fpmsdk.replay.trace_stream import TraceStream

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
WALL = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s")
GROUPS = {
    "enable_prefix_caching": False,
    "kv_cache_capacity_bytes": 6_000,
    "kv_cache_groups": [
        {"name": "full", "kind": "attention", "num_layers": 1, "block_size_tokens": 4, "page_size_bytes": 8},
        {
            "name": "window",
            "kind": "attention",
            "num_layers": 1,
            "block_size_tokens": 4,
            "page_size_bytes": 8,
            "sliding_window": 8,
        },
    ],
}


def trace_of(seed, *, count=300, blocks=True, sessions=False, zero_output=True):
    rng = random.Random(seed)
    prompts = [rng.randrange(1, 60) for _ in range(count)]
    names = [f"s{rng.randrange(count // 3)}" for _ in range(count)] if sessions else None
    seen, delays = set(), []
    for name in names or []:
        delays.append(float(rng.randrange(0, 20)) if name in seen else 0.0)
        seen.add(name)
    fresh = iter(range(1000, 10**9))

    def chain(prompt):
        shared = rng.randrange(0, 6)
        return [rng.randrange(2) * 100 + place if place < shared else next(fresh) for place in range(-(-prompt // 8))]

    return Trace.from_arrays(
        [float(rng.randrange(0, 4000)) for _ in range(count)],
        prompts,
        [rng.randrange(0 if zero_output else 1, 30) for _ in range(count)],
        session_ids=names,
        delay_ms=delays or None,
        priority=[rng.randrange(3) for _ in range(count)],
        hash_ids=[chain(prompt) for prompt in prompts] if blocks else None,
        block_tokens=8,
    )


def engine(**options):
    common = {
        "block_size": 4,
        "num_gpu_blocks": 60,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 6,
        "timing_model": FIXED,
    }
    return {"engine": common | options}


CASES = {
    "prefix caching": {"launch": engine()},
    "no caching": {"launch": engine(enable_prefix_caching=False)},
    "simulator rules": {"launch": engine(), "scheduler_rules": "simulator"},
    "priority": {"launch": engine(), "scheduling_policy": "priority"},
    "workers": {"launch": engine(), "num_workers": 3},
    "routing": {"launch": engine(), "num_workers": 3, "placement": "kv_aware"},
    "routing without caches": {
        "launch": engine(enable_prefix_caching=False),
        "num_workers": 2,
        "placement": "kv_aware",
    },
    "ranks": {"launch": engine() | {"dp_size": 2}, "num_workers": 2},
    "closed loop": {"launch": engine(), "concurrency": 7},
    "cut off": {"launch": engine(), "max_sim_time_ms": 1900.0},
    "faster": {"launch": engine(), "arrival_speedup_ratio": 7.0},
    "model length": {"launch": engine(max_model_len=40)},
    "goodput": {"launch": engine(), "sla": {"ttft_ms": 30.0, "itl_ms": 2.0}, "exact_itl": True},
    "drafts": {"launch": engine(aic_nextn=2, aic_nextn_accept_rates="0.7,0.4"), "scheduler_rules": "simulator"},
    "byte budget": {"launch": engine(**GROUPS), "scheduler_rules": "simulator"},
    "groups of vLLM": {"launch": engine(**GROUPS)},
    "two pools": {
        "launch": engine(worker_type="decode"),
        "prefill_launch": engine(worker_type="prefill", kv_transfer_bytes_per_token=100_000, kv_transfer_bandwidth=1.0),
        "scheduler_rules": "simulator",
        "num_workers": 2,
        "num_prefill_workers": 2,
    },
}


@pytest.fixture(autouse=True)
def few_indices(monkeypatch):
    """So few that they are used many times, and chains of blocks are forgotten all the time."""
    monkeypatch.setattr(run_stream, "_FIRST_SLOTS", 4)
    monkeypatch.setattr(run_stream, "_ENDED_AT_ONCE", 3)
    monkeypatch.setattr(run_stream, "_FEW_KEYS", 8)
    monkeypatch.setattr("fpmsdk.replay.trace_stream._ROWS_PER_PORTION", 5)


def without_wall(summary):
    return {name: value for name, value in summary.items() if name not in WALL}


@pytest.mark.parametrize("sessions", [False, True], ids=["", "sessions"])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_is_served_as_the_trace_is(case, sessions, tmp_path):
    for seed in range(3):
        trace = trace_of(f"{case} {sessions} {seed}", sessions=sessions)
        whole = replay_trace(trace, **CASES[case])
        streamed = replay_stream(TraceStream.of(trace), requests_path=tmp_path / "rows.parquet", **CASES[case])
        assert without_wall(streamed.summary) == without_wall(whole.summary)
        rows = pq.read_table(tmp_path / "rows.parquet").sort_by("request_id")
        assert rows.equals(whole.requests.sort_by("request_id"))
        options = dict(whole.options)
        assert options.pop("warm_prefix_cache") is False
        assert streamed.options == options


def test_requests_that_all_wait_at_once_are_held():
    trace = Trace.from_arrays([0.0] * 500, [8] * 500, [3] * 500)
    options = {"launch": engine(max_num_seqs=1)}
    assert without_wall(replay_stream(TraceStream.of(trace), **options).summary) == without_wall(
        replay_trace(trace, **options).summary
    )


def test_a_synthetic_stream_is_the_synthetic_trace():
    for options in (
        {"request_rate": 300.0, "arrival_seed": 5},
        {"arrival_interval_ms": 3.0, "random_range_ratio": 0.5, "random_seed": 9},
        {"turns_per_session": 3, "inter_turn_delay_ms": 4.0, "request_rate": 90.0},
        {"cached_prefix_tokens": 17, "random_range_ratio": 0.7, "arrival_interval_ms": 9.0},
        {"shared_prefix_ratio": 0.5, "num_prefix_groups": 3, "block_tokens": 8, "turns_per_session": 2},
    ):
        trace = Trace.synthetic(60, 40, 12, **options)
        stream = TraceStream.synthetic(60, 40, 12, **options)
        assert stream.num_requests == len(trace)
        assert without_wall(replay_stream(stream, launch=engine()).summary) == without_wall(
            replay_trace(trace, launch=engine()).summary
        )


def test_a_stream_says_what_went_wrong_as_a_trace_does():
    late = TraceStream.of(Trace.from_arrays([5.0], [8], [3]))
    with pytest.raises(EmptyResultError, match="no request completed: 0 of 0 were rejected; 0 were unfinished"):
        replay_stream(late, launch=engine(), max_sim_time_ms=1.0)
    huge = TraceStream.of(Trace.from_arrays([5.0], [999], [3], request_ids=["huge"]))
    with pytest.raises(EmptyResultError, match="the first, huge, because its prompt needs more than"):
        replay_stream(huge, launch=engine())
    outgrows = TraceStream.of(Trace.from_arrays([5.0], [30], [300], request_ids=["outgrows"]))
    with pytest.raises(RequestNeverFitsError, match="request 'outgrows' can never be scheduled again"):
        replay_stream(outgrows, launch=engine(), scheduler_rules="simulator")
    with pytest.raises(TraceError, match="give a TraceStream"):
        replay_stream(Trace.from_arrays([5.0], [8], [3]))
    branching = Trace.from_arrays([0.0] * 3, [8] * 3, [1] * 3, session_ids=["a"] * 3, awaits=[[], [1], [2]])
    with pytest.raises(TraceError, match="sessions that branch"):
        TraceStream.of(branching)
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        replay_stream(TraceStream.of(trace_of("x")), launch=engine(enable_chunked_prefill=False))
    with pytest.raises(ConfigError, match="dp_rank 3 is out of range"):
        replay_stream(TraceStream.of(Trace.from_arrays([5.0], [8], [3], dp_rank=[3])), launch=engine())


def test_a_failed_replay_leaves_no_file_of_rows(tmp_path):
    outgrows = TraceStream.of(Trace.from_arrays([5.0], [30], [300]))
    with pytest.raises(RequestNeverFitsError):
        replay_stream(outgrows, launch=engine(), scheduler_rules="simulator", requests_path=tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []
