"""A profile with observed memory in a collection: its plan, its acceptance, and the engine that must be the same."""

import copy
import hashlib
import json

import pytest

from fpmsdk.collect.fake_observations import FakePool
from fpmsdk.documents.strict import checked
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from fpmsdk.onboard.checkpoint import load_checkpoint
from fpmsdk.onboard.checkpoint_save import save_checkpoint
from fpmsdk.onboard.collect import CollectionCall, collector_words, select_collection
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.import_observations import import_observations
from fpmsdk.onboard.imported_profile import require_accepted, verify_collection_observations
from fpmsdk.onboard.launch import resolve_launch
from fpmsdk.onboard.plan import create_plan
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.request import SupportRequest
from tests.cli.test_commands import run
from tests.collect.observed import CONFIG, REVISION, write_bundle, write_observations
from tests.onboard.probed import draft_of

LABEL = "tp1"


@pytest.fixture
def session(tmp_path):
    """The checkpoint of a session whose one configuration was probed, imported and not accepted yet."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    # Planning verifies the architecture of observed memory on the checkpoint.
    draft = draft_of(model, REVISION)
    inputs = {
        "precision": dict.fromkeys(
            ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kv_cache_dtype"), "bfloat16"
        ),
        "model_config": str(model / "config.json"),
        "collection_deployment": {"image": "registry/engine:1"},
    }
    path = tmp_path / "session" / "onboarding-checkpoint.json"
    state, _ = save_checkpoint(path, patch={"configurations": {LABEL: {"inputs": inputs, "draft_request": draft}}})
    facts = resolve_launch(state, LABEL, path).facts
    index = write_observations(tmp_path / "probe", write_bundle(tmp_path / "bundle"), {LABEL: facts})
    report = import_observations(path, index, tmp_path / "drafts")
    assert report["status"] == "complete", report["configurations"][LABEL]["diagnostics"]
    return path


def accept(path):
    save_checkpoint(path, expected_revision=load_checkpoint(path).revision, accept=[LABEL])


def request_of(path):
    """The draft of the configuration."""
    return checked(SupportRequest, load_checkpoint(path).configurations[LABEL].draft_request, "draft")


def test_the_commands_of_its_plan_name_the_observers_and_the_deployment(session, tmp_path):
    request, folder = request_of(session), tmp_path / "plan"
    plan = create_plan(request, folder)
    check_plan(request, folder)
    commands = json.loads((folder / "commands.json").read_text())
    words = commands["fpm_plan_local"]
    place = words.index("--fpm-database-root")
    assert words[place + 2 :: 2][:3] == [
        "--fpm-runtime-instrumentation",
        "--fpm-runtime-launch",
        "--fpm-runtime-configuration",
    ]
    assert commands["fpm_run_local"][-4:] == ["--executor", "kubernetes", "--image", "registry/engine:1"]
    assert commands["finalize"][-1] == f"{folder}-resolved"
    assert plan["prerequisites"][0]["status"] == "runtime_memory_resolved"


def test_its_collection_takes_over_the_probed_deployment(session, tmp_path):
    request, folder = request_of(session), tmp_path / "plan"
    create_plan(request, folder)
    inherited = collector_words(select_collection(request, folder, CollectionCall()), CollectionCall())
    assert 'K8sConfig.k8s_image="registry/engine:1"' in inherited
    other = CollectionCall(deployment=CollectionDeployment(image="registry/engine:2"))
    with pytest.raises(OnboardError, match="differs from .*runtime probe"):
        collector_words(select_collection(request, folder, other), other)


def test_its_version_is_known_from_the_probe(session, tmp_path):
    request, folder = request_of(session), tmp_path / "plan"
    create_plan(request, folder)

    def never(deployment):
        raise AssertionError("the image was looked into")

    selected = select_collection(request, folder, CollectionCall(execute=True), detect=never)
    assert selected.folder == folder


def test_evidence_that_changed_is_found_by_the_check_of_the_plan(session, tmp_path):
    request, folder = request_of(session), tmp_path / "plan"
    create_plan(request, folder)
    worker = next((tmp_path / "drafts").rglob("*worker*.json"))
    worker.write_text(worker.read_text() + " ")
    with pytest.raises(EvidenceError, match="changed"):
        check_plan(request, folder)


def test_collecting_needs_the_accepted_draft(session):
    request = request_of(session)
    with pytest.raises(OnboardError, match=r"is not accepted; review it.*--accept-profile tp1"):
        require_accepted(request)
    accept(session)
    require_accepted(request)
    with pytest.raises(OnboardError, match="is another request than the one to be collected"):
        require_accepted(request.replaced({"workload": {"input_tokens": 17}}))
    # A change of the session takes the acceptance back.
    save_checkpoint(
        session,
        expected_revision=load_checkpoint(session).revision,
        patch={"configurations": {LABEL: {"draft_request": {"workload": {"input_tokens": 18}}}}},
    )
    with pytest.raises(OnboardError, match="is not accepted"):
        require_accepted(request)


@pytest.fixture
def collected(session, tmp_path):
    """A function that writes what a formal campaign observed; the request, the index and the campaign's checkpoint."""
    request = request_of(session)
    facts = resolve_launch(load_checkpoint(session), LABEL, session).facts
    count = iter(range(9))

    def write(*, change=None, pool=None):
        root = tmp_path / f"campaign-{next(count)}"
        bundle = next((tmp_path / "bundle").glob("manifest.json"))
        index = write_observations(root, bundle, {LABEL: facts}, change=change, pool=pool)
        document = json.loads(index.read_text())
        attempt = document["configurations"][LABEL]["attempts"][0]
        checkpoint = {"runtime_observation_attempt_id": attempt["attempt_id"], "cells": {}}
        for phase, saved in attempt["phases"].items():
            launch = root / saved["launch_manifest"]["path"]
            context = json.loads(launch.read_text())
            context |= {"cell_id": f"fpm-{phase}", "collector_attempt_id": f"attempt-{phase}"}
            launch.write_text(json.dumps(context))
            saved["launch_manifest"]["sha256"] = sha256_of(launch)
            saved |= {"cell_id": f"fpm-{phase}", "collector_attempt_id": f"attempt-{phase}"}
            checkpoint["cells"][f"fpm-{phase}"] = {"status": "passed", "attempt_id": f"attempt-{phase}"}
        index.write_text(json.dumps(document))
        return request, index, checkpoint

    return write


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_engine_is_compatible(collected):
    request, index, checkpoint = collected()
    compatibility = verify_collection_observations(request, index, checkpoint)["compatibility"]
    bound = request.profile_deployment().resources.runtime_memory.kv_cache_bytes
    assert compatibility["status"] == "compatible"
    assert compatibility["accepted_capacity_bytes"] == compatibility["observed_capacity_bytes"] == bound
    assert compatibility["observations_index"] == str(index)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda document: document.update(runtime_observation_attempt_id="other"), "another attempt than the campaign"),
        (lambda document: document["cells"]["fpm-decode"].update(status="failed"), "in which cell fpm-decode passed"),
        (lambda document: document["cells"]["fpm-decode"].update(attempt_id="x"), "in which cell fpm-decode passed"),
        (lambda document: document["cells"].update({"fpm-more": {}}), r"cells \['fpm-more'\] were collected without"),
    ],
)
def test_observations_belong_to_the_attempts_that_passed(collected, edit, reason):
    request, index, checkpoint = collected()
    checkpoint = copy.deepcopy(checkpoint)
    edit(checkpoint)
    with pytest.raises(CollectionError, match=reason):
        verify_collection_observations(request, index, checkpoint)


