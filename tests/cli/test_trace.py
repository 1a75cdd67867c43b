"""`fpmsdk trace` and how `fpmsdk replay` gets its requests: results, JSON, exit codes 0, 1 and 2."""

import builtins
import json

import pytest

from fpmsdk import Trace
from tests.cli.test_commands import REQUESTS, rejection_of, result_of, run

ROW = {"timestamp": 0, "input_length": 8, "output_length": 3, "hash_ids": [1, 2]}


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="trace.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return str(path)

    return write_rows


def test_check_lists_findings_and_exits_with_1_for_a_fault(write):
    sound = write(ROW, ROW | {"timestamp": -5})
    ran = run("trace", "check", sound, "--block-tokens", "4")
    assert ran.exit_code == 0
    assert ran.stdout.splitlines() == [
        f"{sound}: mooncake, 2 requests",
        "note: rows lie before the row above them; they are put in order (1 x; line 2)",
    ]
    faulty = write(ROW, {"timestamp": 3}, name="faulty.jsonl")
    result = result_of("trace", "check", faulty, "--block-tokens", "4", code=1)
    assert result["ok"] is False
    assert [(found["level"], found["lines"]) for found in result["findings"]] == [("fault", [2])]


def test_check_says_what_an_engine_would_reject(write, tmp_path):
    launch = tmp_path / "launch.json"
    launch.write_text(json.dumps({"engine": {"block_size": 4, "max_model_len": 8}}))
    options = ("--block-tokens", "4", "--launch", str(launch))
    result = result_of("trace", "check", write(ROW), *options, code=1)
    (finding,) = result["findings"]
    assert (finding["kind"], finding["count"]) == ("rejected", 1)
    assert "max_model_len = 8" in finding["text"]
    assert run("trace", "check", write(ROW | {"input_length": 5}), *options).exit_code == 0


def test_convert_writes_a_trace_that_reads_equal(write, tmp_path):
    source, target = write(ROW, ROW | {"timestamp": 7}), tmp_path / "t.parquet"
    result = result_of("trace", "convert", source, str(target), "--block-tokens", "4")
    assert result == {
        "target": str(target),
        "source_format": "mooncake",
        "target_format": "parquet",
        "block_tokens": 4,
        "num_requests": 2,
        "left_out": {},
    }
    assert Trace.read(target).arrival_ms.tolist() == [0.0, 7.0]


def test_convert_reads_seconds_and_writes_any_name(write, tmp_path):
    target = str(tmp_path / "t.txt")
    arguments = ("trace", "convert", write(ROW, ROW | {"timestamp": 0.5}), target, "--to", "mooncake")
    assert run(*arguments, "--time-unit", "s", "--block-tokens", "4").exit_code == 0
    assert Trace.read(target, "mooncake", block_tokens=4).arrival_ms.tolist() == [0.0, 500.0]


def test_convert_says_what_was_left_out(tmp_path):
    (tmp_path / "t.csv").write_text("Timestamp,Request tokens,Response tokens\n1,5,5\n2,0,0\n")
    ran = run("trace", "convert", str(tmp_path / "t.csv"), str(tmp_path / "t.parquet"))
    assert ran.stdout.splitlines() == [
        f"{tmp_path}/t.parquet: 1 requests, 512 tokens per hash id",
        "1 records left out: failed: no response tokens",
    ]


def test_stats_tell_lengths_arrivals_and_repetition(write, tmp_path):
    rows = [ROW, ROW | {"timestamp": 500}, ROW | {"timestamp": 1000, "hash_ids": [1, 3], "output_length": 0}]
    plot = tmp_path / "plot.html"
    result = result_of("trace", "stats", write(*rows), "--block-tokens", "4", "--plot", str(plot))
    assert result["prompt_tokens"]["median"] == 8.0
    assert result["output_tokens"]["max"] == 3.0
    assert result["interarrival_ms"]["mean"] == 500.0
    assert result["busiest_second_requests"] == 2
    assert result["repeated_block_ratio"] == 0.5
    page = plot.read_text()
    assert "trace.jsonl: 3 requests" in page
    assert "Plotly.newPlot" in page and 'src="http' not in page
    assert "prompt tokens" in run("trace", "stats", write(*rows), "--block-tokens", "4").stdout


