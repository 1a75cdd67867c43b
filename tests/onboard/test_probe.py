"""Runtime probes of a session: launches that are resolved, previewed, run, resumed and cleaned up.

Source: onboarding.md section 6.2, collector.md section 8.4, onboarding-transcripts.md section 3 and section 4 #27.
"""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from fpmsdk.collect.executors import executor_factory
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.instrumentation import load_instrumentation
from fpmsdk.collect.observers import bundled_versions
from fpmsdk.collect.probe import with_cpu_policy
from fpmsdk.collect.probe_attempt import attempt_folder
from fpmsdk.documents.canonical import digest
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import CollectionError, ConfigError, EvidenceError, OnboardError
from fpmsdk.onboard.import_observations import import_observations
from fpmsdk.onboard.launch import resolve_launch
from fpmsdk.onboard.probe import probe_runtime
from tests.onboard.observed_sessions import EXAMPLE, INPUTS, Session

TP1 = {"tp1": {"draft_request": EXAMPLE}}


@pytest.fixture
def session(tmp_path, monkeypatch):
    def make(configurations=None, **options):
        made = Session(tmp_path, configurations or TP1, **options)
        monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(made.systems))
        return made

    return make


def probe(session, output="probe", **options):
    options = {"instrumentation": session.bundle, **options}
    return probe_runtime(session.path, session.folder / output, **options)


def executed(session, **options):
    return probe(session, executors=executor_factory, **options)


def launch(session, label="tp1"):
    return resolve_launch(session.state, label, session.path).facts


# --- resolving a launch ---


def test_a_launch_is_worked_out_from_inputs_and_draft(session):
    made = session({"dec": {"draft_request": EXAMPLE, "inputs": {"worker_type": "decode", "max_batch_size": 8}}})
    config = made.folder / "model" / "config.json"
    assert launch(made, "dec") == {
        "worker_type": "decode",
        "identity": {
            "model": "org/model",
            "model_revision": INPUTS["model_revision"],
            "model_kind": "dense",
            "framework": "vllm",
            "framework_version": "0.27.0",
            "gpu": "h200_sxm",
            "interconnect": "nvswitch",
        },
        "topology": {"tp": 1, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1},
        "precision": {
            "gemm_quant_mode": "bfloat16",
            "moe_quant_mode": "bfloat16",
            "fmha_quant_mode": "bfloat16",
            "kvcache_quant_mode": "bfloat16",
            "comm_quant_mode": "half",
            "moe_backend": "auto",
            "attention_backend": "auto",
            "enable_wideep": False,
            "enable_eplb": False,
        },
        "collection": {
            "max_model_len": 128,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.9,
            "prefill_cudagraph_policy": "runtime",
            "max_prefill_cudagraph_size": None,
            "async_scheduling": False,
            "enforce_eager": False,
            "warmup_iterations": 5,
        },
        "model_config": {"path": str(config), "sha256": hashlib.sha256(config.read_bytes()).hexdigest()},
        "deployment": {"executor": "fake", "image": "registry/engine:1", "container_mount": []},
    }


def test_a_session_without_a_draft_leaves_graphs_to_the_engine_and_an_old_draft_captures(session):
    made = session({"fresh": {}, "old": {"draft_request": {"workload": {"input_tokens": 16, "output_tokens": 4}}}})
    collection = {label: launch(made, label)["collection"] for label in ("fresh", "old")}
    assert collection["fresh"]["prefill_cudagraph_policy"] == "runtime"
    assert (collection["old"]["prefill_cudagraph_policy"], collection["old"]["max_prefill_cudagraph_size"]) == (
        "explicit",
        2048,
    )


