"""replay_trace: options, timing arguments, outcomes of requests, and what a run records."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk import EngineLaunchConfig, Trace, replay_trace
from fpmsdk._ext.placement import Placement
from fpmsdk._ext.pricing import FixedTiming, PassPricer
from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.replay import Replay
from fpmsdk._ext.scheduler import Requests, Scheduler
from fpmsdk._ext.workers import WorkerPool
from fpmsdk.errors import (
    ConfigError,
    EmptyResultError,
    LaunchConfigError,
    MissingCapabilityError,
    RequestNeverFitsError,
    TimingError,
    TraceError,
)
from fpmsdk.replay.system import as_timing_model

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
ENGINE = {"block_size": 4, "num_gpu_blocks": 64, "max_num_batched_tokens": 16, "timing_model": FIXED}


def trace(*shapes, arrivals=None, **columns):
    prompts, outputs = zip(*shapes, strict=True)
    return Trace.from_arrays(arrivals or [0.0] * len(shapes), prompts, outputs, **columns)


def replayed(*shapes, arrivals=None, columns=None, engine=None, launch=None, **options):
    configuration = {"engine": ENGINE | (engine or {})} | (launch or {})
    return replay_trace(trace(*shapes, arrivals=arrivals, **(columns or {})), launch=configuration, **options)


def column(report, name):
    return report.requests.column(name).to_pylist()


# Outcomes of requests


@pytest.mark.parametrize("rules", ["vllm", "simulator"])
@pytest.mark.parametrize(
    ("oversized", "engine", "reason"),
    [
        ((300, 2), {}, "needs more than the 6. usable KV blocks of 4 tokens"),
        ((10, 1), {"max_model_len": 10}, "leaves no room below max_model_len = 10"),
    ],
)
def test_a_request_that_can_never_fit_is_rejected_with_the_reason_and_the_others_go_on(
    rules, oversized, engine, reason
):
    report = replayed(oversized, (4, 1), engine=engine, scheduler_rules=rules)
    assert column(report, "status") == ["rejected", "completed"]
    assert column(report, "first_token_ms") == [None, 10.0]
    # vLLM refuses at arrival, the simulator when the request reaches the head.
    assert column(report, "end_ms") == [0.0 if rules == "vllm" else 10.0, 10.0]
    assert report.requests.column("rejection_reason")[1].as_py() is None
    assert re.search(reason, column(report, "rejection_reason")[0])


def test_without_chunked_prefill_a_prompt_beyond_the_budget_is_rejected():
    report = replayed((17, 1), (4, 1), engine={"enable_chunked_prefill": False})
    assert column(report, "status") == ["rejected", "completed"]
    assert "max_num_batched_tokens = 16" in column(report, "rejection_reason")[0]


def test_without_chunked_prefill_a_prefix_hit_lets_a_prompt_beyond_the_budget_run():
    shared = {"hash_ids": [[1, 2, 3], [1, 2, 3, 4, 5], [7, 8, 9, 10, 11]], "block_tokens": 4}
    report = replayed(
        (12, 1), (20, 1), (20, 1), arrivals=[0, 50, 60], columns=shared, engine={"enable_chunked_prefill": False}
    )
    assert column(report, "status") == ["completed", "completed", "rejected"]
    assert column(report, "reused_tokens")[1] == 12


@pytest.mark.parametrize("caching", [False, True])
def test_a_request_that_would_outgrow_the_cache_is_rejected_at_arrival_under_vllm_rules(caching):
    blocks = {"num_gpu_blocks": 11, "enable_prefix_caching": caching}
    # The last token needs no KV: 38 + 3 tokens fit into 40 places, 38 + 4 do not.
    report = replayed((38, 3), (38, 4), (40, 0), engine=blocks)
    assert column(report, "status") == ["completed", "rejected", "completed"]
    assert column(report, "end_ms")[1] == 0.0
    reason = "its prompt and output together need more than the 10 usable KV blocks of 4 tokens"
    assert column(report, "rejection_reason") == [None, reason, None]


def test_the_model_length_that_stops_generation_counts_not_the_output_that_was_asked_for():
    report = replayed((38, 1000), engine={"num_gpu_blocks": 11, "max_model_len": 41})
    assert column(report, "output_tokens") == [3]


@pytest.mark.parametrize("caching", [False, True])
def test_a_request_that_outgrows_the_cache_ends_the_replay_under_simulator_rules(caching):
    options = {"engine": {"num_gpu_blocks": 10, "enable_prefix_caching": caching}, "scheduler_rules": "simulator"}
    assert column(replayed((38, 3), **options), "output_tokens") == [3]
    with pytest.raises(RequestNeverFitsError, match="request 'long' can never be scheduled again") as failure:
        replayed((38, 4), **options, columns={"request_ids": ["long"]})
    assert "41 tokens needs 11 KV blocks of 4 tokens, the cache has 10" in str(failure.value)


def test_a_prompt_that_no_unchunked_pass_can_hold_is_named_under_simulator_rules():
    with pytest.raises(RequestNeverFitsError, match="exceeds max_num_batched_tokens = 16 without chunked prefill"):
        replayed((17, 1), engine={"enable_chunked_prefill": False}, scheduler_rules="simulator")


def test_zero_output_requests_complete_without_a_token():
    report = replayed((8, 0), (8, 2))
    assert column(report, "status") == ["completed", "completed"]
    assert column(report, "first_token_ms") == [None, 10.0]
    assert column(report, "end_ms") == [10.0, 11.0]


def test_every_request_emits_exactly_its_planned_tokens():  # U20
    report = replayed((8, 101), (8, 202), (8, 303), engine={"num_gpu_blocks": 256})
    assert column(report, "output_tokens") == [101, 202, 303]
    assert column(report, "first_reused_tokens") == [0, 0, 0]


def test_nothing_completed_is_an_error_not_an_empty_report():
    with pytest.raises(EmptyResultError, match="1 of 1 were rejected"):
        replayed((300, 2))


def test_unfinished_requests_are_reported_as_such():
    report = replayed((8, 2), (8, 2), (8, 2), arrivals=[0.0, 1000.0, 2000.0], max_sim_time_ms=1005.0)
    assert column(report, "status") == ["completed", "unfinished"]
    assert report.summary["num_requests"] == 2


# Load


def test_a_rejected_turn_lets_its_session_go_on():
    report = replayed((8, 2), (300, 1), (8, 2), columns={"session_ids": ["s"] * 3, "delay_ms": [0.0, 5.0, 5.0]})
    assert column(report, "status") == ["completed", "rejected", "completed"]
    assert column(report, "arrival_ms") == [0.0, 16.0, 21.0]


def test_a_rejected_request_frees_its_place_in_a_closed_loop():
    report = replayed((300, 1), (8, 2), (8, 2), concurrency=1)
    assert column(report, "arrival_ms") == [0.0, 0.0, 11.0]


def test_ranks_of_a_group_end_with_the_slowest():
    report = replayed((16, 2), (4, 3), launch={"dp_size": 2})
    assert column(report, "worker") == [0, 1]
    assert column(report, "end_ms") == [11.0, 12.0]


def test_the_prefill_cadence_starts_anew_with_each_busy_period():
    # Round robin over two ranks: the fifth request meets the third on rank 0. Their period starts at 100 ms; its
    # passes 1 to 3 only decode, the fourth takes the new prompt.
    report = replayed(
        (4, 2), (4, 2), (4, 20), (4, 1), (4, 1),
        arrivals=[0.0, 0.0, 100.0, 100.0, 105.0],
        engine={"prefill_schedule_interval": 4},
        launch={"dp_size": 2},
        scheduler_rules="simulator",
    )  # fmt: skip
    assert column(report, "first_token_ms")[2:] == [110.0, 110.0, 124.0]


def test_priority_serves_the_smaller_value_first():
    options = {"columns": {"priority": [0, 5, 1]}, "engine": {"max_num_seqs": 1}}
    shapes = [(8, 2), (8, 2), (8, 2)]
    assert column(replayed(*shapes, **options), "end_ms") == [11.0, 22.0, 33.0]
    assert column(replayed(*shapes, scheduling_policy="priority", **options), "end_ms") == [11.0, 33.0, 22.0]


# Recording


def test_a_pass_row_tells_work_queue_price_and_state():
    report = replayed((8, 3), (12, 2), engine={"max_num_batched_tokens": 8, "enable_prefix_caching": False})
    rows = report.passes.to_pylist()
    assert [row["end_ms"] for row in rows] == [10.0, 21.0, 32.0, 33.0]
    assert rows[1] == rows[1] | {
        "start_ms": 10.0,
        "prefill_ms": 10.0,
        "decode_ms": 1.0,
        "worker": 0,
        "composed": 0,
        "num_prefill_requests": 1,
        "sum_prefill_tokens": 7,
        "num_decode_requests": 1,
        "sum_decode_kv_tokens": 8,
        "num_running": 2,
        "num_waiting": 0,
        "active_blocks": 5,
    }
    assert (rows[0]["num_queued_prefill"], rows[0]["sum_queued_prefill_tokens"]) == (1, 12)


def test_passes_are_left_out_on_request_and_nothing_else_changes():
    full = replayed((8, 3), (12, 2))
    brief = replayed((8, 3), (12, 2), record_passes=False)
    assert brief.passes.num_rows == 0
    assert brief.requests.equals(full.requests)
    same = full.summary.keys() - {key for key in full.summary if "wall" in key or "processed" in key}
    assert {key: brief.summary[key] for key in same} == {key: full.summary[key] for key in same}


def run_core(shapes, **settings):
    settings = {"num_gpu_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16} | settings
    prompts, outputs = zip(*shapes, strict=True)
    requests = Requests(prompts, outputs)
    scheduler = Scheduler(requests, "simulator", **settings)
    recorder = Recorder(len(shapes), True)
    replay = Replay(
        requests,
        recorder,
        WorkerPool([scheduler], PassPricer(FixedTiming(10.0, 1.0), True, 1.0, 1.0), Placement(1, 1), recorder),
        arrival_ms=np.zeros(len(shapes)),
        next_turn=np.full(len(shapes), -1),
        delay_ms=np.zeros(len(shapes)),
    )
    replay.run()
    return replay.recorder


def test_admissions_are_recorded_one_by_one():
    recorder = run_core([(8, 8), (8, 8)], num_gpu_blocks=6, max_num_seqs=2)
    assert recorder.admissions.array().tolist() == [(0, 0.0, 0, 0), (1, 0.0, 0, 0), (1, 17.0, 0, 0)]
    assert recorder.column("num_admissions").tolist() == [1, 2]


def test_the_report_tells_every_admission():
    report = replayed((8, 8), (8, 8), engine={"num_gpu_blocks": 7, "max_num_seqs": 2, "enable_prefix_caching": False})
    assert report.admissions.to_pylist() == [
        {"request_id": "request_1", "at_ms": 0.0, "reused_tokens": 0},
        {"request_id": "request_2", "at_ms": 0.0, "reused_tokens": 0},
        {"request_id": "request_2", "at_ms": 17.0, "reused_tokens": 0},
    ]
    record = json.loads(report.to_json())["per_request"][1]
    assert [admission["is_readmission"] for admission in record["admission_history"]] == [False, True]
    assert len(record["admission_history"]) == record["admission_count"]


def test_admissions_belong_to_the_requests_that_arrived():
    # The second turn of session a stands between the two that arrive before the end.
    sessions = {"session_ids": ["a", "b", "a"]}
    report = replayed((8, 4), (8, 2), (8, 1), arrivals=[0.0, 1.0, 0.0], columns=sessions, max_sim_time_ms=22.5)
    assert column(report, "request_id") == ["request_1", "request_2"]
    assert report.admissions.column("request_id").to_pylist() == ["request_1", "request_2"]


def test_requests_that_continue_together_share_one_gap_entry_per_pass():
    # The first two decode while the third prompt takes two passes; then all three go on.
    recorder = run_core([(8, 5), (8, 5), (16, 2)])
    assert recorder.gaps.array().tolist() == [(11.0, 2), (11.0, 2), (1.0, 3), (1.0, 2)]


def test_a_resumed_request_has_a_gap_of_its_own():
    # The third request loses its place after its first token (10 ms), gets it back when the second is done
    # (13 ms), and recomputes until 24 ms.
    recorder = run_core([(8, 6), (8, 4), (8, 3)], num_gpu_blocks=8, max_num_batched_tokens=32)
    assert recorder.admissions.array().tolist()[-1] == (2, 13.0, 0, 0)
    assert recorder.gaps.array().tolist() == [(1.0, 2)] * 3 + [(11.0, 1), (14.0, 1), (1.0, 2)]


# Timing arguments


class Model:
    def timing_model(self):
        return FixedTiming(5.0, 2.0)


class Provider:
    def predict_prefill_ms(self, batch, mean_isl, mean_prefix):
        return 5.0

    def predict_decode_ms(self, batch, active_kv_tokens, mean_context, total_kv_tokens):
        return 2.0


@pytest.mark.parametrize(
    "timing",
    [FixedTiming(5.0, 2.0), Model(), Provider(), {"type": "fixed", "prefill_ms": 5, "decode_ms": 2}],
    ids=["compiled", "model", "python", "mapping"],
)
def test_timing_may_be_a_timing_model_a_model_a_mapping_or_a_python_object(timing):
    assert column(replayed((8, 3), timing=timing), "end_ms") == [9.0]


@pytest.mark.parametrize(
    ("timing", "message"),
    [
        (
            {"type": "external", "provider": "ais", "config": {}},
            "provider 'ais' is a configuration, not a model",
        ),
        ({"type": "fixed", "prefill_ms": 1.0}, "give {type: polynomial}"),
        ({"type": "other"}, "give {type: polynomial}"),
        (42, "int has no method predict_prefill_ms"),
    ],
)
def test_anything_else_is_no_timing(timing, message):
    with pytest.raises(TimingError, match=message):
        as_timing_model(timing)


def test_an_error_of_a_python_object_ends_the_replay_as_it_is():
    class Broken(Provider):
        def predict_decode_ms(self, batch, active_kv_tokens, mean_context, total_kv_tokens):
            raise LookupError(f"batch {batch} was never measured")

    with pytest.raises(LookupError, match="batch 2 was never measured"):
        replayed((8, 3), (8, 3), timing=Broken())


def test_composed_and_separate_passes_are_counted():
    class Composing(Provider):
        def predict_mixed_pass_ms(self, prefill, decode):
            return (6.0, 0.5) if decode[0] == 1 else None

    shapes, arrivals = [(8, 9), (8, 9), (8, 9)], [0.0, 6.0, 14.0]
    report = replayed(*shapes, arrivals=arrivals, timing=Composing())
    assert report.summary["composed_passes"] == 1
    assert report.summary["mixed_passes_priced_separately"] == 1
    assert sum(row["composed"] for row in report.passes.to_pylist()) == 1
    separate = replayed(*shapes, arrivals=arrivals, timing=Composing(), mixed_pass_pricing="separate")
    assert separate.summary["composed_passes"] == 0


# Options


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"scheduler_rules": "other"}, "scheduler_rules"),
        ({"mixed_pass_pricing": "sum"}, "mixed_pass_pricing"),
        ({"scheduling_policy": "lottery"}, "scheduling_policy"),
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"concurrency": 0}, "concurrency"),
        ({"arrival_speedup_ratio": 0.0}, "arrival_speedup_ratio"),
        ({"arrival_speedup_ratio": math.inf}, "arrival_speedup_ratio"),
        ({"arrival_speedup_ratio": math.nan}, "arrival_speedup_ratio"),
        ({"max_sim_time_ms": -1.0}, "max_sim_time_ms"),
        ({"watermark": 1.0}, "watermark"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"vllm_version": "latest"}, "vllm_version"),
        ({"vllm_version": 0.32}, "vllm_version"),
        ({"vllm_version": None}, "vllm_version"),
        ({"scheduler_rules": ["vllm"]}, "scheduler_rules"),
        ({"sla": 5}, "sla"),
        ({"sla": {"ttft_ms": 10**400}}, "sla.ttft_ms"),
        ({"sla": {1: 2}}, "sla.1"),
        *(({name: 10**400}, name) for name in ("arrival_speedup_ratio", "max_sim_time_ms", "watermark")),
        ({"num_workers": 65_537}, "num_workers"),
        ({"num_workers": 10**5000}, "num_workers"),
        ({"num_workers": 2, "launch": {"dp_size": 32_769}}, "num_workers"),
        ({"launch": {"dp_size": 2**32 - 1}}, "dp_size"),
        ({"engine": {"num_gpu_blocks": 2**63}}, "engine.num_gpu_blocks"),
        ({"engine": {"num_gpu_blocks": 2**61}}, "engine.num_gpu_blocks"),
        ({"engine": {"block_size": 2**63}}, "engine.block_size"),
        ({"scheduler_rules": "simulator", "watermark": 0.1}, "watermark"),
        ({"scheduler_rules": "simulator", "scheduling_policy": "priority"}, "scheduling_policy"),
        ({"scheduler_rules": "simulator", "scheduler_reserve_full_isl": False}, "scheduler_reserve_full_isl"),
        ({"scheduler_rules": "simulator", "vllm_version": "0.30"}, "vllm_version"),
        ({"long_prefill_token_threshold_adaptive": True}, "long_prefill_token_threshold_adaptive"),
        ({"concurrency": 1, "arrival_speedup_ratio": 2.0}, "arrival_speedup_ratio"),
        ({"engine": {"num_gpu_blocks": 1}}, "engine.num_gpu_blocks"),
        (
            {"engine": {"max_model_len": 32}, "long_prefill_token_threshold": 33},
            "long_prefill_token_threshold",
        ),
    ],
)
def test_an_option_out_of_range_is_named(options, path):
    with pytest.raises(ConfigError) as failure:
        replayed((8, 2), **options)
    assert failure.value.path == path
    assert path in str(failure.value)
    assert len(str(failure.value)) < 500


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 2**64},
        {"long_prefill_token_threshold": 2**64},
        {"launch": {"dp_size": 2}, "engine": {"prefill_schedule_interval": 2**63}},
        {"engine": dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_model_len"), 2**64 - 2)},
        {"engine": {"num_gpu_blocks": 2**60, "block_size": 4}},
        {"engine": {"num_gpu_blocks": 2, "block_size": 2**61}},
    ],
)
def test_a_limit_beyond_any_replay_limits_nothing(options):
    assert column(replayed((8, 2), (8, 2), **options), "output_tokens") == [2, 2]


@pytest.mark.parametrize("ratio", [1e-300, 2.3e-308])
def test_a_speedup_that_moves_arrivals_beyond_all_time_is_refused(ratio):
    with pytest.raises(ConfigError, match="arrival_speedup_ratio = .* lie beyond 2\\^64 s") as failure:
        replayed((8, 2), (8, 2), arrivals=[0.0, 5.0], arrival_speedup_ratio=ratio)
    assert failure.value.path == "arrival_speedup_ratio"


@pytest.mark.parametrize("wrong", [None, 5, [(8, 2)], {"trace": 1}])
def test_only_a_trace_can_be_replayed(wrong):
    with pytest.raises(TraceError, match="give a Trace"):
        replay_trace(wrong)


@pytest.mark.parametrize("phase", ["prefill_ms", "decode_ms"])
@pytest.mark.parametrize("value", [10**400, -1, math.nan, "1", None, True])
def test_a_fixed_latency_is_a_finite_number(phase, value):
    with pytest.raises(TimingError, match=phase):
        replayed((8, 2), timing=FIXED | {phase: value})


def test_passes_too_long_to_be_counted_end_the_replay():
    with pytest.raises(TimingError, match="1e\\+305 ms, divided by a speedup of 1.0, is too long"):
        replayed((8, 2), timing=FIXED | {"decode_ms": 1e305})


@pytest.mark.parametrize(
    "engine",
    [
        {"backend": "sglang"},
    ],
)
def test_an_engine_that_is_not_simulated_is_refused_by_name(engine):
    with pytest.raises(MissingCapabilityError, match=f"engine.{next(iter(engine))} = "):
        replayed((8, 2), engine=engine)


def test_a_malformed_launch_is_refused():
    with pytest.raises(LaunchConfigError):
        replayed((8, 2), launch={"dp_size": 0})


def test_the_launch_may_be_given_as_an_object_or_left_out():
    launch = EngineLaunchConfig.from_mapping({"engine": ENGINE})
    assert column(replay_trace(trace((8, 3)), launch=launch), "end_ms") == [12.0]
    assert column(replay_trace(trace((8, 1))), "status") == ["completed"]


# Invariants


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=8),
    st.sampled_from(["vllm", "simulator"]),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_replay_is_repeatable_ordered_in_time_and_loses_nobody(shapes, rules, num_workers, caching):
    engine = {"num_gpu_blocks": 20, "enable_prefix_caching": caching, "max_num_seqs": 3}
    first, second = (replayed(*shapes, engine=engine, scheduler_rules=rules, num_workers=num_workers) for _ in range(2))
    assert first.requests.equals(second.requests)
    assert first.passes.equals(second.passes)
    for row in first.requests.to_pylist():
        assert row["status"] == "completed"
        assert row["output_tokens"] == row["requested_output_tokens"]
        times = [row[name] for name in ("arrival_ms", "first_admit_ms", "first_token_ms", "second_token_ms")]
        times = [time for time in [*times, row["last_token_ms"], row["end_ms"]] if time is not None]
        assert times == sorted(times)
