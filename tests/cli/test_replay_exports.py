"""`fpmsdk replay`: what it writes beside the report, and what Ctrl-C leaves."""

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import fpmsdk
import fpmsdk.sample
from fpmsdk import FpmBatch
from fpmsdk.cli.app import app
from fpmsdk.metrics import read_frames

ROWS = [
    {"timestamp": 40 * i, "input_length": 600, "output_length": 8, "hash_ids": [2 * i, 2 * i + 1]} for i in range(3)
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_the_telemetry_of_every_pass_is_written_in_the_form_of_the_ending(trace, tmp_path):
    table, wire = tmp_path / "stream.parquet", tmp_path / "stream.bin"
    for path in (table, wire):
        assert run(trace, "--fixed", 30, 5, "--fpm-stream", path).exit_code == 0
    batch = FpmBatch.from_arrow(pq.read_table(table))
    assert len(batch) == len(read_frames(wire)) > 3
    assert batch.sum_prefill_tokens.sum() == 3 * 600


def test_samples_are_written_at_the_interval(trace, tmp_path):
    path = tmp_path / "series.jsonl"
    assert run(trace, "--fixed", 30, 5, "--series", path, "--sample-interval-ms", 25).exit_code == 0
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample["sampled_at_ms"] for sample in samples[:3]] == [0.0, 25.0, 50.0]
    assert sum(sample["traffic"]["completed_requests"] for sample in samples) == 3
    assert run(trace, "--fixed", 30, 5, "--series", path).exit_code == 0
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == [
        "baseline",
        "final",
    ]  # under a second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sample-interval-ms", 5), "no effect without --series"),
        (("--series", "series.csv"), "give .parquet or .arrow"),
        (("--fpm-stream", "stream.txt"), "give .parquet or .arrow"),
    ],
)
def test_exports_that_cannot_be_are_rejected(trace, options, said):
    ran = run(trace, "--fixed", 30, 5, *options)
    assert ran.exit_code == 2
    assert said in ran.stderr


def test_a_stream_has_the_summary_of_the_whole_and_rows_in_a_file(trace, tmp_path):
    whole = json.loads(run(trace, "--fixed", 30, 5, "--json").stdout)["summary"]
    done = run(trace, "--fixed", 30, 5, "--stream", "--requests", tmp_path / "rows.parquet", "--json")
    streamed = json.loads(done.stdout)["summary"]
    figures = ("num_requests", "p99_ttft_ms", "mean_itl_ms", "duration_ms", "prefix_cache_reused_ratio")
    assert [streamed[name] for name in figures] == [whole[name] for name in figures]
    assert pq.read_table(tmp_path / "rows.parquet")["request_id"].to_pylist() == [f"request_{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--requests", "rows.parquet"), "--requests has no effect without --stream"),
        (("--stream", "--html", "page.html"), "--html needs all requests in memory"),
        (("--stream", "--series", "s.parquet"), "--series needs all requests in memory"),
        (("--stream", "--fpm-stream", "s.parquet"), "--fpm-stream needs all requests in memory"),
        (("--stream", "--head", 2), "--head needs all requests in memory"),
        (("--stream", "--warm-prefix-cache"), "--warm-prefix-cache needs all requests in memory"),
    ],
)
def test_what_needs_the_whole_trace_is_refused_of_a_stream(trace, options, said):
    ran = run(trace, "--fixed", 30, 5, *options)
    assert ran.exit_code == 2
    assert said in ran.stderr


@pytest.mark.parametrize("name", ["passes.parquet", "passes.arrow", "passes.bin"])
def test_what_was_recorded_prices_the_run_again(trace, tmp_path, name):
    first = run(trace, "--fixed", 30, 5, "--fpm-stream", tmp_path / name, "--output", tmp_path / "first.json")
    assert first.exit_code == 0, first.output
    again = run(trace, "--recorded-passes", tmp_path / name, "--output", tmp_path / "again.json")
    assert again.exit_code == 0, again.output
    one, other = (json.loads((tmp_path / name).read_text())["per_request"] for name in ("first.json", "again.json"))
    assert one == other


def test_two_prices_are_one_too_many(trace, tmp_path):
    ran = run(trace, "--fixed", 30, 5, "--recorded-passes", tmp_path / "passes.bin")
    assert (ran.exit_code, "--fixed and --recorded-passes both price the passes" in ran.stderr) == (2, True)


def interrupt_after(passes, monkeypatch):
    class Provider:
        left = passes

        def predict_prefill_ms(self, *_):
            return 30.0

        def predict_decode_ms(self, *_):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
            return 5.0

    replay_trace = fpmsdk.replay_trace
    monkeypatch.setattr(
        fpmsdk, "replay_trace", lambda trace, **options: replay_trace(trace, **{**options, "timing": Provider()})
    )


def test_ctrl_c_reports_what_was_simulated_as_partial(trace, tmp_path, monkeypatch):
    interrupt_after(10, monkeypatch)
    output = tmp_path / "report.json"
    ran = run(trace, "--fixed", 30, 5, "--output", output, "--json")
    assert ran.exit_code == 130
    assert "interrupted at" in ran.stderr
    result = json.loads(ran.stdout)
    assert result["partial"] is True
    assert 1 <= result["summary"]["completed_requests"] < 3
    report = json.loads(output.read_text())
    assert report["partial"] is True
    assert "unfinished" in {record["terminal_status"] for record in report["per_request"]}


def test_ctrl_c_before_anything_completed_reports_nothing(trace, monkeypatch):
    interrupt_after(1, monkeypatch)
    ran = run(trace, "--fixed", 30, 5)
    assert ran.exit_code == 130
    assert "before any request completed" in ran.stderr
    assert ran.stdout == ""


def test_a_page_is_written_with_the_measured_run_of_a_recorded_trace(trace, tmp_path):
    path = tmp_path / "report.html"
    assert run(trace, "--fixed", 30, 5, "--html", path).exit_code == 0
    assert "<h1>Replay of traffic.jsonl</h1>" in path.read_text()
    assert '"measured":{"panels"' not in path.read_text()
    recorded = Path(fpmsdk.sample.__file__).parent / "requests_burst.json.gz"
    launch = tmp_path / "launch.json"
    launch.write_text(json.dumps(fpmsdk.sample.launch(fpmsdk.sample.burst_run())))
    options = (recorded, "--launch", launch, "--fixed", 50, 6, "--html", path)
    assert run(*options).exit_code == 0
    assert '"measured":{"panels"' in path.read_text()
    # Not what was measured: another speed, or a part of it.
    for change in (("--speedup", 2), ("--head", 20)):
        assert run(*options, *change).exit_code == 0
        assert '"measured":{"panels"' not in path.read_text()
