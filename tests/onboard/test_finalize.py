"""Finalising a collection: what comes out, what it rests on, and every reason to refuse, with nothing half-written.

Source: onboarding.md sections 7, 9 and 10.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fpmsdk.collect.plan import plan_digest
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_meta, manifest
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from fpmsdk.onboard import finalize as module
from fpmsdk.onboard.finalize import finalize, verify_finalization
from fpmsdk.onboard.plan import create_plan
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.request import load_request, request_id
from fpmsdk.onboard.validate_fpm import validate_fpm
from tests.onboard.collected import checkpoint, collected, request_of, systems, trace_file
from tests.onboard.finished import FakeExecutor, collect, finished_in, model_in, request_for, with_blocks

PLAY = {
    "id": "play",
    "block_size": 16,
    "requests": [
        {"type": "n", "t": 0.0, "in": 16, "out": 3, "hash_ids": [1]},
        {"type": "n", "t": 0.1, "in": 32, "out": 4, "hash_ids": [1, 2]},
    ],
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """The request and the plan folder of a finished collection, which no test changes for good."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
        systems(place, patch)
        yield finished_in(place)


@pytest.fixture
def restored(collection):
    """The same; every file is as it was when the test has ended."""
    _, folder = collection
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield collection
    for path in [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]:
        if path not in before:
            path.unlink()
    for path, content in before.items():
        if path.is_symlink() or not path.exists() or path.read_bytes() != content:
            path.unlink(missing_ok=True)
            path.write_bytes(content)


@pytest.fixture
def resolved(collection, tmp_path):
    request, folder = collection
    outcome = finalize(request, folder, tmp_path / "resolved")
    return outcome, tmp_path / "resolved"


def files_of(folder):
    return {name: meta for name, meta in manifest(folder).items() if not name.endswith(".support.lock")}


def test_the_memory_of_the_collection_is_the_least_of_its_phases(resolved):
    outcome, target = resolved
    request = load_request(target / "request.yaml")
    resources = request.profile_deployment().resources
    assert resources.runtime_memory.kv_cache_bytes == 920576
    (group,) = resources.cache_groups
    assert (group.num_layers, group.block_size_tokens, group.page_size_bytes) == (2, 16, 1024)
    assert (resources.memory_source, resources.max_num_tokens, resources.max_batch_size) == ("runtime", 64, 4)
    assert outcome == {
        "resolved_directory": str(target),
        "request": str(target / "request.yaml"),
        "review_status": "requires_review",
        "collection_quality": "not_assessed",
        "accuracy": "not_assessed",
    }


def test_the_resolved_folder_is_a_plan_with_a_copy_of_the_table(collection, resolved):
    _, folder = collection
    _, target = resolved
    check_plan(load_request(target / "request.yaml"), target)
    assert set(files_of(target)) == {
        "request.yaml",
        "support-plan.json",
        "commands.json",
        "finalization.json",
        "fpm-model-profile.json",
        "predict/pilot.yaml",
        "recommend/pilot.yaml",
        "systems/h200_sxm.yaml",
        "systems/data/h200_sxm/vllm/0.27.0/fpm_forward_perf.parquet",
        "systems/data/h200_sxm/vllm/0.27.0/fpm_forward_perf.metadata.json",
    }
    pair = "systems/data/h200_sxm/vllm/0.27.0"
    assert manifest(target / pair) == {
        name: meta for name, meta in manifest(folder / pair).items() if not name.startswith(".")
    }
    assert yaml.safe_load((target / "predict/pilot.yaml").read_text())["engine"]["systems_paths"] == [
        str(target / "systems")
    ]


def test_the_manifest_names_the_evidence_and_is_that_of_the_profile(collection, resolved):
    request, folder = collection
    _, target = resolved
    found = read_document(target / "finalization.json")
    profile = load_request(target / "request.yaml").fpm_profile
    assert json.loads(profile.deployments[0].resources.runtime_memory.provenance) == found
    assert json.loads(profile.provenance)["collection_quality"] == found["collection_quality"]
    assert found["source_request_id"] == request_id(request)
    assert found["source_directory"] == str(folder)
    assert (found["review_status"], found["observation_provenance"]) == ("requires_review", "source_references")
    for reference in found["source_artifacts"]:
        assert file_meta(reference["path"])["sha256"] == reference["sha256"]
    names = {Path(reference["path"]).name for reference in found["source_artifacts"]}
    assert {"fpm_forward.json", "collection-plan.json", "benchmark.json", "cell.json"} <= names
    assert {"fpm-memory-worker-dp0-tp0-pp0.json", "fpm-memory-scheduler-dp0.json"} <= names
    assert [entry["relative_path"].rsplit(".", 1)[1] for entry in found["formal_data"]] == ["json", "parquet"]


