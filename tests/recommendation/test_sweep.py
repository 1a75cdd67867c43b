"""A sweep from its plan to its files: the same result from every executor, after every interruption, from its parts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.recommendation.journal import read_journal
from fpmsdk.recommendation.merging import merged_journal
from fpmsdk.recommendation.run import Options, put_together
from fpmsdk.recommendation.shards import parse_shard
from tests.recommendation import made_up

OPTIONS = [
    Options(workers=1),
    Options(workers=4),
    Options(executor="processes", workers=1),
    Options(executor="processes", workers=3),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "output"
    return made_up.run(folder)


def test_a_sweep_ranks_what_is_feasible_and_writes_it(whole):
    assert (whole.exit_code, whole.end) == (0, "complete")
    assert whole.ledger["counts"]["feasible"] == 26
    assert whole.ledger["counts"]["infeasible"] == 4
    assert whole.best.score == pytest.approx(100 + 20 / 7)
    assert dict(whole.best.sample.knobs) == {"knobs.a": 4, "knobs.b": 20}
    assert json.loads((whole.output_dir / "recommendation.json").read_text()) == whole.ledger
    assert (whole.output_dir / "recommendations" / "0001.yaml").exists()
    assert len(read_journal(whole.output_dir / "candidates.jsonl").entries) == 30


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{options.executor}-{options.workers}")
def test_the_result_does_not_depend_on_the_executor(tmp_path, whole, options):
    found = made_up.run(tmp_path / "output", options=options)
    assert made_up.ledger(found) == made_up.ledger(whole)
    assert made_up.written(found.output_dir) == made_up.written(whole.output_dir)


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    found = made_up.run(None)
    assert made_up.ledger(found) == made_up.ledger(whole)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_without_a_feasible_candidate_has_exit_code_1_and_a_ledger(tmp_path):
    space = made_up.Space((made_up.branch({"knobs.a": {"choices": [6]}}),))
    found = made_up.run(tmp_path / "output", space=space)
    assert found.exit_code == 1
    assert (found.best, found.ledger["counts"]["infeasible"]) == (None, 3)
    assert (tmp_path / "output" / "recommendation.json").exists()


def test_a_sweep_of_which_a_candidate_uses_up_every_worker_has_exit_code_3_and_its_results(tmp_path):
    options = Options(executor="processes", workers=1)
    found = made_up.run(tmp_path / "output", options=options, happens={"dies_at": {"a": 2, "b": 10}})
    assert found.exit_code == 3
    limited = [candidate for candidate in found.result.candidates if candidate.outcome.status == "resource_limited"]
    assert {candidate.outcome.reason for candidate in limited} == {
        "its worker died 3 times (exit code 9, exit code 9, exit code 9), as it does when memory runs out"
    }
    assert [candidate.outcome.used_gpus for candidate in limited] == [1, 2]
    assert found.ledger["counts"]["feasible"] == 24


def test_a_worker_that_dies_in_the_middle_changes_nothing(tmp_path, whole):
    happens = {"dies_once_at": {"a": 3, "b": 20}, "mark": str(tmp_path / "died")}
    found = made_up.run(None, options=Options(executor="processes", workers=2), happens=happens)
    assert (tmp_path / "died").exists()
    scores = [(candidate.candidate_id, candidate.score) for candidate in found.result.order]
    assert scores == [(candidate.candidate_id, candidate.score) for candidate in whole.result.order]


def test_a_late_candidate_is_timed_out_and_tried_again_by_resume(tmp_path, whole):
    folder = tmp_path / "output"
    late = {"happens": {"hangs_at": {"a": 2, "b": 10}}, "candidate_timeout_seconds": 1.0}
    options = Options(executor="processes", workers=2)
    found = made_up.run(folder, options=options, **late)
    assert found.ledger["counts"]["timed_out"] == 2
    # The time that a candidate may take decides nothing else, so that more of it goes on with the same sweep.
    again = made_up.run(folder, options=Options(resume=True), candidate_timeout_seconds=60.0)
    assert [candidate.outcome for candidate in again.result.candidates] == [
        candidate.outcome for candidate in whole.result.candidates
    ]


# --- going on ---


@pytest.mark.parametrize("kept", [0, 1, 17, 29, 30])
@pytest.mark.parametrize("torn", [False, True])
def test_a_sweep_that_was_killed_at_any_candidate_goes_on(tmp_path, whole, kept, torn):
    folder = tmp_path / "output"
    folder.mkdir()
    lines = (whole.output_dir / "candidates.jsonl").read_bytes().splitlines(keepends=True)
    tail = lines[kept + 1][:9] if torn else b""
    (folder / "candidates.jsonl").write_bytes(b"".join(lines[: kept + 1]) + tail)
    log = tmp_path / "log"
    log.touch()
    found = made_up.run(folder, options=Options(resume=True), happens={"log": str(log)})
    assert len(log.read_text().splitlines()) == 30 - kept
    scores = [(candidate.candidate_id, candidate.score, candidate.outcome) for candidate in found.result.candidates]
    assert scores == [
        (candidate.candidate_id, candidate.score, candidate.outcome) for candidate in whole.result.candidates
    ]
    assert read_journal(folder / "candidates.jsonl").end == "complete"


def test_a_finished_sweep_is_written_again_from_its_journal(tmp_path, whole):
    folder = tmp_path / "output"
    made_up.run(folder)
    for name in ("recommendation.json", "recommendations/0001.yaml"):
        (folder / name).unlink()
    (folder / "recommendations" / "0099.yaml").write_text("stale")
    found = made_up.run(folder, options=Options(resume=True))
    assert made_up.ledger(found) == made_up.ledger(whole)
    assert made_up.written(folder) == made_up.written(whole.output_dir)


def test_a_sweep_that_ran_out_of_time_goes_on_with_more(tmp_path, whole):
    folder = tmp_path / "output"
    one = Options(workers=1)
    found = made_up.run(folder, options=one, happens={"seconds": 0.02}, time_budget_seconds=0.1)
    assert found.end == "time_budget"
    assert 0 < len(found.result.candidates) < 30
    again = made_up.run(folder, options=Options(resume=True), happens={"seconds": 0.02}, time_budget_seconds=60.0)
    assert again.end == "complete"
    assert [candidate.score for candidate in again.result.candidates] == [
        candidate.score for candidate in whole.result.candidates
    ]


OTHERS = [
    ({"seed": 1}, "config.optimizer.seed is absent there, 1 here"),
    ({"config": {"name": "other"}}, "config.name is made up there, other here"),
    ({"inputs": {"/trace.jsonl": "00ff"}}, "inputs./trace.jsonl is absent there, 00ff here"),
    ({"algorithm": "grid"}, "config.optimizer.algorithm is random there, grid here"),
    ({"shard": parse_shard("1/2")}, "shard is 1/1 there, 1/2 here"),
]


@pytest.mark.parametrize(("changed", "difference"), OTHERS)
def test_a_sweep_of_other_inputs_does_not_go_on(whole, changed, difference):
    before = made_up.written(whole.output_dir)
    with pytest.raises(OnboardError, match="is of another sweep: ") as caught:
        made_up.run(whole.output_dir, options=Options(resume=True), **changed)
    assert difference in str(caught.value)
    assert made_up.written(whole.output_dir) == before


def test_a_journal_of_other_candidates_is_refused(tmp_path):
    folder = tmp_path / "output"
    made_up.run(folder)
    path = folder / "candidates.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines[1:3]]
    entries[0]["fingerprint"], entries[1]["fingerprint"] = entries[1]["fingerprint"], entries[0]["fingerprint"]
    path.write_text(lines[0] + "".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(EvidenceError, match="of the journal is another one than this sweep suggests"):
        made_up.run(folder, options=Options(resume=True))


INTERRUPTED = """
import sys
from fpmsdk.recommendation.run import Options
from tests.recommendation import made_up
made_up.run(sys.argv[1], options=Options(executor=sys.argv[2], workers=2), happens={"seconds": 0.05})
"""


@pytest.mark.parametrize("executor", ["threads", "processes"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_was_stopped_in_the_middle_goes_on(tmp_path, whole, executor, how):
    folder = tmp_path / "output"
    running = subprocess.Popen([sys.executable, "-c", INTERRUPTED, folder, executor], stderr=subprocess.PIPE)
    while (
        not (folder / "candidates.jsonl").exists() or len((folder / "candidates.jsonl").read_bytes().splitlines()) < 6
    ):
        time.sleep(0.02)
        assert running.poll() is None
    os.kill(running.pid, how)
    running.communicate(timeout=30)
    assert running.returncode != 0
    kept = len(read_journal(folder / "candidates.jsonl").entries)
    assert 5 <= kept < 30
    found = made_up.run(folder, options=Options(resume=True), happens={"seconds": 0.05})
    assert [candidate.score for candidate in found.result.candidates] == [
        candidate.score for candidate in whole.result.candidates
    ]


# --- parts ---


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    for number in (1, 2, 3):
        made_up.run(folder / str(number), shard=parse_shard(f"{number}/3"))
    return folder


def test_the_parts_of_a_sweep_are_merged_into_what_one_would_have_found(tmp_path, parts, whole):
    journal = merged_journal([parts / "3", parts / "1", parts / "2"])
    found = put_together(made_up.plan(), journal, tmp_path / "output")
    assert made_up.ledger(found) == made_up.ledger(whole)
    assert made_up.written(found.output_dir) == made_up.written(whole.output_dir)
    assert found.exit_code == 0


def test_a_part_has_its_own_candidates_and_no_others(parts):
    indices = [sorted(read_journal(parts / str(number) / "candidates.jsonl").entries) for number in (1, 2, 3)]
    assert indices == [list(range(start, 30, 3)) for start in (0, 1, 2)]


def test_candidates_that_were_given_up_in_a_part_are_merged_as_they_are(tmp_path):
    for number in (1, 2):
        made_up.run(
            tmp_path / str(number),
            options=Options(executor="processes", workers=1),
            shard=parse_shard(f"{number}/2"),
            happens={"dies_at": {"a": 2, "b": 10}},
        )
    found = put_together(made_up.plan(), merged_journal([tmp_path / "1", tmp_path / "2"]), tmp_path / "merged")
    assert (found.exit_code, found.ledger["counts"]["resource_limited"]) == (3, 2)


def test_merging_needs_every_part(parts):
    with pytest.raises(OnboardError, match="part 2/3 is missing; run it, and name its directory"):
        merged_journal([parts / "1", parts / "3"])


def test_merging_takes_a_part_once(parts):
    with pytest.raises(OnboardError, match="is part 1/3, and so is .*; name each part once"):
        merged_journal([parts / "1", parts / "1"])


def test_merging_needs_finished_parts(tmp_path, parts):
    folder = tmp_path / "2"
    folder.mkdir()
    lines = (parts / "2" / "candidates.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "candidates.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(OnboardError, match=r"part 2/3 is not finished \(interrupted\); .* --shard 2/3 --resume"):
        merged_journal([parts / "1", folder, parts / "3"])


MIXED = [
    ({"seed": 7, "shard": parse_shard("2/3")}, "config.optimizer.seed is 7 there, absent here"),
    ({"inputs": {"/t": "00"}, "shard": parse_shard("2/3")}, "inputs./t is 00 there, absent here"),
    ({"shard": parse_shard("2/4")}, "parts is 4 there, 3 here"),
]


@pytest.mark.parametrize(("changed", "difference"), MIXED)
def test_parts_of_different_sweeps_are_not_merged(tmp_path, parts, changed, difference):
    made_up.run(tmp_path / "other", **changed)
    with pytest.raises(OnboardError) as caught:
        merged_journal([parts / "1", tmp_path / "other", parts / "3"])
    assert difference in str(caught.value)


def test_a_directory_without_a_journal_is_no_part(tmp_path, parts):
    with pytest.raises(EvidenceError, match="no journal; name the output directory of a part"):
        merged_journal([parts / "1", tmp_path])


def test_merging_nothing_is_refused():
    with pytest.raises(OnboardError, match="name the output directories of all parts"):
        merged_journal([])
