"""Groups over one block pool: what is held adds up in every step of random histories."""

import random

import numpy as np

from fpmsdk._ext.hybrid import HybridCache
from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.scheduler import Requests, Scheduler


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
