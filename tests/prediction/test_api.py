"""`fpmsdk.predict`: one prediction in this process, without files."""

import sys
from types import SimpleNamespace

import pytest

import fpmsdk
from fpmsdk.errors import OnboardError
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.documents import read_document
from fpmsdk.sample.quickstart import write_quickstart

SMALL = {"engine": {"model": "org/m", "hardware": "h200_sxm"}}
CONSTANTS = "engine.workers.aggregated.timing={type: fixed, prefill_ms: 10, decode_ms: 1}"
BLOCKS = "engine.workers.aggregated.kv_cache={capacity: {type: fixed, blocks: 256}}"


def test_defaults_are_what_their_own_validation_would_give():
    config = PredictConfig.model_validate(SMALL)
    assert PredictConfig.model_validate(config.model_dump()) == config
    assert config.traffic.stop.requests == 100
    assert config.roles["aggregated"].parallelism.tensor == 1


def test_a_mapping_is_predicted_with_overrides_and_stays_as_it_was():
    given = {"engine": dict(SMALL["engine"])}
    result = fpmsdk.predict(given, overrides=[CONSTANTS, BLOCKS, "traffic.stop.requests=3"])
    assert (result.status, result.report["completed_requests"]) == ("completed", 3)
    assert given == SMALL


def test_a_path_a_mapping_and_a_model_predict_the_same(tmp_path):
    path = write_quickstart(tmp_path)
    first = fpmsdk.predict(path)
    model = PredictConfig.model_validate(read_document(path).document)
    again = fpmsdk.predict(model)
    assert again.report["duration_ms"] == first.report["duration_ms"]


def test_an_override_to_a_section_of_a_search_is_refused():
    with pytest.raises(OnboardError, match="belongs to a search"):
        fpmsdk.predict(SMALL, overrides=["optimizer.seed=1"])


def test_a_data_frame_has_a_row_for_every_request(monkeypatch):
    frame = SimpleNamespace(from_records=list)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame))
    rows = fpmsdk.predict(SMALL, overrides=[CONSTANTS, BLOCKS, "traffic.stop.requests=3"]).to_pandas()
    # Three prompts of 1024 tokens fit one pass of 8192.
    assert [row["ttft_ms"] for row in rows] == [10.0, 10.0, 10.0]
