"""`collect-fpm --budget`, with the fake engine: rounds, when they end, and how they go on."""

import itertools
import json

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.run import run_collector
from fpmsdk.onboard.budget import run as budget_run
from fpmsdk.onboard.budget.grid import whole_grid
from fpmsdk.onboard.budget.holdout import coordinates, phase_points
from fpmsdk.onboard.budget.rounds import table_of
from tests.onboard.journey import FAKE, Journey

TRAFFIC = {
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 40, "output_tokens": 8},
        "load": {"type": "concurrency", "concurrency": 2},
        "stop": {"requests": 20},
    }
}


def call(*words):
    ran = CliRunner().invoke(app, ["onboard", *words])
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.fixture
def journey(tmp_path, monkeypatch):
    """A plan whose smoke run has passed."""
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(tmp_path / "installed-systems"))
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    found = Journey(tmp_path, call)
    found.review()
    found.plan()
    found.document(*words(found), "--execute", "--smoke")
    return found


def words(journey):
    return ("collect-fpm", "-c", journey.request, "--output-dir", journey.collection, *FAKE)


def collect(journey, *more, code=0):
    return journey.document(*words(journey), "--execute", "--budget", "5", *more, code=code)


def collected(journey):
    return journey.collection / "runtime-resolved"


def folder(journey):
    return collected(journey) / "budget"


def rows_of(place):
    cell = table_of(place)[1]
    return {phase: set(map(tuple, coordinates(phase_points(cell, phase)).tolist())) for phase in ("prefill", "decode")}


def test_the_grid_that_a_smoke_run_tells_is_what_a_full_collection_measures(journey):
    assert journey.document(*words(journey), "--execute")["collector_exit_status"] == 0
    found = collected(journey)
    plan = CollectionPlan.read(next(found.glob("fpm-artifacts/*/collection-plan.json")))
    grids = whole_grid(plan, found / "fpm-checkpoint")
    assert {phase: set(map(tuple, grid.tolist())) for phase, grid in grids.items()} == rows_of(found)


def test_it_ends_as_soon_as_the_holdout_is_predicted(journey):
    report = collect(journey, "--holdout-error", "0.5")
    assert (report["status"], len(report["rounds"])) == ("met", 1)
    assert report["measured_points"] < report["grid_points"] / 3
    assert report == json.loads((folder(journey) / "budget-report.json").read_text())
    assert report["next_points"] and report["next_points"][0]["expected_error"] > 0


def test_every_round_measures_what_the_last_one_did_and_more_and_never_the_holdout(journey):
    report = collect(journey, "--holdout-error", "0.0001")
    assert report["status"] == "complete" and len(report["rounds"]) > 2
    rounds = [rows_of(folder(journey) / f"round-{number:03d}") for number in range(len(report["rounds"]))]
    apart = {
        phase: {tuple(each["point"]) for each in report["predictions"] if each["phase"] == phase} for phase in rounds[0]
    }
    for phase, held in apart.items():
        assert held and held <= rounds[0][phase]
        rounds[0][phase] -= held
        for earlier, later in itertools.pairwise(rounds):
            assert earlier[phase] <= later[phase] and not held & later[phase]


def test_a_round_that_would_take_too_long_is_not_begun(journey, monkeypatch):
    monkeypatch.setattr(budget_run.Journal, "end", lambda self, _seconds: _end(self, 200.0))
    report = collect(journey, "--holdout-error", "0.0001", code=1)
    # Five minutes hold one round of 200 s, and no second one.
    assert (report["status"], len(report["rounds"])) == ("out_of_time", 1)


def _end(journal, seconds):
    journal.rounds[-1].seconds = seconds
    journal._write()


def test_an_interrupted_collection_goes_on_with_the_round_it_was_in(journey, monkeypatch):
    started = []

    def interrupted(options, plan):
        started.append(plan.benchmark_points["sha256"])
        if len(started) == 2:
            raise KeyboardInterrupt
        return run_collector(options, plan)

    monkeypatch.setattr(budget_run.collect_on_budget, "__kwdefaults__", {"run": interrupted})
    told = call(*map(str, words(journey)), "--execute", "--budget", "5", "--holdout-error", "0.0001")
    assert told[0] == 130 and "--resume" in told[2]
    points = json.loads((folder(journey) / "budget.json").read_text())["rounds"]
    assert [each["seconds"] is None for each in points] == [False, True]

    report = collect(journey, "--holdout-error", "0.0001", "--resume")
    assert report["status"] == "complete"
    assert len(set(started)) == len(started) - 1 and started[1] == started[2]
    assert len(started) == len(report["rounds"]) + 1


