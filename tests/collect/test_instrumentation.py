"""Instrumentation bundles: the rules of their manifest, their digest, their frozen copy, their verified import.

Source: collector.md section 8.3.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from fpmsdk.collect.instrumentation import (
    contained_file,
    freeze_instrumentation,
    load_instrumentation,
    loader_binding,
    loader_path,
)
from fpmsdk.errors import EvidenceError, OnboardError
from tests.collect.observed import MANIFEST, write_bundle


def test_the_digest_of_a_bundle_is_that_of_the_peer(tmp_path):
    # Taken from the peer's load_instrumentation of the same files.
    assert load_instrumentation(write_bundle(tmp_path)).sha256 == (
        "28e09da3b0ccdd69d4bc413086813590cc28da28101a78e13aa7a161fb20799d"
    )


def test_json_and_yaml_manifests_have_one_digest(tmp_path):
    manifest = write_bundle(tmp_path)
    written = json.loads(manifest.read_text())
    (tmp_path / "other.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in written.items()))
    assert load_instrumentation(tmp_path / "other.yaml").sha256 == load_instrumentation(manifest).sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": "other"}, "schema_version: must be"),
        ({"observation_schema": "other"}, "observation_schema: must be"),
        ({"extra": 1}, "extra: is no field"),
        ({"files": None}, "files: must list"),
        ({"files": []}, "files: must list"),
        ({"files": ["../out.py"]}, "must be relative and normalised"),
        ({"files": ["/etc/passwd"]}, "must be relative and normalised"),
        ({"files": ["instrumentation/missing.py", *MANIFEST["files"]]}, "this file is missing"),
        ({"files": ["instrumentation/__init__.py", "Instrumentation/__init__.py"]}, "names a file twice"),
        ({"files": ["fpm_runtime_instrumentation.py"]}, "name of the collector itself"),
        ({"files": ["not-a-module.py"]}, "does not name one Python module"),
        ({"worker_class": "elsewhere.Worker"}, "worker_class: must be module.Class"),
        ({"worker_class": "instrumentation"}, "worker_class: must be module.Class"),
        ({"scheduler_class": 3}, "scheduler_class: must be module.Class"),
        ({"source_notes": "absent.md"}, "source_notes: must be one of files"),
        ({"runtime": {"framework": "vllm", "version": "0.27.0"}}, "runtime: must have framework"),
        (
            {"runtime": {"framework": "sglang", "version": "0.27.0", "source_revision": "a" * 40}},
            "runtime.framework: must be 'vllm'",
        ),
        (
            {"runtime": {"framework": "vllm", "version": "0.27.0", "source_revision": "main"}},
            "runtime.source_revision: must be a full",
        ),
        (
            {"runtime": {"framework": "vllm", "version": " ", "source_revision": "a" * 40}},
            "runtime.version: must be one pinned",
        ),
        (
            {"runtime": {"framework": "vllm", "version": "1", "source_revision": "a" * 40, "source_files": {"a": "b"}}},
            "must be a lower-case SHA-256",
        ),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(tmp_path, change, message):
    manifest = write_bundle(tmp_path)
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(OnboardError, match=message):
        load_instrumentation(manifest)


def test_a_manifest_of_another_engine_version_is_refused(tmp_path):
    with pytest.raises(OnboardError, match=r"is written for '0\.27\.0', the engine is '0\.28\.0'"):
        load_instrumentation(write_bundle(tmp_path), "0.28.0")


def test_repeated_keys_and_missing_fields_are_refused(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text('{"files": [], "files": []}')
    with pytest.raises(OnboardError, match="the key 'files' is given twice"):
        load_instrumentation(path)
    path.write_text("{}")
    with pytest.raises(OnboardError, match="files: is missing"):
        load_instrumentation(path)


@pytest.mark.parametrize("linked", ["manifest.json", "instrumentation/observer.py", "instrumentation"])
def test_symbolic_links_are_refused(tmp_path, linked):
    manifest = write_bundle(tmp_path)
    place = tmp_path / linked
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    with pytest.raises(OnboardError, match="symbolic link"):
        load_instrumentation(manifest)


def test_a_frozen_copy_has_the_digest_of_its_source_and_replaces_nothing(tmp_path):
    bundle = load_instrumentation(write_bundle(tmp_path))
    frozen = freeze_instrumentation(bundle, tmp_path / "attempt" / "instrumentation")
    assert frozen.sha256 == bundle.sha256
    assert frozen.files == bundle.files
    with pytest.raises(OnboardError, match="fresh folder"):
        freeze_instrumentation(bundle, tmp_path / "attempt" / "instrumentation")


def test_a_bundle_that_changed_since_it_was_loaded_is_not_frozen(tmp_path):
    bundle = load_instrumentation(write_bundle(tmp_path))
    (tmp_path / "instrumentation" / "observer.py").write_text("changed = True\n")
    with pytest.raises(EvidenceError, match="changed while it was copied"):
        freeze_instrumentation(bundle, tmp_path / "attempt")
    assert not (tmp_path / "attempt").exists()


@pytest.mark.parametrize("path", ["", ".", "a//b", "a/../b", "/a", "a\\b", "c:x", "a\n", None, 3])
def test_a_contained_file_has_a_normal_relative_path(tmp_path, path):
    with pytest.raises(EvidenceError, match="must be relative and normalised"):
        contained_file(tmp_path, path)


IMPORTING = """
import json, fpm_runtime_instrumentation as entry
worker, scheduler = entry.ObservedWorker, entry.ObservedInstrumentedScheduler
print(json.dumps([worker().told(), scheduler.__name__, worker.__module__, entry.observed_binding()]))
"""


def unit(tmp_path, **changes):
    """What a launch stages: the frozen bundle, the importer and the context; and its environment."""
    frozen = freeze_instrumentation(load_instrumentation(write_bundle(tmp_path / "source")), tmp_path / "bundle")
    (tmp_path / "results").mkdir()
    shutil.copy(loader_path(), tmp_path / "bundle")
    context = {
        "attempt_id": "a1",
        "configuration": "tp1",
        "phase": "prefill",
        "bundle_sha256": frozen.sha256,
        "instrumentation_binding": loader_binding(),
        **changes,
    }
    (tmp_path / "context.json").write_text(json.dumps(context))
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path / "bundle"),
        "AISIMULATE_RUNTIME_CONTEXT": str(tmp_path / "context.json"),
        "AISIMULATE_RUNTIME_INSTRUMENTATION": str(tmp_path / "bundle" / "manifest.json"),
        "AISIMULATE_RUNTIME_OBSERVATION_DIR": str(tmp_path / "results"),
    }


def run(environment, script=IMPORTING):
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def receipt(tmp_path):
    (path,) = (tmp_path / "results").glob("runtime-instrumentation-imports-*.json")
    return json.loads(path.read_text())


def test_observers_are_executed_from_the_verified_bytes_and_leave_a_receipt(tmp_path):
    done = run(unit(tmp_path))
    assert done.returncode == 0, done.stderr
    told, scheduler_name, module, binding = json.loads(done.stdout)
    assert (told, scheduler_name, module) == (
        "observed",
        "ObservedInstrumentedScheduler",
        "fpm_runtime_instrumentation",
    )
    assert binding == receipt(tmp_path)
    assert binding["status"] == "verified"
    assert binding["bundle_sha256"] == binding["expected_bundle_sha256"]
    assert sorted(binding["imports"]) == ["instrumentation", "instrumentation.observer"]
    assert binding["classes"] == {
        "worker_class": "instrumentation.observer.Worker",
        "scheduler_class": "instrumentation.observer.InstrumentedScheduler",
    }


def test_a_stale_compiled_file_is_never_executed(tmp_path):
    environment = unit(tmp_path)
    run(environment, "import instrumentation.observer")
    cache = next((tmp_path / "bundle").rglob("observer.*.pyc"))
    cache.write_bytes(cache.read_bytes()[:-4] + b"evil")
    assert json.loads(run(environment).stdout)[0] == "observed"


def test_changed_observers_are_not_imported(tmp_path):
    environment = unit(tmp_path)
    (tmp_path / "bundle" / "instrumentation" / "observer.py").write_text("raise SystemExit(3)\n")
    done = run(environment)
    assert done.returncode == 1
    assert "is not the frozen" in done.stderr
    assert receipt(tmp_path)["status"] == "failed"


def test_another_importer_than_the_frozen_one_imports_nothing(tmp_path):
    done = run(unit(tmp_path, instrumentation_binding={**loader_binding(), "loader_sha256": "0" * 64}))
    assert "the importer is not the one that the launch froze" in done.stderr
    assert receipt(tmp_path)["imports"] == {}


def test_a_module_imported_before_its_verification_is_refused(tmp_path):
    done = run(unit(tmp_path), "import instrumentation.observer\n" + IMPORTING)
    assert "was imported before it could be verified" in done.stderr


def test_a_bundle_that_changes_after_its_import_is_noticed(tmp_path):
    script = IMPORTING.replace(
        "print(", "open(entry._sessions[0].root + '/instrumentation/observer.py', 'a').write('#')\nprint("
    )
    done = run(unit(tmp_path), script)
    assert "changed after it was imported" in done.stderr
    assert receipt(tmp_path)["status"] == "failed"


def test_a_record_cannot_claim_an_import_that_did_not_happen(tmp_path):
    done = run(unit(tmp_path), "import fpm_runtime_instrumentation as entry\nentry.observed_binding()")
    assert "not loaded through fpm_runtime_instrumentation" in done.stderr
