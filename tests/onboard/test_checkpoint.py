"""The checkpoint of a session: revisions, patches, files, contexts, invalidation, acceptance, report.

Source: onboarding.md section 6.1, onboarding-transcripts.md section 3 and section 4 #26.
"""

import copy
import json
import os
import subprocess
import sys

import pytest

from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.checkpoint import checkpoint_path, load_checkpoint, lock_path
from fpmsdk.onboard.checkpoint_merge import merge_patch
from fpmsdk.onboard.checkpoint_report import checkpoint_report
from fpmsdk.onboard.checkpoint_save import save_checkpoint
from tests.onboard.sessions import DRAFT, SESSION, draft_of, write_files


@pytest.fixture
def path(tmp_path):
    write_files(tmp_path)
    return checkpoint_path(tmp_path / "session.json")


def save(path, patch=None, accept=(), revision=None):
    if revision is None and path.exists():
        revision = load_checkpoint(path).revision
    return save_checkpoint(path, patch=patch, expected_revision=revision, accept=accept)[0]


def saved(path, *patches, accept=()):
    """The session after some patches, with configurations accepted after the first one."""
    save(path, SESSION)
    if accept:
        save(path, accept=accept)
    for patch in patches:
        save(path, patch)
    return load_checkpoint(path)


def report(path):
    return checkpoint_report(load_checkpoint(path), path)


# --- the document and its revisions ---


def test_digests_are_those_of_the_peer(path):
    state = saved(path, accept=("tp2", "role"))
    assert {label: entry.acceptance and entry.acceptance.sha256 for label, entry in state.configurations.items()} == {
        "tp2": "45dddc4ba6051303970aed6f1f24f7cdc5e664627806c8e2227d588f383f5f02",
        "role": "63b3c09363482c4faddffbe9f745c6fd7b6bfacefb85635d8d396a06c03c5dd9",
        "dep": None,
    }
    contexts = {name: artifact.context_sha256 for name, artifact in state.configurations["tp2"].artifacts.items()}
    assert contexts == {
        "collector": "a76074ab2c1e7a5e47aa0e1c054f73ca22aedf40d4fecb24b375b83128abccb7",
        "measured": "a76074ab2c1e7a5e47aa0e1c054f73ca22aedf40d4fecb24b375b83128abccb7",
        "validated": "16ddf6196a859079c4e59307436ba49ebf140ac0d6cd1bc0924c58b3911ddd3a",
    }


def test_every_save_is_one_revision_and_the_file_is_private(path):
    assert save(path, SESSION).revision == 1
    assert save(path, {"research": {"n": 1}}, revision=1).revision == 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == json.dumps(load_checkpoint(path).document(), indent=2, sort_keys=True).encode() + b"\n"


@pytest.mark.parametrize("revision", [None, 2, 0])
def test_a_change_of_an_existing_session_names_the_revision_it_read(path, revision):
    save(path, SESSION)
    before = path.read_bytes()
    with pytest.raises(OnboardError, match="at revision 1; read it, then retry with --expect-revision 1"):
        save_checkpoint(path, patch={"research": {}}, expected_revision=revision)
    assert path.read_bytes() == before


def test_a_new_session_has_no_revision_to_expect(path):
    with pytest.raises(OnboardError, match="at revision 0"):
        save_checkpoint(path, patch={}, expected_revision=1)
    assert not path.exists()


