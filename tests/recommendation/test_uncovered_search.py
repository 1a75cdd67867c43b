"""A search whose table covers a part of it: what it says, plans and writes, until it is covered."""

import json
import shlex
from pathlib import Path

import pytest

from fpmsdk.collect.__main__ import main as collect
from fpmsdk.recommendation import Options, recommend
from tests.recommendation.measured import candidate, measured_in


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    measured_in(folder)
    return folder


def a_search(place, **engine):
    """Prompts of 32 tokens, one or several at a time; the table has single ones."""
    document = candidate(place, 1, **engine)
    document["traffic"]["source"] |= {"input_tokens": 32, "output_tokens": 1}
    document["traffic"]["load"]["concurrency"] = {"choices": [1, 2, 3]}
    document["engine"]["workers"]["aggregated"]["parallelism"] = {"tensor": 1}
    return document | {
        "optimization": {"target": "throughput", "constraints": {"max_candidate_gpus": 1}},
        "optimizer": {"algorithm": "grid", "max_trials": 8},
    }


def statuses(found):
    return [candidate.outcome.status for candidate in found.result.candidates]


def test_uncovered_candidates_have_no_score_and_the_covered_ones_are_ranked(place, tmp_path):
    found = recommend(a_search(place), tmp_path / "out")
    assert statuses(found) == ["feasible", "uncovered", "uncovered"]
    assert [candidate.score is None for candidate in found.result.candidates] == [False, True, True]
    assert [candidate.outcome.reason_category for candidate in found.result.candidates][1:] == ["fpm_uncovered"] * 2
    coverage = json.loads((tmp_path / "out/fpm-coverage.json").read_text())
    assert (coverage["status"], coverage["candidates"]["uncovered"]) == ("incomplete", 2)
    assert not (tmp_path / "out/missing-points.json").exists()


def test_a_search_that_stops_at_a_gap_ranks_what_came_until_then(place, tmp_path):
    found = recommend(a_search(place), tmp_path / "out", options=Options(on_uncovered="stop", workers=1))
    assert "uncovered" in statuses(found) and found.end != "complete"


def test_what_a_search_plans_to_collect_covers_the_same_search(place, tmp_path, monkeypatch):
    options = Options(on_uncovered="collect-plan", emit=("vllm-cmd", "k8s", "slurm"))
    first = recommend(a_search(place), tmp_path / "out", options=options)
    assert statuses(first) == ["feasible", "uncovered", "uncovered"]
    # What is covered is recommended with its files, whatever is missing elsewhere.
    ranked = sorted(path.name for path in (tmp_path / "out/recommendations/0001").iterdir())
    assert ranked == ["deploy.yaml", "job.sbatch", "serve.sh"]
    monkeypatch.chdir(tmp_path / "out")
    (campaign,) = json.loads(Path("missing-points.json").read_text())["campaigns"]
    assert campaign["candidate_ids"] == ["candidate-000002", "candidate-000003"]
    _, variable, *command = shlex.split(campaign["command"])
    monkeypatch.setenv(*variable.split("="))
    assert collect([*command[3:], "--fpm-executor", "fake"]) == 0
    roots = [str(Path(path).absolute()) for path in campaign["systems_paths"]]
    second = recommend(a_search(place, systems_paths=roots), tmp_path / "covered", options=options)
    assert statuses(second) == ["feasible"] * 3
    assert json.loads((tmp_path / "covered/fpm-coverage.json").read_text())["status"] == "covered"
    assert not (tmp_path / "covered/missing-points.json").exists()
