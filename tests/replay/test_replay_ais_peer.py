"""Replays of the public peer with its own timing provider: passes priced by operators or by a whole-forward table.

Equal per-request figures, summaries and coverage. Source: engine-and-replay.md section 7, AIS-timed scenarios.
"""

import json
import os

import pytest

from fpmsdk import ForwardPassPerfModel, Trace, replay_trace
from fpmsdk.errors import PerfDataNotAvailableError
from tests.perfdb.pairs import VERSION, row, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfmodel.deployments import checkpoint
from tests.replay.test_replay_peer import PEER, assert_summary_equal
from tests.vectors import load_vectors

VECTORS = load_vectors("replay_ais_peer")["scenarios"]
COLUMNS = (
    "request_id",
    "arrival_ms",
    "first_admit_ms",
    "ttft_ms",
    "ttst_ms",
    "e2e_latency_ms",
    "reused_tokens",
    "num_admissions",
    "output_tokens",
    "status",
)


def trace_of(requests):
    tokens = [request.get("input_token_ids") or [] for request in requests]
    return Trace.from_arrays(
        [request["arrival_time_ms"] for request in requests],
        [request["input_tokens"] for request in requests],
        [request["output_tokens"] for request in requests],
        request_ids=[request["id"] for request in requests],
        hash_ids=tokens if any(tokens) else None,
        block_tokens=1,
    )


def replayed(spec, *, without=(), **config):
    engine = spec["engine"]
    priced = engine["rank"]["timing_model"]["config"] | config
    priced.pop("gpu_memory_utilization", None)  # sizes the peer's cache, which the rank states
    model = ForwardPassPerfModel.best_available(priced)
    return replay_trace(
        trace_of(spec["requests"]),
        launch={
            "engine": {name: value for name, value in engine["rank"].items() if name not in ("timing_model", *without)},
            "dp_size": engine["dp_size"],
            "tensor_parallel_size": engine["tensor_parallel_size"],
            "num_gpu_blocks_is_explicit": engine["num_gpu_blocks_is_explicit"],
        },
        timing=model,
        num_workers=spec["topology"]["workers"]["initial_workers"],
        concurrency=spec["max_in_flight"],
        sla=spec["sla"] or None,
        **PEER,
    )


def check(report, result):
    rows = [[record[name] for name in COLUMNS] for record in report.requests.to_pylist()]
    assert rows == result["per_request"]
    assert_summary_equal(report, result["summary"])


@pytest.fixture
def replay_on_table(tmp_path, monkeypatch):
    """Serve a scenario that a whole-forward table prices, in a folder with that table and its checkpoint."""
    monkeypatch.chdir(tmp_path)
    Systems(tmp_path / "systems").hardware(gpu={"mem_capacity": 1_000_000})

    def replay(spec, without=()):
        # The table stands in for any system and version; those of the test tables are others.
        spec = json.loads(json.dumps(spec).replace("h200_sxm", "x100").replace("9.9.9-vec", VERSION))
        config = spec["engine"]["rank"]["timing_model"]["config"]
        model = config["model"]
        checkpoint(tmp_path / model, "VecForCausalLM")
        rows = load_vectors("fpm_interpolation_peer")["table"]["models"][model]
        table = write_pair(
            tmp_path / "pair",
            [row(kind, *at, model=model, cell_id=f"{model}-{kind}") for kind, *at in (line[:5] for line in rows)],
        )
        interpolation = config["estimator_config"]["fpm_interpolation"] | {"fpm_parquet_path": str(table)}
        return replayed(
            spec,
            without=without,
            systems_paths=[str(tmp_path / "systems")],
            estimator_config={"fpm_interpolation": interpolation},
        )

    return replay


@pytest.mark.parametrize("name", ["fpm_grouped_single_chunked", "fpm_grouped_staggered", "fpm_grouped_contention"])
def test_a_replay_priced_by_a_table_equals_the_peer(replay_on_table, name):
    expected = VECTORS[name]["result"]
    report = replay_on_table(VECTORS[name]["spec"])
    check(report, expected)
    assert report.fpm_query_coverage["queries"] == expected["fpm_query_coverage"]["queries"]
    assert report.fpm_query_coverage["status"] == expected["fpm_query_coverage"]["status"]


def test_the_profile_of_the_timing_gives_the_cache_that_a_launch_leaves_out(replay_on_table):
    # The pool that three requests contend for: another size would preempt at other times.
    scenario = VECTORS["fpm_grouped_contention"]
    check(replay_on_table(scenario["spec"], ("kv_cache_capacity_bytes", "kv_cache_groups")), scenario["result"])


def test_a_pass_that_the_table_does_not_support_ends_the_replay_with_the_peers_coverage(replay_on_table):
    expected = VECTORS["fpm_grouped_miss"]["result"]
    with pytest.raises(PerfDataNotAvailableError) as failure:
        replay_on_table(VECTORS["fpm_grouped_miss"]["spec"])
    query = "FPM direct prefill query (batch_size=1, total_prefill_tokens=2, total_kv_read_tokens=1022)"
    assert query in expected["message"]
    assert query in str(failure.value)
    coverage = json.loads(failure.value.fpm_query_coverage)
    assert coverage["status"] == "incomplete"
    assert coverage["queries"] == expected["coverage"]["queries"]


@pytest.mark.peer_data
@pytest.mark.parametrize("name", [name for name in VECTORS if name.startswith("op_")])
def test_a_replay_priced_by_operators_equals_the_peer(name):
    # A decode step is asked for by known tokens, the newest one included.
    check(
        replayed(VECTORS[name]["spec"], systems_paths=[os.environ["FPMSDK_TEST_SYSTEMS_013"]], fallback_policy="deny"),
        VECTORS[name]["result"],
    )
