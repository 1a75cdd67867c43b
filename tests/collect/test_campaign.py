"""Campaigns: attempts, resume, recovery, publication, faults (collector.md sections 2 and 11)."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fpmsdk.collect import checkpoint as checkpoint_module
from fpmsdk.collect.__main__ import main
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.local_executor import LocalExecutor
from fpmsdk.errors import CollectionError, OnboardError
from tests.collect.conftest import LIMITS


def faulty(faults, phase=None):
    return lambda launch: FakeExecutor(launch, faults=faults if phase in (None, launch.cell.workload_kind) else "")


def statuses(document):
    """By cell, prefill first."""
    return [entry["status"] for entry in document["cells"].values()]


def test_a_campaign_measures_every_cell_and_publishes(run, small_plan, tmp_path):
    plan = small_plan()
    errors, document, outcome = run(plan)
    assert errors == []
    assert statuses(document) == ["passed", "passed"]
    database = document["database"]
    assert (database["status"], database["published_cells"], database["missing_cells"]) == ("passed", 2, [])
    rows = pq.read_table(database["parquet"])
    assert set(rows["cell_id"].to_pylist()) == {cell.cell_id for cell in plan.cells}
    assert rows.num_rows == database["row_count"] == sum(e["measured_point_count"] for e in document["cells"].values())
    prefill = document["cells"][plan.cells[0].cell_id]
    assert prefill["native_kv_seed_regime_counts"].keys() == {"not_applicable", "real_prefix"}
    root = outcome.campaign_root
    assert json.loads((root / "collection-plan.json").read_text()) == plan.document
    manifest = json.loads((root / "run-manifest.json").read_text())
    assert [attempt["status"] for attempt in manifest["attempts"]] == ["passed", "passed"]
    assert manifest["cells"].keys() == document["cells"].keys()
    folder = root / "cells" / plan.cells[0].cell_id
    assert {"cell.json", "run.sh", "fpm_env.sh", "k8s_deploy.yaml", "generator-request.json"} <= set(os.listdir(folder))


def test_a_smoke_run_measures_little_and_publishes_nothing(run, tmp_path):
    errors, document, outcome = run(smoke=True, limit=2)
    assert errors == []
    assert document["smoke"] == {
        "status": "passed",
        "cell_count": 2,
        "sampling_profile": "dynamo_native_minimal_axes",
        "formal_database_written": False,
    }
    assert outcome.checkpoint.name == "fpm_forward_smoke.json"
    assert outcome.campaign_root.name == "smoke"
    assert not (tmp_path / "data").exists()
    assert max(entry["measured_point_count"] for entry in document["cells"].values()) < 9


def test_a_smoke_run_takes_the_first_cell_by_default(run):
    assert len(run(smoke=True)[1]["cells"]) == 1


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ("--fail-at launch", "exit code 1"),
        ("--fail-at mid", "exit code 1"),
        ("--fail-at validate", "completed_points"),
        ("--partial", "status"),
        ("--rank-missing", "wrote no"),
    ],
)
def test_a_failed_cell_is_kept_and_the_others_run(run, faults, reason):
    errors, document, _ = run(executor=faulty(faults, "prefill"))
    assert errors == ["campaign_cell_failed"]
    assert statuses(document) == ["failed", "passed"]
    entry = next(iter(document["cells"].values()))
    assert reason in entry["error"]
    assert "database" not in document


def test_another_engine_version_than_observed_fails_and_leaves_its_provenance(run, small_plan):
    plan = small_plan("--fpm-runtime-backend-version", "0.27.0")
    errors, document, _ = run(plan, executor=faulty("--wrong-version"))
    assert errors == ["campaign_cell_failed"] * 2
    folder = Path(document["cells"][plan.cells[0].cell_id]["artifact_dir"])
    provenance = json.loads((folder / "raw/node0000/collector-provenance.json").read_text())
    assert provenance["runtime"]["backend_version"] == "0.0.0"


def test_what_cannot_be_cleaned_up_is_no_success(run):
    errors, document, _ = run(executor=faulty("--fail-at teardown", "prefill"))
    assert errors == ["resource_cleanup_failed"]
    entry = next(iter(document["cells"].values()))
    assert (entry["status"], "does not end" in entry["cleanup_error"]) == ("cleanup_failed", True)


@pytest.mark.parametrize(
    ("faults", "retry", "expected"),
    [
        ("--fail-at launch", False, ["failed", "passed"]),
        ("--fail-at launch", True, ["passed", "passed"]),
        ("--fail-at teardown", False, ["cleanup_failed", "passed"]),
    ],
)
def test_failed_cells_are_run_again_only_when_asked_for(run, faults, retry, expected):
    run(executor=faulty(faults, "prefill"))
    errors, document, _ = run(resume=True, retry_failed=retry)
    assert statuses(document) == expected
    assert errors == ([] if retry else ["campaign_incomplete"])


def test_passed_cells_are_not_run_again(run):
    _, before, _ = run(executor=faulty("--fail-at launch", "decode"))
    _, after, _ = run(resume=True, retry_failed=True)
    first, second = before["cells"]
    assert after["cells"][first]["attempt_id"] == before["cells"][first]["attempt_id"]
    assert after["cells"][second]["attempt_id"] != before["cells"][second]["attempt_id"]


def test_a_finished_campaign_has_nothing_to_do(run, tmp_path):
    _, before, _ = run()

    def refuse(launch):
        raise AssertionError("nothing may be launched")

    errors, after, _ = run(resume=True, executor=refuse)
    assert errors == []
    assert after["database"] == before["database"]


def test_a_changed_publication_is_written_anew(run):
    _, before, _ = run()
    Path(before["database"]["metadata"]).unlink()
    Path(before["database"]["parquet"]).unlink()
    errors, after, _ = run(resume=True)
    assert errors == []
    assert after["database"]["cell_rows"] == before["database"]["cell_rows"]


def test_passed_cells_can_be_published_without_the_others(run, small_plan):
    plan = small_plan()
    errors, document, _ = run(plan, executor=faulty("--fail-at launch", "decode"), publish_partial=True)
    assert errors == ["campaign_cell_failed", "campaign_incomplete"]
    assert document["database"]["missing_cells"] == [plan.cells[1].cell_id]
    assert set(pq.read_table(document["database"]["parquet"])["cell_id"].to_pylist()) == {plan.cells[0].cell_id}


def test_nothing_is_published_when_that_is_asked_for(run, tmp_path):
    errors, document, _ = run(publish=False)
    assert (errors, "database" in document, (tmp_path / "data").exists()) == ([], False, False)


def test_complete_results_of_a_failed_attempt_are_taken_over(run, small_plan):
    plan = small_plan()

    class FailsLate(FakeExecutor):
        def collect(self, units, *, require_benchmark=True):
            if require_benchmark:
                raise CollectionError("the copy was interrupted")

    _, before, _ = run(plan, executor=FailsLate)
    assert statuses(before) == ["failed", "failed"]
    errors, after, _ = run(plan, resume=True)
    assert errors == []
    entry = after["cells"][plan.cells[0].cell_id]
    assert entry["attempt_id"] == before["cells"][plan.cells[0].cell_id]["attempt_id"]
    recovery = entry["artifact_recovery"]
    assert (recovery["original_status"], recovery["error"]) == ("failed", "the copy was interrupted")
    assert entry["measured_point_count"] > 0
    assert "error" not in entry


def test_results_of_another_attempt_are_not_taken_over(run, small_plan):
    plan = small_plan()
    _, document, outcome = run(plan, executor=faulty("--fail-at launch"))
    run_elsewhere = next(iter(document["cells"].values()))
    run_elsewhere["attempt_id"] = "another"
    outcome.checkpoint.write_text(json.dumps(document))
    errors, after, _ = run(plan, resume=True)
    assert statuses(after) == ["failed", "failed"]
    assert errors == ["campaign_incomplete"]


def test_ctrl_c_salvages_cleans_up_and_is_told_to_resume(run, small_plan):
    plan = small_plan()
    calls = []

    class Interrupted(FakeExecutor):
        def execute(self, units, timeout_seconds=0):
            super().execute(units)
            raise KeyboardInterrupt

        def cleanup(self):
            calls.append("cleanup")
            super().cleanup()

    with pytest.raises(KeyboardInterrupt):
        run(plan, executor=Interrupted)
    assert calls == ["cleanup", "cleanup"]
    # The attempt was complete: it is taken over, and only the other cell runs.
    errors, document, _ = run(plan, resume=True)
    assert errors == []
    first, second = document["cells"].values()
    assert first["artifact_recovery"]["original_status"] == "interrupted"
    assert "artifact_recovery" not in second


def test_two_processes_cannot_have_one_campaign(run, small_plan, tmp_path):
    plan = small_plan()

    def nested(launch):
        with pytest.raises(OnboardError, match="another process works on this checkpoint"):
            run(plan)
        return FakeExecutor(launch)

    assert run(plan, executor=nested)[0] == []


def test_a_checkpoint_of_another_plan_is_not_continued(run, small_plan):
    run()
    with pytest.raises(OnboardError, match="does not match the current frozen plan"):
        run(small_plan("--fpm-max-model-len", "512"), resume=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"limit": 1}, "for a smoke run alone"),
        ({"limit": 0, "smoke": True}, "a positive number"),
        ({"retry_failed": True}, "needs resume"),
    ],
)
def test_contradicting_arguments_are_refused(run, options, reason):
    with pytest.raises(OnboardError, match=reason):
        run(**options)


def test_explicit_points_are_measured_and_receipted(run, small_plan, tmp_path):
    points = {
        "schema_version": 1,
        "prefill": [{"batch_size": 2, "total_prefill_tokens": 16, "total_kv_read_tokens": 32}],
        "decode": [{"batch_size": 2, "total_kv_read_tokens": 64}],
    }
    (tmp_path / "points.json").write_text(json.dumps(points))
    plan = small_plan("--fpm-benchmark-points-file", str(tmp_path / "points.json"))
    errors, document, outcome = run(plan)
    assert errors == []
    assert [entry["requested_point_count"] for entry in document["cells"].values()] == [1, 1]
    receipt = outcome.campaign_root / "cells" / plan.cells[0].cell_id / "raw/node0000/point_manifest_receipt.json"
    assert json.loads(receipt.read_text())["phase"] == "after"
    receipt.write_text(json.dumps({**json.loads(receipt.read_text()), "phase": "before"}))
    del document["database"]
    outcome.checkpoint.write_text(json.dumps(document))
    with pytest.raises(CollectionError, match="expected the receipt"):
        run(plan, resume=True)


@pytest.mark.parametrize("written", range(1, 5))
def test_a_full_disk_leaves_a_state_that_resumes(run, small_plan, monkeypatch, written):
    plan = small_plan()
    real, count = checkpoint_module.write_document, []

    def full(path, value):
        count.append(path)
        if len(count) > written:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, value)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_module, "write_document", full)
        with pytest.raises(OSError, match="No space left"):
            run(plan)
    errors, document, _ = run(plan, resume=True)
    assert errors == []
    assert statuses(document) == ["passed", "passed"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from fpmsdk.collect.__main__ import main
from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.plan import CollectionPlan

folder, plan = Path({folder!r}), CollectionPlan.read({plan!r})

class Killed(FakeExecutor):
    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name == {step!r} and self._launch.cell.workload_kind == "decode":
            def killing(*arguments, **options):
                if {after!r}:
                    method(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return killing
        return method

run_campaign(plan, executor=Killed, artifact_root=folder / "artifacts", checkpoint_dir=folder / "checkpoint",
             database_root=folder / "data")
"""


