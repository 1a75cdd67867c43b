"""Observations become drafts: what is compared, what is kept, and what an imported profile still rests on.

Source: onboarding.md sections 6.3 and 6.4, section 9 (rows 7 and 24), onboarding-transcripts.md section 4 #28.
"""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest

from fpmsdk.collect.fake_observations import FakePool
from fpmsdk.documents.evidence import manifest as files_below
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.checkpoint_report import checkpoint_report
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.import_observations import import_observations
from fpmsdk.onboard.imported_profile import require_accepted
from fpmsdk.onboard.provenance import probe_manifest
from fpmsdk.onboard.request import SupportRequest, load_request
from fpmsdk.onboard.runtime_profile import runtime_collection_inputs, verify_runtime_profile
from tests.onboard.observed_sessions import EXAMPLE, Session


@pytest.fixture
def session(tmp_path, monkeypatch):
    def make(configurations=None, **options):
        made = Session(tmp_path, configurations or {"tp1": {"draft_request": EXAMPLE}}, **options)
        monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(made.systems))
        return made

    return make


def imported(session, output="drafts", **options):
    return import_observations(session.path, session.observed(**options), session.folder / output)


def request_of(session, label="tp1"):
    return SupportRequest.model_validate(session.draft(label))


# --- what an import writes ---


def test_sound_evidence_becomes_a_draft_that_can_be_accepted(session):
    made = session()
    result = imported(made)
    folder = made.folder / "drafts" / "configuration-001"
    assert result == {
        "checkpoint": str(made.path),
        "revision": 2,
        "status": "complete",
        "configurations": {
            "tp1": {
                "status": "complete",
                "diagnostics": [],
                "validation": str(folder / "validation.json"),
                "request": str(folder / "request.yaml"),
                "profile": str(folder / "fpm-model-profile.json"),
            }
        },
    }
    assert json.loads((made.folder / "drafts" / "import.json").read_text()) == result
    request = request_of(made)
    assert load_request(folder / "request.yaml") == request
    resources = request.profile_deployment().resources
    assert (resources.memory_source, resources.cache_layout) == ("runtime", "grouped")
    assert resources.runtime_memory.kv_cache_bytes == 1022976
    assert request.collection.gpu_memory_utilization == 0.9  # what the probe took by default is stated from now on
    entry = made.state.configurations["tp1"]
    assert entry.acceptance is None
    assert (entry.progress.stage, entry.progress.status) == (3, "in_progress")
    assert entry.history[0]["event"] == "runtime_observations_import"
    made.save(accept=("tp1",))
    report = checkpoint_report(made.state, made.path)
    assert (report["integrity_issues"], report["configurations"]["tp1"]["profile_accepted"]) == ([], True)
    require_accepted(request)


def test_the_copied_evidence_is_that_of_the_probe_file_by_file(session):
    made = session()
    imported(made)
    copied = files_below(made.folder / "drafts" / "configuration-001" / "evidence" / "raw")
    original = files_below(made.folder / "probe")
    original.pop("observations.json")
    assert copied == original


def test_what_was_made_of_a_former_draft_is_archived_and_inputs_stay(session, tmp_path):
    made = session()
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "out.json").write_text("{}")
    made.save(
        {
            "configurations": {
                "tp1": {
                    "artifacts": {
                        "notes": {"path": "notes.md"},
                        "measured": {"path": "out.json", "scope": "collection"},
                    }
                }
            }
        }
    )
    imported(made)
    artifacts = made.state.configurations["tp1"].artifacts
    assert (artifacts["notes"].archived, artifacts["measured"].archived) == (False, True)
    first = {name for name in artifacts if name.startswith("runtime-")}
    import_observations(made.path, made.folder / "probe" / "observations.json", made.folder / "again")
    artifacts = made.state.configurations["tp1"].artifacts
    assert all(artifacts[name].archived for name in first)
    assert {artifact.kind for name, artifact in artifacts.items() if not artifact.archived} == {
        "file",
        "request",
        "profile",
    }


