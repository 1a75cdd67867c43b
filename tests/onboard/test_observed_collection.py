"""From a probe to a finalised profile with the fake engine, and the bindings between what was accepted and collected.

Source: onboarding.md sections 6.4, 6.5 and 7, section 10.6.
"""

import copy
import json
import shutil

import pytest
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from fpmsdk.collect.cells import Cell
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.bindings import checkpoint_observations, phase_review, verify_phase_bindings, verify_phase_plans
from fpmsdk.onboard.checkpoint_report import checkpoint_report
from fpmsdk.onboard.collection_controls import collection_controls
from fpmsdk.onboard.request import load_request
from tests.onboard.observed_sessions import EXAMPLE, Session

DEPLOYMENT = ("--executor", "fake", "--image", "registry/engine:1")


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["onboard", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The folder of a session whose probe was imported, accepted and collected under, all through the commands."""
    folder = tmp_path_factory.mktemp("journey")
    with pytest.MonkeyPatch.context() as patch:
        made = Session(
            folder,
            {"tp1": {"draft_request": EXAMPLE}},
            inputs={"model": str(folder / "model"), "context_length": 2048},
            config={"max_position_embeddings": 4096},
        )
        patch.setenv("FPMSDK_SYSTEMS_PATH", str(made.systems))
        session = ("--checkpoint", made.path)
        run("probe-runtime", *session, "--output-dir", folder / "probe", "--instrumentation", made.bundle, "--execute")
        index = folder / "probe" / "observations.json"
        run("import-observations", *session, "--observations", index, "--output-dir", folder / "drafts")
        request = folder / "drafts" / "configuration-001" / "request.yaml"
        plan = ("--config", request, "--output-dir", folder / "plan")
        run("plan", *plan)
        told = run("collect-fpm", *plan, *DEPLOYMENT, "--execute", "--smoke", code=2)
        assert "is not accepted; review it" in told
        run("checkpoint", "--file", made.path, "--expect-revision", "3", "--accept-profile", "tp1")
        run("collect-fpm", *plan, *DEPLOYMENT, "--execute", "--smoke")
        run("collect-fpm", *plan, "--check-readiness")
        run("collect-fpm", *plan, *DEPLOYMENT, "--execute")
        yield made


@pytest.fixture
def journey(collected, tmp_path, monkeypatch):
    """The same, for a test that only reads."""
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(collected.systems))
    return collected


def readiness(session):
    return json.loads((session.folder / "plan" / "fpm-readiness.json").read_text())


def request_of(session):
    return load_request(session.folder / "drafts" / "configuration-001" / "request.yaml")


def bindings_of(session):
    phases = readiness(session)["runtime_compatibility"]["phases"]
    return [copy.deepcopy(phase["binding"]) for phase in phases.values()]


def test_a_collection_under_a_probe_is_ready_with_its_memory_compared(journey):
    report = readiness(journey)
    assert (report["status"], report["blockers"]) == ("ready", [])
    compared = report["runtime_compatibility"]
    assert compared["status"] == "complete"
    assert set(compared["phases"]) == {"prefill", "decode"}
    assert compared["compatibility"]["accepted_capacity_bytes"] == 1022976
    assert compared["resources"]["runtime_memory"]["kv_cache_bytes"] == 1022976
    assert json.loads(compared["resources"]["runtime_memory"]["provenance"])["source"] == "bound_collection_phases"
    # The formal attempt stands for its memory too.
    assert {cell["campaign"] for cell in report["selected_cells"]} == {"formal"}
    for reference in compared["inputs"]:
        assert len(reference["sha256"]) == 64


def test_a_campaign_keeps_the_observations_of_every_attempt(journey):
    (index,) = (journey.folder / "plan" / "fpm-artifacts").glob("*/runtime-observations.json")
    (attempt,) = json.loads(index.read_text())["configurations"]["tp1"]["attempts"]
    assert attempt["status"] == "captured"
    for phase in ("prefill", "decode"):
        (kept,) = attempt["phase_attempts"][phase]
        assert kept == attempt["phases"][phase]
        assert kept["status"] == "passed"
        kinds = [artifact["kind"] for artifact in kept["artifacts"]]
        assert kinds.count("observation") == 2


def test_a_finalised_profile_is_accepted_from_the_collection_it_came_of(journey):
    plan = ("--config", journey.folder / "drafts" / "configuration-001" / "request.yaml")
    resolved = journey.folder / "resolved"
    run("finalize", *plan, "--output-dir", journey.folder / "plan", "--resolved-output-dir", resolved)
    finalised = load_request(resolved / "request.yaml")
    forged = finalised.document()
    forged["fpm_profile"]["deployments"][0]["resources"]["runtime_memory"]["kv_cache_bytes"] *= 2
    with pytest.raises(EvidenceError, match="gives another request than the finalised one"):
        journey.save({"configurations": {"tp1": {"draft_request": forged}}})
    journey.save({"configurations": {"tp1": {"draft_request": finalised.document()}}})
    # The files of the draft that it came of are history now, and have to be said to be.
    with pytest.raises(OnboardError, match="is not the current draft's"):
        journey.save(accept=("tp1",))
    former = {
        name: {"archived": True}
        for name, artifact in journey.state.configurations["tp1"].artifacts.items()
        if artifact.kind in ("request", "profile")
    }
    journey.save({"configurations": {"tp1": {"artifacts": former}}})
    journey.save(accept=("tp1",))
    report = checkpoint_report(journey.state, journey.path)
    assert report["configurations"]["tp1"]["profile_accepted"]


def test_verified_bindings_name_every_file_they_rest_on(journey):
    found = verify_phase_bindings(request_of(journey), bindings_of(journey))
    names = {reference["path"].rsplit("/", 1)[-1] for reference in found["inputs"]}
    assert {
        "collection-plan.json",
        "fpm_forward.json",
        "runtime-observations.json",
        "launch.json",
        "config.json",
    } <= names


def test_plans_are_verified_before_anything_was_collected(journey):
    bindings = [{"phase": one["phase"], "plan": one["plan"]} for one in bindings_of(journey)]
    found = verify_phase_plans(request_of(journey), bindings)
    assert (found["status"], set(found["phases"])) == ("verified", {"prefill", "decode"})
    review = phase_review(request_of(journey), bindings[0])
    assert review["changes"] == []
    assert review["accepted_bundle_sha256"] == review["collection_bundle_sha256"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("phase missing", lambda b: b.pop(), "expected each of prefill, decode once"),
        ("phase twice", lambda b: b.append(b[0]), "expected each of prefill, decode once"),
        ("plan digest", lambda b: b[0]["plan"].update(sha256="0" * 64), "is plan"),
        ("plan name", lambda b: b[0]["plan"].update(path="/plan.json"), "archived collection-plan.json"),
        ("checkpoint digest", lambda b: b[0]["checkpoint"].update(sha256="0" * 64), "bound is 0000"),
        ("observations digest", lambda b: b[0]["observations"].update(sha256="0" * 64), "bound is 0000"),
        ("attempt", lambda b: b[0].update(attempt_id="0" * 32), "is not the checkpoint of the bound plan"),
        ("cell attempt", lambda b: b[0].update(collector_attempt_id="0" * 32), "was not collected in attempt"),
        ("no cell attempt", lambda b: b[0].update(collector_attempt_id=None), "was not collected in attempt"),
        ("needless review", lambda b: b[0].update(review={"rationale": "because"}), "a review that names them exactly"),
        ("nothing", lambda b: b[0].pop("plan"), "malformed evidence"),
    ],
)
def test_a_binding_of_something_else_is_refused(journey, name, change, message):
    bindings = bindings_of(journey)
    change(bindings)
    with pytest.raises(OnboardError, match=message):
        verify_phase_bindings(request_of(journey), bindings)


def test_an_index_outside_of_its_campaign_is_refused(journey, tmp_path):
    bindings = bindings_of(journey)
    copied = tmp_path / "runtime-observations.json"
    shutil.copy(bindings[0]["observations"]["path"], copied)
    bindings[0]["observations"]["path"] = str(copied)
    with pytest.raises(EvidenceError, match="lies outside of the campaign"):
        verify_phase_bindings(request_of(journey), bindings)


def test_a_checkpoint_names_its_index(tmp_path):
    with pytest.raises(EvidenceError, match="recorded no runtime observations"):
        checkpoint_observations(tmp_path / "fpm_forward.json", {})
    (tmp_path / "index.json").write_text("{}")
    found = checkpoint_observations(tmp_path / "fpm_forward.json", {"runtime_observations": "index.json"})
    assert found == tmp_path / "index.json"
    (tmp_path / "link.json").symlink_to("index.json")
    with pytest.raises(EvidenceError, match="symbolic link"):
        checkpoint_observations(tmp_path / "fpm_forward.json", {"runtime_observations": "link.json"})


# --- reviewable controls ---


def cell(words=()):
    overrides = {"params": {"agg": {"extra_cli_args": list(words)}}} if words else {}
    return Cell(
        cell_id="fpm-1",
        workload_kind="prefill",
        topology=None,
        parallel_strategy="single",
        weight_quantization="bfloat16",
        kv_cache_dtype="bfloat16",
        resolved_dtypes={},
        backend_policy={
            "policy_id": "baseline_auto",
            "generator_overrides": overrides,
            "expected_markers": {},
            "aic_fields": {},
            "admission_reason": "",
        },
    )


def environment(*pairs):
    return {"K8sConfig": {"extra_env": [{"name": name, "value": value} for name, value in pairs]}}


@pytest.mark.parametrize(
    ("words", "timeout"),
    [
        (("--benchmark-timeout", "60"), ["--benchmark-timeout", "60"]),
        (("--benchmark-timeout=60",), ["--benchmark-timeout=60"]),
    ],
)
def test_a_timeout_is_a_control_and_leaves_no_trace_in_what_is_compared(words, timeout):
    (kept,), _, changes = collection_controls([cell(words)], {})
    assert kept.backend_policy["generator_overrides"] == {}
    assert changes == [
        {"field": "/collection_controls/prefill/benchmark_timeout", "accepted": [], "collection": timeout}
    ]


def test_controls_of_the_environment_are_told_and_others_stay():
    deployment = environment(("DYN_BENCH_CONTENT_SEED", "7"), ("DYN_BENCH_KV_WARMUP", "on"))
    _, kept, changes = collection_controls([cell()], deployment)
    assert kept == environment(("DYN_BENCH_KV_WARMUP", "on"))
    assert changes == [
        {
            "field": "/collection_controls/environment/DYN_BENCH_CONTENT_SEED",
            "accepted": {"missing": True},
            "collection": "7",
        }
    ]


@pytest.mark.parametrize(
    ("words", "pairs", "message"),
    [
        (("--benchmark-timeout", "60", "--benchmark-timeout=70"), (), "given twice"),
        (("--benchmark-timeout", "soon"), (), "expected whole seconds"),
        (("--benchmark-timeout",), (), "expected whole seconds"),
        ((), (("DYN_BENCH_POOL_TAG", "a"), ("DYN_BENCH_POOL_TAG", "b")), "one entry"),
        ((), (("DYN_BENCH_POOL_TAG", 3),), "a literal string"),
        ((), (("DYN_BENCH_POOL_TAG", "a\nb"),), "a literal string"),
        ((), (("DYN_BENCH_PREFILL_CONTENT", "poems"),), "one of random, sharegpt"),
        ((), (("DYN_BENCH_GIANT_KV_REPEATS", "01"),), "an integer of at least 0"),
        ((), (("DYN_FORWARDPASS_METRIC_PORT", "65536"),), "from 1 to 65535"),
        ((), (("FPM_RESULT_WAIT_TIMEOUT_SECONDS", "43201"),), "from 1 to 43200"),
        ((), (("FPM_FINALIZATION_TIMEOUT_SECONDS", "0"),), "from 1 to 3600"),
    ],
)
def test_a_control_out_of_its_range_is_refused(words, pairs, message):
    with pytest.raises(OnboardError, match=message):
        collection_controls([cell(words)], environment(*pairs))
