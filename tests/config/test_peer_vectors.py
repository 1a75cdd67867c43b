"""Recorded verdicts, normal forms and error paths of public software on whole configurations."""

import json

import pytest

from fpmsdk.config import normalize_config
from fpmsdk.config.legacy import migrate_legacy_config
from fpmsdk.errors import ConfigError
from tests.vectors import load_vectors

CASES = load_vectors("config_peer")["cases"]


def cases(kind, accepted):
    chosen = [case for case in CASES if case["kind"] == kind and case["accepted"] is accepted]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])


def migrate(case):
    record, options = case["input"]["record"], case["input"]["options"]
    worker_type, allow = case["input"]["worker_type"], case["input"]["allow_regression"]
    return migrate_legacy_config(record, worker_type, options, allow_regression=allow)


def test_the_recorded_cases_are_complete():
    counts = {kind: sum(case["kind"] == kind for case in CASES) for kind in ("canonical", "legacy")}
    assert counts == {"canonical": 82, "legacy": 16}


@cases("canonical", accepted=True)
def test_accepted_configurations_have_the_recorded_normal_form(case):
    assert json.dumps(normalize_config(case["input"])) == json.dumps(case["normalized"])


@cases("canonical", accepted=True)
def test_json_text_gives_the_same_normal_form(case):
    assert normalize_config(json.dumps(case["input"])) == normalize_config(case["input"])


@cases("canonical", accepted=False)
def test_rejected_configurations_name_the_recorded_path_and_fields(case):
    expected = case["error"]
    with pytest.raises(ConfigError) as caught:
        normalize_config(case["input"])
    text = str(caught.value)
    stage = {"parse": "invalid forward-pass config at ", "validation": "invalid engine config: "}
    assert text.startswith(stage[expected["stage"]])
    if expected["path"] is not None:
        assert caught.value.path == expected["path"]
        assert expected["path"] in text
    named = [*expected.get("mentions", []), *filter(None, [expected.get("field")])]
    assert [name for name in named if name not in text] == []


@cases("legacy", accepted=True)
def test_legacy_records_migrate_to_the_recorded_canonical_form(case):
    assert json.dumps(migrate(case)) == json.dumps(case["normalized"])


@cases("legacy", accepted=False)
def test_rejected_legacy_records_name_the_recorded_fields(case):
    with pytest.raises(ConfigError) as caught:
        migrate(case)
    assert [name for name in case["error"]["mentions"] if name not in str(caught.value)] == []