def test_evidence_that_does_not_hold_leaves_the_draft_and_is_kept(session):
    made = session({"good": {"draft_request": EXAMPLE}, "bad": {"draft_request": EXAMPLE}})
    before = made.draft("bad")

    def change(label, phase, name, record):
        if label == "bad":
            record.update(error="boom")

    result = imported(made, change=change)
    assert result["status"] == "incomplete"
    assert [result["configurations"][label]["status"] for label in ("good", "bad")] == ["complete", "incomplete"]
    entry = made.state.configurations["bad"]
    assert made.draft("bad") == before
    assert entry.progress.status == "blocked"
    assert "boom" in entry.progress.blockers[0]
    assert entry.artifacts
    assert all(artifact.archived for artifact in entry.artifacts.values())
    assert made.draft("good")["fpm_profile"]["context_length"] == 128


@pytest.mark.parametrize("damage", ["tampered", "truncated", "gone", "linked"])
def test_damaged_evidence_is_told_and_nothing_is_imported(session, damage):
    made = session()
    index = made.observed()
    record = next(index.parent.glob("attempts/*/decode/raw/*/*worker*.json"))
    content = record.read_bytes()
    record.unlink()
    if damage == "tampered":
        record.write_bytes(content.replace(b"after_warmup", b"AFTER_WARMUP"))
    elif damage == "truncated":
        record.write_bytes(content[:-5])
    elif damage == "linked":
        (made.folder / "elsewhere.json").write_bytes(content)
        record.symlink_to(made.folder / "elsewhere.json")
    result = import_observations(made.path, index, made.folder / "drafts")
    assert result["status"] == "incomplete"
    assert record.name in " ".join(result["configurations"]["tp1"]["diagnostics"])
    assert "fpm_profile" not in made.draft("tp1")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("index is no JSON", {"content": "{"}, "invalid JSON"),
        ("index of another kind", {"content": "{}"}, "no aisimulate-runtime-observations/v1 index"),
        ("output exists", {"output": "model"}, "does not exist yet"),
        ("output holds the session", {"output": "."}, "holds the session"),
        ("unknown configuration", {"configurations": ["other"]}, "unknown are other"),
        ("configuration twice", {"configurations": ["tp1", "tp1"]}, "each once"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(session, name, arguments, message):
    made = session()
    index = made.observed()
    if "content" in arguments:
        index.write_text(arguments["content"])
    before = made.path.read_bytes()
    with pytest.raises(OnboardError, match=message):
        import_observations(
            made.path, index, made.folder / arguments.get("output", "drafts"), arguments.get("configurations")
        )
    assert made.path.read_bytes() == before
    assert not (made.folder / "drafts").exists()


def test_a_session_that_moves_on_during_an_import_is_not_overwritten(session, monkeypatch):
    made = session()
    index = made.observed()
    from fpmsdk.onboard import import_observations as module

    validate = module.validate_observations

    def meanwhile(*arguments):
        made.save({"decisions": {"by": "someone else"}})
        return validate(*arguments)

    monkeypatch.setattr(module, "validate_observations", meanwhile)
    with pytest.raises(OnboardError, match="at revision 2; read it, then retry"):
        import_observations(made.path, index, made.folder / "drafts")
    assert "fpm_profile" not in made.draft("tp1")
    assert (made.folder / "drafts" / "configuration-001" / "validation.json").exists()


# --- claims and measurement ---


@pytest.mark.parametrize(
    ("claims", "pool", "layout", "reason"),
    [
        ({}, None, "grouped", None),
        ({"cache_layout": "grouped"}, None, "grouped", None),
        ({"kv_bytes_per_token": 64}, None, "linear", "linear: the stated kv_bytes_per_token agrees"),
        ({"cache_layout": "linear"}, None, "linear", "linear: the stated cache_layout agrees"),
        # 48 bytes in blocks of 32 tokens: one and a half bytes a token.
        (
            {"cache_layout": "linear"},
            FakePool(block_size_tokens=1, kv_heads=1, head_dim=8, layers_per_group=1),
            "grouped",
            "no one size above 1",
        ),
    ],
)
def test_a_linear_claim_that_the_measurement_supports_makes_the_profile_linear(session, claims, pool, layout, reason):
    made = session({"tp1": {"draft_request": EXAMPLE, "inputs": {"resource_overrides": claims}}})
    result = imported(made, pool=pool)["configurations"]["tp1"]
    assert result["status"] == "complete", result["diagnostics"]
    assert request_of(made).profile_deployment().resources.cache_layout == layout
    assert (reason or "") in result.get("cache_layout_reason", "")
    assert ("cache_layout_reason" in result) == (reason is not None)
    verify_runtime_profile(request_of(made))


def test_claimed_groups_are_compared_without_names_and_order(session):
    group = {"kind": "attention", "num_layers": 2, "block_size_tokens": 16, "page_size_bytes": 1024}
    groups = [{"name": "b", **group, "sliding_window": 32}, {"name": "a", **group}]
    made = session({"tp1": {"draft_request": EXAMPLE, "inputs": {"resource_overrides": {"cache_groups": groups}}}})
    assert imported(made, pool=FakePool(windows_tokens=(None, 32)))["status"] == "complete"


@pytest.mark.parametrize(
    ("claims", "pool", "message"),
    [
        ({"kv_bytes_per_token": 65}, None, "stated is 65, measured is 64"),
        ({"cache_layout": "linear"}, FakePool(windows_tokens=(32,)), "groups with windows"),
        ({"kv_bytes_per_token": 64}, FakePool(windows_tokens=(32,)), "have no one rate"),
        (
            {
                "cache_groups": [
                    {
                        "name": "a",
                        "kind": "attention",
                        "num_layers": 3,
                        "block_size_tokens": 16,
                        "page_size_bytes": 1024,
                    }
                ]
            },
            None,
            "cache_groups: stated is",
        ),
        ({"max_batch_size": 8}, None, "max_batch_size: stated is 8, measured is 4"),
        ({"context_length": 256}, None, "context_length: 256 contradicts 128"),
        ({"architecture": "Qwen3ForCausalLM"}, None, "architecture: 'Qwen3ForCausalLM' contradicts"),
    ],
)
def test_a_claim_that_the_measurement_contradicts_names_both(session, claims, pool, message):
    made = session({"tp1": {"draft_request": EXAMPLE, "inputs": {"resource_overrides": claims}}})
    result = imported(made, pool=pool)
    assert message in " ".join(result["configurations"]["tp1"]["diagnostics"])
    assert "fpm_profile" not in made.draft("tp1")


# --- what an imported profile still rests on ---


def edited(session, change):
    draft = copy.deepcopy(session.draft("tp1"))
    change(draft)
    return SupportRequest.model_validate(draft)


def resources_of(draft):
    return draft["fpm_profile"]["deployments"][0]["resources"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("context", lambda d: d["search"].update(context_length=64), "settings of the runtime differ"),
        ("fraction", lambda d: d["collection"].update(gpu_memory_utilization=0.8), "settings of the runtime differ"),
        ("image revision", lambda d: d["identity"].update(sm=90), "settings of the runtime differ"),
        (
            "geometry",
            lambda d: resources_of(d)["cache_groups"][0].update(page_size_bytes=512),
            "cache geometry or limits differ",
        ),
        (
            "capacity beside the checkpoint",
            lambda d: resources_of(d)["runtime_memory"].update(kv_cache_bytes=1024),
            "edit it through",
        ),
        ("metadata", lambda d: d["fpm_profile"].update(context_length=256), "model metadata"),
    ],
)
def test_an_edit_beyond_the_evidence_needs_a_fresh_probe(session, name, change, message):
    made = session()
    imported(made)
    with pytest.raises(OnboardError, match=message):
        verify_runtime_profile(edited(made, change))