def test_nothing_to_change_only_looks(path):
    save(path, SESSION)
    before = path.stat()
    state, written = save_checkpoint(path)
    assert (state.revision, written) == (1, False)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("document", "patch", "outcome"),
    # RFC 7386, appendix A.
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_patches_are_those_of_rfc_7386(document, patch, outcome):
    before = copy.deepcopy(document)
    assert merge_patch(document, patch) == outcome
    assert document == before


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"revision": 3}, "revision: is kept by the checkpoint itself"),
        ({"schema_version": "v2"}, "schema_version: is kept by the checkpoint itself"),
        ({"configurations": {"tp2": {"acceptance": None}}}, "only --accept-profile tp2"),
        ({"artifacts": {"config": {"sha256": "0" * 64}}}, "artifacts.config.sha256: is taken when"),
        (
            {"configurations": {"tp2": {"artifacts": {"measured": {"context_sha256": None}}}}},
            "configurations.tp2.artifacts.measured.context_sha256: is taken when",
        ),
        ({"configurations": []}, "configurations: Input should be a valid"),
        ({"progress": {"stage": 7}}, "progress.stage: Input should be less than or equal to 6, found 7"),
        ({"progress": {"stage": "3"}}, "progress.stage: Input should be a valid integer, found '3'"),
        ({"plan": {}}, "plan: Extra inputs are not permitted"),
        ({"artifacts": {"new": {"path": "missing.json"}}}, "artifacts.new.path: there is no such file"),
        ({"artifacts": {"new": {"path": "."}}}, "artifacts.new.path: there is no such file"),
        ({"artifacts": {"new": {"path": "session.json"}}}, "is the checkpoint or its lock"),
        ({"artifacts": {"new": {"path": "./x/../.session.json.lock"}}}, "is the checkpoint or its lock"),
        ({"artifacts": {"new": {"path": "a\0b"}}}, "NUL"),
        ({"artifacts": {"config": {"kind": "request"}}}, "remove the reference before"),
        ({"artifacts": {"new": {"path": "out.json", "scope": "collection"}}}, "shared artifacts are inputs"),
        (
            {"artifacts": {"new": {"path": "out.json", "kind": "collector_checkpoint"}}},
            "a collector_checkpoint belongs to a configuration",
        ),
        (
            {"configurations": {"dep": {"artifacts": {"new": {"path": "out.json", "kind": "collector_checkpoint"}}}}},
            "a collector_checkpoint belongs to a configuration, with scope collection",
        ),
    ],
)
def test_a_patch_that_breaks_a_rule_changes_nothing(path, patch, message):
    save(path, SESSION)
    before = path.read_bytes()
    with pytest.raises(OnboardError, match=message):
        save(path, patch)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("revision"), "revision are missing"),
        (lambda d: d.update(revision=0), "has at least 1, found 0"),
        (lambda d: d["configurations"]["tp2"]["acceptance"].update(revision=9), "is later than the checkpoint's own"),
        (lambda d: d["artifacts"]["config"].update(sha256=None), "artifacts.config.sha256: must be recorded"),
        (
            lambda d: d["configurations"]["tp2"]["artifacts"]["measured"].update(context_sha256=None),
            "measured.context_sha256: must be recorded",
        ),
        (lambda d: d["artifacts"]["config"].update(scope="collection"), "shared artifacts are inputs"),
        (lambda d: d.update(schema_version="aisimulate-onboarding-checkpoint/v2"), "schema_version"),
        (lambda d: d.update(extra=1), "extra: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_no_save_writes_is_refused(path, change, message):
    saved(path, accept=("tp2",))
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(OnboardError, match=message):
        load_checkpoint(path)


def test_a_missing_session_says_how_to_make_one(path):
    with pytest.raises(OnboardError, match="onboard checkpoint --file"):
        load_checkpoint(path)


def test_the_checkpoint_and_its_lock_are_no_links(tmp_path, path):
    save(path, SESSION)
    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(OnboardError, match="symbolic link"):
        checkpoint_path(tmp_path / "link.json")
    os.unlink(lock_path(path))
    lock_path(path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OnboardError, match="symbolic link"):
        save(path, {"research": {}})
    with pytest.raises(OnboardError, match="regular file"):
        checkpoint_path(tmp_path)


# --- files ---


def test_a_registered_file_keeps_the_digest_of_its_registration(path):
    state = saved(path)
    (path.parent / "config.json").write_text("changed")
    again = save(path, {"artifacts": {"config": {"path": "./config.json"}}})
    assert again.artifacts == state.artifacts
    (issue,) = [issue for issue in report(path)["integrity_issues"] if issue["artifact"] == "config"]
    assert issue["configuration"] is None
    assert "other bytes" in issue["detail"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "missing"),
        (lambda p: p.write_text(""), "other bytes"),
        (lambda p: (p.rename(p.with_suffix(".real")), p.symlink_to(p.with_suffix(".real"))), "symbolic link"),
        (lambda p: (p.unlink(), p.mkdir()), "directory"),
    ],
)
def test_a_file_that_is_not_what_it_was_is_an_issue(path, damage, message):
    saved(path)
    damage(path.parent / "config.json")
    told = report(path)
    assert [message in issue["detail"] for issue in told["integrity_issues"]] == [True]
    assert {entry["effective_status"] for entry in told["configurations"].values()} == {"needs_attention"}


