"""From a search that misses measurements to a campaign, and back to the same search, which then is covered."""

import json
import shlex
from pathlib import Path

import pytest

from fpmsdk.collect.__main__ import main as collect
from fpmsdk.collect.points import read_points
from fpmsdk.perfmodel.stand_in import MissingPoint
from fpmsdk.prediction import PredictConfig, predict
from fpmsdk.recommendation.candidate import Candidate, Outcome, Sample
from fpmsdk.recommendation.collect_plan import write_collect_plan
from fpmsdk.recommendation.missing import missing_points
from fpmsdk.recommendation.plan_files import remove_collect_plan
from fpmsdk.recommendation.uncovered import write_uncovered
from tests.recommendation.measured import MEASURED, candidate, measured_in


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    measured_in(folder)
    return folder


def search(place, **engine):
    return [(f"candidate-{n:06d}", candidate(place, n, **engine)) for n in (1, 2)]


@pytest.fixture
def planned(place, tmp_path):
    return write_collect_plan(missing_points(search(place)), tmp_path)


def test_all_missing_points_are_met_and_not_the_first_alone(place):
    missing = missing_points(search(place)[:1])
    (cell,) = missing.cells
    # Four requests, one at a time: a prompt of 40 tokens, and a decode step for each of two further tokens.
    assert {tuple(point): occurrences for point, occurrences in cell.points.items()} == {
        ("prefill", 1, 40, 0): 4,
        ("decode", 1, 0, 40): 4,
        ("decode", 1, 0, 41): 4,
    }
    assert missing.stopped == {}


def test_the_plan_names_who_misses_what_and_how_often(planned):
    (campaign,) = planned["campaigns"]
    assert campaign["candidate_ids"] == ["candidate-000001", "candidate-000002"]
    assert campaign["measured_before"] == 6
    counts = [point["occurrences"] for point in campaign["missing"]]
    assert counts == sorted(counts, reverse=True)
    assert "made up" in planned["stand_in"]


def test_the_list_holds_the_points_of_the_table_and_the_missing_ones(planned, tmp_path):
    (campaign,) = planned["campaigns"]
    payload = read_points(tmp_path / campaign["points_file"])["payload"]
    assert [point for point in payload["prefill"] if point in MEASURED["prefill"]] == MEASURED["prefill"]
    assert len(payload["prefill"]) == 3 + sum(point["phase"] == "prefill" for point in campaign["missing"])
    assert [point for point in payload["decode"] if point in MEASURED["decode"]] == MEASURED["decode"]
    assert len(payload["decode"]) == 3 + sum(point["phase"] == "decode" for point in campaign["missing"])


def test_what_the_plan_collects_covers_the_same_search(place, planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (campaign,) = planned["campaigns"]
    before = predict(PredictConfig.model_validate(candidate(place, 2)), tmp_path / "before")
    assert before.exit_code == 4
    env, variable, python, module_flag, module, *words = shlex.split(campaign["command"])
    assert (env, python, module_flag, module) == ("env", "python", "-m", "fpmsdk.collect")
    monkeypatch.setenv(*variable.split("="))
    assert collect([*words, "--fpm-executor", "fake"]) == 0
    roots = [str(Path(path).absolute()) for path in campaign["systems_paths"]]
    assert missing_points(search(place, systems_paths=roots)).cells == ()
    after = predict(PredictConfig.model_validate(candidate(place, 2, systems_paths=roots)), tmp_path / "after")
    assert (after.exit_code, after.coverage["status"]) == (0, "covered")


def test_an_earlier_plan_is_removed_and_what_was_collected_stays(planned, tmp_path):
    remove_collect_plan(tmp_path)
    (left,) = (tmp_path / "missing-points").iterdir()
    assert tmp_path / planned["campaigns"][0]["systems_paths"][0] == left / "systems"
    assert not (tmp_path / "missing-points.json").exists()


def test_another_plan_in_the_same_folder_collects_beside_the_first(place, planned, tmp_path):
    again = write_collect_plan(missing_points(search(place)), tmp_path)
    assert again == planned
    other = write_collect_plan(missing_points(search(place)[:1]), tmp_path)
    first, second = (shlex.split(plan["campaigns"][0]["command"]) for plan in (planned, other))
    for option in ("--checkpoint-dir", "--fpm-artifact-root", "--fpm-database-root"):
        assert first[first.index(option) + 1] != second[second.index(option) + 1]


def test_a_covered_search_has_a_plan_without_campaigns(place, tmp_path):
    short = candidate(place, 1)
    short["traffic"]["source"] |= {"input_tokens": 16, "output_tokens": 2}
    assert write_collect_plan(missing_points([("candidate-000001", short)]), tmp_path)["campaigns"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["missing-points.json"]


def test_a_deployment_that_cannot_be_replayed_is_named_in_one_line(place):
    document = candidate(place, 1)
    document["engine"]["workers"]["aggregated"]["parallelism"] = {"tensor": 3}
    missing = missing_points([("candidate-000001", document), *search(place)[1:]])
    assert list(missing.stopped) == ["candidate-000001"]
    assert "\n" not in missing.stopped["candidate-000001"]
    assert [cell.candidate_ids for cell in missing.cells] == [["candidate-000002"]]


def test_cached_tokens_that_are_fewer_than_the_requests_are_told_by_request(place, tmp_path):
    missing = missing_points(search(place))
    missing.cells[0].points[MissingPoint("prefill", 3, 8, 2)] += 1
    (campaign,) = write_collect_plan(missing, tmp_path)["campaigns"]
    payload = read_points(tmp_path / campaign["points_file"])["payload"]
    assert payload["schema_version"] == 3
    (point,) = [point for point in payload["prefill"] if "rows" in point]
    assert point["rows"] == [[3, 1], [3, 1], [2, 0]]


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"tp": "2", "dp": "2", "moe_ep": "4"}, "none of the collected layouts"),
        ({"pp": "2"}, "pp and cp above 1 are not collected"),
    ],
)
def test_a_layout_that_is_not_collected_has_its_points_and_the_reason(place, tmp_path, sizes, reason):
    missing = missing_points(search(place))
    cell = missing.cells[0]
    cell.cell = cell.cell._replace(identity=dict(cell.cell.identity) | sizes)
    (campaign,) = write_collect_plan(missing, tmp_path)["campaigns"]
    assert campaign["command"] is None and reason in campaign["not_collected"]
    assert read_points(tmp_path / campaign["points_file"])["payload"]["prefill"]