def test_an_example_may_change_freely(session):
    made = session()
    imported(made)
    verify_runtime_profile(edited(made, lambda d: d["workload"].update(request_count=9)))


def test_a_lower_capacity_is_kept_beside_the_observed_one(session):
    made = session()
    imported(made)
    draft = copy.deepcopy(made.draft("tp1"))
    resources_of(draft)["runtime_memory"]["kv_cache_bytes"] = 500_000
    made.save({"configurations": {"tp1": {"draft_request": draft}}})
    request = request_of(made)
    assert probe_manifest(request)["user_overrides"] == {
        "runtime_memory.kv_cache_bytes": {
            "observed": 1022976,
            "value": 500_000,
            "source": "user override; assumption, not a runtime measurement",
        }
    }
    verify_runtime_profile(request)
    made.save({"configurations": {"tp1": {"draft_request": edit_back(made)}}})
    assert probe_manifest(request_of(made))["user_overrides"] == {}


def edit_back(session):
    draft = copy.deepcopy(session.draft("tp1"))
    resources_of(draft)["runtime_memory"]["kv_cache_bytes"] = 1022976
    return draft


def test_a_linear_capacity_is_a_whole_number_of_blocks(session):
    made = session({"tp1": {"draft_request": EXAMPLE, "inputs": {"resource_overrides": {"kv_bytes_per_token": 64}}}})
    imported(made)
    draft = copy.deepcopy(made.draft("tp1"))
    resources_of(draft)["runtime_memory"]["kv_cache_bytes"] = 5000
    made.save({"configurations": {"tp1": {"draft_request": draft}}})
    # 16 tokens of 64 bytes make a block of 1024 bytes.
    with pytest.raises(OnboardError, match="the next lower one is 4096"):
        verify_runtime_profile(request_of(made))