def test_archived_files_are_history_and_no_longer_verified(path):
    saved(path, {"artifacts": {"config": {"archived": True}}})
    (path.parent / "config.json").unlink()
    told = report(path)
    assert told["archived_artifacts"] == [{"configuration": None, "artifact": "config", "path": "config.json"}]
    assert not [issue for issue in told["integrity_issues"] if issue["artifact"] == "config"]


def test_a_collector_checkpoint_may_go_on_but_stays_json(path):
    saved(path)
    (path.parent / "collector.json").write_text('{"cells": {}}')
    assert report(path)["integrity_issues"] == []
    (path.parent / "collector.json").write_text("{")
    assert [issue["artifact"] for issue in report(path)["integrity_issues"]] == ["collector"]


def test_paths_are_kept_relative_to_the_checkpoint(path, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "x.json").write_text("{}")
    state = saved(path, {"artifacts": {"x": {"path": str(tmp_path / "below" / "x.json")}}})
    assert state.artifacts["x"].path == "below/x.json"


@pytest.mark.parametrize("kind", ["request", "profile"])
def test_a_saved_request_or_profile_is_the_draft(path, tmp_path, kind):
    draft = draft_of("decode")
    content, change = (
        (draft, {"workload": {"input_tokens": 8}}) if kind == "request" else (draft["fpm_profile"], {"provenance": "y"})
    )
    for name, written in (("saved", content), ("other", content | change)):
        (tmp_path / f"{name}.json").write_text(json.dumps(written))
    saved(path, {"configurations": {"role": {"artifacts": {"saved": {"path": "saved.json", "kind": kind}}}}})
    assert report(path)["integrity_issues"] == []
    save(path, {"configurations": {"role": {"artifacts": {"other": {"path": "other.json", "kind": kind}}}}})
    (issue,) = report(path)["integrity_issues"]
    assert (issue["artifact"], "not the current draft's" in issue["detail"]) == ("other", True)


# --- invalidation ---


def edited(path, patch):
    state = saved(
        path,
        {"configurations": {"role": {"progress": {"stage": 6}}, "tp2": {"progress": {"stage": 6}}}},
        patch,
        accept=("tp2", "role"),
    )
    return {label: state.configurations[label] for label in ("tp2", "role")}


