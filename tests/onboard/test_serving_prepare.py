"""What preparing a serving run writes, and what it refuses.

Source: onboarding.md section 8.5.
"""

import json
import sys

import pytest
import yaml

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.policy import ServingPolicy
from fpmsdk.onboard.serving_prepare import prepare_serving
from tests.onboard.serving_run import ServingRun


@pytest.fixture
def run(tmp_path):
    return ServingRun(tmp_path / "run")


def prepared(run, **changes):
    tokenizer = run.place / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    options = {
        "trace": run.trace,
        "prediction_config": run.config,
        "prediction_report": run.prediction,
        "endpoint": "http://localhost:8000/v1",
        "tokenizer": tokenizer,
        "expected_execution": run.expected,
        "policy": ServingPolicy(),
    }
    return prepare_serving(run.place.parent / "serving", **options | changes)


def test_a_recipe_binds_the_play_its_prediction_and_the_tables(run):
    recipe = prepared(run)
    folder = run.place.parent / "serving"
    assert read_document(folder / "recipe.json") == recipe
    assert (recipe["status"], recipe["timing_subset"]) == ("incomplete", "zero_recorded_api_time")
    assert recipe["issues"] == ["--aiperf-python is needed to make the requests in the environment of the benchmark"]
    assert recipe["prediction_report"] == file_evidence(run.prediction)
    assert [reference["path"].rsplit("/", 1)[1] for reference in recipe["timing_artifacts"]] == [
        "fpm_forward_perf.metadata.json",
        "fpm_forward_perf.parquet",
    ]
    template = read_document(folder / "observed-execution.template.json")
    assert template["recipe"] == file_evidence(folder / "recipe.json")
    assert set(template["observed_execution"].values()) == {None} and len(template["observed_execution"]) == 14
    provenance = read_document(folder / "serving-provenance.json")
    assert (provenance["purpose"], provenance["recipe"]) == ("matched_serving_accuracy", template["recipe"])


def test_an_execution_that_is_not_that_of_the_prediction_is_an_issue(run):
    recipe = prepared(run, expected_execution=run.expected | {"context_length": 4096, "graph_config": None})
    assert recipe["issues"][:2] == [
        "the collection's context_length is not that of the prediction",
        "the collection has no one graph_config over all phases and ranks",
    ]


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://host", "http://user:secret@host", "http://"])
def test_an_endpoint_is_a_plain_address_and_never_repeated_with_its_secrets(run, endpoint):
    with pytest.raises(OnboardError, match="--endpoint: expected an HTTP") as caught:
        prepared(run, endpoint=endpoint)
    assert "secret" not in str(caught.value)
    assert not (run.place.parent / "serving").exists()


def test_a_tokenizer_must_be_a_local_folder(run):
    with pytest.raises(OnboardError, match="--tokenizer"):
        prepared(run, tokenizer=run.place / "absent")


def test_a_benchmark_of_other_sources_is_refused(run):
    with pytest.raises(OnboardError, match="install https://github.com/ai-dynamo/aiperf.git@7db2ba37"):
        prepared(run, benchmark_python=sys.executable)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("traffic", "load", "agentic_lanes"), 2, "one lane"),
        (("engine", "workers", "aggregated", "parallelism"), {"replicas": 2}, "one worker"),
        (("engine", "estimator_config"), {"fpm_interpolation": {"method": "sol"}}, "strict direct lookups"),
        (("traffic", "source", "nested_timestamp_basis"), "relative", "absolute nested timestamps"),
    ],
)
def test_a_prediction_that_serving_cannot_match_is_refused(run, path, value, words):
    document = yaml.safe_load(run.config.read_text())
    *parents, last = path
    place = document
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    run.config.write_text(yaml.safe_dump(json.loads(json.dumps(document))))
    with pytest.raises(OnboardError, match=words):
        prepared(run)