def test_an_index_that_names_another_cell_is_refused(collected):
    request, index, checkpoint = collected()
    document = json.loads(index.read_text())
    document["configurations"][LABEL]["attempts"][0]["phases"]["prefill"]["cell_id"] = "fpm-decode"
    index.write_text(json.dumps(document))
    with pytest.raises((CollectionError, EvidenceError), match="another cell|incomplete"):
        verify_collection_observations(request, index, checkpoint)


def test_more_capacity_than_accepted_is_compatible_and_less_is_not(collected):
    request, index, checkpoint = collected(pool=FakePool(num_blocks=1001))
    compatibility = verify_collection_observations(request, index, checkpoint)["compatibility"]
    # One block more, of 1024 bytes.
    assert compatibility["observed_capacity_bytes"] == compatibility["accepted_capacity_bytes"] + 1024
    with pytest.raises(CollectionError, match="below the accepted"):
        verify_collection_observations(*collected(pool=FakePool(num_blocks=999)))


def test_another_geometry_of_the_cache_is_not_compatible(collected):
    with pytest.raises(CollectionError, match="geometry of the cache differs"):
        verify_collection_observations(*collected(pool=FakePool(block_size_tokens=32)))


@pytest.mark.parametrize(("policy", "warns"), [("explicit", True), ("runtime", False)])
def test_a_probe_warns_of_explicit_captures_too(session, tmp_path, policy, warns):
    patch = {"configurations": {LABEL: {"draft_request": {"collection": {"prefill_cudagraph_policy": policy}}}}}
    patch["configurations"][LABEL]["draft_request"]["fpm_profile"] = None
    save_checkpoint(session, expected_revision=load_checkpoint(session).revision, patch=patch)
    ran = run(
        *("onboard", "probe-runtime", "--checkpoint", str(session), "--output-dir", str(tmp_path / "probe-2")),
        *("--instrumentation", str(tmp_path / "bundle" / "manifest.json")),
    )
    assert ran.exit_code == 0, ran.output
    assert ("captured graphs of prefill only" in ran.stderr) == warns


def test_a_probed_model_is_collected_under_its_accepted_profile(session, tmp_path, monkeypatch):
    """Probe, import, acceptance, smoke and formal collection with the fake engine and its observers."""
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    label = {"draft_request": {"fpm_profile": None}, "inputs": {"collection_deployment": None}}
    save_checkpoint(
        session, expected_revision=load_checkpoint(session).revision, patch={"configurations": {LABEL: label}}
    )
    probed = tmp_path / "probed"
    ran = run(
        *("onboard", "probe-runtime", "--checkpoint", str(session), "--output-dir", str(probed), "--execute"),
        *("--instrumentation", str(tmp_path / "bundle" / "manifest.json"), "--executor", "fake"),
        *("--image", "registry/engine:1"),
    )
    assert ran.exit_code == 0, ran.output
    report = import_observations(session, probed / "observations.json", tmp_path / "imported")
    assert report["status"] == "complete", report["configurations"][LABEL]["diagnostics"]
    accept(session)
    request, folder = request_of(session), tmp_path / "plan"
    create_plan(request, folder)
    collect = ("onboard", "collect-fpm", "-c", str(folder / "request.yaml"), "--output-dir", str(folder), "--execute")
    smoke = run(*collect, "--smoke")
    assert smoke.exit_code == 0, json.loads(smoke.stdout)["blockers"]
    assert json.loads(smoke.stdout)["runtime_compatibility"]["status"] == "complete"
    formal = run(*collect)
    assert formal.exit_code == 0, formal.stderr
    compatibility = json.loads((folder / "runtime-compatibility.json").read_text())["compatibility"]
    assert compatibility["status"] == "compatible"
    assert compatibility["observations_index"].startswith(str(folder / "fpm-artifacts"))