def test_a_collection_that_has_ended_is_told_again_without_a_launch(journey, monkeypatch):
    first = collect(journey)
    monkeypatch.setattr(budget_run.collect_on_budget, "__kwdefaults__", {"run": None})
    assert collect(journey, "--resume") == first


def test_points_that_the_traffic_needs_are_measured_first(journey):
    file = journey.place / "traffic.yaml"
    file.write_text(yaml.safe_dump(TRAFFIC))
    report = collect(journey, "--traffic", file, "--holdout-error", "0.0001")
    second = json.loads((folder(journey) / "budget.json").read_text())["rounds"][1]["points"]["decode"]
    first = json.loads((folder(journey) / "budget.json").read_text())["rounds"][0]["points"]["decode"]
    new = [row for row in second if row not in first]
    # Two requests of 40 to 48 tokens: passes of two with 80 to 96 tokens in the cache.
    assert [2, 0, 64] in new or [2, 0, 128] in new, new
    assert report["status"] == "complete"


@pytest.mark.parametrize(
    "more, text",
    [
        (["--budget", "0"], "--budget: expected more than 0 minutes, found 0"),
        (["--budget", "-1"], "--budget: expected more than 0 minutes, found -1"),
        (["--budget", "nan"], "--budget: expected more than 0 minutes, found nan"),
        (["--budget", "5", "--holdout-error", "10"], "--holdout-error: expected a fraction between 0 and 1"),
        (["--budget", "5", "--smoke"], "--budget: needs --execute, and none of --smoke"),
        (["--holdout-error", "0.1"], "belong to --budget MINUTES"),
        (["--traffic", "traffic.yaml"], "belong to --budget MINUTES"),
    ],
)
def test_options_that_make_no_sense_are_refused(journey, more, text):
    code, _, errors = call(*map(str, words(journey)), "--execute", *more)
    assert code == 2 and text in errors
    assert not folder(journey).exists()


def test_a_traffic_file_with_more_than_traffic_is_refused(journey):
    file = journey.place / "traffic.yaml"
    file.write_text(yaml.safe_dump(TRAFFIC | {"engine": {}}))
    code, _, errors = call(*map(str, words(journey)), "--execute", "--budget", "5", "--traffic", str(file))
    assert code == 2 and "expected the section traffic" in errors and not folder(journey).exists()


def test_another_traffic_does_not_go_on_with_a_collection(journey):
    file = journey.place / "traffic.yaml"
    file.write_text(yaml.safe_dump(TRAFFIC))
    collect(journey)
    again = (*map(str, words(journey)), "--execute", "--budget", "5")
    assert "go on with --resume" in call(*again)[2]
    code, _, errors = call(*again, "--resume", "--traffic", str(file))
    assert code == 2 and "began with other settings" in errors


def test_without_a_smoke_run_nothing_is_known_of_the_grid(journey):
    (collected(journey) / "fpm-checkpoint/fpm_forward_smoke.json").unlink()
    code, _, errors = call(*map(str, words(journey)), "--execute", "--budget", "5")
    assert code == 1 and "no smoke run of prefill that passed" in errors


def test_a_round_that_fails_is_run_again(journey, monkeypatch):
    monkeypatch.setenv("FPMSDK_FAKE_FAULTS", "--fail-at launch")
    code, _, errors = call(*map(str, words(journey)), "--execute", "--budget", "5")
    assert code == 1 and "round 0 failed, go on with --resume" in errors
    monkeypatch.delenv("FPMSDK_FAKE_FAULTS")
    assert collect(journey, "--resume")["status"] == "met"


def test_errors_of_a_phase_count_what_its_points_weigh():
    from fpmsdk.onboard.budget.holdout import Prediction, figures

    told = figures(
        [
            Prediction("decode", (1, 0, 8), 10.0, 11.0, 0.75),
            Prediction("decode", (1, 0, 16), 10.0, None, 0.25),
        ]
    )
    assert told["decode"]["weighted"] == pytest.approx(0.75 * 0.1 + 0.25)
    assert (told["decode"]["unanswered"], told["decode"]["points"]) == (1, 2)
    assert np.isclose(told["decode"]["bias"], 0.55)
