"""`fpmsdk recommend`: exit codes, what is printed, and the files; searches of the peer from end to end."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import fpmsdk
from fpmsdk.cli.app import app
from fpmsdk.sample.quickstart import write_quickstart
from tests.prediction.cases import filled, peer_systems
from tests.vectors import load_vectors

PEER = load_vectors("recommend_peer")["cases"]
PEER_RULES = {"scheduler_rules": "simulator", "mixed_pass_pricing": "separate"}
GOAL = "optimization={target: throughput, constraints: {max_candidate_gpus: 2}}"
LOADS = "traffic.load.concurrency={choices: [1, 2, 4]}"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines(text):
    return text.splitlines()


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The file of a small deployment; `GOAL` makes it a search of two candidates, with `LOADS` of six."""
    monkeypatch.chdir(tmp_path)
    return write_quickstart(tmp_path)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return peer_systems(tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize("name", PEER)
def test_a_search_of_the_peer_ends_as_there(name, places, tmp_path):
    case = PEER[name]
    file = tmp_path / "search.yaml"
    file.write_text(yaml.safe_dump(filled(case["config"], places) | {"execution": PEER_RULES}))
    ran = run("recommend", "-c", file, "--output-dir", tmp_path / "output", "--format", "json")
    assert ran.exit_code == case["exit_code"], ran.stderr
    ranking = json.loads(ran.stdout)
    selected = [case["candidates"][index] for index in case["selected"]]
    document = json.loads((tmp_path / "output/recommendation.json").read_text())
    assert len(document["candidates"]) == len(case["candidates"])
    by_id = {candidate["candidate_id"]: candidate for candidate in document["candidates"]}
    view = document["views"]["pareto_front" if case["view"] == "pareto_front" else "top_n"]
    scores = [by_id[candidate]["score"] for candidate in view]
    assert scores == pytest.approx([peer["score"] for peer in selected], rel=1e-9)
    assert [entry["config_path"] for entry in ranking] == [
        str(tmp_path / "output" / entry["config_path"]) for entry in document["recommendations"]
    ]
    assert len(ranking) == len(selected)
    written = sorted(file.name for file in (tmp_path / "output/recommendations").glob("*"))
    assert written == [f"{rank:04d}.yaml" for rank in range(1, len(selected) + 1)]
    with open(tmp_path / "output/recommendation.csv") as table:
        assert len(list(csv.DictReader(table))) == len(case["candidates"])


def test_the_table_tells_what_the_ranked_differ_in_and_the_rest_is_on_standard_error(config):
    ran = run("recommend", "-c", config, "--set", GOAL, "--set", LOADS)
    assert ran.exit_code == 0
    head, best, *others = lines(ran.stdout)
    for name in ("score", "GPUs", "layout", "concurrency", "TTFT ms", "ITL ms", "tok/s", "in SLA"):
        assert name in head
    assert best.split()[:1] == ["1"] and "2 x tp1" in best
    assert len(others) == 5
    assert "6 of 6 candidates feasible; saved in fpmsdk-output" in ran.stderr


def test_json_is_one_line_of_the_ranking(config):
    ran = run("recommend", "-c", config, "--set", GOAL, "--format", "json")
    (line,) = lines(ran.stdout)
    first = json.loads(line)[0]
    assert sorted(first) == ["config_path", "objectives", "rank", "score", "used_gpus"]
    assert first["config_path"] == "fpmsdk-output/recommendations/0001.yaml"


def test_a_recommendation_is_predicted_with_the_same_figures(config):
    run("recommend", "-c", config, "--set", GOAL, "--set", LOADS)
    ran = run("predict", "-c", "fpmsdk-output/recommendations/0002.yaml", "--output-dir", "p", "--format", "json")
    document = json.loads((config.parent / "fpmsdk-output/recommendation.json").read_text())
    second = document["recommendations"][1]["candidate_id"]
    (candidate,) = [each for each in document["candidates"] if each["candidate_id"] == second]
    report = json.loads(ran.stdout)
    assert {name: report[name] for name in candidate["metrics"]} == candidate["metrics"]


def test_a_dry_run_tells_the_size_and_writes_nothing(config):
    before = sorted(config.parent.rglob("*"))
    ran = run("recommend", "-c", config, "--set", GOAL, "--set", LOADS, "--dry-run")
    assert ran.exit_code == 0
    assert "aggregated: 6 candidates: 2 layouts, traffic.load.concurrency (3)" in ran.stdout
    assert "algorithm grid (fpmsdk " in ran.stdout and "6 candidates, about " in ran.stdout
    document = json.loads(run("recommend", "-c", config, "--set", GOAL, "--dry-run", "--format", "json").stdout)
    assert (document["candidates"], document["planned"]) == (2, 2)
    assert document["expected_seconds"] > 0
    assert sorted(config.parent.rglob("*")) == before


def test_progress_is_events_on_request(config):
    ran = run("recommend", "-c", config, "--set", GOAL, "--progress", "json")
    events = [json.loads(line) for line in lines(ran.stderr) if line.startswith("{")]
    assert [event["event"] for event in events] == ["begin", "candidate", "candidate", "end"]


def test_parts_are_merged(config):
    whole = run("recommend", "-c", config, "--set", GOAL, "--set", LOADS, "--format", "json", "--output-dir", "whole")
    for part in ("1/2", "2/2"):
        ran = run("recommend", "-c", config, "--set", GOAL, "--set", LOADS, "--shard", part, "--output-dir", part[0])
        assert ran.exit_code == 0
    merged = run("recommend", "merge", "2", "1", "--output-dir", "merged", "--format", "json")
    assert merged.exit_code == 0, merged.stderr
    assert merged.stdout.replace("merged/", "whole/") == whole.stdout
    tables = [(config.parent / name / "recommendation.csv").read_bytes() for name in ("merged", "whole")]
    assert tables[0] == tables[1]


def test_a_sweep_that_ctrl_c_stops_goes_on_with_resume(config):
    many = "traffic.load.concurrency={range: {min: 1, max: 40, step: 1}}"
    longer = "traffic.stop.requests=4000"
    command = ["recommend", "-c", str(config), "--set", GOAL, "--set", many, "--set", longer, "--workers", "1"]
    code = "from fpmsdk.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(Path(fpmsdk.__file__).parent.parent)}
    process = [sys.executable, "-c", code, *command]
    running = subprocess.Popen(process, env=environment, stderr=subprocess.PIPE, text=True)
    journal = config.parent / "fpmsdk-output/candidates.jsonl"
    while not journal.exists() or len(journal.read_bytes().splitlines()) < 4:
        time.sleep(0.01)
        assert running.poll() is None
    os.kill(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "the same command with --resume goes on" in said
    assert not (config.parent / "fpmsdk-output/recommendation.json").exists()
    kept = len(journal.read_bytes().splitlines()) - 1
    assert 3 <= kept < 80
    again = run(*command, "--resume")
    assert again.exit_code == 0
    assert len(json.loads((config.parent / "fpmsdk-output/recommendation.json").read_text())["candidates"]) == 80


def test_launch_files_are_written_beside_each_configuration(config):
    ran = run("recommend", "-c", config, "--set", GOAL, "--emit", "vllm-cmd")
    assert ran.exit_code in (0, 2), ran.stderr
    ranked = config.parent / "fpmsdk-output/recommendations"
    assert (ranked / "0001.yaml").is_file()
    assert (ranked / "0001/serve.sh").is_file() == (ran.exit_code == 0)


# Every mistake: what is asked, and what the one line on standard error says.
MISTAKES = [
    ("no file", ["recommend"], "error: -c/--config: missing; name the YAML file of the search"),
    ("no goal", ["recommend", "-c", "predict.yaml"], "a search needs a goal: add optimization: {target: throughput}"),
    ("other stack", ["recommend", "-c", "predict.yaml", "--stack", "afd"], "--stack: found 'afd', accepted is engine"),
    ("part", ["recommend", "-c", "predict.yaml", "--set", GOAL, "--shard", "3/2"], "--shard: found '3/2', accepted is"),
    (
        "kind",
        ["recommend", "-c", "predict.yaml", "--set", GOAL, "--emit", "helm"],
        "--emit: found 'helm', accepted are",
    ),
    (
        "small grid",
        ["recommend", "-c", "predict.yaml", "--set", GOAL, "--set", "optimizer={algorithm: grid, max_trials: 1}"],
        "the grid has 2 candidates, found 1 trials; set max_trials: 2",
    ),
    (
        "foreign directory",
        ["recommend", "-c", "predict.yaml", "--set", GOAL, "--output-dir", "systems"],
        "systems: the output directory is not empty and holds no sweep",
    ),
    ("merge of nothing", ["recommend", "merge", "systems"], "no journal; name the output directory of a part"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), MISTAKES, ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_one_line_with_exit_code_2_and_nothing_is_written(config, name, arguments, message):
    (config.parent / "systems").mkdir(exist_ok=True)
    (config.parent / "systems/notes.txt").write_text("mine")
    before = sorted(config.parent.rglob("*"))
    ran = run(*arguments)
    assert ran.exit_code == 2
    (line,) = [line for line in lines(ran.stderr) if not line.startswith("note: ")]
    assert line.startswith("error: ") and message in line
    assert sorted(config.parent.rglob("*")) == before


def test_a_finished_search_is_neither_repeated_nor_lost(config):
    assert run("recommend", "-c", config, "--set", GOAL).exit_code == 0
    again = run("recommend", "-c", config, "--set", GOAL)
    assert again.exit_code == 2
    assert "pass --resume to go on with it, or --overwrite to begin anew" in again.stderr
    assert run("recommend", "-c", config, "--set", GOAL, "--overwrite").exit_code == 0
    other = run("recommend", "-c", config, "--set", GOAL, "--set", LOADS, "--resume")
    assert other.exit_code == 2
    assert "is of another sweep: config.traffic.load.concurrency is 4 there, " in other.stderr


def test_a_search_whose_workers_do_not_start_in_time_has_its_code(config):
    limit = "execution.resources.initialization_timeout_seconds=0.000001"
    ran = run("recommend", "-c", config, "--set", GOAL, "--set", limit, "--executor", "processes")
    assert ran.exit_code == 124
    assert "error: a worker process was not ready within 1e-06 s" in ran.stderr
