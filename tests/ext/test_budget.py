"""The byte budget of grouped KV caches: its formulas, and its invariants over random histories."""

import random

import pytest

from fpmsdk._ext.budget import ByteBudgetCache
from fpmsdk.errors import KvForwardTooLargeError


def test_a_refused_forward_changes_nothing_and_space_returns():  # U1
    pool = ByteBudgetCache(3, 42, [(4, 8, None), (2, 6, 3)], 4)
    assert pool.allocate(0, 0, 4) and pool.state()[0] == 20
    assert pool.allocate(1, 0, 2) and pool.state()[0] == 34
    assert not pool.allocate(0, 4, 8)
    assert pool.state() == (34, 5)
    pool.free(1)
    assert pool.allocate(0, 4, 8)
    assert (pool.state()[0], pool.ranges(4, 8)) == (34, [(0, 2), (1, 4)])
    assert pool.allocate(0, 8, 9)
    assert (pool.state()[0], pool.ranges(8, 9)) == (36, [(0, 3), (3, 5)])
    pool.free(0)
    pool.free(0)
    assert pool.state() == (0, 0)


@pytest.mark.parametrize(
    ("computed", "tokens", "live", "held"),
    [
        (0, 32, (0, 2), 320),
        (32, 33, (0, 3), 480),
        (48, 49, (1, 4), 480),
        (64, 65, (2, 5), 480),
        (512, 640, (30, 40), 1600),
    ],
)
def test_a_window_keeps_what_the_first_new_token_sees_and_the_whole_chunk(computed, tokens, live, held):  # U2
    pool = ByteBudgetCache(1, 10_000, [(16, 160, 32)], 16)
    assert pool.ranges(computed, tokens) == [live]
    assert pool.bytes_of(computed, tokens) == held


def test_without_a_window_everything_stays():
    assert ByteBudgetCache(1, 10_000, [(16, 160, None)], 16).bytes_of(64, 65) == 800


def test_a_forward_larger_than_the_pool_is_an_error_and_holds_nothing():
    pool = ByteBudgetCache(1, 8, [(4, 4, 4)], 4)
    assert pool.allocate(0, 0, 8)
    with pytest.raises(KvForwardTooLargeError, match="needs 12 bytes for 8 scheduled tokens after 8 computed tokens"):
        pool.allocate(0, 8, 16)
    assert pool.state() == (8, 2)


def test_bytes_beyond_exact_numbers_never_fit():
    with pytest.raises(KvForwardTooLargeError):
        ByteBudgetCache(1, 2**53, [(1, 2**53, None)], 4).allocate(0, 0, 2)


def random_groups(choose):
    return [
        (choose.randint(1, 9), choose.randint(1, 40), choose.choice([None, choose.randint(1, 30)]))
        for _ in range(choose.randint(1, 4))
    ]


def test_used_bytes_are_the_sum_of_the_leases_in_ten_thousand_random_histories():
    choose = random.Random(5)
    for _ in range(10_000):
        groups = random_groups(choose)
        capacity = choose.randint(1, 600)
        pool = ByteBudgetCache(4, capacity, groups, 4)
        forwards = {}
        for _ in range(choose.randint(1, 12)):
            request = choose.randrange(4)
            if choose.random() < 0.25:
                pool.free(request)
                forwards.pop(request, None)
            else:
                computed = forwards.get(request, (0, 0))[1]
                forward = (computed, computed + choose.randint(1, 25))
                before = pool.state()
                try:
                    granted = pool.allocate(request, *forward)
                except KvForwardTooLargeError:
                    granted = False
                    assert pool.bytes_of(*forward) > capacity
                if granted:
                    forwards[request] = forward
                else:
                    assert pool.state() == before
            used, active = pool.state()
            assert used == sum(pool.bytes_of(*forward) for forward in forwards.values()) <= capacity
            live = [end - first for forward in forwards.values() for first, end in pool.ranges(*forward)]
            assert active == sum(live)
        for request in range(4):
            pool.free(request)
        assert pool.state() == (0, 0)
