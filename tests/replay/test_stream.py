"""The telemetry that a replayed engine would have published: what it says, what learns from it, what repeats it."""

import json

import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, Trace, replay_trace, sample
from fpmsdk.errors import ConfigError, MetricsError, ReplayError
from fpmsdk.metrics import decode_frame, group_ranks, read_frames
from fpmsdk.replay import RecordedPasses, fit_pass_timing
from fpmsdk.replay.stream import read_table
from tests.vectors import load_vectors

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
SMALL = {"engine": {"block_size": 4, "num_gpu_blocks": 64, "max_num_batched_tokens": 8, "timing_model": FIXED}}
TRACE = Trace.from_arrays([0.0, 11.5], [4, 12], [6, 2])


def test_a_frame_says_what_a_pass_scheduled():
    frames = [decode_frame(frame) for frame in replay_trace(TRACE, launch=SMALL).fpm_frames()]
    assert [frame.counter_id for frame in frames] == [1, 2, 3, 4, 5, 6]
    # A decoding request and the first seven tokens of the new prompt.
    mixed = frames[3]
    assert mixed.scheduled_requests.num_prefill_requests == 1
    assert mixed.scheduled_requests.sum_prefill_tokens == 7
    assert mixed.scheduled_requests.num_decode_requests == 1
    assert mixed.scheduled_requests.sum_decode_kv_tokens == 6
    assert mixed.wall_time == pytest.approx(0.011)
    assert {(frame.worker_id, frame.dp_rank) for frame in frames} == {("0", 0)}


def test_a_queued_request_is_reported():
    waiting = Trace.from_arrays([0.0, 0.0], [8, 8], [2, 2])
    frames = [decode_frame(frame) for frame in replay_trace(waiting, launch=SMALL).fpm_frames()]
    assert frames[0].queued_requests.num_prefill_requests == 1
    assert frames[0].queued_requests.sum_prefill_tokens == 8


def test_every_rank_of_a_group_reports_the_duration_of_the_group():
    launch = {**SMALL, "dp_size": 2}
    trace = Trace.from_arrays([0.0, 0.0, 30.0], [8, 4, 4], [2, 1, 3])
    report = replay_trace(trace, launch=launch)
    iterations = group_ranks(report.fpm_frames(), 2)
    assert len(iterations) == len(FpmBatch.from_arrow(report.fpm_stream)) == 5
    for ranks in iterations:
        assert ranks[0].wall_time == ranks[1].wall_time
    # Rank 1 has nothing to do from the second pass on, and says so; then it gets the third request alone.
    work = [
        [rank.scheduled_requests.num_prefill_requests + rank.scheduled_requests.num_decode_requests for rank in ranks]
        for ranks in iterations
    ]
    assert work == [[1, 1], [1, 0], [1, 0], [1, 0], [1, 0]]


def test_a_stream_of_an_engine_tunes_a_model():
    run = sample.burst_run()
    timing = fit_pass_timing(FpmBatch.from_frames(sample.train_frames()))
    report = replay_trace(run.trace, launch=sample.launch(run), timing=timing)
    from_table, from_wire = (ForwardPassPerfModel.best_available(sample.MODEL) for _ in range(2))
    batch = FpmBatch.from_arrow(report.fpm_stream)
    from_table.tune_with_fpms(batch)
    from_wire.tune_with_fpms(FpmBatch.from_frames(report.fpm_frames()))
    assert from_table.diagnostics()["readiness"] == "ready"
    query = {"scheduled_requests": {"num_decode_requests": 8, "sum_decode_kv_tokens": 6000}}
    latency_ms = from_table.estimate_forward_pass_time_ms(query)
    assert latency_ms == from_wire.estimate_forward_pass_time_ms(query)
    constant, _, _, per_request, per_token, _ = timing.coefficients_ms
    assert latency_ms == pytest.approx(constant + 8 * per_request + 6000 * per_token, rel=0.02)


@pytest.mark.parametrize("pricing", ["composed", "separate"])
@pytest.mark.parametrize(
    "scenario", load_vectors("replay_telemetry_peer")["scenarios"], ids=lambda scenario: scenario["name"]
)
def test_a_replayed_export_is_the_original_run_bit_for_bit(scenario, pricing, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, scenario["trace"])))
    options = {
        "launch": scenario["launch"],
        "prefill_launch": scenario.get("prefill"),
        "num_workers": scenario["workers"],
        "scheduler_rules": "simulator",
        "mixed_pass_pricing": pricing,
    }

    class Uneven:
        """Latencies that no sum of nanoseconds makes even."""

        def predict_prefill_ms(self, batch, mean_isl, mean_prefix):
            return 3.1 + 0.37 * batch * (mean_isl - mean_prefix) ** 1.1

        def predict_decode_ms(self, batch, active_kv_tokens, mean_context, total_kv_tokens):
            return 1.7 + 0.0123 * active_kv_tokens

    timings = {"timing": Uneven()} | ({"prefill_timing": Uneven()} if "prefill" in scenario else {})
    first = replay_trace(Trace.read(path, block_tokens=4), **options, **timings)
    export = tmp_path / "stream.parquet"
    first.write_fpm_stream(export)
    pools = {"timing": "decode", "prefill_timing": "prefill"} if "prefill" in scenario else {"timing": None}
    recorded = {name: RecordedPasses.from_stream(export, pool) for name, pool in pools.items()}
    again = replay_trace(Trace.read(path, block_tokens=4), **options, **recorded)
    assert again.requests.equals(first.requests)
    assert again.passes.equals(first.passes)
    assert again.admissions.equals(first.admissions)


