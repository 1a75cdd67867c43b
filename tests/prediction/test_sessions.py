"""Synthetic sessions: prompts that repeat all that was said before. Source: predict-recommend.md section 3.1."""

import numpy as np
import pytest

from fpmsdk.prediction.compile.sessions import session_trace
from fpmsdk.prediction.config import SessionSource
from fpmsdk.replay import replay_trace

LAUNCH = {
    "engine": {
        "block_size": 4,
        "num_gpu_blocks": 64,
        "enable_prefix_caching": True,
        "timing_model": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }
}


def sessions(count, fresh, generated, **session):
    source = {"type": "synthetic-session", "new_input_tokens_per_turn": fresh, "output_tokens_per_turn": generated}
    return session_trace(SessionSource.model_validate(source | {"session": session}), np.zeros(count), 4)


@pytest.mark.parametrize(
    ("fresh", "generated", "reused"),
    [
        (8, 5, [0, 12, 24]),  # of 13 and 26 known tokens the whole blocks, though 8 is where a prompt ends
        (8, 4, [0, 8, 20]),  # the KV of the last token of 12 and 24 is never computed
        (6, 1, [0, 4, 12]),  # 7 and 14 known tokens, 6 and 13 computed
    ],
)
def test_a_turn_finds_what_was_said_before_in_the_cache(fresh, generated, reused):
    trace = sessions(1, fresh, generated, turns=3)
    assert trace.prompt_tokens.tolist() == [fresh + turn * (fresh + generated) for turn in range(3)]
    report = replay_trace(trace, launch=LAUNCH, concurrency=1)
    assert report.requests["reused_tokens"].to_pylist() == reused


def test_first_prompts_of_a_group_share_their_leading_blocks_and_nothing_else():
    # 10 tokens are three blocks, of which half are 1.5, rounded to 2: 8 tokens.
    trace = sessions(2, 10, 3, turns=2, shared_prefix_ratio=0.5, prefix_groups=1)
    report = replay_trace(trace, launch=LAUNCH, concurrency=1)
    assert report.requests["reused_tokens"].to_pylist() == [0, 12, 8, 12]


def test_a_shared_block_that_an_answer_goes_on_in_is_shared_no_further():
    # All three blocks of 10 tokens are shared; the third holds two of them, and then what was answered.
    trace = sessions(2, 10, 3, turns=2, shared_prefix_ratio=1.0, prefix_groups=1)
    # Every first turn is served by one worker, every second turn by the other.
    report = replay_trace(trace, launch=LAUNCH, concurrency=1, num_workers=2)
    assert report.requests["reused_tokens"].to_pylist() == [0, 0, 8, 8]


def test_a_turn_waits_for_the_one_before_it():
    trace = sessions(1, 8, 3, turns=2, inter_turn_delay_ms=25.0)
    # 2 ms of prefill and two more tokens; the delay; the same again.
    assert replay_trace(trace, launch=LAUNCH, concurrency=1).requests["end_ms"].to_pylist() == [4.0, 33.0]


@pytest.mark.parametrize(
    ("num_groups", "is_first_of_its_group"),
    [
        (2, [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (3, [1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (4, [1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]),
        (8, [1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]),
        (16, [1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0]),
    ],
)
def test_sessions_draw_the_groups_that_the_peer_draws(num_groups, is_first_of_its_group):
    # Recorded: which of 16 sessions, one after the other, found a shared prefix in the cache.
    trace = sessions(16, 64, 2, turns=2, shared_prefix_ratio=0.5, prefix_groups=num_groups)
    first_blocks = trace.hash_ids[trace.hash_offsets[:-1]][trace.turn_index == 0].tolist()
    assert [int(block not in first_blocks[:i]) for i, block in enumerate(first_blocks)] == is_first_of_its_group
