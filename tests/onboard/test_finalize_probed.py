"""Finalising a collection whose profile came from a runtime probe, and a revision that lowers its capacity.

Source: onboarding.md sections 6.4 and 7.
"""

import functools
import json
import os

import pytest

from fpmsdk.collect import fake_observations
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from fpmsdk.onboard.checkpoint import load_checkpoint
from fpmsdk.onboard.checkpoint_save import save_checkpoint
from fpmsdk.onboard.finalize import finalize, verify_finalization
from fpmsdk.onboard.finalize_revision import verify_revision
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.request import load_request
from tests.onboard.collected import systems
from tests.onboard.probed import collected_in, imported, onboard, probed_in


def surroundings(place, patch):
    systems(place, patch)
    patch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """The request file and the plan folder of a collection under an accepted probe."""
    place = tmp_path_factory.mktemp("probed")
    with pytest.MonkeyPatch.context() as patch:
        surroundings(place, patch)
        probed_in(place)
        yield collected_in(place)


def memory_of(request):
    return request.profile_deployment().resources.runtime_memory


def test_the_observed_capacity_is_held_against_the_accepted_one(collection, tmp_path):
    file, folder = collection
    request = load_request(file)
    finalize(request, folder, tmp_path / "resolved")
    resolved = load_request(tmp_path / "resolved/request.yaml")
    assert memory_of(resolved).kv_cache_bytes == memory_of(request).kv_cache_bytes == 999 * 1024
    manifest = read_document(tmp_path / "resolved/finalization.json")
    assert manifest["runtime_probe"] == json.loads(memory_of(request).provenance)
    compatibility = manifest["runtime_compatibility"]
    assert (compatibility["status"], compatibility["accepted_capacity_bytes"]) == ("compatible", 999 * 1024)
    names = {os.path.basename(reference["path"]) for reference in manifest["source_artifacts"]}
    assert {"runtime-observations.json", "manifest.json"} <= names
    check_plan(resolved, tmp_path / "resolved")
    verify_finalization(resolved)


def test_observations_that_changed_are_refused(collection, tmp_path):
    file, folder = collection
    index = folder / read_document(folder / "fpm-checkpoint/fpm_forward.json")["runtime_observations"]
    path = next(iter(sorted((index.parent / "runtime-observations").rglob("*worker*.json"))))
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    try:
        with pytest.raises((EvidenceError, CollectionError, OnboardError)):
            finalize(load_request(file), folder, tmp_path / "resolved")
    finally:
        path.write_bytes(content)
    assert not (tmp_path / "resolved").exists()


def test_a_revision_needs_a_probe_and_a_lower_capacity(collection, tmp_path):
    file, folder = collection
    with pytest.raises(OnboardError, match="must be lower than the accepted"):
        finalize(load_request(file), folder, tmp_path / "resolved", memory_config=file)
    assert not (tmp_path / "resolved").exists()


@pytest.fixture(scope="module")
def lower(tmp_path_factory):
    """A collection whose engine had a smaller cache than the probe, and the revision imported from it."""
    place = tmp_path_factory.mktemp("lower")
    with pytest.MonkeyPatch.context() as patch:
        surroundings(place, patch)
        session = probed_in(place)
        request, folder = next((place / "drafts").rglob("request.yaml")), place / "collection"
        onboard("plan", "-c", request, "--output-dir", folder)
        collect = ("collect-fpm", "-c", request, "--output-dir", folder, "--execute")
        onboard(*collect, "--smoke")
        pool = functools.partial(fake_observations.FakePool, num_blocks=900)
        patch.setattr(fake_observations, "FakePool", pool)
        report = json.loads(onboard(*collect, code=1))
        assert "below the accepted" in report["execution_error"]
        index = folder / read_document(folder / "fpm-checkpoint/fpm_forward.json")["runtime_observations"]
        yield request, folder, session, imported(session, index, place / "revision")


def test_a_smaller_cache_than_accepted_is_refused_without_a_revision(lower, tmp_path):
    request, folder, _, _ = lower
    with pytest.raises(EvidenceError, match="is below the accepted"):
        finalize(load_request(request), folder, tmp_path / "resolved")


def test_an_accepted_revision_lowers_the_capacity_and_keeps_the_timing_identity(lower, tmp_path):
    request, folder, _, revision = lower
    original = load_request(request)
    finalize(original, folder, tmp_path / "resolved", memory_config=revision)
    resolved = load_request(tmp_path / "resolved/request.yaml")
    assert memory_of(resolved).kv_cache_bytes == 899 * 1024 < memory_of(original).kv_cache_bytes
    manifest = read_document(tmp_path / "resolved/finalization.json")
    assert manifest["memory_revision"]["path"] == str(revision)
    assert manifest["runtime_probe"] == json.loads(memory_of(original).provenance)
    verify_finalization(resolved)


def test_a_revision_that_is_not_accepted_is_refused(lower, tmp_path):
    request, folder, session, revision = lower
    saved = session.read_bytes()
    change = {"configurations": {"tp1": {"draft_request": {"workload": {"input_tokens": 17}}}}}
    save_checkpoint(session, patch=change, expected_revision=load_checkpoint(session).revision)
    try:
        with pytest.raises(OnboardError, match="is not accepted"):
            finalize(load_request(request), folder, tmp_path / "resolved", memory_config=revision)
    finally:
        session.write_bytes(saved)
    assert not (tmp_path / "resolved").exists()


def test_a_revision_that_changes_more_than_the_capacity_is_refused(lower):
    request, _, _, revision = lower
    other = load_request(revision).replaced({"workload": {"input_tokens": 17}})
    with pytest.raises(OnboardError, match="changes more than the cache capacity"):
        verify_revision(load_request(request), other, {})


def test_a_revision_of_another_capacity_than_observed_is_refused(lower):
    request, _, _, revision = lower
    observed = {"resources": {"runtime_memory": {"kv_cache_bytes": 898 * 1024}}}
    with pytest.raises(EvidenceError, match=f"{899 * 1024} is not the observed minimum {898 * 1024}"):
        verify_revision(load_request(request), load_request(revision), observed)
