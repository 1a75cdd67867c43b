"""Groups over one block pool: what is held adds up in every step of random histories."""

import random

import numpy as np
import pytest

from fpmsdk._ext.hybrid import HybridCache
from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.scheduler import Refusal, Requests, Scheduler
from fpmsdk._ext.speculation import DraftAcceptance


def random_case(choose):
    block_size = choose.choice([2, 4])
    prompts = np.array([choose.randint(1, 40) for _ in range(6)])
    outputs = np.array([choose.randint(0, 12) for _ in range(6)])
    ids = [[choose.randint(0, 1) for _ in range(prompt)] for prompt in prompts]
    keys = None
    if choose.random() < 0.6:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(prompts)])
        keys = PrefixKeys(prompts, outputs, offsets, np.concatenate(ids), 1, block_size)
    groups = [(block_size, None)] * choose.randint(0, 2)
    groups += [(block_size, choose.randint(2, 20))] * choose.randint(0 if groups else 1, 3)
    choose.shuffle(groups)
    num_blocks = choose.randint(28, 45) * len(groups)
    budget = choose.randint(1, 40)
    cache = HybridCache(
        prompts,
        num_blocks,
        groups,
        keys,
        max_num_batched_tokens=budget,
        max_model_len=64,
        keeps_every_block=choose.random() < 0.5,
    )
    scheduler = Scheduler(
        Requests(prompts, outputs),
        "vllm",
        num_gpu_blocks=num_blocks + 1,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=64,
        kv_cache=cache,
    )
    return scheduler, cache, num_blocks, outputs, keys is not None


def test_no_block_is_lost_or_held_twice_in_random_histories_and_everybody_finishes():
    choose = random.Random(11)
    for _ in range(1500):
        scheduler, cache, num_blocks, outputs, shared = random_case(choose)
        queue, done, steps = list(range(6)), {}, 0
        while queue or scheduler.has_unfinished():
            if queue and choose.random() < 0.6:
                request = queue.pop(0)
                assert scheduler.enqueue(request)
            decided = scheduler.schedule_pass()
            holdings = [group for request in scheduler.running_requests() for group in cache.holdings(request)]
            held = sum(real for _, real in holdings)
            assert all(0 <= real <= length for length, real in holdings)
            used = num_blocks - decided["free_blocks"]
            assert used == held or (shared and used <= held)
            emitted = scheduler.complete_pass()[0]
            for request in emitted:
                done[request] = done.get(request, 0) + 1
            steps += 1
            assert steps < 2000
        assert [done.get(request, 0) for request in range(6)] == outputs.tolist()


def unchunked(prompts, ids, groups, *, budget, drafts=None):
    """A scheduler without chunked prefill over groups; says what it refuses on arrival."""
    prompts, outputs = np.array(prompts), np.full(len(prompts), 2)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in ids])])
    keys = PrefixKeys(prompts, outputs, offsets, np.concatenate(ids).astype(np.int64), 4, 4)
    cache = HybridCache(prompts, 400, groups, keys, max_num_batched_tokens=budget, max_model_len=256)
    scheduler = Scheduler(
        Requests(prompts, outputs),
        "vllm",
        num_gpu_blocks=401,
        block_size=4,
        max_num_batched_tokens=budget,
        max_model_len=256,
        enable_chunked_prefill=False,
        kv_cache=cache,
        drafts=drafts,
    )
    return scheduler.refusals().tolist()


@pytest.mark.parametrize(
    ("groups", "drafts", "refused"),
    [
        # Twelve tokens are shared: eight of twenty are left to compute. A hit is whole blocks of all groups.
        ([(4, None)], None, False),
        ([(4, None), (4, 8)], None, False),
        ([(8, None), (4, 8)], None, True),  # only eight of the twelve align with blocks of eight
        ([(4, None), (4, 8)], DraftAcceptance([0.5], 1), True),  # drafting computes the last block again
    ],
)
def test_without_chunked_prefill_a_prompt_may_count_on_the_longest_prefix_that_all_groups_can_have(
    groups, drafts, refused
):
    shared = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [9, 8, 7, 6, 5]]
    said = unchunked([20, 20, 20], shared, groups, budget=8, drafts=drafts)
    assert said == [Refusal.UNCHUNKED_PROMPT if refused else Refusal.ACCEPTED] * 2 + [Refusal.UNCHUNKED_PROMPT]