@pytest.mark.parametrize(
    ("step", "after", "takes_over"),
    [
        ("cleanup", False, False),
        ("apply", True, False),
        ("wait_ready", True, False),
        ("stage", True, False),
        ("prepare_attempt", True, False),
        ("execute", False, False),
        ("execute", True, True),
        ("collect", True, True),
    ],
)
def test_a_kill_at_any_step_loses_nothing(run, small_plan, tmp_path, step, after, takes_over):
    plan = small_plan()
    (tmp_path / "plan.json").write_text(json.dumps(plan.document))
    script = KILLED.format(
        root=str(Path(__file__).parents[2]),
        folder=str(tmp_path),
        plan=str(tmp_path / "plan.json"),
        step=step,
        after=after,
    )
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed = json.loads((tmp_path / "checkpoint" / "fpm_forward.json").read_text())
    assert [killed["cells"][cell.cell_id]["status"] for cell in plan.cells] == ["passed", "running"]
    errors, document, _ = run(plan, resume=True)
    assert errors == []
    assert statuses(document) == ["passed", "passed"]
    first, second = plan.cells
    kept = document["cells"][first.cell_id]["attempt_id"]
    assert kept == killed["cells"][first.cell_id]["attempt_id"]
    assert ("artifact_recovery" in document["cells"][second.cell_id]) is takes_over
    assert document["database"]["published_cells"] == 2


