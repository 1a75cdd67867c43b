"""`fpmsdk onboard checkpoint`, `resume`, `probe-runtime` and `import-observations`: output, exit codes, refusals.

Source: onboarding-transcripts.md section 3 and section 4 #26-28.
"""

import json

import pytest
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from tests.onboard.observed_sessions import EXAMPLE, Session
from tests.onboard.sessions import SESSION, write_files


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, ["onboard", *map(str, arguments)], input=stdin)


@pytest.fixture
def file(tmp_path):
    write_files(tmp_path)
    return tmp_path / "session.json"


def saved(file, patch=SESSION, *options):
    return run("checkpoint", "--file", file, "--update", "-", *options, stdin=json.dumps(patch))


def test_a_save_prints_one_line_of_json(file):
    done = saved(file)
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 1
    report = json.loads(done.stdout)
    assert set(report) == {
        "archived_artifacts",
        "checkpoint",
        "configurations",
        "integrity_issues",
        "saved",
        "state",
        "verification",
    }
    assert (report["saved"], report["state"]["revision"], len(report["state"])) == (True, 1, 10)
    assert report["configurations"]["dep"] == {
        "effective_status": "draft",
        "next_action": "Go on with the investigation, then review the profile.",
        "profile_accepted": False,
        "reported_progress": {"blockers": [], "next_action": None, "stage": 3, "status": "in_progress"},
    }


def test_the_steps_of_a_session(file):
    saved(file)
    again = saved(file)
    assert (again.exit_code, "--expect-revision 1" in again.stderr) == (2, True)
    accepted = run("checkpoint", "--file", file, "--expect-revision", 1, "--accept-profile", "tp2")
    report = json.loads(accepted.stdout)
    assert (accepted.exit_code, report["state"]["revision"]) == (0, 2)
    assert report["configurations"]["tp2"]["effective_status"] == "accepted"
    refused = run("checkpoint", "--file", file, "--expect-revision", 2, "--accept-profile", "dep")
    assert (refused.exit_code, "identity: Field required" in refused.stderr) == (2, True)
    resumed = run("resume", "--checkpoint", file)
    assert resumed.exit_code == 0
    assert json.loads(resumed.stdout) == {**report, "saved": False}


def test_a_broken_file_makes_both_commands_exit_with_2_though_the_save_succeeded(file):
    saved(file)
    (file.parent / "config.json").write_text("changed")
    done = saved(file, {"research": {"n": 1}}, "--expect-revision", 1)
    assert (done.exit_code, json.loads(done.stdout)["saved"]) == (2, True)
    assert run("resume", "--checkpoint", file).exit_code == 2


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ('{"a": 1, "a": 2}', "duplicate field `a`"),
        ('{"research": {"n": NaN}}', "NaN is not a JSON number"),
        ('{"revision": 2}', "revision: is kept by the checkpoint itself"),
        ("", "invalid JSON"),
        ("[]", "expected a JSON object, found list"),
    ],
)
def test_an_update_that_is_no_patch_is_refused(file, stdin, message):
    done = run("checkpoint", "--file", file, "--update", "-", stdin=stdin)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not file.exists()


def test_an_update_is_read_from_its_file_and_not_from_the_session(file):
    saved(file)
    (file.parent / "update.json").write_text('{"research": {"n": 1}}')
    done = run("checkpoint", "--file", file, "--update", file.parent / "update.json", "--expect-revision", 1)
    assert (done.exit_code, json.loads(done.stdout)["state"]["research"]) == (0, {"n": 1})
    for own in (file, file.with_name(".session.json.lock")):
        done = run("checkpoint", "--file", file, "--update", own, "--expect-revision", 2)
        assert (done.exit_code, "is the checkpoint or its lock" in done.stderr) == (2, True)


def test_a_session_that_is_not_there_is_named(file):
    done = run("resume", "--checkpoint", file)
    assert (done.exit_code, "there is no checkpoint" in done.stderr) == (2, True)