def test_a_sidecar_belongs_to_the_configuration_of_the_model(session):
    made = session()
    sidecar = made.folder / "model" / "hf_quant_config.json"
    sidecar.write_text('{"quantization": {"quant_algo": null}}')
    assert launch(made)["model_config"]["source_files"] == {
        "hf_quant_config.json": hashlib.sha256(sidecar.read_bytes()).hexdigest()
    }


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"context_length": None, "tensor_parallel": None}, "state tensor_parallel, context_length"),
        ({"model_revision": "main"}, "model_revision: must name one revision"),
        ({"precision": {"gemm": "fp8"}}, "inputs.precision: unknown are gemm"),
        ({"resource_overrides": {"gemm_quant_mode": "fp8"}}, "contradicts resource_overrides, 'fp8'"),
        ({"resource_overrides": {"weights": 1}}, "unknown override fields: weights"),
        ({"precision": {"fmha_quant_mode": None}}, "precision.fmha_quant_mode: expected a mode"),
        ({"precision": {"comm_quant_mode": "int8"}}, "comm_quant_mode: expected half"),
        ({"model_config": None}, "inputs.model_config: expected an object"),
        ({"model_config": {"path": "model/config.json", "sha256": "0" * 64}}, "model_config.sha256"),
        ({"model_config": "absent.json"}, "absent.json"),
        ({"max_num_tokens": 3}, "max_num_tokens 3 must be at least max_batch_size 4"),
        ({"collection_deployment": {"image": None}}, "deployment.image: expected the image"),
        ({"collection_deployment": {"executor": "slurm", "namespace": "ns"}}, "does not take --namespace"),
        ({"interconnect": "a\nb"}, "identity.interconnect: expected text"),
    ],
)
def test_a_launch_that_is_not_fully_stated_is_refused(session, inputs, message):
    made = session()
    made.save({"inputs": inputs})
    with pytest.raises((OnboardError, ConfigError, OSError), match=message):
        launch(made)


def test_two_statements_of_one_fact_must_agree(session):
    made = session({"tp1": {"draft_request": {**EXAMPLE, "identity": {"gpu": "gb200"}}}})
    with pytest.raises(OnboardError, match=r"'h200_sxm' contradicts draft_request\.identity\.gpu, 'gb200'"):
        launch(made)


def test_another_executor_drops_the_options_of_the_former_one(session):
    made = session()
    made.save({"inputs": {"collection_deployment": {"executor": "slurm", "cpus_per_task": 8, "cpu_bind": "none"}}})
    facts = resolve_launch(made.state, "tp1", made.path, {"executor": "kubernetes"}).facts
    assert facts["deployment"] == {"executor": "kubernetes", "image": "registry/engine:1", "container_mount": []}


# --- preview ---


def test_a_preview_renders_everything_and_launches_nothing(session):
    made = session()
    result = probe(made)
    assert (result["status"], result["observations_path"], result["revision"]) == ("preview", None, 2)
    found = result["configurations"]["tp1"]
    assert (found["status"], found["minimum_gpus"], found["diagnostics"]) == ("preview", 1, [])
    root = made.folder / "probe"
    attempt = root / "previews" / f"tp1-{digest('tp1')[:8]}" / found["attempt_id"]
    assert sorted(place.name for place in attempt.iterdir()) == ["decode", "instrumentation", "prefill"]
    names = {place.name for place in (attempt / "prefill").iterdir() if place.is_file()}
    assert names == {
        "run.sh",
        "fpm_env.sh",
        "collector-runtime-env.sh",
        "k8s_deploy.yaml",
        "generator-request.json",
        "model-config.json",
        "runtime-probe-context.json",
        "runtime-instrumentation.zip",
    }
    plan = json.loads((root / "probe-plan.json").read_text())
    assert set(plan) == {"schema_version", "configurations", "bundle_sha256"}
    assert plan["configurations"]["tp1"] == launch(made)
    context = json.loads((attempt / "decode" / "runtime-probe-context.json").read_text())
    assert set(context) == {
        "attempt_id",
        "bundle_sha256",
        "configuration",
        "expected_ranks",
        "instrumentation_binding",
        "launch",
        "phase",
        "sampling",
        "schema_version",
    }
    (report,) = root.glob("onboarding-probe-*.json")
    event = made.state.configurations["tp1"].history[-1]
    assert (event["event"], event["report"]) == ("runtime_probe", str(report))
    assert event["sha256"] == hashlib.sha256(report.read_bytes()).hexdigest()
    assert not (root / "observations.json").exists()


