"""Samples of a replay: those of the public peer, and what is ours alone."""

import json

import pyarrow.parquet as pq
import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import ConfigError, ReplayError
from tests.vectors import load_vectors

SCENARIOS = {scenario["name"]: scenario for scenario in load_vectors("replay_telemetry_peer")["scenarios"]}
# The peer completes a pass inside when it starts: a command during the pass shows requests gone that still run.
GAUGES_OF_RUNNING_PASSES_DIFFER = {
    "dp_group": ("decode_scheduler_metrics",),
    "disaggregated": ("prefill_scheduler_metrics",),
    "zero_output_and_rejected": ("decode_scheduler_metrics",),
}
# The peer counts no cache hits here.
CACHE_COUNTERS = ("cache_hit_tokens", "cache_total_tokens")

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}


def replayed(scenario, tmp_path, **options):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, scenario["trace"])))
    return replay_trace(
        Trace.read(path, block_tokens=4),
        launch=scenario["launch"],
        prefill_launch=scenario.get("prefill"),
        num_workers=scenario["workers"],
        scheduler_rules="simulator",
        mixed_pass_pricing="separate",
        **{"sample_interval_ms": scenario["interval"], **options},
    )


def known(figures):
    # None is no figure to approximate.
    return {name: -1.0 if value is None else value for name, value in figures.items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_samples_are_those_of_the_peer(name, tmp_path):
    scenario = SCENARIOS[name]
    found = replayed(scenario, tmp_path).series.to_pylist()
    assert len(found) == len(scenario["samples"])
    for ours, theirs in zip(found, scenario["samples"], strict=True):
        for part, expected in theirs.items():
            if part in GAUGES_OF_RUNNING_PASSES_DIFFER.get(name, ()):
                continue
            if part.endswith("_interval_metrics"):
                assert ours[part]["preemptions"] == expected["preemptions"], (ours["sample_ordinal"], part)
            elif part == "traffic":
                assert known(ours[part]) == pytest.approx(known(expected), rel=1e-12), ours["sample_ordinal"]
            else:
                assert ours[part] == expected, (ours["sample_ordinal"], part)


def test_sampling_changes_nothing(tmp_path):
    for scenario in SCENARIOS.values():
        plain = replayed(scenario, tmp_path, sample_interval_ms=None)
        assert replayed(scenario, tmp_path).requests.equals(plain.requests)


def test_cache_counters_are_prompt_tokens_of_admissions_that_became_visible(tmp_path):
    samples = replayed(SCENARIOS["caching"], tmp_path).series.to_pylist()
    counted = {
        row["sampled_at_ms"]: tuple(row["decode_interval_metrics"][name] for name in CACHE_COUNTERS) for row in samples
    }
    # Prompts of 8, 12, 8, 16 and 4 tokens; the second finds 8 of its tokens, the fourth 12. Passes of 10 ms and more.
    assert {at: count for at, count in counted.items() if count[1]} == {
        10.0: (0, 8),
        25.0: (8, 12),
        35.0: (0, 8),
        55.0: (12, 16),
        65.0: (0, 4),
    }


def test_passes_that_touch_no_request_show_the_blocks_that_they_have_taken():
    trace = Trace.from_arrays([0.0], [8], [40])
    launch = {"engine": {"block_size": 4, "num_gpu_blocks": 64, "timing_model": FIXED}}
    report = replay_trace(trace, launch=launch, sample_interval_ms=1.0)
    gauges = [row["decode_scheduler_metrics"][0] for row in report.series.to_pylist()]
    # At 10 + k ms the request has computed 8 + k tokens.
    for k in range(39):
        assert gauges[10 + k]["active_blocks"] == -(-(8 + k) // 4), k
    assert gauges[-1]["active_blocks"] == 0
    assert {gauge["total_blocks"] for gauge in gauges} == {63}  # vLLM reserves one


def test_a_run_ends_with_the_rest_of_an_interval():
    trace = Trace.from_arrays([0.0], [8], [2])
    report = replay_trace(trace, launch={"engine": {"timing_model": FIXED}}, sample_interval_ms=4.0)
    series = report.series.to_pydict()
    assert series["sampled_at_ms"] == [0.0, 4.0, 8.0, 11.0]
    assert series["kind"] == ["baseline", "periodic", "periodic", "final"]
    even = replay_trace(trace, launch={"engine": {"timing_model": FIXED}}, sample_interval_ms=5.5).series.to_pydict()
    assert even["kind"] == ["baseline", "periodic", "periodic"]


def test_samples_lie_at_multiples_not_at_sums():
    trace = Trace.from_arrays([0.0], [8], [991])
    series = replay_trace(trace, launch={"engine": {"timing_model": FIXED}}, sample_interval_ms=0.1).series
    assert series["sampled_at_ms"].to_pylist() == [k * 0.1 for k in range(10_001)]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_a_series_is_written_and_read_back(ending, tmp_path):
    report = replayed(SCENARIOS["disaggregated"], tmp_path)
    path = tmp_path / f"series.{ending}"
    report.write_series(path)
    if ending == "jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert found == report.series.to_pylist()
    elif ending == "parquet":
        assert pq.read_table(path).equals(report.series)


def test_what_cannot_be_sampled_is_refused(tmp_path):
    scenario = SCENARIOS["caching"]
    with pytest.raises(ConfigError, match="took no samples"):
        _ = replayed(scenario, tmp_path, sample_interval_ms=None).series
    with pytest.raises(ConfigError, match="sample_interval_ms is 0"):
        replayed(scenario, tmp_path, sample_interval_ms=0)
    with pytest.raises(ReplayError, match="more than 10000000 samples"):
        replayed(scenario, tmp_path, sample_interval_ms=1e-9)
    with pytest.raises(ConfigError, match=r"'.csv'; give .parquet or .arrow"):
        replayed(scenario, tmp_path).write_series(tmp_path / "series.csv")
    assert not (tmp_path / "series.csv").exists()


def test_a_warm_prefix_cache_is_seen_from_the_first_sample():
    trace = Trace.from_arrays([0.0, 5.0], [12, 12], [2, 2], hash_ids=[[1, 2, 10], [1, 2, 11]], block_tokens=4)
    launch = {"engine": {"block_size": 4, "num_gpu_blocks": 64, "timing_model": FIXED}}
    report = replay_trace(trace, launch=launch, warm_prefix_cache=True, sample_interval_ms=2.0, num_workers=2)
    baseline = report.series.to_pylist()[0]
    # The second worker has seen no request: both shared blocks are cached and none is in use.
    assert baseline["decode_scheduler_metrics"][1]["inactive_blocks"] == 2
