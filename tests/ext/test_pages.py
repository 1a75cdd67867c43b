"""KV blocks: content keys, what a prefix lookup finds, what an admission takes, what is evicted first.

The pool is observed through a rank whose blocks hold 4 tokens.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.scheduler import Requests, Scheduler
from fpmsdk.errors import TraceError


def prefix_keys(prompts, hash_ids, trace_block, block_size, outputs=None):
    return PrefixKeys(
        np.array(prompts, np.int64),
        np.array(outputs or [0] * len(prompts), np.int64),
        np.concatenate([[0], np.cumsum([len(ids) for ids in hash_ids])]).astype(np.int64),
        np.array([value for ids in hash_ids for value in ids], np.int64),
        trace_block,
        block_size,
    )


class CachingRank:
    """Serves requests one after the other or together; prompts are named by their blocks of 4 tokens."""

    def __init__(self, *requests, rules="simulator", num_gpu_blocks=64, max_num_batched_tokens=64):
        prompts = [length for length, _, _ in requests]
        outputs = [output for _, output, _ in requests]
        self.scheduler = Scheduler(
            Requests(prompts, outputs),
            rules,
            num_gpu_blocks=num_gpu_blocks,
            block_size=4,
            max_num_batched_tokens=max_num_batched_tokens,
            keys=prefix_keys(prompts, [[ord(name) for name in names] for _, _, names in requests], 4, 4, outputs),
        )

    def admit(self, *requests):
        for request in requests:
            self.scheduler.enqueue(request)
        decided = self.scheduler.schedule_pass()
        self.scheduler.complete_pass()
        return decided

    def serve(self, request):
        """Run one request to its end; return what it reused."""
        reused = self.admit(request)["reused"][request]
        while self.scheduler.has_unfinished():
            self.admit()
        return reused


@pytest.mark.parametrize("rules", ["simulator", "vllm"])
def test_a_repeated_prompt_recomputes_its_last_block(rules):
    rank = CachingRank((12, 2, "abc"), (12, 2, "abc"), (16, 2, "abcd"), (14, 2, "abcd"), rules=rules)
    assert [rank.serve(request) for request in range(4)] == [0, 8, 12, 12]


def test_only_the_simulator_lets_a_request_without_output_reuse_everything():
    for rules, reused in (("simulator", 12), ("vllm", 8)):
        rank = CachingRank((12, 2, "abc"), (12, 0, "abc"), rules=rules)
        assert [rank.serve(request) for request in range(2)] == [0, reused]


def test_blocks_can_be_found_by_a_later_request_of_the_same_pass():
    decided = CachingRank((12, 2, "abc"), (16, 2, "abcd")).admit(0, 1)
    assert decided["reused"] == {0: 0, 1: 12}
    assert decided["active_blocks"] == 4


def test_a_lookup_stops_at_the_first_miss():
    rank = CachingRank((12, 1, "abc"), (12, 1, "axc"))
    assert [rank.serve(request) for request in range(2)] == [0, 4]


def test_generated_tokens_are_never_shared():
    # Both generate blocks after the same prompt; the third asks for a longer prompt than was ever computed.
    rank = CachingRank((4, 9, "a"), (4, 9, "a"), (13, 1, "abcd"))
    assert [rank.serve(request) for request in range(3)] == [0, 0, 4]


def test_requests_without_hash_ids_share_nothing():
    rank = CachingRank((12, 1, ""), (12, 1, ""))
    assert [rank.serve(request) for request in range(2)] == [0, 0]


def test_tails_are_evicted_before_heads():
    # The last one takes 2 of 5 blocks: the blank one, then the tail of the first prompt.
    rank = CachingRank((16, 1, "abcd"), (8, 1, "xy"), (16, 1, "abcd"), num_gpu_blocks=5)
    assert [rank.serve(request) for request in range(3)] == [0, 0, 12]


def test_the_longest_unused_blocks_are_evicted_first():
    rank = CachingRank((8, 1, "ab"), (8, 1, "cd"), (8, 1, "ef"), (8, 1, "ab"), (8, 1, "ef"), num_gpu_blocks=4)
    assert [rank.serve(request) for request in range(5)] == [0, 0, 0, 0, 4]


def test_a_request_never_evicts_its_own_prefix():
    rank = CachingRank((12, 1, "abc"), (16, 1, "abde"), num_gpu_blocks=4)
    assert [rank.serve(request) for request in range(2)] == [0, 8]


def test_free_hits_use_up_capacity_and_shared_ones_do_not():
    # 3 blocks hold "abc"; 5 usable. A 16-token sequence that shares 12 needs 4 blocks if they are free ...
    rank = CachingRank((12, 1, "abc"), (12, 4, "xyz"), (16, 1, "abcd"), num_gpu_blocks=6)
    rank.serve(0)
    assert rank.admit(1, 2)["reused"] == {1: 0}  # 3 of 6 in use, 4 needed
    # ... and 1 if another request holds them.
    rank = CachingRank((12, 4, "abc"), (16, 1, "abcd"), num_gpu_blocks=4)
    assert rank.admit(0, 1)["reused"] == {0: 0, 1: 12}


def test_of_several_copies_the_first_published_one_is_found():
    # Requests 0 and 1 compute "ab" in the same passes, block by block, because neither can find the other's.
    # While 0 runs on, its copy is in use: a hit on it needs no free block, a hit on 1's copy would.
    rank = CachingRank((9, 30, "abc"), (9, 1, "abd"), (9, 1, "abe"), num_gpu_blocks=7, max_num_batched_tokens=4)
    assert rank.admit(0, 1)["tokens"] == {0: 4}
    for _ in range(4):
        rank.admit()
    assert rank.admit(2)["reused"][2] == 8


def test_vllm_reserves_one_block():
    for rules, admitted in (("simulator", [0, 1]), ("vllm", [0])):
        rank = CachingRank((16, 2, "abcd"), (16, 2, "efgh"), rules=rules, num_gpu_blocks=8)
        assert list(rank.admit(0, 1)["tokens"]) == admitted


def test_memory_follows_the_blocks_in_use_not_the_size_of_the_pool():
    rank = CachingRank((12, 2, "abc"), num_gpu_blocks=10**15)
    assert rank.serve(0) == 0


# Content keys


def test_a_hash_id_stands_for_its_block_of_tokens():
    keys = prefix_keys([1024, 700, 1024], [[1, 2], [1, 2], [1, 3]], 512, 64)
    assert [keys.key_of(0, block) == keys.key_of(1, block) for block in range(10)] == [True] * 10
    assert [keys.key_of(0, block) == keys.key_of(2, block) for block in range(16)] == [True] * 8 + [False] * 8


def test_a_prompt_longer_than_its_hash_ids_is_an_error():
    with pytest.raises(TraceError, match="request 0: prompt of 9 tokens exceeds its 2 hash ids of 4 tokens"):
        prefix_keys([9], [[1, 2]], 4, 4)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 5)), min_size=2),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_keys_are_equal_exactly_where_all_tokens_so_far_are(requests, trace_block, block_size):
    prompts = [max(1, len(ids) * trace_block - cut) for ids, cut in requests]
    keys = prefix_keys(prompts, [ids for ids, _ in requests], trace_block, block_size, [3] * len(prompts))
    key_of = {}
    for request, (ids, _) in enumerate(requests):
        described = [value for value in ids for _ in range(trace_block)]
        # More ids than the prompt has blocks say what is generated; else that is the request's own.
        more = 3 if (len(ids) - 1) * trace_block >= prompts[request] else 0
        tokens = described[: prompts[request] + more]
        tokens += [(request, position) for position in range(prompts[request] + 3 - len(tokens))]
        for block in range(len(tokens) // block_size):
            chain = tuple(tokens[: (block + 1) * block_size])
            assert key_of.setdefault(chain, keys.key_of(request, block)) == keys.key_of(request, block)
    assert len(set(key_of.values())) == len(key_of)
