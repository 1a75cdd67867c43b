"""`fpmsdk predict --on-uncovered`: the points that one prediction misses, and how to collect them."""

import json

import pytest
import yaml

from fpmsdk.cli.app import app
from tests.recommendation.measured import candidate, measured_in


@pytest.fixture
def predict(tmp_path, capsys):
    """Exit code, files and stderr of a prediction that its table does not cover."""
    (tmp_path / "measured").mkdir()
    measured_in(tmp_path / "measured")
    (tmp_path / "predict.yaml").write_text(yaml.safe_dump(candidate(tmp_path / "measured", 1)))

    def run(*words):
        arguments = ["predict", "-c", str(tmp_path / "predict.yaml"), "--output-dir", str(tmp_path / "out"), *words]
        code = app(arguments, standalone_mode=False)
        files = {path.name for path in (tmp_path / "out").iterdir()}
        return code, files & {"prediction.json", "missing-points.json", "missing-points"}, capsys.readouterr().err

    run.folder = tmp_path / "out"
    return run


def test_every_missing_point_is_planned_and_the_prediction_stays_uncovered(predict):
    code, files, errors = predict("--on-uncovered", "collect-plan")
    assert (code, files) == (4, {"missing-points.json", "missing-points"})
    assert "3 missing points, and how to collect them" in errors
    (campaign,) = json.loads((predict.folder / "missing-points.json").read_text())["campaigns"]
    assert campaign["candidate_ids"] == ["prediction"]


def test_without_being_asked_nothing_is_planned_and_an_earlier_plan_goes(predict):
    predict("--on-uncovered", "collect-plan")
    code, files, errors = predict("--overwrite")
    assert (code, files) == (4, {"missing-points"})
    assert "missing-points.json" not in errors
    (collected,) = (predict.folder / "missing-points").iterdir()
    assert (collected / "systems").is_dir()
