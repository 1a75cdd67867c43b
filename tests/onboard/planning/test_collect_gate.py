"""The gate of `collect-fpm`: preview, readiness, and what execution does before and after the collector runs.

The collector is a function here, and readiness is scripted; both are tested where they live.
"""

import json
import shlex

import pytest

from fpmsdk.errors import CollectionError, OnboardError
from fpmsdk.onboard import collect, collect_execute
from fpmsdk.onboard.collect import CollectionCall, collector_words, pending_version, preview, readiness
from fpmsdk.onboard.collect_execute import execute, exit_code
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.plan import create_plan, plan_lock
from fpmsdk.onboard.version_detect import RuntimeVersions

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
READY = {"status": "ready", "ready_for_full_collection": True, "blockers": []}
BLOCKED = {"status": "blocked", "ready_for_full_collection": False, "blockers": ["decode has no eligible points"]}
FAKE = CollectionDeployment(executor="fake")


@pytest.fixture(autouse=True)
def checkpoint_of_the_model(surroundings, tmp_path, monkeypatch):
    """The model of the collectable request, in the working directory, and a collector of a known revision."""
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    folder = tmp_path / "work" / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def collectable(request_of):
    """A function that makes a request of a model whose configuration is at hand."""

    def make(name="declared linear", **sections):
        profile = request_of(name).fpm_profile.model_dump(mode="json")
        profile |= {"model": "./llama", "architecture": "LlamaForCausalLM", "context_length": 128}
        profile["deployments"][0]["resources"] |= {"kv_bytes_per_token": 64, "max_num_tokens": 64, "max_batch_size": 4}
        example = {"input_tokens": 16, "output_tokens": 4, "request_count": 1}
        document = request_of(name).document() | {
            "identity": request_of(name).identity.model_dump(mode="json", exclude_none=True) | {"model": "./llama"},
            "search": {"context_length": 128},
            "workload": example,
            "fpm_profile": profile,
        }
        return type(request_of(name)).model_validate(document).replaced(sections)

    return make


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "plan"


@pytest.fixture
def notices():
    return []


@pytest.fixture
def select(folder, notices):
    """A function that selects the plan of a request, in a cluster whose image has vLLM 0.27.0."""

    def chosen(request, **call):
        options = CollectionCall(**{"deployment": FAKE} | call)
        seen = RuntimeVersions(backend_version="0.27.0")
        found = collect.select_collection(request, folder, options, detect=lambda _: seen, notice=notices.append)
        return found, options

    return chosen


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- preview and readiness ---


def test_a_preview_is_one_line_for_a_shell_and_writes_nothing(collectable, folder, select, notices):
    create_plan(collectable(), folder)
    before = files(folder)
    line = preview(*select(collectable(), smoke=True), notice=notices.append)
    assert shlex.split(line)[:3] == ["python3", "-m", "fpmsdk.collect"]
    assert shlex.split(line)[-4:] == ["--fpm-executor", "fake", "--plan-only", "--smoke"]
    assert files(folder) == before and notices == []


def test_a_preview_without_a_plan_needs_the_profile_file(collectable, select, notices):
    with pytest.raises((OnboardError, OSError), match=r"fpm-model-profile\.json"):
        preview(*select(collectable()), notice=notices.append)


def test_a_preview_without_a_plan_or_a_profile_is_shown(request_of, folder, select, notices):
    line = preview(*select(request_of("plain dense TP2")), notice=notices.append)
    assert "--fpm-max-gpus 2" in line and not folder.exists()


def test_a_preview_finds_a_precision_that_is_not_the_checkpoints(collectable, folder, select, notices):
    request = collectable()
    profile = request.fpm_profile.model_dump(mode="json")
    profile["deployments"][0]["gemm_quant_mode"] = "fp8"
    request = request.replaced({"fpm_profile": profile})
    create_plan(request, folder)
    with pytest.raises(OnboardError, match="fp8"):
        preview(*select(request), notice=notices.append)


def test_a_preview_checks_what_is_there(collectable, folder, select, notices):
    create_plan(collectable(), folder)
    (folder / "commands.json").write_text("{}")
    with pytest.raises(OnboardError, match="was modified"):
        preview(*select(collectable()), notice=notices.append)


def test_a_resumed_preview_needs_a_plan(request_of, select, notices):
    with pytest.raises(OnboardError, match="run `fpmsdk onboard plan` first"):
        preview(*select(request_of("plain dense TP2"), resume=True), notice=notices.append)


def test_explicit_captures_without_a_role_warn_through_the_preview(request_of, select, notices):
    preview(*select(request_of("legacy without a profile")), notice=notices.append)
    assert len(notices) == 1 and "captured graphs of prefill only" in notices[0]


