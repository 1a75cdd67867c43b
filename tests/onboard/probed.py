"""A session whose configuration is probed, imported, accepted and collected with the fake engine and its observers."""

import json

from fpmsdk.onboard.checkpoint import load_checkpoint
from fpmsdk.onboard.checkpoint_save import save_checkpoint
from fpmsdk.onboard.import_observations import import_observations
from tests.cli.test_commands import run
from tests.collect.observed import write_bundle
from tests.onboard.finished import model_in

LABEL = "tp1"


def onboard(*words, code=0):
    """The output of a command that must end with a code."""
    ran = run("onboard", *map(str, words))
    assert ran.exit_code == code, ran.output
    return ran.stdout


def draft_of(model, revision="a" * 40):
    """A draft of one worker of a model without a profile, all four sizes given."""
    return {
        "identity": {
            "model": str(model),
            "model_revision": revision,
            "model_kind": "dense",
            "framework_version": "0.27.0",
            "gpu": "h200_sxm",
            "interconnect": "nvswitch",
        },
        "search": {
            "tensor_parallel": 1,
            "attention_data_parallel": 1,
            "moe_tensor_parallel": 1,
            "moe_expert_parallel": 1,
            "context_length": 128,
        },
        "collection": {
            "max_num_tokens": 64,
            "max_batch_size": 4,
            "gpu_memory_utilization": 0.9,
            "prefill_cudagraph_policy": "runtime",
        },
        "workload": {"input_tokens": 16, "output_tokens": 4, "request_count": 1},
    }


def probed_in(place):
    """The checkpoint of the session, with the imported draft accepted."""
    model = model_in(place)
    draft = draft_of(model)
    modes = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kv_cache_dtype")
    inputs = {
        "precision": dict.fromkeys(modes, "bfloat16"),
        "model_config": str(model / "config.json"),
        "collection_deployment": {"executor": "fake", "image": "registry/engine:1"},
    }
    session = place / "session" / "onboarding-checkpoint.json"
    save_checkpoint(session, patch={"configurations": {LABEL: {"inputs": inputs, "draft_request": draft}}})
    onboard(
        *("probe-runtime", "--checkpoint", session, "--output-dir", place / "probe", "--execute"),
        *("--instrumentation", write_bundle(place / "bundle")),
    )
    imported(session, place / "probe/observations.json", place / "drafts")
    return session


def imported(session, index, output):
    """Import observations into the session and accept the draft; its request file."""
    report = import_observations(session, index, output)
    assert report["status"] == "complete", report["configurations"][LABEL]["diagnostics"]
    save_checkpoint(session, expected_revision=load_checkpoint(session).revision, accept=[LABEL])
    return next(output.rglob("request.yaml"))


def collected_in(place, *, formal_code=0):
    """Plan and collect the imported draft; its request file and the plan folder."""
    request, folder = next((place / "drafts").rglob("request.yaml")), place / "collection"
    onboard("plan", "-c", request, "--output-dir", folder)
    collect = ("collect-fpm", "-c", request, "--output-dir", folder, "--execute")
    report = json.loads(onboard(*collect, "--smoke"))
    assert report["runtime_compatibility"]["status"] == "complete"
    onboard(*collect, code=formal_code)
    return request, folder