def test_the_collection_is_only_read(collection, tmp_path):
    request, folder = collection
    before = files_of(folder)
    finalize(request, folder, tmp_path / "resolved")
    assert files_of(folder) == before


def test_a_trace_is_covered_by_the_resolved_pair(resolved, tmp_path):
    _, target = resolved
    trace = trace_file(tmp_path, PLAY)
    report, exit_code = validate_fpm(target / "request.yaml", target, trace, tmp_path / "replay")
    assert (report["status"], exit_code, report["issues"]) == ("covered", 0, [])
    assert report["fpm_query_coverage"]["queries"]["unsupported"] == 0


# --- refusals ---


def refuse(collection, target, words, error=OnboardError, **options):
    request, folder = collection
    with pytest.raises(error, match=words):
        finalize(request, folder, target, **options)
    parent = target.parent
    left = [place.name for place in parent.iterdir() if place.name.startswith(".fpmsdk-")] if parent.exists() else []
    assert left == []


def test_the_target_is_new_apart_and_no_link(collection, tmp_path):
    _, folder = collection
    used, link = tmp_path / "used", tmp_path / "link"
    used.mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    refuse(collection, used, "exists; nothing is replaced")
    refuse(collection, link, "is a symbolic link")
    for inside in (folder, folder / "resolved", folder.parent):
        refuse(collection, inside, "must be apart from")
    assert not (tmp_path / "elsewhere").exists()


def test_a_collection_in_use_is_refused(collection, tmp_path):
    _, folder = collection
    with exclusive(folder / ".support.lock", "the plan"):
        refuse(collection, tmp_path / "resolved", "another process works on the plan")


def test_declared_memory_needs_no_finalisation(tmp_path, monkeypatch):
    systems(tmp_path, monkeypatch)
    request = request_of(checkpoint(tmp_path))
    folder, _ = collected(tmp_path, request)
    refuse((request, folder), tmp_path / "resolved", "there is nothing to finalize")


def test_a_plan_that_was_not_collected_is_refused(tmp_path, monkeypatch):
    systems(tmp_path, monkeypatch)
    request = request_of(checkpoint(tmp_path), memory={})
    folder = tmp_path / "collection"
    create_plan(request, folder)
    refuse((request, folder), tmp_path / "resolved", "exactly one formal", EvidenceError)


def raw_file(folder, name):
    return next(path for path in sorted((folder / "fpm-artifacts").rglob(name)) if "smoke" not in path.parts)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-20])


def linked(path):
    copy = path.with_name("moved")
    path.rename(copy)
    path.symlink_to(copy)


TAMPERED = {
    "a measured time": ("benchmark.json", lambda path: path.write_text(path.read_text().replace("0.0", "0.1", 1))),
    "a truncated artifact": ("benchmark.json", truncated),
    "a number beyond float64": (
        "benchmark.json",
        lambda path: path.write_text(
            re.sub(r'"wall_time": ?[0-9.e-]+', '"wall_time": 1e400', path.read_text(), count=1)
        ),
    ),
    "a missing artifact": ("benchmark.json", Path.unlink),
    "a linked artifact": ("benchmark.json", linked),
    "another attempt": (
        "collector-provenance.json",
        lambda path: write_document(path, read_document(path) | {"attempt_id": "f" * 32}),
    ),
    "another engine": (
        "collector-provenance.json",
        lambda path: write_document(path, read_document(path) | {"runtime": {"backend": "vllm"}}),
    ),
    "a missing rank": ("fpm-memory-worker-dp0-tp0-pp0.json", Path.unlink),
    "a missing scheduler": ("fpm-memory-scheduler-dp0.json", Path.unlink),
    "an unresolved rank": (
        "fpm-memory-worker-dp0-tp0-pp0.json",
        lambda path: write_document(path, read_document(path) | {"status": "unresolved"}),
    ),
    "another cell": ("cell.json", lambda path: write_document(path, read_document(path) | {"workload_kind": "other"})),
    "another plan": (
        "collection-plan.json",
        lambda path: write_document(path, read_document(path) | {"model_path": "other"}),
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_evidence_is_refused_and_nothing_is_written(restored, tmp_path, case):
    name, change = TAMPERED[case]
    change(raw_file(restored[1], name))
    refuse(restored, tmp_path / "resolved", ".", OnboardError)
    assert not (tmp_path / "resolved").exists()


@pytest.mark.parametrize("name", ["fpm_forward_perf.parquet", "fpm_forward_perf.metadata.json"])
def test_a_changed_pair_is_refused(restored, tmp_path, name):
    path = next((restored[1] / "systems/data").rglob(name))
    path.write_bytes(path.read_bytes().replace(b"PAR1", b"PAR2").replace(b'"row_count": ', b'"row_count": 1'))
    refuse(restored, tmp_path / "resolved", ".", EvidenceError)
    assert not (tmp_path / "resolved").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda document: document["database"].update(status="failed"), "database.status"),
        (lambda document: document["database"].update(missing_cells=["fpm-x"]), "database.missing_cells"),
        (lambda document: document["database"].update(published_cells=1), "database.published_cells"),
        (lambda document: document["database"].update(skipped_first_publisher_wins=["fpm-x"]), "first_publisher"),
        (lambda document: next(iter(document["cells"].values())).update(status="failed"), "has not passed"),
        (lambda document: document["cells"].popitem(), "cell"),
        (lambda document: document.update(schema="other"), "schema"),
    ],
)
def test_an_incomplete_campaign_is_refused(restored, tmp_path, change, words):
    path = restored[1] / "fpm-checkpoint/fpm_forward.json"
    document = read_document(path)
    change(document)
    write_document(path, document)
    refuse(restored, tmp_path / "resolved", words)
    assert not (tmp_path / "resolved").exists()


