"""`trace_stats`: figures of a file that is never in memory."""

import json
import random
import tracemalloc

import pytest

from fpmsdk.replay import fold, sorting, spool, stats
from fpmsdk.replay.stats import trace_stats

EXPECTED = {
    "num_requests": 400,
    "num_sessions": 236,
    "arrival_span_ms": 7730.0,
    "arrival_rate_rps": 30.40103492884864,
    "total_prompt_tokens": 209366,
    "mean_prompt_tokens": 523.415,
    "max_prompt_tokens": 999,
    "total_output_tokens": 390,
    "mean_output_tokens": 0.975,
    "max_output_tokens": 2,
    "zero_output_requests": 137,
    "num_prompt_blocks": 612,
    "num_distinct_prompt_blocks": 221,
    "prompt_tokens": {
        "mean": 523.415,
        "min": 2.0,
        "max": 999.0,
        "median": 534.0,
        "p75": 789.0,
        "p90": 910.0,
        "p95": 962.0,
        "p99": 988.0,
        "std": 290.30609324469924,
    },
    "output_tokens": {
        "mean": 0.975,
        "min": 0.0,
        "max": 2.0,
        "median": 1.0,
        "p75": 2.0,
        "p90": 2.0,
        "p95": 2.0,
        "p99": 2.0,
        "std": 0.8120190884455858,
    },
    "interarrival_ms": {
        "mean": 32.8936170212766,
        "min": 1.0,
        "max": 614.0,
        "median": 16.0,
        "p75": 30.0,
        "p90": 48.0,
        "p95": 79.0,
        "p99": 471.0,
        "std": 72.77848467506044,
    },
    "turns_per_session": {
        "mean": 1.694915254237288,
        "min": 1.0,
        "max": 6.0,
        "median": 1.0,
        "p75": 2.0,
        "p90": 3.0,
        "p95": 4.0,
        "p99": 6.0,
        "std": 1.1608622932995094,
    },
    "busiest_second_requests": 56,
    "repeated_block_ratio": 0.6388888888888888,
}


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    monkeypatch.setattr(spool, "_ROWS_PER_PORTION", 7)


def write_chats(path, count, seed=1):
    """Requests of several sessions under way at once, with blocks that few share."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            row = {
                "timestamp": number * 10 + (rng.randrange(5000) if rng.random() < 0.3 else 0),
                "input_length": rng.randrange(1, 1000),
                "output_length": rng.randrange(3),
                "hash_ids": [rng.randrange(9), 2**63 + number],
            }
            if rng.random() < 0.7:
                row |= {"session_id": f"chat {number // 20 * 20 + rng.randrange(6)}", "timestamp": number * 10}
            file.write(json.dumps(row) + "\n")


def test_figures_are_those_of_the_trace_as_a_whole(tmp_path):
    write_chats(tmp_path / "t.jsonl", 400)
    # Recorded from columns of the whole trace.
    assert trace_stats(tmp_path / "t.jsonl") == EXPECTED


def test_a_single_request_has_figures(tmp_path):
    (tmp_path / "t.csv").write_text("Timestamp,Request tokens,Response tokens\n5,472,18\n")
    figures = trace_stats(tmp_path / "t.csv")
    assert (figures["arrival_rate_rps"], figures["repeated_block_ratio"]) == (None, None)
    assert (figures["busiest_second_requests"], figures["interarrival_ms"]["max"]) == (1, 0.0)


def test_memory_does_not_grow_with_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(sorting, "_VALUES_IN_MERGE", 2048)
    monkeypatch.setattr(sorting, "_LEAST_READ", 16)
    monkeypatch.setattr(fold, "_VALUES_AT_ONCE", 256)
    monkeypatch.setattr(stats, "_VALUES_PER_RUN", 1000)
    peaks = []
    for count in (2000, 16000):
        write_chats(tmp_path / "t.jsonl", count)
        tracemalloc.start()
        try:
            assert trace_stats(tmp_path / "t.jsonl")["num_requests"] == count
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
