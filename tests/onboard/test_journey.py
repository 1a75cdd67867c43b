"""All six stages on one CPU, from `config.json` to a prediction, every command in this process.

Source: onboarding.md sections 1 and 10.
"""

import json

import pytest
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from fpmsdk.onboard.request import load_request
from tests.onboard.journey import Journey


def in_this_process(*words):
    ran = CliRunner().invoke(app, ["onboard", *words])
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.fixture
def journey(tmp_path, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(tmp_path / "installed-systems"))
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    return Journey(tmp_path, in_this_process)


def test_a_configuration_becomes_a_prediction_through_all_six_stages(journey):
    said = []
    journey._say = said.append
    journey.whole()
    assert [text.split()[0] for text in said] == ["inspect", "choose", "review", "plan", "collect", "use"]
    resources = load_request(journey.resolved / "request.yaml").profile_deployment().resources
    assert (resources.memory_source, resources.runtime_memory.kv_cache_bytes) == ("runtime", 16383 * 1024)
    session = json.loads(journey.session.read_text())
    events = [entry["event"] for entry in session["configurations"]["tp1"]["history"]]
    assert events == ["draft_replaced"]  # the finalised profile took the place of the one that was accepted before
    assert session["configurations"]["tp1"]["history"][0]["acceptance"]["sha256"]
    report = json.loads((journey.place / "replay/validation.json").read_text())
    assert report["accuracy"] == "not_assessed"
    prediction = json.loads((journey.place / "prediction/prediction.json").read_text())
    assert prediction["completed_requests"] == 1
