"""How a prediction runs: what it leaves in every case, and what it leaves alone.

Source: predict-recommend.md sections 1.2, 1.3, 3.2, 9.3, 9.4 and 11.
"""

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from fpmsdk.errors import FpmSdkError, OnboardError, ReplayInterrupted, TraceError
from fpmsdk.prediction import PredictConfig, predict
from fpmsdk.prediction import run as run_module
from fpmsdk.prediction.deployment import ModelCache
from fpmsdk.prediction.simulate import TraceCache, simulate
from tests.prediction.cases import filled, peer_systems
from tests.vectors import load_vectors

FIXED = {
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 100, "output_tokens": 4},
        "load": {"type": "concurrency", "concurrency": 2},
        "stop": {"requests": 6},
    },
    "engine": {
        "model": "org/m",
        "hardware": "any",
        "workers": {
            "aggregated": {
                "scheduler": {"max_batched_tokens": 512, "max_sequences": 8},
                "kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 30}},
                "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 2.0},
            }
        },
    },
}
EVIDENCE = ["execution-events.jsonl", "resource-runtime.json"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return peer_systems(tmp_path_factory.mktemp("systems"))


def fixed(**changes):
    config = copy.deepcopy(FIXED)
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = config
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return config


def direct(places):
    return filled(copy.deepcopy(load_vectors("predict_peer")["cases"]["p7_fpm_direct_profile"]["config"]), places)


def files(folder):
    return sorted(file.name for file in folder.iterdir())


def test_equal_runs_have_equal_reports_but_for_the_time_they_took(tmp_path):
    config = fixed(traffic__load={"type": "poisson", "requests_per_second": 90.0, "seed": 3})
    of_the_host = {"wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s"}
    reports = [predict(config, tmp_path / str(i)).report for i in range(2)]
    first, second = ({name: r[name] for name in r if name not in of_the_host} for r in reports)
    assert first == second


def test_overwriting_removes_what_predictions_write_and_nothing_else(tmp_path):
    for name in ("fpm-coverage.json", "resource-plan.json", "recommendation.csv", "notes.txt"):
        (tmp_path / name).write_text("old")
    predict(fixed(), tmp_path, overwrite=True)
    assert files(tmp_path) == sorted([*EVIDENCE, "notes.txt", "prediction.json"])


def test_a_trace_that_breaks_off_in_a_row_is_refused_before_anything_is_written(tmp_path):
    trace = tmp_path / "trace.jsonl"
    row = json.dumps({"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]})
    trace.write_text(f"{row}\n{row[:30]}\n")
    config = fixed(
        traffic={"source": {"type": "trace", "paths": [str(trace)]}, "load": {"type": "trace_timestamps"}},
    )
    with pytest.raises(TraceError, match=r"trace\.jsonl.*line 2"):
        predict(config, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_replay_that_memory_does_not_hold_is_refused_with_its_plan(tmp_path):
    config = fixed(execution__resources={"memory_limit_gb": 0.00001})  # 10 kB; six requests are taken for 12 kB
    prediction = predict(config, tmp_path)
    assert prediction.exit_code == 3
    assert files(tmp_path) == sorted([*EVIDENCE, "resource-plan.json"])
    plan = json.loads((tmp_path / "resource-plan.json").read_text())
    assert (plan["num_requests"], plan["limit_bytes"]) == (6, 10000)
    assert plan["needed_bytes"] > 10000
    assert prediction.error == plan["reason"]
    assert json.loads((tmp_path / "resource-runtime.json").read_text())["status"] == "refused"


def test_an_interrupted_run_keeps_its_coverage_and_its_evidence_and_no_report(places, tmp_path, monkeypatch):
    def stopped(*_arguments, **_options):
        raise ReplayInterrupted("interrupted at 3.0 ms of simulated time")

    monkeypatch.setattr(run_module, "replay_prepared", stopped)
    with pytest.raises(ReplayInterrupted):
        predict(direct(places), tmp_path)
    assert files(tmp_path) == sorted([*EVIDENCE, "fpm-coverage.json"])
    coverage = json.loads((tmp_path / "fpm-coverage.json").read_text())
    assert (coverage["status"], coverage["replay_completed"]) == ("incomplete", False)
    ended = json.loads((tmp_path / "execution-events.jsonl").read_text().splitlines()[-1])
    assert (ended["event"], ended["status"], ended["exit_code"]) == ("ended", "interrupted", 130)


def test_a_share_of_the_cache_is_a_number_of_requests_in_flight(tmp_path):
    # 30 blocks of 16 are 480 tokens; a request takes 100 + 4 // 2 = 102 of them, so four fit, and half of them are two.
    config = fixed(traffic__load={"type": "kv_capacity_fraction", "fraction": 0.5})
    report = predict(config, tmp_path / "share").report
    assert report["kv_load"] == {"concurrency": 2, "capacity_requests": 4, "capacity_tokens": 480}
    assert report["kv_capacity"]["aggregated"] == {"num_gpu_blocks": 30, "kv_cache_tokens": 480, "num_ranks": 1}
    in_flight = predict(fixed(), tmp_path / "count").report
    assert report["duration_ms"] == in_flight["duration_ms"]


def test_a_cache_that_holds_no_request_is_refused_before_anything_is_written(tmp_path):
    config = fixed(traffic__load={"type": "kv_capacity_fraction", "fraction": 0.5})
    config["traffic"]["source"]["input_tokens"] = 500
    with pytest.raises(FpmSdkError, match="holds no request of 502 tokens"):
        predict(config, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_details_of_a_measured_table_tell_memory_passes_and_their_points(places, tmp_path):
    config = direct(places)
    del config["engine"]["workers"]["aggregated"]["kv_cache"]["capacity"]
    details = predict(config, tmp_path, details=["all"]).report["details"]
    assert details["schema_version"] == "1.0"
    assert sorted(details["sections"]) == ["memory", "source", "summary", "time"]
    assert list(details["skipped"]) == ["energy"]
    memory = details["sections"]["memory"]["roles"]["aggregated"]["memory_breakdown"]
    assert memory["weights_bytes"] == 16400000000
    phases = {phase["name"]: phase for phase in details["sections"]["time"]["phases"]}
    for phase in phases.values():
        (operation,) = phase["operations"]
        estimated = sum(
            row["count"] * row["estimate"]["latency_ms"] * row["latency_scale"] for row in operation["fpm_estimates"]
        )
        assert operation["latency_ms"] == pytest.approx(estimated, rel=1e-6)  # simulated in whole nanoseconds
    total = sum(phase["latency_ms"] for phase in phases.values())
    report = json.loads((tmp_path / "prediction.json").read_text())
    # Of one worker that is never idle.
    assert total == pytest.approx(report["duration_ms"], rel=1e-9)


def test_details_of_constants_name_them_and_say_why_memory_is_missing(tmp_path):
    details = predict(fixed(), tmp_path, details=["time", "memory"]).report["details"]
    assert details["skipped"] == {"memory": "the blocks of every role are given, so no memory was estimated"}
    # Two prompts at a time, three times; three more tokens each.
    assert {phase["name"]: phase["latency_ms"] for phase in details["sections"]["time"]["phases"]} == {
        "prefill": 30.0,
        "decode": 18.0,
    }


def test_an_unknown_section_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(OnboardError, match=r"no section 'memroy'; accepted are summary, memory"):
        predict(fixed(), tmp_path / "output", details=["memroy"])
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(("asked", "written"), [({}, True), ({"collect_coverage": False}, False)])
def test_a_direct_table_counts_its_coverage_unless_told_not_to(places, tmp_path, asked, written):
    config = direct(places)
    config["engine"]["estimator_config"] = {"fpm_interpolation": {"method": "direct"} | asked}
    predict(config, tmp_path)
    assert (tmp_path / "fpm-coverage.json").exists() == written


def test_predictions_on_shared_models_in_threads_are_those_of_one_after_the_other(places):
    configs = []
    for tokens in (64, 128, 200, 256, 300, 400):
        config = direct(places)
        config["traffic"]["source"]["input_tokens"] = tokens
        configs.append(PredictConfig.model_validate(config))
    models, traces = ModelCache(), TraceCache()
    with ThreadPoolExecutor(4) as pool:
        shared = list(pool.map(lambda config: simulate(config, models=models, traces=traces), configs * 3))
    alone = [simulate(config) for config in configs] * 3
    assert [one.status for one in shared] == [one.status for one in alone]
    assert [one.coverage for one in shared] == [one.coverage for one in alone]
    assert [one.records for one in shared] == [one.records for one in alone]


@pytest.mark.parametrize(
    ("format", "name", "content"),
    [
        (
            "azure",
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,100,4\n2024-01-01 00:00:01,80,4\n",
        ),
        (
            "burstgpt",
            "t.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0,m,100,4,104,API log\n"
            "1,m,80,4,84,API log\n",
        ),
    ],
)
def test_every_form_of_trace_that_a_replay_reads_can_be_predicted(format, name, content, tmp_path):
    (tmp_path / name).write_text(content)
    source = {"type": "trace", "paths": [str(tmp_path / name)], "format": format}
    timed = predict(fixed(traffic={"source": source, "load": {"type": "trace_timestamps"}}), tmp_path / "timed").report
    assert (timed["completed_requests"], timed["duration_ms"]) == (2, 1016.0)
    load = {"type": "concurrency", "concurrency": 1}
    closed = predict(fixed(traffic={"source": source, "load": load}), tmp_path / "closed").report
    assert (closed["completed_requests"], closed["duration_ms"]) == (2, 32.0)


def test_a_form_of_trace_that_no_replay_reads_is_refused_with_those_that_are(tmp_path):
    source = {"type": "trace", "paths": ["trace.jsonl"], "format": "applied_compute_agentic"}
    with pytest.raises(
        OnboardError, match=r"format: must be 'mooncake', 'mooncake-delta', 'dynamo'.*found 'applied_compute_agentic'"
    ):
        predict(fixed(traffic={"source": source, "load": {"type": "trace_timestamps"}}), tmp_path / "output")