def test_a_process_of_this_machine_measures_as_well(run, small_plan):
    plan = small_plan()
    errors, _, outcome = run(plan, executor=LocalExecutor)
    assert errors == []
    folder = outcome.campaign_root / "cells" / plan.cells[0].cell_id
    assert (folder / "logs" / "node0000.run.stderr.log").exists()
    assert not (folder / "local-owner.json").exists()


def test_an_engine_that_hangs_is_ended(tmp_path, small_plan, run):
    plan = small_plan()

    class Impatient(LocalExecutor):
        def __init__(self, launch):
            super().__init__(launch, faults="--hang", grace_s=5.0)

        def execute(self, units, timeout_seconds=0):
            super().execute(units, timeout_seconds=0.8)

    errors, document, _ = run(plan, executor=Impatient)
    assert errors == ["campaign_cell_failed"] * 2
    assert "exit code 124" in next(iter(document["cells"].values()))["error"]


def test_only_processes_with_the_token_of_the_cell_are_ended(tmp_path, small_plan, run):
    from fpmsdk.collect.local_process import TOKEN, OwnedProcess

    owner = OwnedProcess(tmp_path / "owner.json", grace_s=5.0)
    owner.claim()
    token = json.loads((tmp_path / "owner.json").read_text())["token"]
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(sleeper, env={**os.environ, TOKEN: token})
    other = subprocess.Popen(sleeper, env={**os.environ, TOKEN: "another"})
    try:
        # Wait until the environments are in place.
        while any(TOKEN.encode() not in Path(f"/proc/{p.pid}/environ").read_bytes() for p in (ours, other)):
            pass
        OwnedProcess(tmp_path / "owner.json", grace_s=5.0).end()
        assert ours.wait(5) == -signal.SIGTERM
        assert other.poll() is None
        assert not (tmp_path / "owner.json").exists()
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def raw_file(outcome, plan):
    return outcome.campaign_root / "cells" / plan.cells[0].cell_id / "raw/node0000/benchmark.json"


