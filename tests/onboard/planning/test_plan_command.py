"""`fpmsdk onboard plan` on the terminal: what it prints, its exit codes, and that a rejection writes nothing."""

import json
import shlex

import pytest
import yaml

from tests.cli.test_commands import rejection_of, run


@pytest.fixture
def saved(request_of, tmp_path):
    """A function that saves a recorded request and returns its path."""

    def save(name="declared linear", **sections):
        path = tmp_path / "request.yaml"
        path.write_bytes(request_of(name, **sections).yaml_bytes())
        return str(path)

    return save


KEYS = [
    "request_id",
    "candidate_count",
    "collection_gpus_required",
    "plan",
    "commands",
    "prerequisites",
    "resources",
    "accuracy",
    "next",
]


def test_a_plan_is_summarised_with_the_next_command(saved, tmp_path):
    folder = tmp_path / "my plan"
    ran = run("onboard", "plan", "--config", saved(), "--output-dir", str(folder))
    assert ran.exit_code == 0
    lines = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert list(lines) == KEYS
    assert lines["resources"] == "declared" and lines["collection_gpus_required"] == "1"
    words = shlex.split(lines["next"])
    assert words[:3] == ["fpmsdk", "onboard", "collect-fpm"] and words[-1] == str(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pending linear", {"resources": "pending", "candidate_count": 1}),
        ("runtime linear", {"resources": "runtime"}),
        ("plain dense TP2", {"prerequisites": "unchecked", "collection_gpus_required": 2}),
        ("prefill DEP4", {"collection_gpus_required": 4}),
        ("no version", {"status": "pending_runtime_version", "candidate_count": 0}),
    ],
)
def test_the_summary_as_json(saved, tmp_path, name, expected):
    folder = tmp_path / "plan"
    ran = run("onboard", "plan", "-c", saved(name), "--output-dir", str(folder), "--format", "json")
    assert ran.exit_code == 0
    summary = json.loads(ran.stdout)
    assert expected.items() <= summary.items()
    assert ("resources" in summary) == (name != "plain dense TP2")
    assert ("status" in summary) == (name == "no version")


def test_a_refresh_keeps_the_request_id(saved, tmp_path):
    folder, example = str(tmp_path / "plan"), {"workload": {"input_tokens": 99}}
    first = run("onboard", "plan", "-c", saved(), "--output-dir", folder, "--format", "json")
    second = run("onboard", "plan", "-c", saved(**example), "--output-dir", folder, "--overwrite", "--format", "json")
    assert second.exit_code == 0
    assert json.loads(first.stdout)["request_id"] == json.loads(second.stdout)["request_id"]


def test_rejected_requests_exit_with_2_and_write_nothing(saved, tmp_path):
    folder = tmp_path / "plan"

    def rejected(*options, name="declared linear", edit=None, **sections):
        path = saved(name, **sections)
        if edit is not None:
            document = yaml.safe_load((tmp_path / "request.yaml").read_text())
            edit(document)
            (tmp_path / "request.yaml").write_text(yaml.safe_dump(document))
        return rejection_of("onboard", "plan", "--config", path, "--output-dir", str(folder), *options)

    assert "no description of system" in rejected(name="plain dense TP2", identity={"gpu": "z100"})
    assert "search.max_candidates" in rejected(edit=lambda document: document["search"].update(max_candidates=3))
    for label in ("../outside", "a/b", "a\\b", ".", "..", "two words"):
        rejected(edit=lambda document, label=label: document["identity"].update(framework_version=label))
    assert "insufficient KV capacity" in rejected(collection={"gpu_memory_utilization": 0.0085})
    assert not folder.exists()


def test_a_folder_with_something_else_exits_with_2(saved, tmp_path):
    folder = str(tmp_path / "plan")
    assert run("onboard", "plan", "-c", saved(), "--output-dir", folder).exit_code == 0
    assert "pass --overwrite" in rejection_of("onboard", "plan", "-c", saved(), "--output-dir", folder)
    another = saved(collection={"gpu_memory_utilization": 0.5})
    assert "another request identity" in rejection_of(
        "onboard", "plan", "-c", another, "--output-dir", folder, "--overwrite"
    )