def test_evidence_cannot_be_taken_out_of_an_imported_profile(session):
    made = session()
    imported(made)
    draft = copy.deepcopy(made.draft("tp1"))
    resources_of(draft)["runtime_memory"]["provenance"] = "measured by hand"
    with pytest.raises(OnboardError, match="cannot be taken out of it"):
        made.save({"configurations": {"tp1": {"draft_request": draft}}})


@pytest.mark.parametrize("damage", ["changed", "gone", "linked"])
def test_an_accepted_profile_falls_with_its_evidence(session, damage):
    made = session()
    imported(made)
    made.save(accept=("tp1",))
    evidence = next((made.folder / "drafts").glob("configuration-001/evidence/raw/**/*worker*.json"))
    content = evidence.read_bytes()
    evidence.unlink()
    if damage == "changed":
        evidence.write_bytes(content + b" ")
    elif damage == "linked":
        shutil.copy(next(evidence.parent.glob("*scheduler*")), made.folder / "copy.json")
        (made.folder / "copy.json").write_bytes(content)
        evidence.symlink_to(made.folder / "copy.json")
    with pytest.raises(EvidenceError):
        verify_runtime_profile(request_of(made))
    report = checkpoint_report(made.state, made.path)
    assert report["configurations"]["tp1"]["effective_status"] == "needs_attention"
    with pytest.raises(OnboardError, match="is not accepted"):
        require_accepted(request_of(made))


def test_inputs_of_the_runtime_that_change_after_the_probe_end_the_acceptance(session):
    made = session()
    imported(made)
    made.save({"inputs": {"collection_deployment": {"image": "registry/engine:2"}}})
    with pytest.raises(OnboardError, match="have changed since the probe"):
        made.save(accept=("tp1",))


def test_provenance_that_claims_a_probe_and_lacks_its_parts_is_refused(session):
    made = session()
    imported(made)
    request = edited(
        made,
        lambda d: resources_of(d)["runtime_memory"].update(
            provenance=json.dumps({"schema_version": "aisimulate-onboarding-runtime-probe/v1"})
        ),
    )
    with pytest.raises(OnboardError, match="source_artifacts of the runtime probe are missing"):
        verify_runtime_profile(request)


def test_a_collection_takes_over_the_probe_and_its_deployment(session):
    made = session()
    imported(made)
    arguments, deployment = runtime_collection_inputs(request_of(made), None)
    evidence = made.folder / "drafts" / "configuration-001" / "evidence"
    assert arguments == [
        "--fpm-runtime-instrumentation",
        str(evidence / "raw" / "attempts" / "instrumentation" / "manifest.json"),
        "--fpm-runtime-launch",
        str(evidence / "launch.json"),
        "--fpm-runtime-configuration",
        "tp1",
    ]
    assert deployment.document() == {"executor": "fake", "image": "registry/engine:1", "container_mount": []}
    with pytest.raises(OnboardError, match="differs from"):
        runtime_collection_inputs(request_of(made), CollectionDeployment(executor="fake", image="registry/engine:2"))


