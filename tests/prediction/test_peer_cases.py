"""Predictions that the peer has made: figures, requests, coverage and exit codes.

Recorded with aisimulate 0.13.0.dev202610270000000085 on the table of `cases.py`. Its code for an uncovered query is 1,
ours 4. Source: predict-recommend.md sections 1.3, 5.4 and 13, onboarding.md section 8.4.
"""

import json
from pathlib import Path

import pytest

from fpmsdk.prediction import PredictConfig, predict
from tests.prediction.cases import filled, peer_systems

CASES = json.loads((Path(__file__).parent / "peer_cases.json").read_text())
PEER_RULES = {"execution": {"scheduler_rules": "simulator", "mixed_pass_pricing": "separate"}}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    place = tmp_path_factory.mktemp("peer")
    trace = place / "plays.jsonl"
    trace.write_text("".join(json.dumps(play) + "\n" for play in CASES["plays"]))
    return peer_systems(place) | {"$TRACE": str(trace)}


def run(name, places, folder):
    config = PredictConfig.model_validate(filled(CASES[name]["config"], places) | PEER_RULES)
    return predict(config, folder, capture_per_request=True)


@pytest.mark.parametrize("name", ["even_prompts", "cache_of_the_profile", "weka_one_lane"])
def test_figures_requests_and_coverage_are_those_of_the_peer(name, places, tmp_path):
    case = CASES[name]
    prediction = run(name, places, tmp_path / "output")
    assert prediction.exit_code == case["exit_code"] == 0
    assert {key: prediction.report[key] for key in case["result"]} == pytest.approx(case["result"], rel=1e-9)
    assert (prediction.coverage["status"], prediction.coverage["queries"]) == ("covered", case["coverage"]["queries"])
    columns = ("arrival_time_ms", "ttft_ms", "e2e_latency_ms", "reused_input_tokens")
    rows = sorted([row[column] for column in columns] for row in prediction.report["per_request"])
    assert len(rows) == len(case["requests"])
    for found, expected in zip(rows, case["requests"], strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    lines = (tmp_path / "output/requests.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == prediction.report["per_request"]


def test_one_lane_settles_the_plays_of_a_trace_one_after_the_other(places, tmp_path):
    case = CASES["weka_one_lane"]
    report = run("weka_one_lane", places, tmp_path / "output").report
    assert report["agentic_graph"] == case["graph"]
    outcomes = report["agentic_play_outcomes"]
    assert [outcome["play_id"] for outcome in outcomes] == ["play-a", "play-b"]
    assert [outcome["settled_at_ms"] for outcome in outcomes] == pytest.approx(case["settled_at_ms"], rel=1e-12)


def test_an_uncovered_query_leaves_the_coverage_and_no_report(places, tmp_path):
    case = CASES["uncovered"]
    prediction = run("uncovered", places, tmp_path / "output")
    assert (case["exit_code"], prediction.exit_code) == (1, 4)
    assert not (tmp_path / "output/prediction.json").exists()
    coverage = json.loads((tmp_path / "output/fpm-coverage.json").read_text())
    assert coverage["queries"] == case["coverage"]["queries"]
    gap = case["coverage"]["gaps"][0]
    (found,) = coverage["roles"][0]["coverage"]["gaps"]
    assert {key: found[key] for key in gap} == gap
    assert coverage["error"] == prediction.error