def test_the_command_asks_for_two_samples_of_every_axis_and_the_observed_classes(session):
    made = session()
    result = probe(made)
    request = json.loads(Path(result["configurations"]["tp1"]["phases"]["prefill"]["generator_request"]).read_text())
    command = " ".join(request["params"]["agg"]["command"])
    for words in (
        "--prefill-max-new-token-samples 2 --prefill-max-kv-read-token-samples 2 --prefix-max-batch-size-samples 2",
        "--worker-cls fpm_runtime_instrumentation.ObservedWorker",
        "--scheduler-cls fpm_runtime_instrumentation.ObservedInstrumentedScheduler",
        f"--revision {INPUTS['model_revision']}",
        "--max-model-len 128",
        "--max-num-batched-tokens 64 --max-num-seqs 4",
    ):
        assert words in command


def test_graphs_of_an_aggregated_role_reach_both_phases_and_a_single_role_keeps_its_own(session):
    graphs = {
        "prefill_cudagraph_policy": "runtime",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 2, 4],
    }
    drafts = {role: {**EXAMPLE, "worker_type": role, "collection": graphs} for role in ("aggregated", "decode")}
    made = session({role: {"draft_request": draft} for role, draft in drafts.items()})
    found = probe(made)["configurations"]
    assert {role: sorted(result["phases"]) for role, result in found.items()} == {
        "aggregated": ["decode", "prefill"],
        "decode": ["decode"],
    }
    for result in found.values():
        for phase in result["phases"].values():
            command = json.loads(Path(phase["generator_request"]).read_text())["params"]["agg"]["command"]
            compilation = json.loads(command[command.index("--compilation-config") + 1])
            assert compilation == {
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": [1, 2, 4],
                "max_cudagraph_capture_size": 4,
            }


@pytest.mark.parametrize(("cache", "path"), [("claim", "org/model"), ("claim:/models:org/model", "/models/org/model")])
def test_both_layouts_of_a_model_cache_render_for_both_phases(session, cache, path):
    made = session()
    found = probe(made, deployment={"executor": "kubernetes", "model_cache": cache})["configurations"]["tp1"]
    assert found["status"] == "preview", found
    for phase in found["phases"].values():
        command = json.loads(Path(phase["generator_request"]).read_text())["params"]["agg"]["command"]
        assert command[command.index("--model") + 1] == path
        assert command[command.index("--served-model-name") + 1] == "org/model"


def test_the_start_script_unpacks_only_the_frozen_observers(session, tmp_path):
    made = session()
    found = probe(made)["configurations"]["tp1"]
    folder = next((made.folder / "probe" / "previews").glob(f"*/{found['attempt_id']}/prefill"))
    script = (folder / "collector-runtime-env.sh").read_text().replace("/tmp/fpm-bench", str(folder))
    run = ["bash", "-c", script + '\necho "$PYTHONPATH"']
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "runtime-instrumentation" / "instrumentation" / "observer.py").exists()
    assert done.stdout.startswith(f"{folder}/runtime-instrumentation:{folder}")
    with zipfile.ZipFile(folder / "runtime-instrumentation.zip", "a") as archive:
        archive.writestr("more.py", "")
    done = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True, check=False)
    assert "other observers than the launch froze" in done.stderr


def test_a_configuration_that_cannot_be_resolved_does_not_hold_up_the_others(session):
    made = session({**TP1, "bad": {"draft_request": EXAMPLE, "inputs": {"context_length": None}}})
    made.save({"inputs": {"context_length": None}, "configurations": {"tp1": {"inputs": {"context_length": 128}}}})
    result = probe(made)
    assert result["status"] == "partial"
    assert [result["configurations"][label]["status"] for label in ("tp1", "bad")] == ["preview", "incomplete"]
    assert made.state.configurations["bad"].history[-1]["result"]["status"] == "incomplete"
    result = probe(made, "alone", configurations=["bad"])
    assert (result["status"], result["revision"]) == ("failed", 4)