def test_without_a_probe_nothing_is_taken_over_and_nothing_is_verified(session, monkeypatch):
    made = session()
    imported(made)
    request = edited(made, lambda d: d.pop("fpm_profile"))
    monkeypatch.setattr("fpmsdk.onboard.runtime_profile.verify_runtime_profile", None)
    deployment = CollectionDeployment(image="registry/engine:2")
    assert runtime_collection_inputs(request, deployment) == ([], deployment)


# --- the scale of a real probe ---


def test_a_dep8_probe_of_three_roles_imports_from_64_records_and_368_artifacts(session, tmp_path):
    dep8 = {
        "gpu": "gb200",
        "model_kind": "moe",
        "attention_data_parallel": 8,
        "moe_expert_parallel": 8,
    }

    def role(worker_type, mode, largest):
        graphs = {
            "prefill_cudagraph_policy": "runtime",
            "cudagraph_mode": mode,
            "max_cudagraph_capture_size": largest,
        }
        return {"draft_request": {**EXAMPLE, "worker_type": worker_type, "collection": graphs}}

    made = session(
        {
            "prefill": role("prefill", "PIECEWISE", 32),
            "decode": role("decode", "FULL_DECODE_ONLY", 16),
            "aggregated": role("aggregated", "FULL_AND_PIECEWISE", 32),
        },
        inputs=dep8,
        config={
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    )
    index = made.observed()
    document = json.loads(index.read_text())
    phases = [
        phase for entry in document["configurations"].values() for phase in entry["attempts"][0]["phases"].values()
    ]
    assert [len(phase["artifacts"]) for phase in phases] == [16, 16, 16, 16]
    # Beside its 16 records every phase of a real probe leaves 76 further files of two nodes.
    for number, phase in enumerate(phases):
        for name in range(76):
            place = index.parent / "attempts" / "logs" / f"{number}" / f"node{name % 2:04d}" / f"{name}.log"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{number} {name}\n")
            digest = files_below(place.parent)[place.name]["sha256"]
            relative = place.relative_to(index.parent).as_posix()
            phase["artifacts"].append({"path": relative, "sha256": digest, "kind": "runtime-artifact"})
    index.write_text(json.dumps(document))
    assert sum(len(phase["artifacts"]) for phase in phases) == 368

    result = import_observations(made.path, index, made.folder / "drafts")
    assert result["status"] == "complete", result["configurations"]
    graphs = {}
    for label in ("prefill", "decode", "aggregated"):
        request = request_of(made, label)
        assert request.worker_type == label
        # Re-derived from the raw records, not from what was concluded before.
        observed = verify_runtime_profile(request)
        ranks = [(one["phase"], one["dp_rank"]) for one in observed.provenance["rank_capacities"]]
        assert ranks == [(phase, dp) for phase in request.collection_phases for dp in range(8)]
        settings = observed.provenance["runtime_settings"]["compilation_config"]
        graphs[label] = (settings["cudagraph_mode"], settings["max_cudagraph_capture_size"])
    assert graphs == {
        "prefill": ("PIECEWISE", 32),
        "decode": ("FULL_DECODE_ONLY", 16),
        "aggregated": ("FULL_AND_PIECEWISE", 32),
    }
    made.save(accept=("prefill", "decode", "aggregated"))
    report = checkpoint_report(made.state, made.path)
    assert report["integrity_issues"] == []


def test_a_probe_without_one_of_its_ranks_is_incomplete(session):
    made = session({"tp1": {"draft_request": EXAMPLE}})
    index = made.observed()
    document = json.loads(index.read_text())
    document["configurations"]["tp1"]["attempts"][0]["phases"]["prefill"]["artifacts"].pop(0)
    index.write_text(json.dumps(document))
    result = import_observations(made.path, index, made.folder / "drafts")
    assert "every rank must report" in result["configurations"]["tp1"]["diagnostics"][0]


def test_a_link_to_the_session_is_resolved_as_a_folder_only(session, tmp_path):
    made = session()
    os.symlink(made.folder / "elsewhere", made.folder / "drafts")
    with pytest.raises(OnboardError, match="symbolic link"):
        import_observations(made.path, made.observed(), made.folder / "drafts")
    assert not Path(made.folder / "elsewhere").exists()
