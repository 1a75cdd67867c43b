"""The shipped recording: complete, consistent with itself, and small."""

from pathlib import Path

import numpy as np

from fpmsdk import FpmBatch, sample


def test_every_frame_is_a_well_formed_iteration():
    for frames in (sample.train_frames(), sample.eval_frames()):
        batch = FpmBatch.from_frames(frames)
        assert set(batch.workload_kind_names()) == {
            None,
            "pure_decode",
            "pure_prefill",
            "contains_locally_mixed",
        }
        assert (batch.wall_time_s[batch.workload_kinds() >= 0] > 0).all()


def test_the_telemetry_counts_the_tokens_of_the_recorded_requests():
    batch, run = FpmBatch.from_frames(sample.eval_frames()), sample.eval_run()
    # Every token but the first of a request comes from a decode step; a resumed request recomputes as one.
    decoded = int(batch.num_decode_requests.sum())
    assert 0 <= decoded - int((run.trace.output_tokens - 1).sum()) <= 10
    assert int(batch.sum_prefill_tokens.sum()) >= int(run.trace.prompt_tokens.sum())


def test_measured_latencies_are_complete_and_ordered():
    run = sample.eval_run()
    latencies = run.latencies()
    assert len(run.token_ms) == run.trace.output_tokens.sum()
    assert (latencies.ttft_ms > 0).all()
    assert (latencies.e2e_ms >= latencies.ttft_ms + latencies.ttst_ms).all()
    assert len(run.gaps_ms()) == len(run.token_ms) - len(run.trace)
    assert np.isclose(run.gaps_ms().sum(), (latencies.e2e_ms - latencies.ttft_ms).sum())


def test_the_sample_stays_well_under_a_megabyte():
    size = sum(file.stat().st_size for file in Path(sample.__file__).parent.iterdir() if file.is_file())
    assert size < 700_000
