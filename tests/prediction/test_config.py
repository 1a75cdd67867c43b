"""The configuration of a prediction: what it refuses, and what it leaves of an earlier output.

Source: predict-recommend.md sections 2 and 9.4.
"""

import copy
import json

import pytest
import yaml

from fpmsdk.errors import ConfigError, OnboardError
from fpmsdk.prediction import PredictConfig, predict, read_config
from fpmsdk.prediction.compile import compile_config
from fpmsdk.prediction.compile.workload import workload_of
from tests.prediction.cases import filled, peer_systems
from tests.prediction.test_peer_cases import CASES, PEER_RULES

SYNTHETIC = {
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 8, "output_tokens": 2},
        "load": {"type": "concurrency", "concurrency": 3},
        "stop": {"requests": 4},
    },
    "engine": {"model": "org/m", "hardware": "h200_sxm"},
}
TRACE = {"type": "trace", "paths": ["plays.json"], "format": "weka"}
WRITTEN = {"prediction.json", "fpm-coverage.json", "execution-events.jsonl", "resource-runtime.json"}
LANES = {"type": "trace_timestamps", "agentic_lanes": 1}


def changed(path, value):
    document = copy.deepcopy(SYNTHETIC)
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place.setdefault(name, {})
    if value is None:
        place.pop(last)
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            "engine.hardwear",
            "h200_sxm",
            "engine.hardwear: unknown field \\(did you mean 'hardware'\\?\\); accepted are",
        ),
        ("optimization", {}, "optimization: belongs to a search; run `fpmsdk recommend`"),
        ("engine.mode", "disaggregated", "needs prefill and decode workers; add workers: {prefill"),
        ("engine.mode", "afd", "engine.mode: must be 'aggregated' or 'disaggregated', found 'afd'"),
        ("engine.hardware", None, "engine.hardware: is required"),
        ("traffic.stop", None, "traffic: .* needs an end; add stop"),
        ("traffic.stop", {"requests": 4, "requests_per_load_unit": 2.0}, "stop: give exactly one"),
        ("traffic.load.concurrency", "3", "must be a number, found the text '3'; remove the quotes"),
        ("traffic.load", LANES, "has no timestamps"),
        ("traffic.source", TRACE, "a trace ends by itself"),
        ("traffic.source.cached_prefix_tokens", 9, "at most input_tokens 8"),
        ("engine.workers.prefill", {}, "mode aggregated has no prefill workers; leave them out"),
        ("engine.kv_transfer", {}, "kv_transfer belongs to mode disaggregated"),
        ("engine.hardware", "auto", "hardware auto is for recommend"),
        ("engine.workers.aggregated.kv_cache.block_size", 1, "must be greater than or equal to 2, found 1"),
        (
            "engine.workers.aggregated.kv_cache.capacity",
            {"type": "fixed", "blocks": 4, "memory_fraction": 0.9},
            "takes no mem",
        ),
        ("execution.scheduler_rules", "sglang", "'vllm' or 'simulator'"),
    ],
)
def test_a_faulty_field_is_one_line_that_names_it(path, value, words):
    with pytest.raises(OnboardError, match=words):
        read_config(changed(path, value))


@pytest.mark.parametrize(
    ("source", "load", "words"),
    [
        (TRACE, {"type": "trace_timestamps"}, "need load type trace_timestamps with agentic_lanes"),
        (TRACE, {"type": "concurrency"}, "format weka needs type trace_timestamps"),
        (TRACE | {"format": "mooncake"}, LANES, "other traces take none"),
        (TRACE | {"block_size": 16}, LANES, "block_size belongs to mooncake rows"),
        (TRACE | {"format": "mooncake", "nested_timestamp_basis": "absolute"}, {"type": "concurrency"}, "format weka"),
    ],
)
def test_a_load_must_be_one_that_the_trace_has(source, load, words):
    document = SYNTHETIC | {"traffic": {"source": source, "load": load}}
    with pytest.raises(OnboardError, match=words):
        read_config(document)


