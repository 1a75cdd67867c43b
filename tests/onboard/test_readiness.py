"""What saved evidence of a campaign is good for, on artifacts of a real engine.

Source: collector.md section 9, onboarding.md section 5; regime counts: onboarding-transcripts.md section 5.
"""

import copy
import json

import pytest

from fpmsdk.collect.paths import campaign_root
from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.documents.canonical import pretty_bytes, read_document, write_document
from fpmsdk.documents.strict import checked
from fpmsdk.onboard.readiness import assess_readiness, resumes_without_workers
from fpmsdk.onboard.request import SupportRequest
from tests.collect.native import DECODE, PREFILL, recorded, recorded_attempt, unit
from tests.collect.native import PLAN as RECORDED_PLAN

CONTEXT = 2048
IDENTITY = {
    "model": "model/tiny-qwen3",
    "model_revision": "revision-1",
    "model_kind": "dense",
    "gpu": "h200_sxm",
    "interconnect": "nvswitch",
    "framework_version": "0.31.0",
}
COLLECTION = {"max_num_tokens": 512, "max_batch_size": 16, "prefill_cudagraph_policy": "runtime"}


def plan_with(**options):
    document = copy.deepcopy(RECORDED_PLAN.document)
    document["options"] |= {"vllm_max_model_len": CONTEXT} | options
    document["sha256"] = plan_digest(document)
    return CollectionPlan.from_document(document)


PLAN = plan_with()


def request_of(**sections):
    sections = {"collection": COLLECTION} | sections
    document = {"identity": IDENTITY, "search": {"context_length": CONTEXT}} | sections
    return checked(SupportRequest, document, "request")


class Campaigns:
    """Campaigns of recorded launches in a plan folder."""

    def __init__(self, root):
        self.root = root
        self.checkpoints = root / "fpm-checkpoint"

    def save(self, *, smoke, cells=(PREFILL, DECODE), plan=PLAN, run=1, change=None, **entry):
        """Save a campaign in which these cells have run; `entry` overrides what the checkpoint says of each."""
        folder = campaign_root(self.root / "fpm-artifacts", plan.sha256, smoke=smoke)
        entries = {}
        for cell in cells:
            attempt = recorded_attempt(cell.workload_kind, run)
            cell_dir = recorded(folder, cell, run, change, attempt)
            unit(cell_dir / "raw/node0000", cell, attempt, "0.31.0", plan_sha256=plan.sha256)
            entries[cell.cell_id] = {"status": "passed", "attempt_id": attempt} | entry
        write_document(folder / "collection-plan.json", plan.document)
        write_document(folder / "generator-overrides.json", {})
        self.checkpoints.mkdir(exist_ok=True)
        name = "fpm_forward_smoke.json" if smoke else "fpm_forward.json"
        checkpoint = {
            "schema": "aic-fpm-collector-checkpoint-v3",
            "plan_sha256": plan.sha256,
            "cells": entries,
        }
        write_document(self.checkpoints / name, checkpoint)
        return folder

    def report(self, request=None, **options):
        return assess_readiness(request or request_of(), self.root, self.checkpoints, **options)


@pytest.fixture
def campaigns(tmp_path):
    return Campaigns(tmp_path)


def of_cell(report, cell):
    return next(found for found in report["selected_cells"] if found["cell"]["cell_id"] == cell.cell_id)


def test_a_folder_without_a_campaign_is_incomplete_and_names_the_phases(campaigns):
    report = campaigns.report()
    assert (report["status"], report["ready_for_full_collection"]) == ("incomplete", False)
    assert (report["campaigns"], report["selected_cells"], report["runtime_compatibility"]) == ([], [], None)
    (blocker,) = report["blockers"]
    assert "expected prefill and decode, missing prefill and decode" in blocker


