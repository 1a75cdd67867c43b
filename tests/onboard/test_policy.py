"""Validation policies: defaults, versions, files.

Source: onboarding.md section 8.1.
"""

import json

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.policy import POLICY_V1, POLICY_V2, ValidationPolicy, load_policy


def test_the_defaults_are_those_of_the_specification():
    assert load_policy(None).document() == {
        "schema_version": POLICY_V2,
        "repeatability": {
            "comparison_mode": "full_grid",
            "samples": 5,
            "max_points_per_cell": 12,
            "max_attempts_per_sample": 2,
            "max_cv": 0.05,
            "max_source_relative_difference": 0.05,
        },
        "interpolation": {
            "max_points_per_phase": 16,
            "seed": 42,
            "max_p95_relative_error": 0.20,
            "max_unsupported_fraction": 0.0,
        },
        "serving": {
            "max_latency_p95_relative_error": 0.20,
            "max_throughput_relative_error": 0.20,
            "max_dispatch_delay_ms": 5.0,
            "max_dispatch_delay_fraction": 0.01,
        },
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("policy.json", '{"interpolation": {"max_p95_relative_error": 1e-05}}'),
        ("policy.yaml", "interpolation:\n  max_p95_relative_error: 0.00001\n"),
        ("policy", '{"interpolation": {"max_p95_relative_error": 1e-05}}'),
    ],
)
def test_a_policy_is_json_first_and_yaml_otherwise(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    policy = load_policy(tmp_path / name)
    assert policy.interpolation.max_p95_relative_error == 1e-05
    assert policy.interpolation.seed == 42


def test_what_is_written_reads_back_as_the_same_policy(tmp_path):
    policy = ValidationPolicy.model_validate({"repeatability": {"samples": 7, "max_cv": 0}})
    (tmp_path / "policy.json").write_text(json.dumps(policy.document()))
    assert load_policy(tmp_path / "policy.json") == policy


def test_version_1_keeps_its_bounded_subset():
    policy = ValidationPolicy.model_validate({"schema_version": POLICY_V1, "repeatability": {"samples": 3}})
    assert policy.repeatability.comparison_mode == "bounded"
    assert policy.schema_version == POLICY_V1


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"schema_version": POLICY_V1, "repeatability": {"comparison_mode": "full_grid"}}, "comparison_mode"),
        ({"schema_version": "aisimulate-onboarding-validation-policy/v3"}, "schema_version"),
        ({"repeatability": {"samples": 1}}, "repeatability.samples"),
        ({"repeatability": {"samples": True}}, "repeatability.samples"),
        ({"repeatability": {"samples": "5"}}, "repeatability.samples"),
        ({"repeatability": {"max_attempts_per_sample": 0}}, "repeatability.max_attempts_per_sample"),
        ({"repeatability": {"max_points_per_cell": 0}}, "repeatability.max_points_per_cell"),
        ({"repeatability": {"max_cv": -0.01}}, "repeatability.max_cv"),
        ({"interpolation": {"seed": -1}}, "interpolation.seed"),
        ({"interpolation": {"max_unsupported_fraction": 1.5}}, "interpolation.max_unsupported_fraction"),
        ({"serving": {"max_latency": 1}}, "serving.max_latency"),
        ({"repeats": {}}, "repeats"),
        ([], "valid dictionary"),
    ],
)
def test_a_faulty_field_is_named_with_the_file(tmp_path, document, field):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(document))
    with pytest.raises(OnboardError) as caught:
        load_policy(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert field in str(caught.value)


def test_every_faulty_field_has_a_line(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"repeatability": {"samples": 1}, "interpolation": {"seed": -1}}))
    with pytest.raises(OnboardError) as caught:
        load_policy(path)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("text", ["{", "a: 1\na: 2\n", '{"serving": {}, "serving": {}}', "- 1\n"])
def test_what_is_neither_json_nor_a_yaml_mapping_is_refused(tmp_path, text):
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(OnboardError, match="policy.yaml"):
        load_policy(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(OnboardError, match="no such policy file"):
        load_policy(tmp_path / "none.json")