def test_a_plot_without_plotly_names_the_extra(write, tmp_path, monkeypatch):
    load = builtins.__import__

    def without_plotly(name, *arguments):
        if name.startswith("plotly"):
            raise ImportError(name)
        return load(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_plotly)
    said = rejection_of("trace", "stats", write(ROW), "--block-tokens", "4", "--plot", str(tmp_path / "p.html"))
    assert "install fpmsdk[plot]" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "none.jsonl"), "cannot read the trace"),
        (("check", REQUESTS, "--scheduler-rules", "vllm"), "--scheduler-rules has no effect without --launch"),
        (("check", REQUESTS, "--block-tokens", "4"), "block_tokens has no effect on a trace of form recorded"),
        (("check", REQUESTS, "--launch", "none.json"), "none.json"),
        (("convert", REQUESTS, "t.csv"), "the ending does not tell the form to write"),
        (("convert", REQUESTS, "none/t.parquet"), "none"),
        (("stats", REQUESTS, "--time-unit", "s"), "time_unit has no effect"),
        (("stats", REQUESTS, "--benchmark", "0"), "benchmark has no effect"),
    ],
)
def test_rejected_input_of_trace_is_one_message_and_exit_code_2(arguments, said):
    message = rejection_of("trace", *arguments)
    assert said in message
    assert message.startswith("error: ")
    assert message.count("\n") == 1


SYNTHETIC = ("replay", "--synthetic", "6", "64", "4", "--fixed", "10", "1")


def test_replay_serves_a_synthetic_workload():
    options = ("--turns-per-session", "2", "--inter-turn-delay-ms", "5", "--request-rate", "20", "--arrival-seed", "7")
    result = result_of(*SYNTHETIC, *options)
    assert result["trace"]["num_requests"] == 12
    assert result["trace"]["num_sessions"] == 6
    assert result["summary"]["completed_requests"] == 12


def test_replay_gives_a_trace_other_arrivals():
    result = result_of("replay", REQUESTS, "--head", "5", "--fixed", "1", "1", "--arrival-interval-ms", "100")
    assert result["trace"]["arrival_span_ms"] == 400.0


def test_replay_warms_caches_and_gives_exact_percentiles(tmp_path):
    (tmp_path / "launch.json").write_text(json.dumps({"engine": {"block_size": 16}}))
    launch = ("--launch", str(tmp_path / "launch.json"))
    shared = ("--cached-prefix-tokens", "32", "--concurrency", "1", "--exact-itl", *launch)
    cold, warm = result_of(*SYNTHETIC, *shared), result_of(*SYNTHETIC, *shared, "--warm-prefix-cache")
    assert cold["summary"]["prefix_cache_reused_ratio"] < warm["summary"]["prefix_cache_reused_ratio"]
    assert warm["summary"]["median_itl_ms"] == 1.0


def test_replay_places_requests_and_has_prefill_workers(tmp_path):
    for role in ("prefill", "decode"):
        (tmp_path / f"{role}.json").write_text(json.dumps({"engine": {"worker_type": role}}))
    result = result_of(
        *SYNTHETIC,
        *("--launch", str(tmp_path / "decode.json"), "--prefill-launch", str(tmp_path / "prefill.json")),
        *("--workers", "2", "--prefill-workers", "3", "--handoff-latency-ms", "4", "--placement", "kv_aware"),
    )
    assert result["options"]["num_prefill_workers"] == 3
    assert result["options"]["placement"] == "kv_aware"
    assert result["summary"]["min_ttft_ms"] == 15.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay",), "give a trace file or --synthetic"),
        (("replay", REQUESTS, "--synthetic", "1", "1", "1"), "one of them"),
        (("replay", REQUESTS, "--random-seed", "1"), "--random-seed has no effect on a trace file"),
        ((*SYNTHETIC, "--time-unit", "s"), "--time-unit has no effect on --synthetic"),
        ((*SYNTHETIC, "--block-tokens", "4"), "block_tokens has no effect"),
        ((*SYNTHETIC, "--request-rate", "3", "--concurrency", "2"), "--request-rate has no effect with --concurrency"),
        ((*SYNTHETIC, "--arrival-seed", "3"), "with_arrivals sets none"),
        ((*SYNTHETIC, "--request-rate", "0"), "request_rate is 0"),
        ((*SYNTHETIC, "--prefill-workers", "2"), "num_prefill_workers has no effect without prefill_launch"),
        ((*SYNTHETIC, "--handoff-latency-ms", "2"), "handoff_latency_ms has no effect without prefill_launch"),
        ((*SYNTHETIC, "--warm-prefix-cache"), "warm_prefix_cache has no effect without hash_ids"),
        ((*SYNTHETIC, "--concurrency", "2", "--speedup", "2"), "arrival_speedup_ratio has no effect with concurrency"),
    ],
)
def test_options_of_replay_without_effect_are_refused(arguments, said):
    message = rejection_of(*arguments)
    assert said in message
    assert message.count("\n") == 1