def test_artifacts_of_a_real_engine_are_told_by_their_seeding(campaigns):
    campaigns.save(smoke=True)
    report = campaigns.report(expected_plan=PLAN)
    prefill, decode = of_cell(report, PREFILL), of_cell(report, DECODE)
    assert (prefill["status"], prefill["blockers"]) == ("ready", [])
    assert set(prefill["native_regime_counts"]) == {"not_applicable", "real_prefix"}
    assert set(prefill["formal_regime_counts"]) == {"n/a"}
    assert prefill["direct_eligible_points"] == sum(prefill["formal_regime_counts"].values())
    assert prefill["coverage"] == "sampled_points_only"
    assert [found["verified"] for found in prefill["rank_diagnostics"]] == [True]
    assert decode["native_regime_counts"] == {"fake_fallback": 55}
    assert decode["observed_backend_version"] == "0.31.0"
    assert (prefill["execution"]["status"], prefill["campaign"]) == ("incomplete", "smoke")
    assert report["campaigns"][0]["runtime_identity"]["model_revision"] == "revision-1"


def test_decode_without_points_that_may_be_queried_is_blocked(campaigns):
    def without_warm_up(document):
        document["kvwarm"] = {"enabled": False, "warm_eligible": False, "skip_reason": "flag_off"}

    campaigns.save(smoke=True, change=without_warm_up)
    report = campaigns.report()
    assert report["status"] == "blocked"
    decode = of_cell(report, DECODE)
    assert decode["formal_regime_counts"] == {"fake_fallback": 55}
    assert (decode["direct_eligible_points"], decode["coverage"]) == (0, "partial")
    assert any(f"decode {DECODE.cell_id}: decode has no points" in blocker for blocker in report["blockers"])


def test_decode_that_does_not_tell_its_warm_up_is_blocked(campaigns):
    campaigns.save(smoke=True, change=lambda document: document.pop("kvwarm", None))
    blockers = of_cell(campaigns.report(), DECODE)["blockers"]
    assert any("how its KV was warmed up" in blocker or "kvwarm" in blocker for blocker in blockers)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"status": "failed"}, "the attempt is 'failed', not passed"),
        ({"cleanup_error": "pod is still there"}, "not cleaned up: pod is still there"),
        ({"attempt_id": ""}, "names no attempt"),
        ({"attempt_id": "0" * 32}, "attempt_id"),
    ],
)
def test_an_attempt_that_did_not_end_well_is_blocked_and_keeps_its_diagnostics(campaigns, entry, words):
    campaigns.save(smoke=True, **entry)
    prefill = of_cell(campaigns.report(), PREFILL)
    assert prefill["status"] == "blocked"
    assert any(words in blocker for blocker in prefill["blockers"])
    assert len(prefill["rank_diagnostics"]) == 1


def test_a_formal_attempt_stands_for_its_cell_even_when_it_failed(campaigns):
    campaigns.save(smoke=True)
    campaigns.save(smoke=False, cells=(PREFILL,), run=2, status="failed")
    report = campaigns.report()
    prefill, decode = of_cell(report, PREFILL), of_cell(report, DECODE)
    assert (prefill["campaign"], prefill["status"]) == ("formal", "blocked")
    assert prefill["attempt_id"] == recorded_attempt("prefill", 2)
    assert decode["campaign"] == "smoke"


def test_the_phases_of_the_role_are_needed_and_no_others(campaigns):
    campaigns.save(smoke=True, cells=(PREFILL,))
    blockers = campaigns.report()["blockers"]
    assert any(f"decode {DECODE.cell_id}: " in blocker and "names no attempt" in blocker for blocker in blockers)


@pytest.mark.parametrize(
    "change",
    [
        {"identity": IDENTITY | {"gpu": "gb200"}},
        {"identity": IDENTITY | {"framework_version": "0.32.0"}},
        {"identity": IDENTITY | {"runtime_framework_version": "0.31.0"}},
        {"search": {"context_length": 1536}},
        {"search": {"context_length": CONTEXT, "tensor_parallel": 2}},
        {"collection": COLLECTION | {"max_batch_size": 8}},
        {"collection": COLLECTION | {"gpu_memory_utilization": 0.5}},
        {"collection": COLLECTION | {"prefill_cudagraph_policy": "explicit"}},
        {"worker_type": "prefill"},
    ],
)
def test_a_campaign_of_another_request_is_blocked(campaigns, change):
    campaigns.save(smoke=True)
    report = campaigns.report(request_of(**change))
    assert (report["status"], report["selected_cells"]) == ("blocked", [])
    assert "no collection of the reviewed request" in report["blockers"][0]


