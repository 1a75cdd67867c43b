"""Campaigns whose engines are observed under an accepted probe (collector.md section 8.4, formal collection)."""

import json
from pathlib import Path

import pytest

from fpmsdk.collect.__main__ import main
from tests.collect import observed

LIMITS = {
    "--fpm-max-model-len": "128",
    "--fpm-max-num-batched-tokens": "64",
    "--fpm-max-num-seqs": "4",
    "--fpm-gpu-memory-utilization": "0.9",
    "--fpm-prefill-cudagraph-policy": "runtime",
}


def profile():
    resources = {
        "cache_layout": "linear",
        "kv_bytes_per_token": 1024,
        "max_num_tokens": 64,
        "max_batch_size": 4,
        "provenance": "by hand",
    }
    modes = dict.fromkeys(("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kv_cache_dtype"), "bfloat16")
    deployment = {
        "system": "h200_sxm",
        "backend": "vllm",
        "backend_version": "0.27.0",
        **dict.fromkeys(("tp", "pp", "dp", "moe_tp", "moe_ep", "cp"), 1),
        **modes,
        "comm_quant_mode": "half",
        "resources": resources,
    }
    return {
        "schema_version": 1,
        "model": "org/model",
        "model_revision": observed.REVISION,
        "architecture": "LlamaForCausalLM",
        "context_length": 128,
        "num_experts": 0,
        "provenance": "by hand",
        "deployments": [deployment],
    }


@pytest.fixture
def collect(tmp_path, monkeypatch, capsys):
    """Run the collector's command; its exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(observed.write_systems(tmp_path / "systems")))
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "test")
    (tmp_path / "config.json").write_text(json.dumps(observed.CONFIG))
    (tmp_path / "profile.json").write_text(json.dumps(profile()))
    facts = observed.launch_facts(tmp_path / "config.json")
    facts["deployment"]["executor"] = "fake"
    (tmp_path / "launch.json").write_text(json.dumps(facts))
    manifest = observed.write_bundle(tmp_path / "bundle")

    def run(*further, **limits):
        words = ["--model-path", "org/model", "--gpu", "h200_sxm", "--fpm-model-config", "config.json"]
        words += ["--fpm-model-profile", "profile.json", "--fpm-max-gpus", "1", "--fpm-executor", "fake"]
        words += [word for option in {**LIMITS, **limits}.items() for word in option]
        words += ["--fpm-runtime-instrumentation", str(manifest), "--fpm-runtime-launch", "launch.json"]
        words += ["--fpm-runtime-configuration", "one", "--generator-set", "K8sConfig.k8s_image=registry/engine:1"]
        code = main([*words, "--fpm-database-root", "data", *further])
        return code, *capsys.readouterr()

    return run


def checkpoint():
    return json.loads(Path(".collector_checkpoint/fpm_forward.json").read_text())


def test_a_plan_names_the_observers_by_path_and_digest(collect):
    code, out, _ = collect("--plan-only")
    observation = json.loads(out)["runtime_observation"]
    assert (code, observation["configuration"]) == (0, "one")
    assert observation["manifest"].endswith("/bundle/manifest.json")
    assert json.loads(out)["runtime_memory_policy"]["source"] == "runtime_instrumentation"


def test_what_observers_wrote_is_kept_by_attempt(collect):
    assert collect()[0] == 0
    found = checkpoint()
    index = json.loads(Path(found["runtime_observations"]).read_text())
    (attempt,) = index["configurations"]["one"]["attempts"]
    assert (attempt["status"], attempt["attempt_id"]) == ("captured", found["runtime_observation_attempt_id"])
    for phase in ("prefill", "decode"):
        kinds = [artifact["kind"] for artifact in attempt["phases"][phase]["artifacts"]]
        assert kinds.count("observation") == 2, phase
    assert collect("--resume")[0] == 0


def test_changed_observations_are_found_on_resume(collect):
    collect()
    index = json.loads(Path(checkpoint()["runtime_observations"]).read_text())
    root = Path(checkpoint()["runtime_observations"]).parent
    artifact = index["configurations"]["one"]["attempts"][0]["phases"]["decode"]["artifacts"][0]
    (root / artifact["path"]).write_text("changed")
    code, _, err = collect("--resume")
    assert (code, json.loads(err)[0]["classification"]) == (1, "runtime_observation_archive_failed")


@pytest.mark.parametrize(
    "limits", [{"--fpm-max-model-len": "64"}, {"--fpm-max-num-seqs": "2"}, {"--fpm-gpu-memory-utilization": "0.8"}]
)
def test_a_campaign_launches_what_was_probed(collect, limits):
    code, _, err = collect(**limits)
    assert code == 2
    assert "the probe had" in err


def test_a_repetition_of_an_observed_campaign_is_observed_too(collect, tmp_path, capsys):
    collect()
    [campaign] = Path("fpm_forward_artifacts").iterdir()
    words = ["--repeatability-source-campaign", str(campaign), "--repeatability-output-dir", "repeats"]
    words += ["--repeatability-source-checkpoint", ".collector_checkpoint/fpm_forward.json"]
    main([*words, "--repeatability-samples", "2", "--repeatability-cv-threshold", "1"])
    samples = json.loads(Path("repeats/repeatability.json").read_text())["samples"]
    attempts = [attempt for slots in samples.values() for slot in slots for attempt in slot["attempts"]]
    assert [(attempt["status"], attempt.get("error")) for attempt in attempts] == [("passed", None)] * 4
    assert len(list(Path("repeats").rglob("runtime-observations.json"))) == 4
