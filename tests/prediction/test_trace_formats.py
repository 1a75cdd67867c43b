"""Traces that tell what turns add, and those of Dynamo, as the peer serves them.

Recorded with aisimulate 0.13.0.dev202610270000000085: KV blocks of 4 tokens, prefill 8 ms, decode 3.5 ms. Source:
predict-recommend.md section 3.3.
"""

import json

import pytest

from fpmsdk.prediction import PredictConfig, predict
from tests.prediction.cases import peer_systems
from tests.replay.formats.test_dynamo import OTHER, event


def turn(session, added, output, hashes, **other):
    return {"session_id": session, "input_length": added, "output_length": output, "hash_ids": hashes} | other


ANSWER = {"output_token_ids": [900, 901, 902, 903, 904]}
# Rows; arrival, prompt tokens, reused tokens and end-to-end latency of each request.
DELTA = {
    "the last token of an answer is not in the cache": (
        [turn("s", 16, 4, [1, 2, 3, 4]), turn("s", 8, 3, [5, 6], delay=10)],
        [[0.0, 16, 0, 18.5], [28.5, 28, 16, 15.0]],
    ),
    "an answer is reused": (
        [
            turn("s", 16, 5, [1, 2, 3, 4]),
            turn("s", 8, 3, [5, 6], delay=10),
            turn("s", 6, 3, [7, 8], delay=10),
        ],
        [[0.0, 16, 0, 22.0], [32.0, 29, 20, 15.0], [57.0, 38, 28, 15.0]],
    ),
    "sessions share prompts": (
        [
            turn("s", 10, 5, [1, 2, 3], timestamp=0),
            turn("s", 8, 3, [5, 6], timestamp=50),
            turn("z", 10, 5, [1, 2, 3], timestamp=100),
            turn("z", 8, 3, [5, 6], timestamp=150),
        ],
        [[0.0, 10, 0, 22.0], [72.0, 23, 12, 15.0], [100.0, 10, 8, 22.0], [172.0, 23, 12, 15.0]],
    ),
    "sessions share told answers": (
        [
            turn("s", 10, 5, [1, 2, 3], timestamp=0, **ANSWER),
            turn("s", 8, 3, [5, 6], delay=0),
            turn("z", 10, 5, [1, 2, 3], timestamp=500, **ANSWER),
            turn("z", 8, 3, [5, 6], delay=0),
        ],
        [[0.0, 10, 0, 22.0], [22.0, 23, 12, 15.0], [500.0, 10, 8, 22.0], [522.0, 23, 20, 15.0]],
    ),
}
# The peer also wants an `event_time_unix_ms` of every event, which changes nothing.
DYNAMO = [[0.0, 10, 0, 22.0], [100.0, 10, 8, 22.0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return peer_systems(tmp_path_factory.mktemp("peer"))["$CKPT"]


def document(model, paths, **source):
    worker = {
        "scheduler": {"max_batched_tokens": 512, "max_sequences": 8},
        "kv_cache": {"block_size": 4, "bytes_per_token": 147456, "capacity": {"type": "fixed", "blocks": 200}},
        "timing": {"type": "fixed", "prefill_ms": 8.0, "decode_ms": 3.5},
    }
    engine = {"mode": "aggregated", "model": model, "hardware": "h200_sxm", "backend": "vllm", "context_length": 2048}
    return {
        "traffic": {
            "source": {"type": "trace", "paths": [str(path) for path in paths]} | source,
            "load": {"type": "trace_timestamps"},
        },
        "engine": engine | {"workers": {"aggregated": worker}},
        "execution": {"scheduler_rules": "simulator", "mixed_pass_pricing": "separate"},
    }


def served(given, folder):
    report = predict(PredictConfig.model_validate(given), folder, capture_per_request=True).report
    columns = ("arrival_time_ms", "input_length", "reused_input_tokens", "e2e_latency_ms")
    return sorted([row[column] for column in columns] for row in report["per_request"])


@pytest.mark.parametrize("name", DELTA)
def test_turns_that_tell_what_they_add_are_served_as_by_the_peer(name, model, tmp_path):
    rows, expected = DELTA[name]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert served(document(model, [path], format="mooncake-delta", block_size=4), tmp_path / "out") == expected


def test_events_of_several_files_are_served_as_by_the_peer(model, tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, row in zip(paths, (OTHER, event()), strict=True):
        path.write_text(json.dumps(row) + "\n")
    assert served(document(model, paths, format="dynamo"), tmp_path / "out") == DYNAMO


def test_only_dynamo_has_several_paths(model, tmp_path):
    with pytest.raises(ValueError, match="format mooncake has one file, found 2; only dynamo has several"):
        PredictConfig.model_validate(document(model, ["a", "b"], format="mooncake"))


def test_turns_that_tell_what_they_add_need_mode_aggregated(model):
    given = document(model, ["a"], format="mooncake-delta")
    worker = given["engine"]["workers"].pop("aggregated")
    given["engine"] |= {"mode": "disaggregated", "workers": {"prefill": worker, "decode": worker}}
    with pytest.raises(ValueError, match="mooncake-delta needs engine.mode aggregated, found disaggregated"):
        PredictConfig.model_validate(given)