def test_another_frozen_plan_is_blocked(campaigns):
    campaigns.save(smoke=True)
    report = campaigns.report(expected_plan=plan_with(global_warmup_iterations=0))
    assert "of the current runtime and launch; start a new campaign" in report["blockers"][0]


def test_phases_of_different_plans_do_not_go_together(campaigns):
    campaigns.save(smoke=True)
    campaigns.save(smoke=False, cells=(PREFILL,), plan=plan_with(global_warmup_iterations=0))
    assert "the phases were measured under different frozen plans" in campaigns.report()["blockers"]


def test_a_broken_checkpoint_blocks_and_is_named(campaigns):
    campaigns.save(smoke=True)
    (campaigns.checkpoints / "fpm_forward_smoke.json").write_text("{}")
    report = campaigns.report()
    assert report["status"] == "blocked"
    assert "smoke: " in report["blockers"][0] and "no checkpoint of a campaign" in report["blockers"][0]


def test_readiness_reads_and_writes_nothing(campaigns, tmp_path):
    campaigns.save(smoke=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    first, second = campaigns.report(), campaigns.report()
    assert pretty_bytes(first) == pretty_bytes(second)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def compiled_launch(folder, cell, text):
    """Launch files that say which graphs were asked for."""
    cell_dir = folder / "cells" / cell.cell_id
    for name in ("fpm_env.sh", "collector-runtime-env.sh"):
        (cell_dir / name).write_text("")
    write_document(cell_dir / "generator-request.json", {"ServiceConfig": {"model_path": "model/tiny-qwen3"}})
    words = "python3 -m dynamo.vllm --model model/tiny-qwen3"
    (cell_dir / "run.sh").write_text(f"engine_command=({words} --compilation-config '{text}')\n")
    return cell_dir


EXPLICIT = {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 2}


@pytest.mark.parametrize(
    ("launch", "native", "words"),
    [
        (EXPLICIT, {}, None),
        ({}, {}, "the saved launch does not have the reviewed explicit graph settings"),
        (EXPLICIT | {"max_cudagraph_capture_size": 4}, {}, "the saved launch does not have"),
        (EXPLICIT, {"capture_sizes": [1]}, "the engine's result has other graph settings than reviewed: capture_sizes"),
    ],
)
def test_explicit_graphs_must_be_in_launch_and_results(campaigns, launch, native, words):
    sampling = PLAN.options["prefill_sampling"] | EXPLICIT
    sampling.pop("cudagraph_policy")
    overrides_digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of no deployment inputs
    document = copy.deepcopy(PLAN.document)
    document["generator_config_sha256"] = overrides_digest
    document["options"]["prefill_sampling"] = sampling
    document["sha256"] = plan_digest(document)

    def change(artifact):
        artifact["cudagraph"] = (
            artifact.get("cudagraph", {})
            | {
                "capture_sizes": [1, 2],
                "max_capture_size": 2,
            }
            | native
        )

    plan = CollectionPlan.from_document(document)
    folder = campaigns.save(smoke=True, plan=plan, change=change)
    for cell in (PREFILL, DECODE):
        compiled_launch(folder, cell, json.dumps(launch))
    explicit = COLLECTION | {"prefill_cudagraph_policy": "explicit"}
    found = of_cell(campaigns.report(request_of(collection=explicit)), PREFILL)["blockers"]
    assert found == [] if words is None else any(words in blocker for blocker in found)


def test_only_a_campaign_whose_cells_have_all_ended_resumes_without_workers(campaigns):
    campaigns.save(smoke=False)
    path = campaigns.checkpoints / "fpm_forward.json"
    assert resumes_without_workers(PLAN, path)
    document = read_document(path)
    for status, expected in (("failed", True), ("cleanup_failed", True), ("running", False), ("interrupted", False)):
        document["cells"][DECODE.cell_id]["status"] = status
        write_document(path, document)
        assert resumes_without_workers(PLAN, path) is expected
    document["cells"].pop(DECODE.cell_id)
    write_document(path, document)
    assert not resumes_without_workers(PLAN, path)
    assert not resumes_without_workers(PLAN, path.with_name("absent.json"))
