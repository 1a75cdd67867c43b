"""Engines whose layers need different KV caches, under both rule sets."""

import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import ConfigError, MissingCapabilityError
from fpmsdk.launch.config import KvCacheGroup
from fpmsdk.replay.groups import pool_layout

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}


def group(name, layers, page, window=None, *, block=4, kind="attention"):
    return {
        "name": name,
        "kind": kind,
        "num_layers": layers,
        "block_size_tokens": block,
        "page_size_bytes": page,
        "sliding_window": window,
    }


def replayed(*shapes, groups, capacity, rules, **engine):
    rank = {
        "block_size": 4,
        "max_num_batched_tokens": 8,
        "enable_prefix_caching": False,
        "timing_model": FIXED,
        "kv_cache_groups": groups,
        "kv_cache_capacity_bytes": capacity,
        **engine,
    }
    prompts, outputs = zip(*shapes, strict=True)
    trace = Trace.from_arrays([0.0] * len(shapes), prompts, outputs)
    return replay_trace(trace, launch={"engine": rank}, scheduler_rules=rules)


def test_a_byte_budget_reports_used_bytes_and_what_a_victim_really_held():  # row 23 and 25 of the vectors
    window = replayed((32, 5), groups=[group("window", 1, 8, 4)], capacity=24, rules="simulator")
    assert window.passes["kv_cache_used_bytes"].to_pylist() == [16, 24, 24, 24, 16, 16, 16, 8]
    both = replayed(
        (4, 6), (4, 6), groups=[group("full", 1, 4), group("window", 1, 4, 4)], capacity=24, rules="simulator"
    )
    assert both.preemptions.select(["request_id", "resident_blocks", "active_blocks_before"]).to_pylist() == [
        {"request_id": "request_2", "resident_blocks": 2, "active_blocks_before": 6}
    ]


def test_linear_caches_have_no_byte_column():
    report = replay_trace(Trace.from_arrays([0.0], [8], [2]))
    assert "kv_cache_used_bytes" not in report.passes.column_names


def test_under_vllm_rules_a_block_that_left_the_window_is_free_again():
    groups = [group("window", 2, 16, 8), group("full", 1, 8)]
    report = replayed((32, 3), groups=groups, capacity=8 * 41, rules="vllm", max_model_len=64)
    # Two window groups and a full one; a chunk of 8 is held whole, with the window before it.
    assert report.passes["active_blocks"].to_pylist() == [6, 12, 14, 16, 15, 15]
    assert report.requests["output_tokens"].to_pylist() == [3]


def test_a_pool_too_small_for_one_longest_request_is_refused():
    with pytest.raises(ConfigError, match="too few for one request of max_model_len = 64 tokens"):
        replayed((8, 2), groups=[group("full", 1, 8)], capacity=8 * 16, rules="vllm", max_model_len=64)


@pytest.mark.parametrize(
    ("groups", "layout"),
    [
        ([("s", 5, 96), ("f", 1, None)], [(32, 96)] * 5 + [(32, None)]),
        ([("s", 2, 64), ("f", 2, None)], [(32, 64), (32, None)]),
        ([("s", 3, 80), ("f", 2, None)], [(32, 80), (32, 80), (32, None)]),
        ([("s", 5, 80), ("f", 4, None)], [(32, 80), (32, None)]),
    ],
)
def test_layers_are_cut_into_groups_of_equal_size(groups, layout):
    found, _ = pool_layout(
        [KvCacheGroup(name, "attention", layers, 32, layers * 8192, window) for name, layers, window in groups], 900
    )
    assert found == layout


def test_a_state_is_kept_once_per_sequence_and_smaller_pages_take_larger_blocks():
    state = KvCacheGroup("conv", "convolution", 3, 4, 3 * 256, 3)
    full = KvCacheGroup("full", "attention", 1, 32, 8192, None)
    assert pool_layout([state, full], 900) == ([(900, None)] * 3 + [(32, None)], 8192)
    narrow = KvCacheGroup("narrow", "attention", 1, 32, 4096, 64)
    assert pool_layout([narrow, full], 900) == ([(64, 64), (32, None)], 8192)


def test_pages_that_cannot_share_blocks_are_refused_by_name():
    odd = KvCacheGroup("odd", "attention", 1, 32, 5000, None)
    full = KvCacheGroup("full", "attention", 1, 32, 8192, None)
    with pytest.raises(MissingCapabilityError, match="kv_cache_groups 'odd'"):
        pool_layout([odd, full], 900)
