"""Warm prefix caches: what requests share is cached on every worker before the first arrival, and nothing else."""

import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import ConfigError

ENGINE = {
    "block_size": 4,
    "num_gpu_blocks": 65,
    "max_num_batched_tokens": 64,
    "timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1},
}


def trace_of(*hash_ids, tokens=12):
    n = len(hash_ids)
    return Trace.from_arrays(
        [100.0 * row for row in range(n)], [tokens] * n, [2] * n, hash_ids=hash_ids, block_tokens=4
    )


def reused(trace, engine=None, **options):
    report = replay_trace(trace, launch={"engine": ENGINE | (engine or {})}, warm_prefix_cache=True, **options)
    return report.requests["reused_tokens"].to_pylist()


def test_the_first_request_finds_what_it_shares_with_another():
    assert reused(trace_of([1, 2, 3], [1, 2, 4])) == [8, 8]


def test_a_prompt_that_others_repeat_still_computes_a_token():
    assert reused(trace_of([1, 2, 3], [1, 2, 3])) == [8, 8]


def test_what_only_one_request_has_is_not_cached():
    assert reused(trace_of([1, 2, 3], [4, 5, 6], [1, 7, 8])) == [4, 0, 4]


@pytest.mark.parametrize("placement", ["round_robin", "kv_aware"])
def test_every_worker_is_warm(placement):
    trace = trace_of([1, 2, 3], [1, 2, 3], [1, 2, 3])
    assert reused(trace, num_workers=3, placement=placement) == [8, 8, 8]


def test_prefixes_that_do_not_all_fit_evict_the_least_recently_used():
    # Two prefixes of three blocks, room for five: of the first one its last block goes.
    trace = trace_of([1, 2, 3, 9], [1, 2, 3, 8], [4, 5, 6, 9], [4, 5, 6, 7], tokens=16)
    assert reused(trace, engine={"num_gpu_blocks": 6})[0] == 8


def test_prefill_workers_are_warm():
    report = replay_trace(
        trace_of([1, 2, 3], [1, 2, 4]),
        launch={"engine": ENGINE | {"worker_type": "decode"}},
        prefill_launch={"engine": ENGINE | {"worker_type": "prefill"}},
        warm_prefix_cache=True,
    )
    assert report.requests["reused_tokens"].to_pylist() == [8, 8]
    assert report.requests["decode_reused_tokens"].to_pylist() == [0, 0]


@pytest.mark.parametrize(
    ("trace", "engine", "why"),
    [
        (trace_of([1, 2, 3]), {"enable_prefix_caching": False}, "engine.enable_prefix_caching"),
        (Trace.from_arrays([0.0], [4], [1]), {}, "hash_ids"),
    ],
)
def test_a_warm_cache_that_can_hold_nothing_is_refused(trace, engine, why):
    with pytest.raises(ConfigError, match=f"warm_prefix_cache has no effect without {why}"):
        reused(trace, engine)