def test_slurm_previews_freeze_sixteen_cores(request_of, select):
    deployment = CollectionDeployment(executor="slurm", image="I", container_mount=["/m:/m"])
    words = collector_words(*select(request_of("plain dense TP2"), deployment=deployment))
    assert shlex.join(words).endswith(
        "--fpm-executor slurm --fpm-slurm-container-image I --fpm-slurm-cpus-per-task 16 --fpm-slurm-cpu-bind cores "
        "--fpm-slurm-container-mount /m:/m --plan-only"
    )


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"check_readiness": True, "smoke": True}, "--check-readiness: only reads"),
        ({"check_readiness": True, "execute": True}, "--check-readiness: only reads"),
        ({"check_readiness": True, "resume": True}, "--check-readiness: only reads"),
        ({"check_readiness": True, "smoke": True, "limit": 1}, "--check-readiness: only reads"),
        ({"limit": 1}, "--limit: must be at least 1 and needs --smoke"),
        ({"limit": 0, "smoke": True}, "--limit: must be at least 1"),
        ({"execute": True, "checkpoint_dir": "fpm-checkpoint"}, "the runtime version is not resolved yet"),
    ],
)
def test_contradictory_options_are_refused(collectable, folder, select, call, reason):
    create_plan(collectable(), folder)
    before = files(folder)
    with pytest.raises(OnboardError, match=reason):
        select(collectable(), **call)
    assert files(folder) == before


def test_readiness_is_that_of_the_checked_plan(collectable, folder, select, monkeypatch):
    monkeypatch.setattr(collect, "assess_readiness", lambda request, root, checkpoint: {"root": root, "at": checkpoint})
    create_plan(collectable(), folder)
    report = readiness(*select(collectable(), check_readiness=True))
    assert report == {"root": folder, "at": folder / "fpm-checkpoint"}
    with pytest.raises(OnboardError, match="inside it"):
        readiness(*select(collectable(), check_readiness=True, checkpoint_dir="/elsewhere"))
    (folder / "request.yaml").unlink()
    with pytest.raises(OnboardError, match="saved request"):
        readiness(*select(collectable(), check_readiness=True))


def test_a_plan_without_a_version_says_what_comes_next(collectable, folder, select):
    request = collectable("no version")
    create_plan(request, folder)
    selected, _ = select(request)
    status = pending_version(selected, execute=False)
    assert status["status"] == "pending_runtime_version" and status["simulation_ready"] is False
    assert "--execute --image IMAGE" in status["next"]
    (folder / "commands.json").unlink()
    with pytest.raises(OnboardError, match=r"commands\.json"):
        pending_version(selected, execute=False)


# --- execution ---


class Collector:
    """Stands for the collector: keeps what it was run with, writes the checkpoint of a publication."""

    def __init__(self, folder, errors=(), label="0.27.0", fault=None):
        self.folder, self.errors, self.label, self.fault = folder, list(errors), label, fault
        self.runs = []

    def __call__(self, options, plan):
        self.runs.append((options, plan))
        if self.fault is not None:
            raise self.fault
        if not options.smoke:
            sidecar = self.folder / "sidecar.json"
            sidecar.write_text(json.dumps({"backend_version": self.label}))
            options.checkpoint_dir.mkdir(exist_ok=True)
            document = {"schema": "aic-fpm-collector-checkpoint-v3", "plan_sha256": plan.sha256, "cells": {}}
            document["database"] = {"status": "passed", "metadata": str(sidecar)}
            (options.checkpoint_dir / "fpm_forward.json").write_text(json.dumps(document))
        return self.errors


@pytest.fixture
def collector(folder):
    """A function that makes a collector."""
    return lambda **how: Collector(folder / "runtime-resolved", **how)


@pytest.fixture
def assessed(monkeypatch):
    """A function that scripts what readiness says, call by call; the last goes on."""

    def script(*reports):
        said = list(reports)

        def assess(request, root, checkpoint, *, expected_plan, resume=False):
            return dict(said.pop(0) if len(said) > 1 else said[0])

        monkeypatch.setattr(collect_execute, "assess_readiness", assess)

    return script


@pytest.fixture
def executed(collectable, folder, select, notices):
    """A function that plans, selects and executes."""
    create_plan(collectable(), folder)

    def go(run, **call):
        return execute(*select(collectable(), execute=True, **call), run=run, notice=notices.append)

    return go


def saved_report(folder):
    return json.loads((folder / "runtime-resolved" / "fpm-readiness.json").read_text())


def test_a_smoke_run_covers_every_cell_of_the_resolved_plan(executed, collector, assessed, folder, notices):
    assessed(READY)
    run = collector()
    report = executed(run, smoke=True)
    options, plan = run.runs[0]
    assert options.limit == len(plan.cells) == 2
    assert plan.runtime_backend_version == "0.27.0"
    assert notices == [
        f"resolved collection: fpmsdk onboard collect-fpm --config {folder}/runtime-resolved/request.yaml "
        f"--output-dir {folder}/runtime-resolved"
    ]
    assert report == saved_report(folder) == READY | {"collector_exit_status": 0, "recovery_only": False}
    assert exit_code(report) == 0


