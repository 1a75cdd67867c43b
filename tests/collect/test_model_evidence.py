"""Where the configuration of a model is found."""

import json

import pytest

from fpmsdk.collect.model_evidence import load_model_evidence
from fpmsdk.errors import OnboardError


@pytest.fixture
def systems(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "systems"
    folder.mkdir(parents=True)
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(folder))
    return folder


def test_a_bundled_configuration_lies_beside_the_descriptions_of_systems(systems):
    bundle = systems.parent / "model_configs"
    bundle.mkdir()
    (bundle / "org--model_config.json").write_text(json.dumps({"hidden_size": 8}))
    evidence = load_model_evidence("org/model", None)
    assert (evidence.payload, evidence.source_kind) == ({"hidden_size": 8}, "aic_cache")


def test_an_unknown_model_is_told_where_its_configuration_belongs(systems):
    with pytest.raises(OnboardError) as refused:
        load_model_evidence("org/model-of-nobody", None)
    assert f"{systems.parent / 'model_configs'}/org--model-of-nobody_config.json" in str(refused.value)