@pytest.mark.parametrize(
    "option", [("prefill_sampling", "max_isl"), ("prefill_sampling", "max_batch_size"), ("global_warmup_iterations",)]
)
def test_a_frozen_plan_with_other_options_than_reviewed_is_refused(restored, tmp_path, option):
    _, folder = restored
    path = raw_file(folder, "collection-plan.json")
    document = read_document(path)
    place = document["options"]
    for name in option[:-1]:
        place = place[name]
    place[option[-1]] += 1
    document["sha256"] = plan_digest(document)
    moved = path.parent.with_name(document["sha256"][:16])
    path.parent.rename(moved)
    try:
        write_document(moved / "collection-plan.json", document)
        checkpoint_file = folder / "fpm-checkpoint/fpm_forward.json"
        write_document(checkpoint_file, read_document(checkpoint_file) | {"plan_sha256": document["sha256"]})
        before = files_of(folder)
        refuse(restored, tmp_path / "resolved", "options differ|differ")
        assert files_of(folder) == before
        assert not (tmp_path / "resolved").exists()
    finally:
        moved.rename(path.parent)


def test_evidence_that_changes_meanwhile_is_refused(restored, tmp_path, monkeypatch):
    real, path = module.plan_documents, raw_file(restored[1], "benchmark.json")

    def meddling(*arguments):
        documents = real(*arguments)
        path.write_bytes(path.read_bytes() + b" ")
        return documents

    monkeypatch.setattr(module, "plan_documents", meddling)
    refuse(restored, tmp_path / "resolved", "evidence was changed since it was recorded", EvidenceError)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_appears_meanwhile_is_not_replaced(collection, tmp_path, monkeypatch):
    real, target = module.plan_documents, tmp_path / "resolved"

    def meddling(*arguments):
        target.mkdir()
        return real(*arguments)

    monkeypatch.setattr(module, "plan_documents", meddling)
    refuse(collection, target, "only written where nothing is", FileExistsError)
    assert list(target.iterdir()) == []


