"""Synthetic sessions whose turns carry on: a prompt is all that was said before, and something new.

Source: predict-recommend.md section 3.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.speculation import RandomWords
from fpmsdk.prediction.config import SessionSource
from fpmsdk.replay.trace import Trace


def session_trace(source: SessionSource, arrivals_ms: NDArray[np.float64], block_tokens: int) -> Trace:
    """Sessions of equal turns.

    Parameters
    ----------
    arrivals_ms: of first turns, float64[sessions], ascending.
    block_tokens: what a share of a first prompt is rounded to, halves up.

    >>> source = SessionSource.model_validate({"type": "synthetic-session", "new_input_tokens_per_turn": 90,
    ...                                        "output_tokens_per_turn": 7, "session": {"turns": 3}})
    >>> session_trace(source, np.zeros(1), 16).prompt_tokens.tolist()
    [90, 187, 284]
    """
    session, turns, count = source.session, source.session.turns, len(arrivals_ms)
    fresh, generated = source.new_input_tokens_per_turn, source.output_tokens_per_turn
    turn = np.tile(np.arange(turns), count)
    prompts = fresh + turn * (fresh + generated)
    # One more than a prompt and its output fill, so that the output counts as described.
    num_blocks = -(-(prompts + generated) // block_tokens) + 1
    offsets = np.zeros(count * turns + 1, np.int64)
    np.cumsum(num_blocks, out=offsets[1:])
    # A block that goes on behind the first prompt has an answer in it, which no other session has.
    shared = min(int(-(-fresh // block_tokens) * session.shared_prefix_ratio + 0.5), fresh // block_tokens)
    widest = int(num_blocks[-1])
    groups = _groups(count, session.prefix_groups) if shared else np.zeros(count, np.int64)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], num_blocks)
    owner = np.repeat(np.arange(count * turns) // turns, num_blocks)
    # Blocks of groups come first, then those of one session after the other.
    own = session.prefix_groups * shared + owner * widest + place
    names = [f"synthetic-{index}" for index in range(count * turns)]
    none = np.zeros(count * turns, np.int64)
    return Trace.ordered(
        request_ids=names,
        session_ids=[f"session-{index}" for index in range(count)],
        session_arrival_ms=arrivals_ms,
        session=np.arange(count * turns) // turns,
        turn=turn,
        delay_ms=np.where(turn > 0, session.inter_turn_delay_ms, 0.0),
        prompt_tokens=prompts,
        output_tokens=none + generated,
        priority=none,
        dp_rank=none - 1,
        prefill_dp_rank=none - 1,
        hash_offsets=offsets,
        hash_ids=np.where(place < shared, groups[owner] * shared + place, own).astype(np.uint64),
        block_tokens=block_tokens,
        awaits_offsets=np.zeros(count * turns + 1, np.int64),
        awaits=none[:0],
    )


def _groups(sessions: int, num_groups: int) -> NDArray[np.int64]:
    """The group of each session as the peer's engine draws it: 32 bits of its generator, scaled to the groups."""
    words = RandomWords(0)
    drawn = np.array([words.next() for _ in range(-(-sessions // 2))], np.uint64)
    halves = np.column_stack([drawn & np.uint64(2**32 - 1), drawn >> np.uint64(32)]).ravel()[:sessions]
    return ((halves * np.uint64(num_groups)) >> np.uint64(32)).astype(np.int64)
