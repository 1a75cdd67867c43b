"""The scheduler rank: who computes how many tokens, who waits, who leaves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.scheduler import Refusal, Requests, Scheduler, Status
from tests.ext.reference import Reference


def rank(shapes, rules="simulator", priority=None, **settings):
    """A rank with blocks of 4 tokens and every request already waiting."""
    settings = {
        "num_gpu_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    } | settings
    prompts, outputs = zip(*shapes, strict=True)
    scheduler = Scheduler(Requests(prompts, outputs, priority), rules, **settings)
    for request in range(len(shapes)):
        scheduler.enqueue(request)
    return scheduler


def passes(scheduler, number):
    decided = []
    for _ in range(number):
        decided.append(scheduler.schedule_pass())
        scheduler.complete_pass()
    return decided


# Facts of engine-and-replay.md section 7.


def test_a_follower_is_admitted_with_the_rest_of_the_budget():  # U6
    scheduler = rank([(8, 2), (8, 2)], num_gpu_blocks=6, max_num_batched_tokens=12, max_num_seqs=3)
    decided = scheduler.schedule_pass()
    assert decided["tokens"] == {0: 8, 1: 4}
    assert (decided["num_running"], decided["active_blocks"]) == (2, 3)
    assert scheduler.complete_pass() == ([0], [])
    assert scheduler.requests.column("computed_tokens").tolist() == [8, 4]


def test_the_head_finishes_its_prompt_before_the_follower_starts():  # U7
    scheduler = rank([(8, 2), (8, 2)], num_gpu_blocks=16, max_num_batched_tokens=4)
    passes(scheduler, 2)
    assert scheduler.requests.column("generated_tokens").tolist() == [1, 0]
    assert scheduler.requests.column("computed_tokens").tolist() == [8, 0]


@pytest.mark.parametrize(("rules", "num_gpu_blocks"), [("simulator", 6), ("vllm", 7)])
def test_no_smaller_follower_overtakes_a_head_that_does_not_fit(rules, num_gpu_blocks):  # U8
    scheduler = rank([(16, 1), (12, 1), (4, 1)], rules, num_gpu_blocks=num_gpu_blocks)
    first, second = passes(scheduler, 2)
    assert list(first["tokens"]) == [0]
    assert list(second["tokens"]) == [1, 2]
    assert scheduler.requests.column("num_preemptions").tolist() == [0, 0, 0]


def test_the_simulator_rejects_at_the_head_and_admits_the_next_in_the_same_pass():  # U9
    decided = rank([(20, 1), (4, 1)], num_gpu_blocks=4).schedule_pass()
    assert (decided["rejected"], decided["tokens"]) == ([0], {1: 4})


def test_a_decoding_and_a_new_request_share_a_pass():  # U10
    scheduler = rank([(4, 3), (4, 3)], max_num_seqs=2, max_num_batched_tokens=4)
    passes(scheduler, 1)
    mixed = scheduler.schedule_pass()
    assert (mixed["num_prefill_requests"], mixed["sum_prefill_tokens"]) == (1, 3)
    assert mixed["num_decode_requests"] == 1


def test_the_cadence_defers_prefill_between_prefill_steps():  # U15
    scheduler = Scheduler(
        Requests([4, 12], [20, 2]),
        "simulator",
        num_gpu_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        prefill_schedule_interval=4,
    )
    scheduler.enqueue(0)
    tokens = []
    for step in range(7):
        tokens.append(scheduler.schedule_pass(step)["tokens"])
        scheduler.complete_pass()
        if step == 0:
            scheduler.enqueue(1)
    assert tokens[1:4] == [{0: 1}] * 3
    assert tokens[4] == {0: 1, 1: 7}
    assert tokens[5] == tokens[6] == {0: 1}


def test_a_queue_that_capacity_kept_waiting_lifts_the_cadence():  # U16
    scheduler = Scheduler(
        Requests([4, 4, 4], [9, 2, 2]),
        "simulator",
        num_gpu_blocks=64,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        prefill_schedule_interval=4,
    )
    for request in range(3):
        scheduler.enqueue(request)
    tokens = []
    for step in range(3):
        tokens.append(scheduler.schedule_pass(step)["tokens"])
        scheduler.complete_pass()
    assert tokens == [{0: 4, 1: 4}, {0: 1, 1: 1}, {0: 1, 2: 4}]


def test_a_one_token_remainder_is_admitted_on_a_throttled_step():  # U16
    prompt = np.zeros(5, np.int64)
    keys = PrefixKeys(np.array([5, 5]), np.array([9, 1]), np.array([0, 5, 10]), np.concatenate([prompt, prompt]), 1, 4)
    scheduler = Scheduler(
        Requests([5, 5], [9, 1]),
        "simulator",
        num_gpu_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        prefill_schedule_interval=4,
        keys=keys,
    )
    scheduler.enqueue(0)
    scheduler.schedule_pass(0)
    scheduler.complete_pass()
    scheduler.enqueue(1)
    assert scheduler.schedule_pass(1)["tokens"] == {0: 1, 1: 1}


# Preemption


@pytest.mark.parametrize(("mode", "victim"), [("lifo", 1), ("fifo", 0)])
def test_the_victim_is_the_newest_or_the_oldest_running_request(mode, victim):
    scheduler = rank([(8, 8), (8, 8)], num_gpu_blocks=6, max_num_seqs=2, preemption_mode=mode)
    preempting = next(decided for decided in passes(scheduler, 10) if decided["preempted"])
    assert preempting["preempted"] == [victim]
    assert preempting["tokens"] == {1 - victim: 1}


def test_a_victim_keeps_its_tokens_and_recomputes_all_of_them():
    scheduler = rank([(8, 8), (8, 8)], num_gpu_blocks=6, max_num_seqs=2)
    decided = passes(scheduler, 9)
    readmission = next(d for d in decided if d["tokens"].get(1, 0) > 8)
    assert readmission["tokens"] == {1: 8 + 5}


def test_nobody_is_admitted_in_a_pass_that_preempts():
    scheduler = rank([(8, 8), (8, 8), (1, 1)], num_gpu_blocks=6, max_num_seqs=2)
    for decided in passes(scheduler, 12):
        assert not (decided["preempted"] and decided["reused"])


def test_the_policy_decides_the_victim_and_the_next_head():
    scheduler = rank(
        [(8, 8), (8, 8), (4, 2)],
        "vllm",
        priority=[2, 1, 0],
        num_gpu_blocks=7,
        max_num_seqs=2,
        scheduling_policy="priority",
    )
    decided = passes(scheduler, 12)
    # Waiting: smallest (priority, arrival) first; victim: largest, here the one admitted last.
    assert list(decided[0]["tokens"]) == [2, 1]
    assert next(d["preempted"] for d in decided if d["preempted"]) == [0]


def test_a_victim_that_was_already_scheduled_gives_its_tokens_back():
    # In the last pass request 0, the least important, comes first and takes the last free block; 2 needs one as well.
    # The token of 0 goes to 1, which computes its last 2 prompt tokens with a budget of 3.
    requests = Requests([2, 4, 2], [8, 3, 7], [2, 0, 0])
    scheduler = Scheduler(
        requests, "vllm", num_gpu_blocks=8, block_size=2, max_num_batched_tokens=3, scheduling_policy="priority"
    )
    arrivals = {0: 0, 2: 2, 3: 1}
    for step in range(6):
        if step in arrivals:
            scheduler.enqueue(arrivals[step])
        decided = passes(scheduler, 1)[0]
    assert decided["preempted"] == [0]
    assert decided["tokens"] == {2: 1, 1: 2}


@pytest.mark.parametrize(("rules", "tokens"), [("vllm", {1: 1, 2: 1}), ("simulator", {1: 1})])
def test_only_the_simulator_skips_who_moved_up_when_an_earlier_request_leaves(rules, tokens):
    # Request 0 has its token already when 1 needs a block and takes its place; 2 moves up below the cursor.
    scheduler = rank([(2, 8), (4, 8), (2, 8)], rules, num_gpu_blocks=3 + (rules == "vllm"), preemption_mode="fifo")
    preempting = passes(scheduler, 2)[1]
    assert preempting["preempted"] == [0]
    assert preempting["tokens"] == tokens


# Limits


@pytest.mark.parametrize(
    ("version", "adaptive", "alone", "together"),
    [
        ((0, 28), False, [6, 6, 6, 2], {0: 6, 1: 6}),
        ((0, 32), False, [16, 4], {0: 6, 1: 6}),
        ((0, 32), True, [16, 4], {0: 8, 1: 8}),
    ],
)
def test_the_long_prefill_threshold_cuts_chunks(version, adaptive, alone, together):
    settings = {
        "long_prefill_token_threshold": 6,
        "long_prefill_token_threshold_adaptive": adaptive,
        "vllm_version": version,
    }
    lone = rank([(20, 1)], "vllm", **settings)
    assert [decided["tokens"][0] for decided in passes(lone, len(alone))] == alone
    assert not lone.has_unfinished()
    assert rank([(20, 1), (20, 1)], "vllm", **settings).schedule_pass()["tokens"] == together


def test_the_watermark_keeps_blocks_free_while_others_run():
    shapes = [(4, 9), (24, 1)]
    assert len(rank(shapes, "vllm", num_gpu_blocks=10, max_num_batched_tokens=64).schedule_pass()["tokens"]) == 2
    held_back = rank(shapes, "vllm", num_gpu_blocks=10, max_num_batched_tokens=64, watermark=0.3)
    assert list(held_back.schedule_pass()["tokens"]) == [0]
    alone = rank([(32, 1)], "vllm", num_gpu_blocks=10, max_num_batched_tokens=64, watermark=0.3)
    assert list(alone.schedule_pass()["tokens"]) == [0]


def test_admission_tests_the_whole_sequence_or_the_first_chunk():
    shapes = [(16, 4), (16, 4)]
    settings = {"num_gpu_blocks": 7, "max_num_batched_tokens": 20}
    assert rank(shapes, "vllm", **settings).schedule_pass()["tokens"] == {0: 16}
    lax = rank(shapes, "vllm", **settings, scheduler_reserve_full_isl=False)
    assert lax.schedule_pass()["tokens"] == {0: 16, 1: 4}


def test_generation_stops_at_max_model_len():
    scheduler = rank([(8, 20)], max_model_len=10)
    while scheduler.has_unfinished():
        passes(scheduler, 1)
    assert scheduler.requests.column("generated_tokens").tolist() == [2]


@pytest.mark.parametrize(
    ("shape", "settings", "refusal"),
    [
        ((10, 1), {"max_model_len": 10}, Refusal.MODEL_LENGTH),
        ((25, 1), {"num_gpu_blocks": 7}, Refusal.KV_CAPACITY),
        ((17, 1), {"enable_chunked_prefill": False}, Refusal.UNCHUNKED_PROMPT),
        ((24, 1), {"num_gpu_blocks": 7}, Refusal.ACCEPTED),
        ((16, 1), {"enable_chunked_prefill": False}, Refusal.ACCEPTED),
    ],
)
def test_vllm_rules_refuse_at_arrival_what_can_never_run(shape, settings, refusal):
    scheduler = rank([shape], "vllm", **settings)
    assert scheduler.requests.column("refusal").tolist() == [refusal]
    assert scheduler.has_unfinished() == (refusal == Refusal.ACCEPTED)
    assert (scheduler.requests.column("status")[0] == Status.REJECTED) == (refusal != Refusal.ACCEPTED)


def keys_of(*prompts, outputs=1, block_size=4):
    """Prefix keys of prompts written as one letter per block."""
    lengths = np.array([len(prompt) * block_size for prompt in prompts])
    offsets = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])])
    ids = np.array([ord(letter) for prompt in prompts for letter in prompt])
    return PrefixKeys(lengths, np.full(len(prompts), outputs), offsets, ids, block_size, block_size)


UNCHUNKED = {"enable_chunked_prefill": False, "max_num_batched_tokens": 12}


@pytest.mark.parametrize(
    ("prompts", "settings", "refused"),
    [
        (["abcdef", "xyz"], {}, True),
        (["abcdef", "abc"], {}, False),  # 24 tokens, 12 of them shared
        (["abcdef", "ab"], {}, True),
        (["abc", "abcdef"], {}, False),
        (["abcd", "abcd"], {}, False),  # 16 tokens, the last block is computed again
        (["abcdef", "xyz"], {"long_prefill_token_threshold": 12}, False),
        (["abcdef", "xyz"], {"long_prefill_token_threshold": 13}, True),
    ],
)
def test_without_chunked_prefill_only_a_prompt_that_nothing_can_shorten_is_refused(prompts, settings, refused):
    shapes = [(4 * len(prompt), 1) for prompt in prompts]
    scheduler = rank(shapes, "vllm", keys=keys_of(*prompts), **UNCHUNKED, **settings)
    longest = max(range(len(prompts)), key=lambda request: len(prompts[request]))
    found = scheduler.requests.column("refusal")[longest]
    assert found == (Refusal.UNCHUNKED_PROMPT if refused else Refusal.ACCEPTED)


def test_without_prefix_caching_shared_blocks_shorten_nothing():
    scheduler = rank([(24, 1), (12, 1)], "vllm", **UNCHUNKED)
    assert scheduler.requests.column("refusal")[0] == Refusal.UNCHUNKED_PROMPT


def test_without_chunked_prefill_a_hit_decides_at_admission():  # vllm-facts 1.2.3
    scheduler = rank([(12, 1), (24, 1)], "vllm", keys=keys_of("abc", "abcdef"), **UNCHUNKED)
    assert [decided["tokens"] for decided in passes(scheduler, 2)] == [{0: 12}, {1: 12}]


def test_without_chunked_prefill_the_threshold_cuts_before_the_budget_is_asked():
    scheduler = rank([(24, 1), (4, 1)], "vllm", long_prefill_token_threshold=8, **UNCHUNKED)
    assert scheduler.schedule_pass()["tokens"] == {0: 8, 1: 4}


def test_vllm_asks_only_at_admission_whether_the_budget_holds_the_prompt():  # vllm-facts 1.1
    # Alone from the second pass on, the first request is not cut any more; 16 tokens are left for a budget of 12.
    scheduler = rank([(24, 1), (4, 1)], "vllm", long_prefill_token_threshold=8, **UNCHUNKED)
    assert [decided["tokens"] for decided in passes(scheduler, 3)] == [{0: 8, 1: 4}, {0: 12}, {0: 4}]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: rank([(8, 1)]).enqueue(10**8), IndexError),
        (lambda: rank([(8, 1)]).enqueue(-1), IndexError),
        (lambda: rank([(8, 1)]).enqueue(0), ValueError),
        (lambda: rank([(8, 1)], block_size=0), ValueError),
        (lambda: rank([(8, 1)], block_size=-4), ValueError),
        (lambda: rank([(8, 1)], "vllm", num_gpu_blocks=0), ValueError),
        (lambda: rank([(8, 1)], num_gpu_blocks=2**62), ValueError),
        (lambda: rank([(8, 1)], prefill_schedule_interval=0), ValueError),
        (lambda: rank([(8, 1)], long_prefill_token_threshold=-1), ValueError),
        (lambda: rank([(8, 1)], keys=keys_of("ab", block_size=8)), ValueError),
        (lambda: rank([(8, 1), (8, 1)], keys=keys_of("ab")), ValueError),
        (lambda: Requests([8, 8], [1]), ValueError),
        (lambda: Requests([8], [1], [0, 0]), ValueError),
        (lambda: keys_of("ab", block_size=4).key_of(1, 0), IndexError),
        (lambda: PrefixKeys(*(np.array(column) for column in ([8], [1], [0, 2], [1, 2])), 0, 4), ValueError),
        (lambda: PrefixKeys(*(np.array(column) for column in ([8], [1], [0, 2], [1, 2])), 4, 0), ValueError),
        (lambda: PrefixKeys(*(np.array(column) for column in ([8], [1], [0, 9], [1, 2])), 4, 4), ValueError),
        (lambda: PrefixKeys(*(np.array(column) for column in ([8, 8], [1], [0, 2], [1, 2])), 4, 4), ValueError),
        (lambda: Scheduler.__new__(Scheduler), TypeError),
        (lambda: Requests.__new__(Requests), TypeError),
        (lambda: rank([(8, 1)], keys=PrefixKeys.__new__(PrefixKeys)), ValueError),
        (lambda: PrefixKeys.__new__(PrefixKeys).key_of(0, 0), IndexError),
    ],
)
def test_arguments_that_would_break_the_books_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_without_chunked_prefill_a_prompt_waits_for_its_whole_budget():
    scheduler = rank([(8, 2), (12, 2)], enable_chunked_prefill=False, max_num_batched_tokens=12)
    assert [d["tokens"] for d in passes(scheduler, 3)] == [{0: 8}, {0: 1}, {1: 12}]


def test_a_request_without_output_computes_its_prompt_and_emits_nothing():
    scheduler = rank([(8, 0)])
    assert scheduler.schedule_pass()["tokens"] == {0: 8}
    assert scheduler.complete_pass() == ([], [0])


# Telemetry


def resumed(rules):
    scheduler = rank([(8, 8), (8, 8)], rules, num_gpu_blocks=6 + (rules == "vllm"), max_num_seqs=2)
    decided = passes(scheduler, 9)
    return (
        next(d for d in decided if d["preempted"]),
        next(d for d in decided if d["tokens"].get(1, 0) > 8),
    )


def test_the_simulator_counts_known_tokens_and_labels_recompute_prefill():
    preempting, readmission = resumed("simulator")
    assert (preempting["num_decode_requests"], preempting["sum_decode_kv_tokens"]) == (1, 13)
    assert (preempting["num_queued_decode"], preempting["sum_queued_decode_kv_tokens"]) == (1, 13)
    assert (readmission["num_prefill_requests"], readmission["sum_prefill_tokens"]) == (1, 13)


def test_vllm_counts_computed_tokens_and_labels_recompute_decode():
    preempting, readmission = resumed("vllm")
    assert (preempting["num_decode_requests"], preempting["sum_decode_kv_tokens"]) == (1, 12)
    assert (preempting["num_queued_decode"], preempting["sum_queued_decode_kv_tokens"]) == (1, 0)
    assert (readmission["num_prefill_requests"], readmission["num_decode_requests"]) == (0, 1)
    assert readmission["sum_decode_kv_tokens"] == 0


def test_queued_lengths_have_population_variance():
    decided = rank([(8, 1), (4, 1), (24, 1)], max_num_seqs=1).schedule_pass()
    assert (decided["num_queued_prefill"], decided["sum_queued_prefill_tokens"]) == (2, 28)
    assert decided["var_queued_prefill_length"] == 100.0


# Random ranks against the plain reference.


@st.composite
def scenarios(draw):
    block_size = draw(st.sampled_from([1, 2, 4]))
    count = draw(st.integers(2, 7))
    common = draw(st.lists(st.integers(0, 1), min_size=16, max_size=16))
    prompts = []
    for _ in range(count):
        shared, length = draw(st.integers(0, 16)), draw(st.integers(1, 16))
        own = draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        prompts.append((common[:shared] + own)[:length])
    outputs = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    rules = draw(st.sampled_from(["vllm", "simulator"]))
    budget = draw(st.integers(25, 40) | st.integers(1, 12))
    longest = max(len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True))
    return {
        "rules": rules,
        "prompts": prompts,
        "outputs": outputs,
        "arrivals": sorted(draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))),
        "priority": draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
        "block_size": block_size,
        # Enough for the longest request alone; others compete.
        "num_gpu_blocks": -(-longest // block_size) + (rules == "vllm") + draw(st.integers(0, 3)),
        "max_num_seqs": draw(st.integers(2, 5)),
        "budget": budget,
        "caching": draw(st.booleans()),
        "fifo": rules == "simulator" and draw(st.booleans()),
        "by_priority": rules == "vllm" and draw(st.booleans()),
        # Without chunks every prompt, and every sequence to recompute, must fit into the budget.
        "chunked": draw(st.booleans()) if budget >= 25 else True,
        "threshold": draw(st.sampled_from([0, 3])) if rules == "vllm" else 0,
    }


def compiled(case):
    prompts, outputs = case["prompts"], case["outputs"]
    lengths = np.array([len(prompt) for prompt in prompts])
    keys = None
    if case["caching"]:
        keys = PrefixKeys(
            lengths,
            np.array(outputs),
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate(prompts).astype(np.int64),
            1,
            case["block_size"],
        )
    return Scheduler(
        Requests(lengths, outputs, case["priority"]),
        case["rules"],
        num_gpu_blocks=case["num_gpu_blocks"],
        block_size=case["block_size"],
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=case["budget"],
        enable_chunked_prefill=case["chunked"],
        preemption_mode="fifo" if case["fifo"] else "lifo",
        scheduling_policy="priority" if case["by_priority"] else "fcfs",
        keys=keys,
        long_prefill_token_threshold=case["threshold"],
    )


@settings(max_examples=500)
@given(scenarios())
def test_every_decision_equals_the_reference(case):
    scheduler, plain = compiled(case), Reference(case)
    arrivals = list(enumerate(case["arrivals"]))
    for step in range(400):
        while arrivals and arrivals[0][1] <= step:
            index = arrivals.pop(0)[0]
            scheduler.enqueue(index)
            plain.requests[index].order = index
            plain.queue(plain.requests[index])
        decided = scheduler.schedule_pass()
        plain.schedule()
        assert decided["tokens"] == plain.tokens
        assert decided["reused"] == plain.reused
        assert decided["preempted"] == plain.preempted
        assert decided["free_blocks"] == plain.free()
        assert scheduler.complete_pass() == plain.complete()
        if not arrivals and not scheduler.has_unfinished():
            break
    assert not scheduler.has_unfinished()


@given(scenarios())
def test_what_must_always_hold(case):
    scheduler = compiled(case)
    usable = case["num_gpu_blocks"] - (case["rules"] == "vllm")
    for index in range(len(case["prompts"])):
        scheduler.enqueue(index)
    completed = []
    for _ in range(2000):
        if not scheduler.has_unfinished():
            break
        decided = scheduler.schedule_pass()
        assert sum(decided["tokens"].values()) <= case["budget"]
        assert decided["num_running"] <= case["max_num_seqs"]
        assert decided["active_blocks"] + decided["free_blocks"] == usable
        column = scheduler.requests.column
        known = np.array([len(prompt) for prompt in case["prompts"]]) + column("generated_tokens")
        assert (column("computed_tokens") <= known).all()
        completed += scheduler.complete_pass()[1]
    # Nobody is lost, nobody is served twice, everybody gets all tokens, all blocks come back.
    assert sorted(completed) == list(range(len(case["prompts"])))
    assert column("generated_tokens").tolist() == case["outputs"]
    assert scheduler.schedule_pass()["active_blocks"] == 0
