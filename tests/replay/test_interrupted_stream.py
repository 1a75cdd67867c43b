"""Ctrl-C while a stream is replayed: whenever it comes, it is heard, and what came out is counted once."""

import itertools
import os
import signal
import threading

import pytest

from fpmsdk.errors import ReplayInterrupted
from fpmsdk.replay import run_stream
from fpmsdk.replay.run_stream import replay_stream
from fpmsdk.replay.trace_stream import TraceStream

COUNT = 1000
LAUNCH = {
    "engine": {
        "block_size": 4,
        "num_gpu_blocks": 100,
        "enable_prefix_caching": False,
        "timing_model": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
    }
}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    monkeypatch.setattr(run_stream, "_FIRST_SLOTS", 4)
    monkeypatch.setattr(run_stream, "_ENDED_AT_ONCE", 50)
    monkeypatch.setattr("fpmsdk.replay.trace_stream._ROWS_PER_PORTION", 5)


@pytest.fixture
def gaps_counted(monkeypatch):
    counted = []
    add_gaps = run_stream.Fold.add_gaps

    def add_and_count(fold, gap_ms, count):
        add_gaps(fold, gap_ms, count)
        counted.append(int(count.sum()))

    monkeypatch.setattr(run_stream.Fold, "add_gaps", add_and_count)
    return counted


def press():
    signal.raise_signal(signal.SIGINT)


def press_at(monkeypatch, owner, name, when, call, press=press):
    """Press before or after the given call of a method."""
    method, calls = getattr(owner, name), itertools.count()

    def pressing(*arguments):
        is_it = next(calls) == call
        if is_it and when == "before":
            press()
        outcome = method(*arguments)
        if is_it and when == "after":
            press()
        return outcome

    monkeypatch.setattr(owner, name, pressing)


def served():
    """Every request takes 12 ms, and none waits for another."""
    return replay_stream(TraceStream.synthetic(COUNT, 8, 3, arrival_interval_ms=20.0), launch=LAUNCH)


def interrupted():
    with pytest.raises(ReplayInterrupted) as stop:
        served()
    assert stop.value.report.partial
    return stop.value.report.summary


def assert_each_is_counted_once(summary, gaps_counted):
    completed = summary["completed_requests"]
    assert summary["num_requests"] - 1 <= completed <= summary["num_requests"]
    assert summary["duration_ms"] == (completed - 1) * 20.0 + 12.0
    assert summary["num_ttft_samples"] == completed
    assert 2 * completed <= sum(gaps_counted) <= 2 * summary["num_requests"]


PLACES = [
    *((run_stream._Supply, name) for name in ("next_requests", "placed", "ended", "gaps")),
    *((run_stream.Fold, name) for name in ("add", "add_gaps")),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_a_press_at_any_moment_is_heard_and_counts_nothing_twice(owner, name, when, monkeypatch, gaps_counted):
    press_at(monkeypatch, owner, name, when, call=7)
    summary = interrupted()
    assert 0 < summary["completed_requests"] < COUNT
    assert_each_is_counted_once(summary, gaps_counted)


@pytest.mark.parametrize("name", ["ended", "gaps"])
def test_a_press_after_the_last_request_is_heard(name, monkeypatch, gaps_counted):
    # Once for every fifty, and at the end for those that ended and for those that did not.
    press_at(monkeypatch, run_stream._Supply, name, "after", call=COUNT // 50)
    summary = interrupted()
    assert summary["completed_requests"] == COUNT
    assert_each_is_counted_once(summary, gaps_counted)


def test_a_second_press_while_the_rest_is_counted_loses_nothing(monkeypatch, gaps_counted):
    press_at(monkeypatch, run_stream._Supply, "next_requests", "before", call=100)
    press_at(monkeypatch, run_stream._Supply, "ended", "before", call=500 // 50)
    summary = interrupted()
    assert 500 - 5 <= summary["num_requests"] <= 500
    assert_each_is_counted_once(summary, gaps_counted)


@pytest.mark.parametrize("name", ["next_requests", "ended"])
def test_a_press_from_elsewhere_is_heard(name, monkeypatch, gaps_counted):
    wanted, given = threading.Event(), threading.Event()

    def press_when_wanted():
        wanted.wait(60.0)
        os.kill(os.getpid(), signal.SIGINT)
        given.set()

    def want():
        wanted.set()
        assert given.wait(60.0)

    elsewhere = threading.Thread(target=press_when_wanted)
    elsewhere.start()
    try:
        press_at(monkeypatch, run_stream._Supply, name, "before", call=7, press=want)
        summary = interrupted()
    finally:
        elsewhere.join()
    assert_each_is_counted_once(summary, gaps_counted)


def test_a_press_that_a_finalizer_swallows_is_heard(monkeypatch, gaps_counted):
    class Finalized:
        def __del__(self):
            press()

    press_at(monkeypatch, run_stream._Supply, "next_requests", "before", call=20, press=Finalized)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    summary = interrupted()
    assert summary["completed_requests"] < COUNT
    assert_each_is_counted_once(summary, gaps_counted)


@pytest.mark.parametrize("name", ["next_requests", "ended"])
def test_a_handler_that_does_not_stop_the_replay_is_called_once(name, monkeypatch):
    presses = []

    def note(number, frame):
        presses.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        press_at(monkeypatch, run_stream._Supply, name, "before", call=7)
        assert served().summary["completed_requests"] == COUNT
        assert signal.getsignal(signal.SIGINT) is note
    finally:
        signal.signal(signal.SIGINT, before)
    assert presses == [signal.SIGINT]


def test_the_handler_is_back_after_an_interrupted_replay(monkeypatch):
    press_at(monkeypatch, run_stream._Supply, "ended", "before", call=7)
    interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_ctrl_c_is_ignored_it_stays_so(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        press_at(monkeypatch, run_stream._Supply, "ended", "before", call=7)
        assert served().summary["completed_requests"] == COUNT
    finally:
        signal.signal(signal.SIGINT, before)


def test_elsewhere_than_in_the_main_thread_a_stream_is_replayed():
    reports = []
    thread = threading.Thread(target=lambda: reports.append(served()))
    thread.start()
    thread.join()
    assert reports[0].summary["completed_requests"] == COUNT
