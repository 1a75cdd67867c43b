"""The fake engine: what it writes is valid and qualified evidence, and its faults are what they say (section 11.1)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fpmsdk.collect import fake_launch
from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.execution_evidence import inspect_execution
from fpmsdk.collect.executor import CellLaunch
from fpmsdk.collect.fake_engine import run_fake_engine
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.fake_launch import FakeFaults
from fpmsdk.collect.fake_law import FakeClock, FakeGpu
from fpmsdk.collect.grid import Point
from fpmsdk.collect.measurement import extract_measurements
from fpmsdk.collect.memory import resolve_memory
from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.collect.render import render_cell
from fpmsdk.collect.rows import attempt_rows
from fpmsdk.collect.runtime_settings import LaunchedSettings
from fpmsdk.collect.topology import Topology
from fpmsdk.errors import CollectionError, OnboardError

ATTEMPT = "0123456789abcdef0123456789abcdef"
# The plans of the upstream collector ask for large grids.
SMALL = {
    "--max-num-batched-tokens": "64",
    "--max-num-seqs": "4",
    "--prefill-max-kv-read-token-samples": "4",
    "--decode-max-kv-read-token-samples": "6",
}


class SmallExecutor(FakeExecutor):
    """Measures few points, whatever the plan asks for."""

    def execute(self, units, timeout_seconds=0):
        script = self._launch.folder / "run.sh"
        words = " ".join(f"{flag} {value}" for flag, value in SMALL.items())
        script.write_text(script.read_text().replace(" --dump-config-to", f" {words} --dump-config-to"))
        super().execute(units)


def measure(tmp_path, document, *, phase, strategy=None, faults="", num_nodes=None, environment=None):
    """One attempt of the first cell of a phase; the plan, the cell and its raw results."""
    plan = CollectionPlan.from_document(document)
    cell = next(
        cell for cell in plan.cells if cell.workload_kind == phase and strategy in (None, cell.parallel_strategy)
    )
    folder = tmp_path / cell.cell_id
    folder.mkdir()
    launch = render_cell(plan, cell, folder, {})
    launch = CellLaunch(plan, cell, folder, num_nodes or launch.num_nodes, launch.gpus_per_node)
    executor = SmallExecutor(launch, faults=faults, environment=environment)
    executor.apply()
    units = executor.wait_ready(launch.num_nodes)
    executor.stage(units, [folder / "run.sh"])
    executor.prepare_attempt(units, cell_id=cell.cell_id, plan_sha256=plan.sha256, attempt_id=ATTEMPT)
    executor.execute(units)
    executor.collect(units)
    return plan, cell, folder / "raw"


@pytest.mark.parametrize(
    ("name", "phase", "strategy", "regimes"),
    [
        ("dense_runtime", "prefill", "single", {"not_applicable", "real_prefix"}),
        ("dense_runtime", "decode", "single", {"fake_fallback"}),
        ("moe", "decode", "dep", {"real_kv"}),
        ("moe", "decode", "tep", {"real_kv"}),
        ("moe", "decode", "pure_tp", {"real_kv"}),
        ("moe", "decode", "single", {"fake_fallback"}),
    ],
)
def test_artifacts_are_valid_and_their_measurements_recorded(tmp_path, peer_plans, name, phase, strategy, regimes):
    plan, cell, raw = measure(tmp_path, peer_plans[name]["plan"], phase=phase, strategy=strategy)
    collection = validate_native(plan, cell, raw, attempt_id=ATTEMPT)
    assert set(collection.regimes) == regimes
    assert len(collection.timings) == cell.topology.dp
    evidence = extract_measurements(raw, collection)
    assert (evidence["status"], evidence["reasons"]) == ("recorded", [])


def test_dense_decode_on_synthetic_kv_is_published_as_such(tmp_path, peer_plans):
    plan, cell, raw = measure(tmp_path, peer_plans["dense_runtime"]["plan"], phase="decode")
    rows = attempt_rows(plan, cell, raw.parent, attempt_id=ATTEMPT)
    assert {row["kv_seed_regime"] for row in rows} == {"skip:dense_model_content_insensitive"}


def test_ranks_write_on_the_node_that_hosts_them(tmp_path, peer_plans):
    document = peer_plans["moe"]["plan"]
    plan = CollectionPlan.from_document(document)
    cell = next(c for c in plan.cells if c.parallel_strategy == "dep" and c.topology.dp == 4)
    document = {**document, "cells": [cell.document()]}
    document["sha256"] = plan_digest(document)
    plan, cell, raw = measure(tmp_path, document, phase=cell.workload_kind, num_nodes=2)
    names = [sorted(path.name for path in (raw / f"node000{node}").glob("benchmark*.json")) for node in (0, 1)]
    assert names == [
        ["benchmark.json", "benchmark_dp1.json", "benchmark_merged.json"],
        ["benchmark_dp2.json", "benchmark_dp3.json"],
    ]
    assert len(validate_native(plan, cell, raw).timings) == 4


def test_equal_launches_measure_equal_times_and_others_do_not(tmp_path, dense_plan):
    walls = []
    for number, launch in enumerate(("a", "a", "b")):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan, cell, raw = measure(folder, dense_plan, phase="decode", environment={fake_launch.LAUNCH: launch})
        walls.append(validate_native(plan, cell, raw).wall_s.tolist())
    assert walls[0] == walls[1] != walls[2]


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ("--partial", "status"),
        ("--rank-missing", "benchmark"),
        ("--fail-at mid", "exit code 1"),
        ("--fail-at launch", "exit code 1"),
        ("--fail-at validate", "completed_points"),
    ],
)
def test_faults_are_found(tmp_path, dense_plan, faults, reason):
    def attempt():
        plan, cell, raw = measure(tmp_path, dense_plan, phase="prefill", faults=faults)
        validate_native(plan, cell, raw)

    with pytest.raises(CollectionError, match=reason):
        attempt()


def test_a_missing_rank_of_several_is_found(tmp_path, moe_plan):
    plan, cell, raw = measure(tmp_path, moe_plan, phase="decode", strategy="dep", faults="--rank-missing")
    with pytest.raises(CollectionError):
        validate_native(plan, cell, raw)


def test_an_older_engine_records_no_evidence(tmp_path, dense_plan):
    plan, cell, raw = measure(tmp_path, dense_plan, phase="prefill", faults="--legacy")
    collection = validate_native(plan, cell, raw)
    assert set(collection.regimes) == {None}
    assert extract_measurements(raw, collection)["status"] == "unestablished"


def test_drift_moves_every_time(tmp_path, dense_plan):
    walls = []
    for drift in ("1.0", "1.08"):
        folder = tmp_path / drift
        folder.mkdir()
        environment = {fake_launch.LAUNCH: "a"}
        plan, cell, raw = measure(
            folder, dense_plan, phase="decode", faults=f"--drift {drift}", environment=environment
        )
        walls.append(validate_native(plan, cell, raw).wall_s)
    assert (walls[1] / walls[0]).tolist() == pytest.approx([1.08] * len(walls[0]))


def test_duplicate_seeds_are_one_row(tmp_path, dense_plan):
    plan, cell, raw = measure(tmp_path, dense_plan, phase="prefill", faults="--duplicate-seeds")
    collection = validate_native(plan, cell, raw)
    rows = attempt_rows(plan, cell, raw.parent, attempt_id=ATTEMPT)
    assert len(rows) < collection.num_points
    assert len({(row["batch_size"], row["total_prefill_tokens"], row["total_kv_read_tokens"]) for row in rows}) == len(
        rows
    )


def test_memory_that_observers_report_resolves_to_resources(tmp_path, peer_plans):
    document = peer_plans["pending_profile"]["plan"]
    plan, cell, raw = measure(tmp_path, document, phase="decode")
    launched = LaunchedSettings(
        topology=cell.topology,
        max_model_len=8192,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        gpu_memory_utilization=0.9,
        gemm_quant_mode="bfloat16",
        moe_quant_mode=None,
        kv_cache_dtype="bfloat16",
    )
    resources = resolve_memory(plan, cell, raw, attempt_id=ATTEMPT, launched=launched, backend_version="0.27.0")
    assert (resources["max_num_tokens"], resources["max_batch_size"]) == (64, 4)
    assert resources["runtime_memory"]["kv_cache_bytes"] > 0
    assert inspect_execution(plan, cell, raw, validate_native(plan, cell, raw))["failures"] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", FakeFaults()),
        ("--fail-at mid --drift 1.08", FakeFaults(fail_at="mid", drift=1.08)),
        ("--async true --hang", FakeFaults(is_async=True, hang=True)),
    ],
)
def test_fault_words(words, expected):
    assert FakeFaults.from_words(words.split()) == expected


def test_an_unknown_fault_is_refused():
    with pytest.raises(OnboardError, match="unknown fault '--explode'"):
        FakeFaults.from_words(["--explode"])


def test_a_command_without_a_mode_ends_with_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fpmsdk.fake_engine", "--model", "x"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "--benchmark-mode is missing" in done.stderr) == (2, True)


def test_the_command_line_alone_is_enough(tmp_path):
    output = tmp_path / "benchmark.json"
    words = ["--benchmark-mode", "decode", "--benchmark-output-path", str(output), "--max-num-seqs", "2"]
    assert run_fake_engine([*words, "--enforce-eager"], {}) == 0
    document = json.loads(output.read_text())
    assert document["cudagraph"]["mode"] == "NONE"
    assert {row["point"]["expected_cudagraph_mode"] for row in document["results"]} == {"NONE"}


def test_larger_passes_take_longer_and_graphs_less():
    gpu, topology = FakeGpu(), Topology()
    times = [
        gpu.pass_s(Point("prefill", 1, tokens, 0), topology, mode="NONE", capture=None) for tokens in (512, 1024, 4096)
    ]
    assert times == sorted(times)
    point = Point("decode", 8, 0, 1024)
    graph = gpu.pass_s(point, topology, mode="FULL", capture=8)
    eager = gpu.pass_s(point, topology, mode="NONE", capture=None)
    assert graph < eager
    # By hand: 16 GB of weights and 1024 tokens of 128 KiB at 78 % of 4.8 TB/s, and the launch of one graph.
    assert graph == pytest.approx(18e-6 + (16e9 + 1024 * 131072) / (4.8e12 * 0.78))


def test_ranks_and_synthetic_contents_differ_by_their_factors():
    first, second = (FakeClock(7, sigma=0.0) for _ in range(2))
    assert second.sample_s(1.0, 1) / first.sample_s(1.0, 0) == pytest.approx(1.008)
    assert second.sample_s(1.0, 0, is_fake_moe_kv=True) / first.sample_s(1.0, 0) == pytest.approx(0.97)


def rank_document(raw):
    return json.loads((raw / "node0000/benchmark.json").read_text())


@pytest.mark.parametrize(("faults", "found"), [("", "FULL_AND_PIECEWISE"), ("--graph-downgrade", "PIECEWISE")])
def test_graphs_can_be_downgraded(tmp_path, dense_plan, faults, found):
    _, _, raw = measure(tmp_path, dense_plan, phase="decode", faults=faults)
    document = rank_document(raw)
    assert document["cudagraph"]["mode"] == found
    modes = {row["point"]["expected_cudagraph_mode"] for row in document["results"]}
    assert modes == {"PIECEWISE" if faults else "FULL"}


@pytest.mark.parametrize(("faults", "found"), [("", False), ("--async", True)])
def test_scheduling_can_be_asynchronous_against_the_command(tmp_path, dense_plan, faults, found):
    _, _, raw = measure(tmp_path, dense_plan, phase="prefill", faults=faults)
    assert rank_document(raw)["engine"]["scheduler"]["async_scheduling"] is found


def test_times_can_spread(tmp_path, dense_plan):
    ratios = {}
    for cv in ("0.001", "0.2"):
        folder = tmp_path / cv
        folder.mkdir()
        environment = {fake_launch.LAUNCH: "a"}
        plan, cell, raw = measure(folder, dense_plan, phase="decode", faults=f"--cv {cv}", environment=environment)
        ratios[cv] = validate_native(plan, cell, raw).wall_s
    spread = ratios["0.2"] / ratios["0.001"]
    assert spread.max() / spread.min() > 1.2
