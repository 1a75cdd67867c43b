"""Which plays can be served as they were recorded, and how their timing is driven.

Source: onboarding.md section 8.5.
"""

import json

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.serving_play import read_play, timing_subset

FIRST = {"type": "n", "t": 0.0, "in": 16, "out": 4, "hash_ids": [1], "model": "m", "api_time": 1.0}
SECOND = {"type": "s", "t": 1.0, "in": 32, "out": 4, "hash_ids": [1, 2], "model": "m", "api_time": 0.5}


def play_of(*requests, **fields):
    return {"id": "a", "requests": list(requests)} | fields


@pytest.mark.parametrize(
    ("play", "issue"),
    [
        (play_of(FIRST, SECOND), None),
        (play_of(FIRST, SECOND, id=""), "no id"),
        (play_of(), "no requests"),
        (play_of(FIRST, {"type": "subagent", "t": 1.0, "requests": []}), "request 1 branches"),
        (play_of(FIRST, SECOND | {"out": 0}), "request 1 needs positive"),
        (play_of(FIRST | {"t": -1.0}), "request 0 needs finite"),
        (play_of(FIRST | {"hash_ids": []}), "request 0 has no hash_ids"),
        (play_of(FIRST, SECOND | {"t": 0.9}), "request 1 overlaps"),
        (play_of(FIRST, SECOND | {"model": "n"}), "request 1 overlaps"),
        (play_of(FIRST, SECOND | {"hash_ids": [3, 2]}), "request 1 overlaps"),
        (play_of(FIRST | {"out": 1}), "no request has more than one output token"),
    ],
)
def test_a_play_of_one_stream_can_be_served_and_others_say_why_not(tmp_path, play, issue):
    file = tmp_path / "play.json"
    file.write_text(json.dumps(play))
    document, issues = read_play(file)
    assert document == play
    assert (issues == []) if issue is None else any(issue in text for text in issues)


@pytest.mark.parametrize("content", ['{"id": "a", "requests": []}\n{"id": "b", "requests": []}', "[1]"])
def test_a_file_of_no_single_play_holds_none(tmp_path, content):
    file = tmp_path / "plays.jsonl"
    file.write_text(content)
    document, issues = read_play(file)
    assert document is None and len(issues) == 1


def test_what_is_no_json_is_refused(tmp_path):
    file = tmp_path / "play.json"
    file.write_text("{")
    with pytest.raises(OnboardError, match=r"play\.json: no Weka play"):
        read_play(file)


@pytest.mark.parametrize(
    ("play", "subset"),
    [
        (play_of(FIRST, SECOND), "zero_idle_gaps"),
        (play_of(FIRST, SECOND | {"t": 3.0}), None),
        (play_of(FIRST | {"api_time": 0.0}, SECOND | {"t": 3.0}), "zero_recorded_api_time"),
        (play_of({**FIRST, "api_time": None}, SECOND), "zero_recorded_api_time"),
        (play_of(FIRST), "zero_recorded_api_time"),
    ],
)
def test_the_benchmark_keeps_gaps_or_timestamps_whichever_the_play_allows(play, subset):
    assert timing_subset(play) == subset