@pytest.mark.parametrize("content", ["a: [", "- 1", "", "\xff"])
def test_what_is_no_yaml_mapping_is_refused_with_its_file(tmp_path, content):
    file = tmp_path / "predict.yaml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(OnboardError, match=r"predict\.yaml[:0-9]*: "):
        read_config(file)


def test_a_count_per_load_unit_is_a_share_of_the_load_and_at_least_one():
    counts = []
    for share in (4.0, 0.5, 0.01):
        config = PredictConfig.model_validate(changed("traffic.stop", {"requests_per_load_unit": share}))
        counts.append(len(workload_of(config)[0]))
    assert counts == [12, 2, 1]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return peer_systems(tmp_path_factory.mktemp("systems"))


def deployment(places, **worker):
    document = filled(CASES["cache_of_the_profile"]["config"], places) | PEER_RULES
    document["engine"]["workers"]["aggregated"].update(worker)
    return PredictConfig.model_validate(document)


def test_limits_that_are_left_out_are_those_of_the_profile(places):
    engine = compile_config(deployment(places, scheduler={})).roles["aggregated"].launch["engine"]
    assert (engine["max_num_batched_tokens"], engine["max_num_seqs"], engine["max_model_len"]) == (512, 8, 2048)


def test_limits_beyond_the_profile_are_refused_and_nothing_is_written(places, tmp_path):
    config = deployment(places, scheduler={"max_batched_tokens": 8192, "max_sequences": 8})
    with pytest.raises(ConfigError, match=r"1\.\.=512, .* found 8192"):
        predict(config, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_refused_configuration_removes_nothing(places, tmp_path):
    (tmp_path / "prediction.json").write_text("{}")
    config = deployment(places, scheduler={"max_batched_tokens": 8192, "max_sequences": 8})
    with pytest.raises(ConfigError):
        predict(config, tmp_path, overwrite=True)
    assert (tmp_path / "prediction.json").read_text() == "{}"


def test_an_output_in_use_is_refused_without_overwrite_and_foreign_files_stay_with_it(places, tmp_path):
    for name in ("prediction.json", "requests.jsonl", "notes.txt"):
        (tmp_path / name).write_text("old")
    config = deployment(places)
    with pytest.raises(OnboardError, match="not empty; pass --overwrite"):
        predict(config, tmp_path)
    assert predict(config, tmp_path, overwrite=True).exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} == {*WRITTEN, "notes.txt"}
    assert json.loads((tmp_path / "prediction.json").read_text())["completed_requests"] == 12


def test_a_pilot_of_planning_is_read(tmp_path):
    pilot = SYNTHETIC | {"evaluation": {"sla": {"ttft_ms": 1000.0, "itl_ms": 100.0}}}
    pilot["engine"] = {
        "mode": "aggregated",
        "model": "org/m",
        "hardware": "h200_sxm",
        "backend": "vllm",
        "backend_version": "0.27.0",
        "systems_paths": [str(tmp_path)],
        "context_length": 128,
        "workers": {
            "aggregated": {
                "scheduler": {"max_batched_tokens": 64, "max_sequences": 4},
                "timing": {
                    "type": "default",
                    "estimation_mode": "fpm_interpolation",
                    "fallback_policy": "deny",
                    "estimator_config": {"fpm_interpolation": {"method": "direct"}},
                },
                "kv_cache": {"capacity": {"memory_fraction": 0.9}, "prefix_caching": False},
                "parallelism": {"replicas": 1, "tensor": 1, "pipeline": 1, "attention_data": 1},
            }
        },
    }
    file = tmp_path / "pilot.yaml"
    file.write_text(yaml.safe_dump(pilot, sort_keys=False))
    assert read_config(file).engine.workers.aggregated.kv_cache.capacity.memory_fraction == 0.9