def linked(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def swapped(path):
    decode = next(other for other in path.parents[3].iterdir() if other != path.parents[2])
    path.write_bytes((decode / "raw/node0000/benchmark.json").read_bytes())


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (linked, "symbolic link"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "JSON"),
        (swapped, "config.mode"),
        (lambda path: path.unlink(), "wrote no results"),
    ],
)
def test_changed_results_are_not_published(run, small_plan, tamper, reason):
    plan = small_plan()
    _, _, outcome = run(plan, publish=False)
    tamper(raw_file(outcome, plan))
    errors, document, _ = run(plan, resume=True)
    assert errors == ["formal_database_failed"]
    assert reason in document["database"]["error"]
    # The results can be restored, or the cell be measured again; nothing else is lost.
    assert statuses(document) == ["passed", "passed"]


@pytest.mark.parametrize("tamper", [linked, swapped])
def test_changed_results_are_not_taken_over(run, small_plan, tamper):
    plan = small_plan()

    class FailsLate(FakeExecutor):
        def collect(self, units, *, require_benchmark=True):
            if require_benchmark:
                raise CollectionError("the copy was interrupted")

    _, _, outcome = run(plan, executor=FailsLate)
    tamper(raw_file(outcome, plan))
    _, document, _ = run(plan, resume=True)
    assert statuses(document) == ["failed", "passed"]