def test_a_full_disk_leaves_nothing(collection, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refuse(collection, tmp_path / "resolved", "No space left", OSError)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_at_any_step_leaves_no_target_and_the_next_call_succeeds(collection, tmp_path):
    _, folder = collection
    before = files_of(folder)
    arguments = [str(folder.parent / "request.yaml"), str(folder), str(tmp_path / "resolved")]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.onboard.killed_finalize", *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout)
    assert len(outcomes) > 5
    assert not any(outcome["exists"] for outcome in outcomes[:-2])
    assert outcomes[-1] == {"killed": False, "exists": True}
    check_plan(load_request(tmp_path / "resolved/request.yaml"), tmp_path / "resolved")
    assert files_of(folder) == before


# --- later verification ---


def test_a_finalised_request_is_verified_from_its_raw_evidence(restored, tmp_path):
    request, folder = restored
    finalize(request, folder, tmp_path / "resolved")
    resolved = load_request(tmp_path / "resolved/request.yaml")
    verify_finalization(resolved)
    verify_finalization(resolved.replaced({"workload": {"input_tokens": 8}}))
    raised = resolved.document()
    memory = raised["fpm_profile"]["deployments"][0]["resources"]["runtime_memory"]
    memory["kv_cache_bytes"] *= 2
    with pytest.raises(EvidenceError, match="gives another request"):
        verify_finalization(resolved.replaced(raised))
    truncated(raw_file(folder, "fpm-memory-scheduler-dp0.json"))
    with pytest.raises((EvidenceError, CollectionError)):
        verify_finalization(resolved)


def test_a_request_that_was_not_finalised_cannot_be_verified(collection):
    with pytest.raises(OnboardError, match="not that of a finalisation"):
        verify_finalization(collection[0])


def test_a_finalised_plan_notices_a_changed_table(resolved):
    _, target = resolved
    request = load_request(target / "request.yaml")
    path = next((target / "systems/data").rglob("*.parquet"))
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(EvidenceError, match="evidence was changed"):
        check_plan(request, target)


def test_finding_16_the_quality_marker_is_verified_again_without_a_probe(resolved, tmp_path):
    """A marker that was edited in both places is found out by the next use of the plan, the profile and the replay."""
    _, target = resolved
    request = load_request(target / "request.yaml")
    document = request.document()
    profile = document["fpm_profile"]
    passed = {"status": "passed", "accuracy": "not_assessed"}
    resources = profile["deployments"][0]["resources"]
    edited = json.loads(resources["runtime_memory"]["provenance"]) | {"collection_quality": passed}
    resources["runtime_memory"]["provenance"] = json.dumps(edited)
    profile["provenance"] = json.dumps(json.loads(profile["provenance"]) | {"collection_quality": passed})
    forged = request.replaced(document)
    with pytest.raises(EvidenceError, match="collection_quality: is not what its evidence gives"):
        verify_finalization(forged)
    folder = tmp_path / "forged"
    create_plan(forged, folder)
    shutil.copytree(target / "systems/data", folder / "systems/data", dirs_exist_ok=True)
    with pytest.raises(EvidenceError, match="collection_quality: is not what its evidence gives"):
        check_plan(forged, folder)
    (tmp_path / "forged.yaml").write_bytes(forged.yaml_bytes())
    with pytest.raises(EvidenceError, match="collection_quality: is not what its evidence gives"):
        validate_fpm(tmp_path / "forged.yaml", folder, trace_file(tmp_path, PLAY), tmp_path / "replay")


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_the_export_is_that_of_the_role(tmp_path, monkeypatch, role):
    systems(tmp_path, monkeypatch)
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    request, folder = finished_in(tmp_path, role=role)
    finalize(request, folder, tmp_path / "resolved")
    names = set(files_of(tmp_path / "resolved"))
    pilots = {"predict/pilot.yaml", "recommend/pilot.yaml"}
    if role == "aggregated":
        assert pilots <= names and "worker.yaml" not in names
        return
    assert "worker.yaml" in names and not pilots & names
    worker = yaml.safe_load((tmp_path / "resolved/worker.yaml").read_text())
    assert (worker["worker_type"], worker["serving_mode"]) == (role, "disaggregated")
    assert list(worker["engine"]["workers"]) == [role]
    commands = read_document(tmp_path / "resolved/commands.json")
    assert (commands["predict"], commands["recommend"]) == ([], [])
    expected = {"prefill": 999 * 1024, "decode": 899 * 1024}[role]
    deployment = load_request(tmp_path / "resolved/request.yaml").profile_deployment()
    assert (deployment.worker_type, deployment.resources.runtime_memory.kv_cache_bytes) == (role, expected)


def test_phases_with_different_graphs_do_not_share_a_profile(tmp_path, monkeypatch):
    systems(tmp_path, monkeypatch)
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    request, folder = request_for(model_in(tmp_path)), tmp_path / "collection"
    create_plan(request, folder)

    def downgraded(launch):
        faults = "--graph-downgrade" if launch.cell.workload_kind == "decode" else ""
        return FakeExecutor(launch, faults=faults)

    collect(request, folder, executor=downgraded)
    refuse((request, folder), tmp_path / "resolved", "observed different engine settings", EvidenceError)


def test_a_smoke_campaign_is_not_finalised(tmp_path, monkeypatch):
    systems(tmp_path, monkeypatch)
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)
    request, folder = request_for(model_in(tmp_path)), tmp_path / "collection"
    create_plan(request, folder)
    collect(request, folder, smoke=True, executor=with_blocks)
    refuse((request, folder), tmp_path / "resolved", "exactly one formal", EvidenceError)
