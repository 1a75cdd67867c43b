"""Figures of portions on disk are those of all values in memory, to the bit."""

import numpy as np
import pytest

from fpmsdk.replay import fold as folding
from fpmsdk.replay.fold import Fold, latencies_of
from fpmsdk.replay.latency import Distribution, Sla
from fpmsdk.replay.sorting import Spill


def values_of(kind, n, rng):
    return {
        "distinct": lambda: rng.lognormal(3, 2, n),
        "repeated": lambda: rng.integers(0, 9, n).astype(float),
        "equal": lambda: np.full(n, 0.1),
        "ascending": lambda: np.arange(n) / 7,
        "descending": lambda: np.arange(n)[::-1] / 7,
        "tiny and huge": lambda: 10.0 ** rng.integers(-200, 150, n),
    }[kind]()


KINDS = ("distinct", "repeated", "equal", "ascending", "descending", "tiny and huge")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 9, 1000, 200_001])
def test_a_spill_hands_back_what_it_got_in_order(kind, n):
    values = values_of(kind, n, np.random.default_rng(1))
    spill = Spill(values_per_run=max(1, n // 13))
    for portion in np.array_split(values, 5):
        spill.add(portion)
    blocks = list(spill.blocks())
    expected, counts = np.unique(values, return_counts=True)
    assert np.array_equal(np.concatenate([block["value"] for block in blocks]), expected)
    assert np.array_equal(np.concatenate([block["count"] for block in blocks]), counts)
    assert spill.total == n
    spill.close()


def test_memory_of_a_merge_is_bounded_by_blocks():
    spill = Spill(values_per_run=1000)
    spill.add(np.random.default_rng(2).random(300_000))
    assert max(len(block) for block in spill.blocks()) <= 1 << 17
    spill.close()


def columns_of(n, rng):
    arrival = np.cumsum(rng.random(n))
    first = arrival + rng.lognormal(3, 1, n)
    output = rng.integers(0, 4, n)
    second = np.where(output > 1, first + rng.random(n), np.nan)
    last = np.where(output > 1, second + rng.random(n), first)
    first, last = (np.where(output > 0, times, np.nan) for times in (first, last))
    status = np.array(["completed", "rejected", "unfinished"], object)[rng.choice(3, n, p=[0.9, 0.05, 0.05])]
    return {
        "request_id": np.array([f"r{row}" for row in range(n)], object),
        "rejection_reason": np.array(["too long" if word == "rejected" else None for word in status], object),
        "status": status,
        "arrival_ms": arrival,
        "first_token_ms": first,
        "second_token_ms": second,
        "last_token_ms": last,
        "end_ms": np.where(output > 0, last, arrival + 1),
        "prompt_tokens": rng.integers(1, 9000, n),
        "output_tokens": output,
        "reused_tokens": rng.integers(0, 90, n),
        "first_reused_tokens": rng.integers(0, 90, n),
    }


@pytest.mark.parametrize("n", [3, 5000, 150_000])
@pytest.mark.parametrize("portions", [1, 7])
def test_a_fold_of_portions_says_what_the_whole_says(n, portions, monkeypatch):
    monkeypatch.setattr(folding, "_VALUES_AT_ONCE", 1024)
    rng = np.random.default_rng(n)
    columns = columns_of(n, rng)
    columns["status"][0] = "completed"
    gaps, counts = rng.choice(rng.random(max(1, n // 3)), n), rng.integers(1, 200, n)
    gaps[:1] = 0.0
    sla = Sla(ttft_ms=20.0)
    with Fold(sla, False) as fold:
        for rows in np.array_split(rng.permutation(n), portions):
            fold.add({name: column[rows] for name, column in columns.items()})
            fold.add_gaps(gaps[rows], counts[rows])
        found = fold.distributions()
        totals = fold.totals
    done = columns["status"] == "completed"
    latencies = latencies_of(columns)
    expected = {
        **Distribution.of_sample(latencies.ttft_ms[done]).named("ttft_ms"),
        **Distribution.of_sample(latencies.ttst_ms[done]).named("ttst_ms"),
        **Distribution.of_sample(latencies.itl_ms[done]).named("tpot_ms"),
        **Distribution.of_sample(latencies.e2e_ms[done]).named("e2e_latency_ms"),
        **Distribution.of_stream(gaps, counts).named("itl_ms"),
        **Distribution.of_stream(1e3 / gaps[gaps > 0], counts[gaps > 0]).named("output_token_throughput_per_user"),
    }
    assert {name: found[name] for name in expected} == expected
    assert totals.completed == done.sum()
    assert totals.good == (done & (latencies.ttft_ms <= 20.0)).sum()


def test_exact_percentiles_of_gaps_are_values_of_the_stream():
    gaps, counts = np.array([1.0, 7.0, 11.0]), np.array([5, 1, 4])
    with Fold(None, True) as fold:
        fold.add_gaps(gaps, counts)
        found = fold.distributions()
    assert (found["median_itl_ms"], found["p90_itl_ms"]) == (7.0, 11.0)  # ranks 5 and 8 of 10


def test_an_empty_fold_tells_why():
    columns = columns_of(4, np.random.default_rng(0))
    columns["status"][:] = ["unfinished", "rejected", "rejected", "unfinished"]
    columns["rejection_reason"][1] = "it is too long"
    with Fold(None, False) as fold:
        fold.add(columns)
        assert fold.why_empty() == (
            "no request completed: 2 of 4 were rejected, the first, r1, because it is too long; 2 were unfinished"
        )
