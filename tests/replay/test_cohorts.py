"""Requests that decode in step are advanced without being touched: nothing may change."""

import math
import random
from contextlib import suppress

import numpy as np
import pytest

from fpmsdk import EngineLaunchConfig, Trace
from fpmsdk._ext.pricing import PassPricer, PolynomialTiming
from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.replay import Replay
from fpmsdk._ext.scheduler import Requests
from fpmsdk.errors import KvForwardTooLargeError, RequestNeverFitsError
from fpmsdk.replay.pools import PoolPlan

SETTINGS = {
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "vllm_version": "0.32",
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
}


def random_groups(choose):
    groups = [
        {"name": "full", "block_size_tokens": 4, "page_size_bytes": 8, "sliding_window": None},
        {"name": "window", "block_size_tokens": choose.choice([2, 16]), "page_size_bytes": 6, "sliding_window": 7},
        {"name": "conv", "block_size_tokens": choose.choice([1, 4]), "page_size_bytes": 1, "sliding_window": 4},
    ]
    return [{"kind": "attention", "num_layers": 2} | group for group in choose.sample(groups, choose.randint(1, 3))]


def random_case(choose):
    n = choose.randint(1, 16)
    prompts = [choose.choice([choose.randint(1, 12), choose.randint(1, 90)]) for _ in range(n)]
    trace = Trace.from_arrays(
        np.cumsum([choose.choice([0.0, 5.0, 40.0, 300.0]) for _ in range(n)]),
        prompts,
        [choose.choice([0, 1, choose.randint(1, 90), choose.randint(1, 90)]) for _ in range(n)],
        hash_ids=[[choose.randint(0, 1) for _ in range(prompt)] for prompt in prompts],
        block_tokens=1,
        priority=[choose.randint(0, 2) for _ in range(n)],
    )
    engine = {
        "block_size": choose.choice([2, 4, 16]),
        "num_gpu_blocks": choose.choice([95, 100, 140, 400]),
        "max_num_batched_tokens": choose.choice([3, 16, 64]),
        "max_num_seqs": choose.choice([1, 2, 4, 16]),
        "enable_prefix_caching": choose.random() < 0.5,
        "preemption_mode": choose.choice(["lifo", "fifo"]),
    }
    if choose.random() < 0.3:
        engine |= {"enable_prefix_caching": False, "kv_cache_groups": random_groups(choose)}
        engine["kv_cache_capacity_bytes"] = choose.choice([900, 1500, 5000])
    rules = "simulator" if "kv_cache_groups" in engine else choose.choice(["vllm", "simulator"])
    settings = SETTINGS | {"scheduler_rules": rules}
    if rules == "vllm" and choose.random() < 0.3:
        settings["scheduling_policy"] = "priority"
    return trace, engine, settings, choose.choice([0, 0, 3]), choose.choice([math.inf, math.inf, 700.0])


def run(case, disaggregated, num_workers, dp_size, pass_by_pass):
    trace, engine, settings, concurrency, end_ms = case
    requests, recorder = Requests(trace.prompt_tokens, trace.output_tokens, trace.priority), Recorder(len(trace), True)

    def pool(worker_type):
        launch = EngineLaunchConfig.from_mapping({"engine": engine | {"worker_type": worker_type}, "dp_size": dp_size})
        pricer = PassPricer(PolynomialTiming(), False, 1.0, 1.0)
        plan = PoolPlan(launch, num_workers, pricer, "round_robin", settings, pass_by_pass)
        return plan.build(trace, requests, recorder)

    pools = [pool("decode"), pool("prefill")] if disaggregated else [pool("aggregated")]
    replay = Replay(
        requests,
        recorder,
        *pools,
        handoff_ms=3.0,
        arrival_ms=trace.arrival_ms,
        next_turn=np.full(len(trace), -1),
        delay_ms=np.zeros(len(trace)),
        concurrency=concurrency,
        max_sim_time_ms=end_ms,
    )
    # A decode pool too small for its own requests, and a forward larger than the whole cache.
    with suppress(RequestNeverFitsError, KvForwardTooLargeError):
        replay.run()
    times = ("first_token_ms", "second_token_ms", "last_token_ms", "end_ms", "decode_admit_ms")
    columns = [
        *(requests.column(name).tolist() for name in ("generated_tokens", "status")),
        *(np.nan_to_num(recorder.column(name), nan=-1.0).tolist() for name in times),
        recorder.column("reused_tokens").tolist(),
    ]
    tables = (recorder.passes, recorder.admissions, recorder.preemptions, recorder.gaps)
    return columns, [table.array().tolist() for table in tables]


@pytest.mark.parametrize("disaggregated", [False, True])
def test_a_run_with_cohorts_equals_the_run_pass_by_pass(disaggregated):
    choose = random.Random(3)
    for _ in range(400):
        case = random_case(choose)
        if disaggregated and "kv_cache_groups" in case[1]:
            continue
        shape = (disaggregated, choose.randint(1, 2), choose.randint(1, 2))
        assert run(case, *shape, False) == run(case, *shape, True)