@pytest.mark.parametrize(
    ("name", "patch", "kept", "stages"),
    [
        ("research", {"research": {"n": 1}, "decisions": {"d": 1}, "pending_questions": [1]}, "both", (6, 6)),
        ("validation inputs", {"validation_inputs": {"trace": "u"}}, "both", (6, 6)),
        ("shared inputs", {"inputs": {"gpu": "gb200"}}, "none", (3, 3)),
        ("retired input file", {"artifacts": {"config": {"archived": True}}}, "none", (3, 3)),
        ("removed input file", {"artifacts": {"config": None}}, "none", (3, 3)),
        ("own inputs", {"configurations": {"tp2": {"inputs": {"x": 1}}}}, "role", (3, 6)),
        ("draft", {"configurations": {"tp2": {"draft_request": {"search": {"seed": 7}}}}}, "role", (3, 6)),
        ("example", {"configurations": {"tp2": {"draft_request": {"workload": {"input_tokens": 8}}}}}, "role", (3, 6)),
        ("its results", {"configurations": {"tp2": {"artifacts": {"measured": {"archived": True}}}}}, "both", (6, 6)),
        ("another configuration", {"configurations": {"dep": None}}, "both", (6, 6)),
    ],
)
def test_an_acceptance_ends_with_its_context_and_not_before(path, name, patch, kept, stages):
    entries = edited(path, patch)
    accepted = {label for label, entry in entries.items() if entry.acceptance is not None}
    assert accepted == {"both": {"tp2", "role"}, "none": set(), "role": {"role"}}[kept]
    assert (entries["tp2"].progress.stage, entries["role"].progress.stage) == stages


def test_changed_validation_inputs_send_a_validated_configuration_back_to_validation(path):
    entries = edited(path, {"validation_inputs": {"trace": "u"}})
    assert entries["tp2"].progress.status == "in_progress"
    assert "Validate again" in entries["tp2"].progress.next_action


def test_a_reported_blocker_outlives_the_change_that_caused_it(path):
    patch = {"configurations": {"tp2": {"inputs": {"x": 1}, "progress": {"status": "blocked", "blockers": ["b"]}}}}
    progress = edited(path, patch)["tp2"].progress
    assert (progress.stage, progress.status, progress.blockers) == (6, "blocked", ["b"])


def test_a_replaced_draft_and_its_acceptance_are_kept_in_the_history(path):
    entry = edited(path, {"configurations": {"tp2": {"draft_request": {"search": {"seed": 7}}}}})["tp2"]
    (event,) = entry.history
    assert event["event"] == "draft_replaced"
    assert event["revision"] == 3
    assert event["draft_request"] == DRAFT
    assert event["acceptance"] == {
        "revision": 2,
        "sha256": "45dddc4ba6051303970aed6f1f24f7cdc5e664627806c8e2227d588f383f5f02",
    }
    assert set(event) == {
        "event",
        "revision",
        "draft_request",
        "inputs",
        "shared_inputs",
        "acceptance",
        "artifacts",
        "shared_artifacts",
    }


def test_an_acceptance_that_inputs_end_is_kept_in_the_history(path):
    (event,) = edited(path, {"inputs": {"gpu": "gb200"}})["role"].history
    assert (event["event"], event["shared_inputs"]) == ("acceptance_invalidated", {"gpu": "h200_sxm"})


def test_results_of_another_draft_are_stale(path):
    saved(path, {"configurations": {"tp2": {"draft_request": {"search": {"seed": 7}}}}})
    stale = {issue["artifact"] for issue in report(path)["integrity_issues"] if "stale" in issue["detail"]}
    # The seed is of the evaluation alone: what was collected still stands.
    assert stale == {"validated"}
    save(path, {"configurations": {"tp2": {"draft_request": {"search": {"context_length": 4096}}}}})
    stale = {issue["artifact"] for issue in report(path)["integrity_issues"] if "stale" in issue["detail"]}
    assert stale == {"validated", "measured", "collector"}


# --- acceptance and report ---


def test_an_acceptance_is_of_one_complete_draft(path):
    saved(path)
    for label, message in (("dep", "identity: Field required"), ("absent", "no configuration 'absent'")):
        with pytest.raises(OnboardError, match=message):
            save(path, accept=(label,))
    incomplete = {key: value for key, value in DRAFT.items() if key != "fpm_profile"}
    save(path, {"configurations": {"new": {"draft_request": incomplete}}})
    with pytest.raises(OnboardError, match=r"draft_request\.fpm_profile: is missing"):
        save(path, accept=("new",))
    state = save(path, accept=("tp2",))
    assert [label for label, entry in state.configurations.items() if entry.acceptance] == ["tp2"]
    assert state.configurations["tp2"].acceptance.revision == state.revision == 3


