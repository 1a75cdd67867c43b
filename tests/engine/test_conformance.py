"""The compiled rank decides as real vLLM did, and the command says so."""

import json
from pathlib import Path

import pytest

from fpmsdk.engine.conformance import main, scenario_differences, vllm_version
from fpmsdk.engine.recordings import read_recording
from tests import vectors
from tests.vectors import load_vectors

VECTORS = Path(vectors.__file__).parent

RECORDINGS = [
    "vllm_scheduler_0.27",
    "vllm_scheduler_0.28",
    "vllm_scheduler_0.32",
    "vllm_hybrid_kv_0.28",
    "vllm_hybrid_kv_0.32",
    "vllm_mixed_0.28",
    "vllm_mixed_0.32",
]


@pytest.mark.parametrize(
    ("recording", "scenario"),
    [(name, scenario["name"]) for name in RECORDINGS for scenario in load_vectors(name)["scenarios"]],
)
def test_every_recorded_decision_is_reproduced(recording, scenario):
    document = read_recording(VECTORS / f"{recording}.json.gz")
    recorded = next(entry for entry in document["scenarios"] if entry["name"] == scenario)
    assert scenario_differences(recorded, vllm_version(document)) == []


def test_the_long_prefill_rule_belongs_to_the_version():
    recorded = load_vectors("vllm_scheduler_0.28")["scenarios"][0]
    differences = scenario_differences(recorded, (0, 32))
    assert "step 0 tokens: recorded {'r000': 64}, simulated {'r000': 212}" in differences


def test_a_rank_that_stops_early_or_goes_on_differs():
    recorded = load_vectors("vllm_scheduler_0.28")["scenarios"][0]
    for steps, difference in (
        (recorded["steps"][:-1], "73 steps recorded, more simulated"),
        ([*recorded["steps"], recorded["steps"][-1]], "75 steps recorded, fewer simulated"),
    ):
        assert scenario_differences(recorded | {"steps": steps}, (0, 28)) == [difference]


@pytest.fixture
def write(tmp_path):
    def write_document(document):
        path = tmp_path / "recording.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return str(path)

    return write_document


def test_the_command_counts_scenarios_steps_and_differences(write, capsys):
    recording = load_vectors("vllm_scheduler_0.28")
    assert main([write(recording)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "long_prefill_v: 74 steps, 0 differences",
        "scenarios 1, steps 74, differences 0",
    ]


def test_the_command_shows_what_differs_and_fails(write, capsys):
    recording = json.loads(json.dumps(load_vectors("vllm_scheduler_0.28")))
    recording["scenarios"][0]["steps"][3]["free_blocks"] -= 1
    assert main([write(recording)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "long_prefill_v: step 3: 191 blocks are free, simulated 192",
        "long_prefill_v: 74 steps, 1 differences",
        "scenarios 1, steps 74, differences 1",
    ]


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ("not json", "Expecting value"),
        ({"note": "Decisions of some engine", "scenarios": []}, "does not name the vLLM version"),
        ({"note": "vLLM 0.32.0"}, "field `scenarios` is missing"),
        ({"note": "vLLM 0.32.0", "scenarios": [{"name": "x"}]}, "scenario x: field `engine` is missing"),
    ],
)
def test_an_unreadable_recording_is_rejected_input(write, capsys, document, fault):
    assert main([write(document)]) == 2
    assert fault in capsys.readouterr().err


def test_without_files_the_command_explains_itself(capsys):
    assert main([]) == 2
    assert "usage: python -m fpmsdk.engine.conformance FILE..." in capsys.readouterr().err
