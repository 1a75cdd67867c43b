"""Fed with the arrivals and step ends of a recorded run, the rank schedules every pass of the real engine."""

import dataclasses

import numpy as np
import pytest

from fpmsdk import EngineLaunchConfig, FpmBatch, sample
from fpmsdk._ext.pricing import FixedTiming
from fpmsdk.errors import TraceError
from fpmsdk.replay import RecordedPasses
from fpmsdk.replay.measured import latencies_of_prices, measured_schedule

RUNS = {
    "train": (sample.train_run, sample.train_frames),
    "eval": (sample.eval_run, sample.eval_frames),
    "burst": (sample.burst_run, sample.burst_frames),
}


def schedule_of(name, changed=lambda run: run):
    run, frames = (read() for read in RUNS[name])
    launch = EngineLaunchConfig.from_mapping(sample.launch(run))
    return run, measured_schedule(changed(run), FpmBatch.from_frames(frames), launch)


@pytest.mark.parametrize(
    ("name", "passes", "tokens", "preemptions"),
    [("train", 15049, 32549, 0), ("eval", 9327, 29804, 2), ("burst", 1653, 16540, 11)],
)
def test_every_recorded_pass_and_every_token_time_is_reproduced(name, passes, tokens, preemptions):
    _, schedule = schedule_of(name)
    assert schedule.differences == []
    assert len(schedule.passes) == passes
    assert schedule.tokens == tokens
    assert sum(len(one["preempted"]) for one in schedule.passes) == preemptions


def test_a_request_that_came_later_than_recorded_is_found_in_words():
    def one_second_late(run):
        added_ms = run.added_ms.copy()
        added_ms[3] += 1000.0
        return dataclasses.replace(run, added_ms=added_ms)

    _, schedule = schedule_of("burst", one_second_late)
    assert any("num_prefill_requests: recorded 1, simulated 0" in line for line in schedule.differences)
    assert any(line.startswith("token 0 of request q0003: recorded at ") for line in schedule.differences)


def test_a_run_that_does_not_say_when_the_engine_got_its_requests_is_refused():
    with pytest.raises(TraceError, match="no added times"):
        schedule_of("burst", lambda run: dataclasses.replace(run, added_ms=run.added_ms * np.nan))


def test_prices_of_recorded_passes_stretch_time_pass_by_pass():
    run, schedule = schedule_of("burst")
    latencies, total_ms = latencies_of_prices(run, schedule, FixedTiming(0.0, 2.0))
    # Two ms for every pass with decode, none for the others: tokens of one request are whole passes apart.
    decoding = sum(one["work"]["num_decode"] > 0 for one in schedule.passes)
    assert total_ms == 2.0 * decoding
    steps = (latencies.e2e_ms - latencies.ttft_ms) / 2.0
    assert np.allclose(steps, np.round(steps), atol=1e-6)
    assert latencies.ttft_ms.min() == 0.0


def test_measured_prices_give_the_measured_latencies():
    run, schedule = schedule_of("eval")
    durations_ms = schedule.end_ms - schedule.start_ms
    timing = RecordedPasses.from_durations([durations_ms.tolist()]).timing_model()
    latencies, total_ms = latencies_of_prices(run, schedule, timing)
    measured = run.latencies()
    assert np.allclose(latencies.ttft_ms, measured.ttft_ms, atol=1e-3)
    assert np.allclose(latencies.e2e_ms, measured.e2e_ms, atol=1e-3)
    assert np.isclose(total_ms, durations_ms.sum())
