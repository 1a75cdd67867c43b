"""The collector's command line: the words of the recorded previews, and what is refused before there are any."""

import shlex
from pathlib import Path

import pytest

from fpmsdk.errors import CollectionError, OnboardError
from fpmsdk.onboard.campaign_outputs import has_formal_checkpoint, published_label, require_unoccupied
from fpmsdk.onboard.collector_command import checkpoint_folder, collector_arguments, noted_commands, shell_line
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.graph_advisory import graph_advisory

FOLDER = Path("/campaign/my plan")

# Recorded from the peer's previews: what follows the words of the request.
TAILS = {
    "": ({}, {}, "--plan-only"),
    "smoke": ({}, {"smoke": True, "limit": 2}, "--plan-only --smoke --limit 2"),
    "resume": ({}, {"resume": True}, "--plan-only --resume"),
    "kubernetes": (
        {
            "image": "reg/x:1",
            "namespace": "ns",
            "model_cache": "pvc:/models:Q",
            "transport": "ib",
            "dynamo_version": "1.6",
            "image_pull_secret": "s",
        },
        {},
        "--dynamo-version 1.6 --generator-set 'K8sConfig.k8s_image=\"reg/x:1\"' --namespace ns "
        "--model-cache pvc:/models:Q --transport ib --image-pull-secret s --plan-only",
    ),
    "slurm": (
        {
            "executor": "slurm",
            "image": "I",
            "container_mount": ["/m:/m", "/n"],
            "cpus_per_task": 16,
            "cpu_bind": "cores",
            "transport": "ib",
            "dynamo_version": "1.6",
        },
        {},
        "--fpm-executor slurm --dynamo-version 1.6 --fpm-slurm-container-image I --fpm-slurm-cpus-per-task 16 "
        "--fpm-slurm-cpu-bind cores --transport ib --fpm-slurm-container-mount /m:/m --fpm-slurm-container-mount /n "
        "--plan-only",
    ),
    # Executors that the peer does not have.
    "local": ({"executor": "local"}, {}, "--fpm-executor local --plan-only"),
    "fake": (
        {"executor": "fake", "image": "i:1"},
        {"smoke": True},
        "--fpm-executor fake --generator-set 'K8sConfig.k8s_image=\"i:1\"' --plan-only --smoke",
    ),
}


@pytest.mark.parametrize("name", TAILS)
def test_deployment_and_run_options_follow_the_request(request_of, name):
    options, run, expected = TAILS[name]
    deployment = CollectionDeployment(**options) if options else None
    words = collector_arguments(request_of(), FOLDER, deployment=deployment, plan_only=True, **run)
    place = words.index("--fpm-model-profile")
    assert words[place + 2 :] == shlex.split(expected)


def test_probe_arguments_come_before_the_versions(request_of):
    words = collector_arguments(request_of(), FOLDER, probe_arguments=["--fpm-runtime-launch", "/launch.json"])
    assert words.index("--fpm-database-root") + 2 == words.index("--fpm-runtime-launch")
    assert words.index("--fpm-backend-version") == words.index("--fpm-runtime-launch") + 2


def test_printed_commands_survive_a_shell(request_of):
    words = collector_arguments(request_of(), FOLDER)
    assert shlex.split(shell_line(words)) == words
    assert "'/campaign/my plan/fpm-checkpoint'" in shell_line(words)


def test_a_limit_needs_smoke_and_a_cell(request_of):
    for options in ({"limit": 1}, {"limit": 0, "smoke": True}):
        with pytest.raises(OnboardError, match="--limit: must be at least 1 and needs --smoke"):
            collector_arguments(request_of(), FOLDER, **options)


def test_a_rank_needs_two_tokens(request_of):
    profile = request_of().fpm_profile.model_dump(mode="json")
    profile["deployments"][0]["resources"] |= {"max_num_tokens": 1, "max_batch_size": 1}
    with pytest.raises(OnboardError, match="at least 2 tokens"):
        collector_arguments(request_of(fpm_profile=profile), FOLDER)


def test_a_checkpoint_stays_in_the_plan():
    assert checkpoint_folder(FOLDER, None) == FOLDER / "fpm-checkpoint"
    assert checkpoint_folder(FOLDER, FOLDER / "fpm-checkpoint" / "b") == FOLDER / "fpm-checkpoint" / "b"
    for place in ("/elsewhere", FOLDER, FOLDER / "fpm-checkpoint" / ".." / "x", FOLDER / "fpm-checkpoint-2"):
        with pytest.raises(OnboardError, match="must be .*fpm-checkpoint or a folder inside it"):
            checkpoint_folder(FOLDER, place)


