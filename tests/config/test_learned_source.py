"""What normalisation does with a learned source: an absolute path, the digest of now, and no forgotten change."""

import hashlib

import pytest

from fpmsdk.config import normalize_config
from fpmsdk.errors import ConfigError, PerfDataNotAvailableError, StateSnapshotIOError

BASE = {
    "model": "m",
    "system": "s",
    "backend": "vllm",
    "worker_type": "aggregated",
    "estimation_mode": "fpm_learned",
}
SNAPSHOT = {"path": "/saved", "sha256": "0" * 64}


def config(correction=None, state_snapshot=None, **learned):
    estimator = {"fpm_learned": {"adaptation": "frozen"} | learned}
    if correction is not None:
        estimator["correction"] = correction
    if state_snapshot is not None:
        estimator["state_snapshot"] = state_snapshot
    return BASE | {"estimator_config": estimator}


def learned_of(written):
    return normalize_config(written)["estimator_config"]["fpm_learned"]


def digest(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a" / "artifact.json"
    path.parent.mkdir()
    path.write_bytes(b"one")
    return path


def test_the_digest_of_an_artifact_is_pinned(source):
    assert learned_of(config(artifact_path=str(source)))["source_sha256"] == digest(b"one")


def test_of_a_checkpoint_the_manifest_is_pinned(source):
    (source.parent / "manifest.json").write_bytes(b"two")
    assert learned_of(config(checkpoint_path=str(source.parent)))["source_sha256"] == digest(b"two")


def test_the_path_becomes_absolute_lexically(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    written = learned_of(config(artifact_path="x/../artifact.json"))
    assert written["artifact_path"] == str(source)


def test_a_canonical_configuration_is_its_own_canonical_form(source):
    canonical = normalize_config(config(artifact_path=str(source)))
    assert normalize_config(canonical) == canonical


def test_a_changed_source_is_seen_although_the_configuration_is_known(source):
    assert learned_of(config(artifact_path=str(source)))["source_sha256"] == digest(b"one")
    source.write_bytes(b"two")
    assert learned_of(config(artifact_path=str(source)))["source_sha256"] == digest(b"two")


def test_the_right_digest_is_accepted_in_either_case(source):
    pinned = digest(b"one").upper()
    assert learned_of(config(artifact_path=str(source), source_sha256=pinned))["source_sha256"] == digest(b"one")


def test_another_digest_is_refused(source):
    with pytest.raises(ConfigError, match="source_sha256: expected") as refusal:
        normalize_config(config(artifact_path=str(source), source_sha256="0" * 64))
    assert refusal.value.path == "estimator_config.fpm_learned.source_sha256"


@pytest.mark.parametrize("field", ["artifact_path", "checkpoint_path"])
def test_a_missing_source_is_missing_data(field, tmp_path):
    with pytest.raises(PerfDataNotAvailableError, match=f"fpm_learned.{field}: .*none"):
        normalize_config(config(**{field: str(tmp_path / "none")}))


@pytest.mark.parametrize("path", ["", "\0", "/dev/null"])
def test_what_is_no_file_is_refused(path, tmp_path):
    with pytest.raises(ConfigError) as refusal:
        normalize_config(config(artifact_path=path or str(tmp_path)))
    assert refusal.value.path == "estimator_config.fpm_learned.artifact_path"


def test_a_source_that_a_saved_state_pins_is_left_to_the_restore():
    written = learned_of(config(artifact_path="/saved/forest", source_sha256="1" * 64, state_snapshot=SNAPSHOT))
    assert (written["artifact_path"], written["source_sha256"]) == ("/saved/forest", "1" * 64)


def test_a_missing_source_of_a_saved_state_is_no_data_to_skip():
    with pytest.raises(StateSnapshotIOError) as refusal:
        normalize_config(config(artifact_path="/saved/forest", state_snapshot=SNAPSHOT))
    assert isinstance(refusal.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("correction", "mode"),
    [(None, "hybrid"), ({"mode": "auto"}, "hybrid"), ({"enabled": False}, "hybrid"), ({"mode": "fixed"}, "fixed")],
)
def test_automatic_correction_of_a_learned_model_is_hybrid(correction, mode, source):
    canonical = normalize_config(config(correction, artifact_path=str(source)))
    assert canonical["estimator_config"]["correction"]["mode"] == mode
