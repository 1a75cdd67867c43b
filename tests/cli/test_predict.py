"""`fpmsdk predict`, `init predict` and `quickstart`: what is printed and written, and the exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fpmsdk
from fpmsdk.cli.app import app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_example_runs_as_it_is(folder):
    assert run("init", "predict").exit_code == 0
    ran = run("predict", "-c", "predict.yaml")
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert "200 of 200 requests completed" in ran.stdout
    assert (folder / "fpmsdk-output/prediction.json").is_file()


def test_the_example_does_not_replace_a_file(folder):
    (folder / "predict.yaml").write_text("mine")
    ran = run("init", "predict")
    assert ran.exit_code == 2
    assert "predict.yaml: the file exists; pass --overwrite" in ran.stderr
    assert (folder / "predict.yaml").read_text() == "mine"
    assert run("init", "predict", "--overwrite").exit_code == 0


def test_json_is_one_line_that_agrees_with_the_table_and_the_report(folder):
    run("init", "predict")
    ran = run("predict", "-c", "predict.yaml", "--format", "json", "--capture-per-request", "--output-dir", "j")
    (line,) = ran.stdout.splitlines()
    summary = json.loads(line)
    report = json.loads((folder / "j/prediction.json").read_text())
    assert summary == {name: value for name, value in report.items() if name not in ("options", "per_request")}
    assert list(summary) == sorted(summary)
    assert len((folder / "j/requests.jsonl").read_text().splitlines()) == 200
    table = run("predict", "-c", "predict.yaml", "--output-dir", "t").stdout
    assert f"{summary['mean_ttft_ms']:.2f}" in table
    assert f"{summary['output_throughput_tok_s']:,.2f}" in table


def test_the_table_has_no_line_for_what_does_not_exist(folder):
    run("init", "predict")
    table = run("predict", "-c", "predict.yaml", "--set", "evaluation.sla=null").stdout
    assert "SLA" not in table
    assert "power" not in table
    assert "None" not in table


def test_a_prediction_that_does_not_begin_in_time_has_its_code_and_writes_nothing(folder):
    run("init", "predict")
    limit = "execution.resources.initialization_timeout_seconds=0.000001"
    ran = run("predict", "-c", "predict.yaml", "--set", limit)
    assert ran.exit_code == 124
    assert ran.stderr.startswith("error: the simulation had not begun after 1e-06 s; raise execution.resources.init")
    assert not (folder / "fpmsdk-output").exists()


def test_quickstart_predicts_offline_from_measured_passes_and_its_files_can_be_run_again(folder):
    ran = run("quickstart", "--format", "json")
    assert ran.exit_code == 0
    # 32 output tokens of 4 requests, whose measured decode passes take 5.3 ms on average
    assert json.loads(ran.stdout)["mean_itl_ms"] == pytest.approx(5.31, abs=0.01)
    again = run("predict", "-c", "fpmsdk-quickstart/predict.yaml", "--format", "json")
    same = {name: json.loads(ran.stdout)[name] for name in ("duration_ms", "mean_ttft_ms")}
    assert {name: json.loads(again.stdout)[name] for name in same} == same
    refused = run("quickstart")
    assert refused.exit_code == 2
    assert "fpmsdk-quickstart: there is something already; name a new directory" in refused.stderr


def test_a_missing_point_of_the_table_is_one_sentence_with_exit_code_4(folder):
    run("quickstart")
    ran = run(
        "predict", "-c", "fpmsdk-quickstart/predict.yaml", "--set", "traffic.source.input_tokens=200",
        "--set", "traffic.load.concurrency=12", "--output-dir", "o",
    )  # fmt: skip
    assert (ran.exit_code, ran.stdout) == (4, "")
    (line,) = ran.stderr.splitlines()
    assert "does not cover prefill with batch_size 3, total_prefill_tokens 512, total_kv_read_tokens 0" in line
    assert "measure this point and add it with `fpmsdk table merge`" in line
    assert "o/fpm-coverage.json" in line
    assert not (folder / "o/prediction.json").exists()


def test_no_completed_request_says_so_and_exits_with_1(folder):
    run("init", "predict")
    ran = run("predict", "-c", "predict.yaml", "--set", "engine.workers.aggregated.kv_cache.capacity.blocks=4")
    assert ran.exit_code == 1
    assert "0 of 200 requests completed" in ran.stdout
    assert "No request completed" in ran.stdout


def test_a_reader_that_has_left_changes_nothing(folder):
    run("init", "predict")
    command = "from fpmsdk.cli import main; main()"
    package = Path(fpmsdk.__file__).parents[1]
    ran = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{command}" predict -c predict.yaml | true; exit ${{PIPESTATUS[0]}}'],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(package)},
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_limits_of_a_profile_are_taken_where_the_scheduler_is_silent(folder):
    run("quickstart")
    ran = run("predict", "-c", "fpmsdk-quickstart/predict.yaml", "--output-dir", "o")
    assert ran.exit_code == 0
    assert ran.stderr == "aggregated: limits of the profile: max_batched_tokens 512, max_sequences 16\n"
    engine = json.loads((folder / "o/prediction.json").read_text())["options"]["launch"]["engine"]
    assert (engine["max_num_batched_tokens"], engine["max_num_seqs"]) == (512, 16)


def test_ctrl_c_exits_with_130_and_leaves_no_report(folder, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    run("init", "predict")
    monkeypatch.setattr("fpmsdk.prediction.run.replay_prepared", interrupted)
    ran = run("predict", "-c", "predict.yaml")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (130, "", "interrupted; there is no report\n")
    assert not (folder / "fpmsdk-output/prediction.json").exists()


def test_details_are_printed_beside_the_table_and_with_the_summary_in_json(folder):
    run("init", "predict")
    table = run("predict", "-c", "predict.yaml", "--detail", "time,memory", "--diagnostics", "power").stdout
    assert "aggregated decode" in table
    assert "memory: the blocks of every role are given" in table
    assert "energy: unsupported" in table
    ran = run("predict", "-c", "predict.yaml", "--detail", "all", "--format", "json", "--output-dir", "j")
    document = json.loads(ran.stdout)
    assert set(document) == {"summary", "details"}
    assert document["details"] == json.loads((folder / "j/prediction.json").read_text())["details"]


def test_an_unknown_detail_is_refused_before_anything_is_written(folder):
    run("init", "predict")
    ran = run("predict", "-c", "predict.yaml", "--detail", "times")
    assert ran.exit_code == 2
    assert "there is no section 'times'; accepted are summary, memory, time, energy, source and all" in ran.stderr
    assert not (folder / "fpmsdk-output").exists()
