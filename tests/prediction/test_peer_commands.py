"""Every predict command that the peer was recorded with: figures, requests, coverage, exit codes and files.

Recorded with aisimulate 0.13.0.dev202610270000000085, whose generator gave one prefix group to all sessions. Its code
for an uncovered query is 1, ours 4.
Source: predict-recommend.md section 13.
"""

import copy
import json

import pytest

from fpmsdk.prediction import predict
from tests.prediction.cases import filled, peer_systems
from tests.vectors import load_vectors

CASES = load_vectors("predict_peer")["cases"]
COLUMNS = ("arrival_time_ms", "turn_index", "ttft_ms", "e2e_latency_ms", "reused_input_tokens")
EXIT_CODES = {"p8_fpm_uncovered": 4}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    place = tmp_path_factory.mktemp("peer")
    trace = place / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in load_vectors("predict_peer")["trace"]))
    return peer_systems(place) | {"$TRACE": str(trace)}


def by_peer_rules(name):
    config = copy.deepcopy(CASES[name]["config"])
    config["execution"] = {"scheduler_rules": "simulator", "mixed_pass_pricing": "separate"}
    return config


@pytest.mark.parametrize("name", CASES)
def test_a_command_of_the_peer_gives_the_same(name, places, tmp_path):
    case = CASES[name]
    prediction = predict(filled(by_peer_rules(name), places), tmp_path / "output", capture_per_request=True)
    assert prediction.exit_code == EXIT_CODES.get(name, case["exit_code"])
    assert sorted(file.name for file in (tmp_path / "output").iterdir()) == case["files"]
    if "result" in case:
        unequal = {
            key: (prediction.report[key], expected)
            for key, expected in case["result"].items()
            if not is_close(prediction.report[key], expected)
        }
        assert unequal == {}
        rows = [
            [row[column] for column in COLUMNS] + [row["terminal_status"]] for row in prediction.report["per_request"]
        ]
        assert len(rows) == len(case["requests_sorted"])
        for row, expected in zip(sorted(rows, key=place), sorted(case["requests_sorted"], key=place), strict=True):
            assert all(map(is_close, row, expected)), (row, expected)
        provenance = prediction.report["prediction_provenance"]
        for role, expected in case["provenance"].items():
            assert {key: provenance[role][key] for key in expected} == expected
        assert prediction.report.get("kv_cache_precision") == case.get("kv_cache_precision")
    if "fpm_coverage" in case:
        assert_coverage_equal(prediction.coverage, case["fpm_coverage"])


def is_close(found, expected):
    if not isinstance(expected, int | float):
        return found == expected
    return found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def place(row):
    return [round(value, 6) if isinstance(value, float) else value or 0 for value in row[:5]]


def assert_coverage_equal(found, expected):
    assert (found["status"], found["queries"]) == (expected["status"], expected["queries"])
    gaps = []
    for role in found["roles"]:
        coverage = role["coverage"]
        gaps += coverage["gaps"]
        for phase, counts in expected["roles"][role["worker_type"]].items():
            assert coverage[phase] == counts, (role["worker_type"], phase)
    kept = [{key: gap[key] for key in wanted} for gap, wanted in zip(gaps, expected["gaps"], strict=True)]
    assert kept == expected["gaps"]