def test_the_deployment_that_was_used_is_noted_with_its_cpu_policy(session):
    made = session()
    probe(made, deployment={"executor": "slurm", "image": "registry/engine:1"})
    assert made.state.configurations["tp1"].inputs["collection_deployment"] == {
        "executor": "slurm",
        "image": "registry/engine:1",
        "container_mount": [],
        "cpus_per_task": 16,
        "cpu_bind": "cores",
    }


def test_an_unknown_engine_version_defers_the_preview_of_all(session):
    made = session({**TP1, "known": {"draft_request": EXAMPLE, "inputs": {"framework_version": "0.27.0"}}})
    made.save({"inputs": {"framework_version": None}})
    result = probe(made, instrumentation=None)
    assert result["status"] == "pending_runtime_version"
    statuses = {label: found["status"] for label, found in result["configurations"].items()}
    assert statuses == {"tp1": "pending_runtime_version", "known": "deferred"}
    assert not (made.folder / "probe").exists()


def test_without_observers_for_a_known_version_the_way_out_is_told(session):
    made = session({"other": {"draft_request": EXAMPLE, "inputs": {"runtime_framework_version": "0.30.0"}}})
    with pytest.raises(OnboardError, match=r"no observers come with .* vLLM 0\.30\.0, only for 0\.27\.0, .*; give the"):
        probe(made, instrumentation=None)


@pytest.mark.parametrize("version", ["0.27.0", "0.28.0", "0.31.0"])
def test_the_bundled_observers_of_the_engine_version_are_taken(session, version):
    made = session({"tp1": {"draft_request": EXAMPLE, "inputs": {"runtime_framework_version": version}}})
    result = probe(made, instrumentation=None)
    assert result["status"] == "preview"
    (manifest,) = (made.folder / "probe").glob("previews/*/*/instrumentation/manifest.json")
    assert load_instrumentation(manifest, version).sha256 == load_instrumentation(bundled_versions()[version]).sha256


def test_engines_of_two_versions_are_not_observed_in_one_probe(session):
    made = session(
        {
            version: {"draft_request": EXAMPLE, "inputs": {"runtime_framework_version": version}}
            for version in ("0.27.0", "0.28.0")
        }
    )
    with pytest.raises(OnboardError, match=r"the engines are vLLM 0\.27\.0, 0\.28\.0.*--configuration"):
        probe(made, instrumentation=None)


def test_a_legacy_launch_with_explicit_captures_is_warned_of(session):
    explicit = {**EXAMPLE, "collection": {"prefill_cudagraph_policy": "explicit"}}
    made = session(
        {"legacy": {"draft_request": explicit}, "role": {"draft_request": {**explicit, "worker_type": "decode"}}}
    )
    result = probe(made)["configurations"]
    assert "prefill alone" in result["legacy"]["diagnostics"][0]
    assert result["role"]["diagnostics"] == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unknown configuration", {"configurations": ["other"]}, "unknown are other"),
        ("output holds the session", {"output": "."}, "holds the session"),
        ("output of something else", {"output": "model"}, "holds something else than a probe"),
    ],
)
def test_bad_input_is_refused(session, name, options, message):
    made = session()
    with pytest.raises(OnboardError, match=message):
        probe(made, **options)
    assert made.state.revision == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"precision": {"gemm_quant_mode": "fp8"}}, "not the checkpoint's own 'bfloat16'"),
        ({"runtime_framework_version": "0.28.0"}, "is written for vLLM 0.27.0, the engine is 0.28.0"),
    ],
)
def test_a_launch_that_contradicts_model_or_observers_fails_alone(session, inputs, message):
    made = session()
    made.save({"inputs": inputs})
    result = probe(made)
    assert result["status"] == "failed"
    assert message in result["configurations"]["tp1"]["diagnostics"][0]