def test_the_commands_of_an_imported_profile_name_its_deployment_and_finalize(request_of):
    deployment = CollectionDeployment(executor="slurm", image="I", container_mount=["/m", "/n"])
    commands = noted_commands(request_of(), FOLDER, probe_arguments=["--probe"], probe_deployment=deployment)
    assert "--probe" in commands["fpm_plan_local"]
    assert commands["fpm_run_local"][-9:] == [
        "--execute",
        *("--executor", "slurm", "--image", "I", "--container-mount", "/m", "--container-mount", "/n"),
    ]
    assert commands["finalize"][-2:] == ["--resolved-output-dir", "/campaign/my plan-resolved"]


# --- warning of explicit captures ---


@pytest.mark.parametrize(
    ("role", "policy", "eager", "warns"),
    [
        (None, "explicit", False, True),
        (None, "explicit", True, False),
        (None, "runtime", False, False),
        ("aggregated", "explicit", False, False),
        ("decode", "explicit", False, False),
    ],
)
def test_explicit_captures_without_a_role_warn_unless_eager(role, policy, eager, warns):
    assert (graph_advisory(role, policy, enforce_eager=eager) is not None) == warns


# --- earlier outputs ---

CHECKPOINT = '{"schema": "v3", "plan_sha256": "' + "a" * 64 + '", "cells": {}}'


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "plan"


def put(folder, path, text=CHECKPOINT):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


@pytest.mark.parametrize(
    ("path", "occupies"),
    [
        ("fpm-artifacts/0123/smoke/cells/x", {True}),
        ("fpm-artifacts/0123/cells/x", {False}),
        ("fpm-artifacts/0123/collection-plan.json", set()),
        ("fpm-artifacts/0123/smoke/generator-overrides.json", set()),
        ("fpm-artifacts/0123/.campaign.lock", set()),
        ("fpm-checkpoint/fpm_forward_smoke.json", {True}),
        ("fpm-checkpoint/deeper/fpm_forward.json", {False}),
        ("systems/data/h200_sxm/vllm/table", {False}),
        ("fpm-readiness.json", set()),
    ],
)
def test_smoke_and_formal_outputs_are_independent(folder, path, occupies):
    put(folder, path)
    for smoke in (True, False):
        if smoke in occupies:
            with pytest.raises(OnboardError, match="pass --resume"):
                require_unoccupied(folder, folder / "fpm-checkpoint", smoke=smoke, resume=False)
        else:
            require_unoccupied(folder, folder / "fpm-checkpoint", smoke=smoke, resume=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "invalid JSON"),
        ("[]", "schema is missing"),
        (CHECKPOINT.replace("v3", ""), "schema is missing"),
        (CHECKPOINT.replace("a" * 64, "a" * 63), "plan_sha256"),
        (CHECKPOINT.replace("{}", "[]"), "cells are missing"),
    ],
)
def test_a_resumption_needs_a_readable_checkpoint(folder, text, reason):
    put(folder, "fpm-artifacts/0123/cells/x")
    if text is not None:
        put(folder, "fpm-checkpoint/fpm_forward.json", text)
    with pytest.raises(OnboardError, match=reason):
        require_unoccupied(folder, folder / "fpm-checkpoint", smoke=False, resume=True)
    put(folder, "fpm-checkpoint/fpm_forward.json")
    require_unoccupied(folder, folder / "fpm-checkpoint", smoke=False, resume=True)


def test_only_a_formal_checkpoint_fixes_the_version(folder):
    put(folder, "fpm-checkpoint/fpm_forward_smoke.json")
    assert not has_formal_checkpoint(folder)
    put(folder, "fpm-checkpoint/again/fpm_forward.json")
    assert has_formal_checkpoint(folder)


def test_a_publication_tells_its_label(folder):
    put(folder, "sidecar.json", '{"backend_version": "cpu-lab"}')
    for database, expected in (
        ('{"status": "passed", "metadata": "%s"}', "cpu-lab"),
        ('{"status": "failed", "metadata": "%s"}', None),
        ("null", None),
    ):
        text = CHECKPOINT[:-1] + ', "database": ' + database.replace("%s", str(folder / "sidecar.json")) + "}"
        put(folder, "fpm-checkpoint/fpm_forward.json", text)
        if expected is None:
            with pytest.raises(CollectionError, match="no completed publication"):
                published_label(folder / "fpm-checkpoint")
        else:
            assert published_label(folder / "fpm-checkpoint") == expected