@pytest.mark.parametrize(
    "sizes, preset, gpus",
    [
        ({"tp": "4"}, "tp", "4"),
        ({"tp": "2", "moe_ep": "2"}, "tep", "2"),
        ({"dp": "8", "moe_ep": "8"}, "dep", "8"),
        ({"tp": "2", "moe_tp": "2"}, "pure_tp", "2"),
    ],
)
def test_a_layout_is_collected_by_its_preset_on_as_many_gpus(place, tmp_path, sizes, preset, gpus):
    missing = missing_points(search(place))
    cell = missing.cells[0]
    cell.cell = cell.cell._replace(identity=dict(cell.cell.identity) | sizes)
    (campaign,) = write_collect_plan(missing, tmp_path)["campaigns"]
    words = shlex.split(campaign["command"])
    assert words[words.index("--fpm-parallel-presets") + 1] == preset
    assert words[words.index("--fpm-max-gpus") + 1] == words[words.index("--fpm-gpu-counts") + 1] == gpus
    # No deployment of the profile has these sizes: the points say how much a pass holds.
    assert words[words.index("--fpm-max-num-batched-tokens") + 1] == "64"
    assert words[words.index("--fpm-max-num-seqs") + 1] == "2"


def test_a_worker_that_needs_no_table_misses_nothing(place):
    document = candidate(place, 1)
    engine = document["engine"]
    for name in ("fpm_profile", "estimator_config", "estimation_mode", "systems_paths"):
        del engine[name]
    engine["workers"]["aggregated"]["timing"] = {"type": "fixed", "prefill_ms": 3.0, "decode_ms": 1.0}
    missing = missing_points([("candidate-000001", document)])
    assert (missing.cells, missing.stopped) == ((), {})


@pytest.mark.parametrize(
    "on_uncovered, files",
    [
        ("skip", ["fpm-coverage.json"]),
        ("stop", ["fpm-coverage.json"]),
        ("collect-plan", ["fpm-coverage.json", "missing-points", "missing-points.json"]),
    ],
)
def test_a_search_leaves_these_files_where_it_was_not_covered(place, tmp_path, on_uncovered, files):
    coverage = predict(PredictConfig.model_validate(candidate(place, 1)), tmp_path / "prediction").coverage
    outcome = Outcome("uncovered", "fpm_uncovered", "why", coverage=dict(coverage))
    found = Candidate("candidate-000001", Sample("aggregated", "vllm", 0), candidate(place, 1), outcome)
    (tmp_path / "out").mkdir()
    write_uncovered([found], tmp_path / "out", on_uncovered)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    written = json.loads((tmp_path / "out/fpm-coverage.json").read_text())
    # The prediction ended at the first miss, a plan has all of them.
    (gap,) = written["roles"][0]["coverage"]["gaps"]
    assert gap["candidate_ids"] == ["candidate-000001"]
    if "missing-points" in files:
        plan = json.loads((tmp_path / "out/missing-points.json").read_text())
        assert len(plan["campaigns"][0]["missing"]) == 3