def test_a_limit_of_a_smoke_run_is_kept(executed, collector, assessed):
    assessed(READY)
    run = collector()
    executed(run, smoke=True, limit=1)
    assert run.runs[0][0].limit == 1


def test_a_formal_run_needs_readiness(executed, collector, assessed, folder, notices):
    assessed(BLOCKED)
    run = collector()
    report = executed(run)
    assert run.runs == []
    assert "decode has no eligible points" in report["execution_error"]
    assert report == saved_report(folder)
    assert report["collector_exit_status"] is None and exit_code(report) == 1
    assert "run --execute --smoke first" in notices[-1]


def test_a_formal_run_publishes_under_its_label(executed, collector, assessed):
    assessed(READY)
    run = collector()
    report = executed(run)
    assert run.runs[0][0].limit is None and not run.runs[0][0].smoke
    assert exit_code(report) == 0


def test_a_publication_under_another_label_is_a_failure(executed, collector, assessed):
    assessed(READY)
    report = executed(collector(label="0.31.0"))
    assert "version label '0.31.0', the request has '0.27.0'" in report["execution_error"]
    assert exit_code(report) == 1


def test_errors_of_cells_are_told(executed, collector, assessed, notices):
    assessed(READY)
    report = executed(collector(errors=[{"cell_id": "fpm-1", "classification": "campaign_cell_failed"}]), smoke=True)
    assert report["collector_exit_status"] == 1 and exit_code(report) == 1
    assert json.loads(notices[-1])[0]["classification"] == "campaign_cell_failed"


def test_ready_evidence_does_not_hide_what_is_not_ready(executed, collector, assessed):
    assessed(BLOCKED)
    report = executed(collector(), smoke=True)
    assert report["collector_exit_status"] == 0 and exit_code(report) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (CollectionError("no worker came up"), "no worker came up"),
        (ModuleNotFoundError("No module named 'kubernetes'"), "ModuleNotFoundError(\"No module named 'kubernetes'\")"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError('division by zero')"),
    ],
)
def test_whatever_fails_leaves_a_report(executed, collector, assessed, folder, notices, fault, told):
    assessed(READY)
    report = executed(collector(fault=fault), smoke=True)
    assert report["execution_error"] == told and report == saved_report(folder)
    assert report["collector_exit_status"] is None and exit_code(report) == 1
    assert notices[-1] == f"error: the collection failed: {told}"


def test_an_interruption_goes_on_to_the_caller(executed, collector, assessed, folder):
    assessed(READY)
    with pytest.raises(KeyboardInterrupt):
        executed(collector(fault=KeyboardInterrupt()), smoke=True)
    with plan_lock(folder / "runtime-resolved"):
        pass


def test_a_resumption_that_starts_no_worker_needs_no_readiness(executed, collector, assessed, folder, monkeypatch):
    assessed(READY)
    executed(collector())
    assessed(BLOCKED, READY)
    monkeypatch.setattr(collect_execute, "resumes_without_workers", lambda plan, path: True)
    run = collector()
    report = executed(run, resume=True)
    assert report["recovery_only"] is True and len(run.runs) == 1 and exit_code(report) == 0


def test_existing_outputs_need_resume(executed, collector, assessed, folder):
    assessed(READY)
    executed(collector())
    run = collector()
    with pytest.raises(OnboardError, match="pass --resume"):
        executed(run)
    assert run.runs == []
    assert exit_code(executed(run, resume=True)) == 0
    # A smoke run is another campaign.
    assert exit_code(executed(run, smoke=True)) == 0


def test_two_executions_of_one_plan_exclude_each_other(executed, collector, assessed, folder):
    assessed(READY)
    executed(collector(), smoke=True)
    run = collector()
    with plan_lock(folder / "runtime-resolved"), pytest.raises(OnboardError, match="another process works on the plan"):
        executed(run, smoke=True)
    assert run.runs == []


def test_another_deployment_is_refused_after_the_first_run(executed, collector, assessed):
    assessed(READY)
    executed(collector(), smoke=True)
    with pytest.raises(OnboardError, match="a fresh plan"):
        executed(collector(), smoke=True, deployment=CollectionDeployment(image="other:2"))


def test_execution_needs_a_plan(collectable, select):
    with pytest.raises(OnboardError, match="run `fpmsdk onboard plan` first"):
        select(collectable(), execute=True)


def test_a_campaign_keeps_its_bytes_when_it_is_selected_again(executed, collector, assessed, folder):
    assessed(READY)
    executed(collector(), smoke=True)
    before = files(folder)
    executed(collector(), smoke=True)
    assert files(folder) == before