# --- execution ---


def test_a_run_leaves_observations_that_can_be_imported(session):
    made = session()
    result = executed(made)
    assert result["status"] == "completed"
    index = made.folder / "probe" / "observations.json"
    assert result["observations_path"] == str(index)
    entry = json.loads(index.read_text())["configurations"]["tp1"]
    (attempt,) = entry["attempts"]
    assert (attempt["status"], entry["active_attempt_id"]) == ("completed", attempt["attempt_id"])
    kinds = [artifact["kind"] for artifact in attempt["phases"]["prefill"]["artifacts"]]
    assert kinds.count("observation") == 2
    assert all("/evidence-" in artifact["path"] for artifact in attempt["phases"]["prefill"]["artifacts"])
    assert import_observations(made.path, index, made.folder / "drafts")["status"] == "complete"


def test_a_run_over_observations_needs_resume_and_a_complete_attempt_is_reused(session):
    made = session()
    first = executed(made)["configurations"]["tp1"]
    with pytest.raises(OnboardError, match="continue them with --resume"):
        executed(made)
    again = executed(made, resume=True)["configurations"]["tp1"]
    assert (again["status"], again["resumed"], again["attempt_id"]) == ("completed", True, first["attempt_id"])


def test_changed_evidence_is_not_reused(session):
    made = session()
    first = executed(made)["configurations"]["tp1"]
    place = made.folder / "probe" / first["phases"]["decode"]["artifacts"][0]["path"]
    place.write_bytes(place.read_bytes() + b" ")
    again = executed(made, resume=True)["configurations"]["tp1"]
    assert again["status"] == "completed"
    assert again["attempt_id"] != first["attempt_id"]
    attempts = json.loads((made.folder / "probe" / "observations.json").read_text())["configurations"]["tp1"][
        "attempts"
    ]
    assert [attempt["attempt_id"] for attempt in attempts] == [first["attempt_id"], again["attempt_id"]]


def test_another_launch_does_not_go_into_a_used_folder(session):
    made = session()
    executed(made)
    made.save({"inputs": {"max_batch_size": 8}})
    result = executed(made, resume=True)
    assert "the launch differs from the one in" in result["configurations"]["tp1"]["diagnostics"][0]


class Failing(FakeExecutor):
    """Fails where it is told to; notes its cleanups."""

    step = "execute"
    fault: BaseException = CollectionError("no GPUs")
    cleanups = 0

    def execute(self, units, timeout_seconds=1.0):
        if self.step == "execute":
            raise self.fault
        super().execute(units)

    def cleanup(self):
        type(self).cleanups += 1
        if self.step == "cleanup" and type(self).cleanups > 1:
            raise CollectionError("it does not end")
        super().cleanup()


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(Failing, "cleanups", 0)
    return lambda name: Failing


@pytest.mark.parametrize(("step", "status"), [("execute", "failed"), ("cleanup", "cleanup_failed")])
def test_a_phase_that_fails_is_kept_and_cleaned_up(session, failing, monkeypatch, step, status):
    monkeypatch.setattr(Failing, "step", step)
    made = session({"dec": {"draft_request": {**EXAMPLE, "worker_type": "decode"}}})
    result = probe(made, executors=failing)
    found = result["configurations"]["dec"]
    assert (result["status"], found["status"], found["phases"]["decode"]["status"]) == ("failed", "failed", status)
    assert found["diagnostics"]
    assert found["phases"]["decode"]["artifacts"]
    assert Failing.cleanups == 2


def test_an_interrupted_attempt_is_cleaned_up_by_the_one_that_resumes(session, failing, monkeypatch):
    monkeypatch.setattr(Failing, "step", "execute")
    monkeypatch.setattr(Failing, "fault", KeyboardInterrupt())
    made = session()
    with pytest.raises(KeyboardInterrupt):
        probe(made, executors=failing)
    saved = json.loads((made.folder / "probe" / "observations.json").read_text())["configurations"]["tp1"]
    assert saved["attempts"][0]["phases"]["prefill"]["status"] == "interrupted"
    assert made.state.revision == 1
    result = executed(made, resume=True)
    assert result["status"] == "completed"
    saved = json.loads((made.folder / "probe" / "observations.json").read_text())["configurations"]["tp1"]
    assert "recovery_artifacts" in saved["attempts"][0]["phases"]["prefill"]
    assert saved["active_attempt_id"] == saved["attempts"][1]["attempt_id"]