def test_nothing_is_accepted_on_files_that_changed(path):
    saved(path)
    (path.parent / "config.json").write_text("changed")
    with pytest.raises(OnboardError, match="input file config: the file has other bytes"):
        save(path, accept=("tp2",))


def test_the_report_tells_status_progress_and_what_comes_next(path):
    saved(path, accept=("tp2",))
    told = report(path)
    assert {
        label: (entry["profile_accepted"], entry["effective_status"]) for label, entry in told["configurations"].items()
    } == {
        "tp2": (True, "accepted"),
        "dep": (False, "draft"),
        "role": (False, "draft"),
    }
    assert told["configurations"]["tp2"]["next_action"] == "Plan the collection of the accepted draft."
    assert told["state"] == load_checkpoint(path).document()
    assert (told["integrity_issues"], told["archived_artifacts"], told["verification"]["executed"]) == ([], [], False)


def test_an_edited_file_of_the_session_ends_the_acceptance(path):
    saved(path, accept=("tp2",))
    document = json.loads(path.read_text())
    document["configurations"]["tp2"]["inputs"] = {"x": 1}
    path.write_text(json.dumps(document))
    told = report(path)
    assert told["configurations"]["tp2"]["effective_status"] == "needs_attention"
    assert any("have changed; review" in issue["detail"] for issue in told["integrity_issues"])


def test_a_role_is_part_of_what_is_accepted_and_a_draft_without_one_stays_so(path):
    state = saved(path, accept=("tp2", "role"))
    assert "worker_type" not in state.configurations["tp2"].draft_request
    assert state.configurations["role"].draft_request == draft_of("decode")
    assert state.configurations["tp2"].acceptance != state.configurations["role"].acceptance


# --- several processes ---


def test_one_process_saves_at_a_time(path):
    save(path, SESSION)
    hold = f"""
from fpmsdk.documents.lock import exclusive
with exclusive({str(lock_path(path))!r}, "it"):
    print(1, flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(OnboardError, match="another process works on the checkpoint"):
            save(path, {"research": {}})
        other.kill()
    assert save(path, {"research": {}}).revision == 2


def test_of_many_writers_of_one_revision_one_wins(path):
    save(path, SESSION)
    writer = f"""
import sys
from pathlib import Path
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.checkpoint_save import save_checkpoint
try:
    save_checkpoint(Path({str(path)!r}), patch={{"research": {{"by": sys.argv[1]}}}}, expected_revision=1)
    print("won")
except OnboardError:
    print("lost")
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", writer, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    outcomes = [process.communicate()[0].strip() for process in writers]
    assert sorted(outcomes) == ["lost", "lost", "won"]
    state = load_checkpoint(path)
    assert (state.revision, state.research) == (2, {"by": str(outcomes.index("won"))})


def test_whenever_a_save_is_killed_the_session_is_the_old_or_the_new_one(path):
    save(path, SESSION)
    killed = subprocess.run(
        [sys.executable, "-m", "tests.onboard.killed", str(path)], capture_output=True, text=True, check=False
    )
    assert killed.returncode == 0, killed.stderr
    outcomes = json.loads(killed.stdout)
    assert outcomes[-1] == {"killed": False, "revision": 2, "saves": True}
    assert {outcome["revision"] for outcome in outcomes if outcome["killed"]} == {1, 2}
    assert all(outcome["saves"] for outcome in outcomes)


def test_a_full_disk_leaves_the_session_as_it_was(path, monkeypatch):
    save(path, SESSION)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, {"research": {}})
    assert path.read_bytes() == before
    assert sorted(place.name for place in path.parent.iterdir()) == [
        ".session.json.lock",
        "collector.json",
        "config.json",
        "out.json",
        "session.json",
    ]


def test_evidence_errors_are_input_errors():
    assert issubclass(EvidenceError, OnboardError)
