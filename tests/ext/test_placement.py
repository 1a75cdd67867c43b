"""Which rank serves a request: turns, pinned ranks, and what a KV-aware placement weighs."""

import numpy as np
import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.placement import KvAwarePlacement, Placement
from fpmsdk._ext.scheduler import Requests

ANY = -1


@pytest.mark.parametrize(
    ("fills_workers", "wanted", "ranks"),
    [
        (False, [ANY] * 5, [0, 2, 1, 3, 0]),
        (True, [ANY] * 5, [0, 1, 2, 3, 0]),
        (False, [ANY, 1, 1, 0, ANY, ANY, 0, ANY, ANY], [0, 3, 1, 2, 1, 2, 0, 3, 0]),
        (True, [ANY, 1, 1, 0, ANY, ANY, 0, ANY, ANY, ANY], [0, 3, 1, 2, 2, 3, 0, 1, 2, 3]),
        (True, [1, 1, 1, ANY, ANY, ANY, ANY, 0, 0, 0, ANY], [1, 3, 1, 1, 2, 3, 0, 2, 0, 2, 2]),
    ],
)
def test_turns_with_and_without_pinned_ranks(fills_workers, wanted, ranks):
    placement = Placement(2, 2, fills_workers)
    assert [placement.place(request, dp_rank) for request, dp_rank in enumerate(wanted)] == ranks


def kv_aware(prompts, hash_ids, num_workers, dp_size=1):
    prompts = np.array(prompts)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(ids) for ids in hash_ids])])
    keys = PrefixKeys(prompts, np.ones_like(prompts), offsets, np.concatenate(hash_ids).astype(np.int64), 4, 4)
    return KvAwarePlacement(num_workers, dp_size, Requests(prompts, np.ones_like(prompts)), keys)


def test_of_equal_costs_the_first_wins_and_waiting_work_counts():
    placement = kv_aware([8, 8, 8], [[1, 2], [3, 4], [5, 6]], 2)
    assert [placement.place(request) for request in range(3)] == [0, 1, 0]


def test_blocks_shared_with_unfinished_requests_count_once():
    # Pending tokens: 5 + 5 blocks against 5; but on the first worker the five blocks are there already.
    placement = kv_aware([20, 4, 20], [[1, 2, 3, 4, 5], [9], [1, 2, 3, 4, 5]], 2)
    assert [placement.place(request) for request in range(3)] == [0, 1, 1]


def test_a_pinned_rank_limits_the_choice():
    placement = kv_aware([8, 8], [[1, 2], [3, 4]], 2, dp_size=2)
    assert [placement.place(request, 1) for request in range(2)] == [1, 3]


def test_a_prompt_goes_where_it_is_cached_once_the_pass_that_published_it_has_ended():
    launch = {"engine": {"block_size": 4, "num_gpu_blocks": 64, "timing_model": {"type": "polynomial"}}}
    trace = Trace.from_arrays(
        [0.0, 0.0, 500.0, 500.0],
        [40, 4, 40, 4],
        [2, 2, 2, 2],
        hash_ids=[list(range(10)), [90], list(range(10)), [91]],
        block_tokens=4,
    )
    report = replay_trace(trace, launch=launch, num_workers=2, placement="kv_aware")
    assert report.requests["worker"].to_pylist() == [0, 1, 0, 1]
    assert report.requests["reused_tokens"].to_pylist() == [0, 0, 36, 0]