@pytest.mark.parametrize("changed", ["runtime-probe-context.json", "k8s_deploy.yaml"])
def test_nothing_is_ended_that_is_not_proven_to_be_this_probes(session, failing, monkeypatch, changed):
    monkeypatch.setattr(Failing, "step", "execute")
    monkeypatch.setattr(Failing, "fault", KeyboardInterrupt())
    made = session()
    with pytest.raises(KeyboardInterrupt):
        probe(made, executors=failing)
    place = next((made.folder / "probe" / "attempts").glob(f"*/*/prefill/{changed}"))
    place.write_text(place.read_text().replace("probe-", "prod-").replace('"tp1"', '"other"'))
    monkeypatch.setattr(Failing, "cleanups", 0)
    result = probe(made, executors=failing, resume=True)
    assert result["status"] == "failed"
    assert "the former attempt was not cleaned up" in result["configurations"]["tp1"]["diagnostics"][0]
    assert Failing.cleanups == 0


def test_an_executor_that_cannot_be_driven_is_told_before_anything_is_rendered(session):
    made = session()
    result = executed(made, deployment={"executor": "kubernetes"})
    assert result["status"] == "failed"
    assert "does not run them" in result["configurations"]["tp1"]["diagnostics"][0]
    assert not (made.folder / "probe" / "probe-plan.json").exists()


def test_one_probe_works_in_a_folder_at_a_time(session):
    made = session()
    probe(made)
    with (
        exclusive(made.folder / "probe" / ".runtime-probe.lock", "it"),
        pytest.raises(OnboardError, match="another process works on the probe"),
    ):
        probe(made)


def test_a_version_found_in_the_image_is_noted_beside_the_label(session):
    made = session()
    made.save({"inputs": {"framework_version": "lab"}})
    executed(made, detect_version=lambda deployment: "0.27.0")
    inputs = made.state.configurations["tp1"].inputs
    assert (inputs["runtime_framework_version"], "framework_version" in inputs) == ("0.27.0", False)
    assert launch(made)["identity"]["framework_version"] == "lab"


# --- the CPU policy of Slurm ---


def test_a_slurm_probe_freezes_its_cpu_policy(session, tmp_path):
    stated = {"executor": "slurm", "cpus_per_task": 8}
    assert with_cpu_policy("tp1", stated, tmp_path, resume=False) == {**stated, "cpu_bind": "cores"}
    assert with_cpu_policy("tp1", {"executor": "fake"}, tmp_path, resume=False) == {"executor": "fake"}


def test_a_frozen_cpu_policy_is_confirmed_by_its_archived_launch(session):
    made = session()
    result = executed(made)
    root = made.folder / "probe"
    index = json.loads((root / "observations.json").read_text())
    deployment = {"executor": "slurm", "cpus_per_task": 8, "cpu_bind": "none"}
    index["configurations"]["tp1"]["launch"]["deployment"] = deployment
    (root / "observations.json").write_text(json.dumps(index))
    # No archived launch says so.
    with pytest.raises(EvidenceError, match="is not the launch whose CPU policy was frozen"):
        with_cpu_policy("tp1", {"executor": "slurm"}, root, resume=True)
    reference = result["configurations"]["tp1"]["phases"]
    assert set(reference) == {"prefill", "decode"}


def test_slugs_of_configurations_are_safe_and_distinct():
    places = {attempt_folder(Path("/p"), "previews", name, "a") for name in ("a/b", "a b")}
    assert all(place.parent.name.startswith("a-b-") for place in places)
    assert len(places) == 2