# --- probes and imports ---


@pytest.fixture
def session(tmp_path, monkeypatch):
    made = Session(
        tmp_path,
        {"tp1": {"draft_request": EXAMPLE}, "role": {"draft_request": {**EXAMPLE, "worker_type": "decode"}}},
        inputs={"collection_deployment": {}},
    )
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(made.systems))
    return made


def probe(session, *options, output="probe"):
    done = run("probe-runtime", "--checkpoint", session.path, "--output-dir", session.folder / output, *options)
    return done.exit_code, json.loads(done.stdout) if done.stdout else done.stderr


def test_a_probe_without_an_image_is_noted_and_fails(session):
    code, result = probe(session)
    assert (code, result["status"], result["revision"]) == (1, "failed", 2)
    assert {found["status"] for found in result["configurations"].values()} == {"incomplete"}
    assert list((session.folder / "probe").glob("onboarding-probe-*.json"))


def test_a_preview_of_one_configuration_notes_its_deployment(session):
    options = ("--executor", "slurm", "--image", "I", "--configuration", "role", "--instrumentation", session.bundle)
    code, result = probe(session, *options)
    assert (code, result["status"], list(result["configurations"])) == (0, "preview", ["role"])
    deployment = session.state.configurations["role"].inputs["collection_deployment"]
    assert (deployment["cpus_per_task"], deployment["cpu_bind"]) == (16, "cores")
    assert session.state.configurations["tp1"].inputs == {}


@pytest.mark.parametrize(
    ("options", "output", "message"),
    [
        (("--configuration", "other"), "probe", "unknown are other"),
        ((), ".", "holds the session"),
        (("--image", "I", "--cpus-per-task", "4"), "probe", "does not take --cpus-per-task"),
        (("--image", "I", "--instrumentation", "manifest.json"), "probe", "manifest.json"),
    ],
)
def test_a_bad_probe_exits_with_2_and_changes_nothing(session, options, output, message):
    code, told = probe(session, *options, output=output)
    assert (code, message in told) == (2, True), told
    assert session.state.revision == 1


def test_a_probe_that_ran_is_imported(session):
    options = ("--executor", "fake", "--image", "I", "--instrumentation", session.bundle, "--execute")
    code, result = probe(session, *options)
    assert (code, result["status"]) == (0, "completed")
    command = ("import-observations", "--checkpoint", session.path, "--observations", result["observations_path"])
    done = run(*command, "--output-dir", session.folder / "drafts")
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (0, "complete")
    again = run(*command, "--output-dir", session.folder / "drafts")
    assert (again.exit_code, "does not exist yet" in again.stderr) == (2, True)
    (session.folder / "probe" / "observations.json").write_text("not json")
    done = run(*command, "--output-dir", session.folder / "more")
    assert (done.exit_code, "invalid JSON" in done.stderr) == (2, True)


def test_an_incomplete_import_exits_with_1(session):
    options = ("--executor", "fake", "--image", "I", "--instrumentation", session.bundle, "--execute")
    _, result = probe(session, *options, "--configuration", "tp1")
    done = run(
        "import-observations",
        *("--checkpoint", session.path, "--observations", result["observations_path"]),
        *("--output-dir", session.folder / "drafts", "--configuration", "role"),
    )
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (1, "incomplete")


def test_an_interrupted_probe_exits_with_130_and_the_session_stays(session, monkeypatch):
    def interrupted(executor, units, timeout_seconds=0.0):
        raise KeyboardInterrupt

    monkeypatch.setattr("fpmsdk.collect.fake_executor.FakeExecutor.execute", interrupted)
    options = ("--executor", "fake", "--image", "I", "--instrumentation", session.bundle, "--execute")
    code, told = probe(session, *options)
    assert (code, "--resume" in told, session.state.revision) == (130, True, 1)
    monkeypatch.undo()
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(session.systems))
    code, result = probe(session, *options, "--resume")
    assert (code, result["status"]) == (0, "completed")