def test_a_composed_replay_is_repeated_from_its_frames_on_the_wire(tmp_path):
    run = sample.eval_run()
    timing = fit_pass_timing(FpmBatch.from_frames(sample.train_frames()))
    first = replay_trace(run.trace, launch=sample.launch(run), timing=timing)
    first.write_fpm_stream(tmp_path / "stream.bin.gz")
    again = replay_trace(
        run.trace,
        launch=sample.launch(run),
        timing=RecordedPasses.from_frames(read_frames(tmp_path / "stream.bin.gz")),
    )
    assert again.requests.equals(first.requests)


def test_the_speedups_of_the_launch_are_in_the_recording_already():
    launch = {"engine": {**SMALL["engine"], "speedup_ratio": 2.0, "decode_speedup_ratio": 5.0}}
    first = replay_trace(TRACE, launch=launch)
    assert first.passes["prefill_ms"].to_pylist()[0] == 5.0
    again = replay_trace(TRACE, launch=launch, timing=RecordedPasses.from_stream(first.fpm_stream))
    assert again.requests.equals(first.requests)


@pytest.mark.parametrize(
    ("trace", "fault"),
    [
        (
            Trace.from_arrays([0.0, 11.5], [4, 13], [6, 2]),
            r"pass 4 of rank 0 is a pass of 1 prefill requests \(6 new tokens after 7\) and 1 decode requests "
            r"\(8 tokens\), recorded was a pass of 1 prefill requests \(5 new tokens after 7\)",
        ),
        (Trace.from_arrays([0.0, 11.5], [4, 12], [6, 3]), "after 6 passes, all that the recording has"),
    ],
)
def test_a_replay_that_is_not_the_recorded_one_is_refused_in_words(trace, fault):
    stream = replay_trace(TRACE, launch=SMALL).fpm_stream
    with pytest.raises(ReplayError, match=fault):
        replay_trace(trace, launch=SMALL, timing=RecordedPasses.from_stream(stream))


def test_passes_that_did_not_happen_are_missed():
    stream = replay_trace(Trace.from_arrays([0.0], [4], [6]), launch=SMALL).fpm_stream
    with pytest.raises(ReplayError, match="2 recorded passes of rank 0 did not happen"):
        replay_trace(Trace.from_arrays([0.0], [4], [4]), launch=SMALL, timing=RecordedPasses.from_stream(stream))


def test_more_workers_than_recorded_are_refused():
    stream = replay_trace(TRACE, launch=SMALL).fpm_stream
    with pytest.raises(ReplayError, match="rank 1 starts .* the recording has 1 ranks"):
        replay_trace(TRACE, launch=SMALL, timing=RecordedPasses.from_stream(stream), num_workers=2)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_the_table_survives_a_file(ending, tmp_path):
    report = replay_trace(TRACE, launch=SMALL)
    report.write_fpm_stream(tmp_path / f"stream.{ending}")
    assert read_table(tmp_path / f"stream.{ending}").equals(report.fpm_stream)


def test_the_wire_file_holds_the_frames(tmp_path):
    report = replay_trace(TRACE, launch=SMALL)
    report.write_fpm_stream(tmp_path / "stream.bin")
    assert read_frames(tmp_path / "stream.bin") == report.fpm_frames()


def test_what_is_no_stream_is_refused(tmp_path):
    report = replay_trace(TRACE, launch=SMALL)
    with pytest.raises(ConfigError, match="'.txt'; give .parquet or .arrow"):
        report.write_fpm_stream(tmp_path / "stream.txt")
    with pytest.raises(ConfigError, match="kept no passes"):
        _ = replay_trace(TRACE, launch=SMALL, record_passes=False).fpm_stream
    with pytest.raises(ConfigError, match="no column pool"):
        RecordedPasses.from_stream(report.fpm_stream.drop_columns(["pool"]))
    with pytest.raises(ConfigError, match="no passes of pool 'decode'; it has agg"):
        RecordedPasses.from_stream(report.fpm_stream, "decode")
    with pytest.raises(MetricsError, match="has no pass"):
        RecordedPasses.from_frames([])
    with pytest.raises(ConfigError, match="finite ms of at least 0"):
        RecordedPasses.from_durations([[1.0, -1.0]])
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="not a parquet file"):
        read_table(tmp_path / "broken.parquet")