def child(tmp_path, plan, faults):
    """Another process that runs the campaign."""
    (tmp_path / "plan.json").write_text(json.dumps(plan.document))
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from pathlib import Path
        from fpmsdk.collect.campaign import run_campaign
        from fpmsdk.collect.local_executor import LocalExecutor
        from fpmsdk.collect.plan import CollectionPlan
        folder = Path({str(tmp_path)!r})
        run_campaign(CollectionPlan.read(folder / "plan.json"),
                     executor=lambda cell: LocalExecutor(cell, faults={faults!r}),
                     artifact_root=folder / "artifacts", checkpoint_dir=folder / "checkpoint",
                     database_root=folder / "data")
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def engine_of(tmp_path):
    """The number of the running engine, once it is known."""
    for record in tmp_path.glob("artifacts/*/cells/*/local-owner.json"):
        return json.loads(record.read_text())["pid"]
    return None


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_engine_of_a_killed_campaign_is_ended_by_the_one_that_resumes(run, small_plan, tmp_path):
    plan = small_plan()
    process = child(tmp_path, plan, "--hang")
    wait_for(lambda: engine_of(tmp_path))
    engine = engine_of(tmp_path)
    process.kill()
    process.communicate()
    errors, document, _ = run(plan, executor=LocalExecutor, resume=True)
    assert not is_alive(engine)
    assert (errors, statuses(document)) == ([], ["passed", "passed"])


def test_sigterm_ends_a_campaign_as_ctrl_c_does(run, small_plan, tmp_path):
    plan = small_plan()
    process = child(tmp_path, plan, "--hang")
    wait_for(lambda: engine_of(tmp_path))
    engine = engine_of(tmp_path)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    assert not is_alive(engine)
    document = json.loads((tmp_path / "checkpoint" / "fpm_forward.json").read_text())
    assert statuses(document) == ["interrupted"]
    assert run(plan, resume=True)[0] == []


def test_the_command_line_runs_a_campaign_and_tells_its_errors(small_plan, tmp_path, monkeypatch, capsys):
    small_plan()  # the environment of the plans
    monkeypatch.chdir(tmp_path)
    words = ["--model-path", "example/dense", "--gpu", "tiny_gpu", "--fpm-model-config", "config.json", *LIMITS]
    words += ["--fpm-max-gpus", "1", "--fpm-backend-version", "0.27.0", "--fpm-executor"]
    assert main([*words, "kubernetes", "--plan-only"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["executor"] == "kubernetes"
    assert main([*words, "kubernetes"]) == 2
    assert "plans and renders its cells but does not run them" in capsys.readouterr().err
    assert main([*words, "fake", "--fpm-database-root", "data"]) == 0
    monkeypatch.setenv("FPMSDK_FAKE_FAULTS", "--fail-at launch")
    assert main([*words, "fake", "--checkpoint-dir", "other", "--fpm-database-root", "data"]) == 1
    found = json.loads(capsys.readouterr().err)
    assert [error["classification"] for error in found] == ["campaign_cell_failed"] * 2
    assert main(["--gpu", "tiny_gpu"]) == 2
