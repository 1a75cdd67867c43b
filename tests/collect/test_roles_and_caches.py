"""Review findings on limits, graphs and model volumes of roles.

Source: onboarding.md section 9, findings 4, 13 and 23.
"""

import copy
import json

import pytest

from fpmsdk.collect.command import engine_command
from fpmsdk.collect.deployment_inputs import read_inputs
from fpmsdk.collect.kubernetes_manifest import manifest_text
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.planner import build_plan
from fpmsdk.collect.render import render_cell
from fpmsdk.errors import OnboardError
from tests.onboard.collected import checkpoint, request_of, systems


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Plan the campaign of a profile with these limits of each width, for a role and with further arguments."""
    systems(tmp_path, monkeypatch)
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "golden")
    model = checkpoint(tmp_path)
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "bfloat16"}
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 65536}
    (model / "config.json").write_text(json.dumps(text | fields))

    def plan(limits, role, *arguments):
        profile = request_of(model).fpm_profile.model_dump(mode="json") | {"context_length": 65536}
        (shape,) = profile["deployments"]
        profile["deployments"] = []
        for tp, tokens in limits.items():
            record = copy.deepcopy(shape) | {"tp": tp, "worker_type": role}
            record["resources"]["max_num_tokens"] = tokens
            profile["deployments"].append(record)
        (tmp_path / "profile.json").write_text(json.dumps(profile))
        words = ["--backend", "vllm", "--model-path", str(model), "--gpu", "h200_sxm"]
        words += ["--fpm-max-gpus", "2", "--fpm-gpu-counts", *map(str, limits), "--fpm-parallel-presets", "tp"]
        words += ["--fpm-prefill-cudagraph-policy", "runtime", "--fpm-worker-type", role]
        return build_plan(parse_arguments([*words, "--fpm-model-profile", str(tmp_path / "profile.json"), *arguments]))

    return plan


@pytest.mark.parametrize(("tokens", "role", "expected"), [(16384, "aggregated", 16384), (16384, "prefill", 8192)])
def test_finding_4_prefill_of_an_aggregated_worker_goes_up_to_its_own_limit(planned, tokens, role, expected):
    assert planned({1: tokens}, role).options["prefill_sampling"]["max_isl"] == expected


def test_finding_4_aggregated_workers_of_different_limits_need_a_shared_one(planned):
    with pytest.raises(OnboardError, match="set one with --fpm-max-num-batched-tokens"):
        planned({1: 4096, 2: 2048}, "aggregated")
    shared = planned({1: 4096, 2: 2048}, "aggregated", "--fpm-max-num-batched-tokens", "2048")
    assert shared.options["prefill_sampling"]["max_isl"] == 2048
    with pytest.raises(OnboardError, match="2048"):
        planned({1: 4096, 2: 2048}, "aggregated", "--fpm-max-num-batched-tokens", "4096")


GRAPHS = ("--fpm-cudagraph-mode", "FULL_AND_PIECEWISE", "--fpm-cudagraph-capture-sizes", "1", "2", "4")


def graphs_of(plan, cell):
    words = engine_command(plan, cell, {}, smoke=False)
    return json.loads(words[words.index("--compilation-config") + 1])


def test_finding_13_explicit_graphs_of_an_aggregated_worker_reach_both_launches(planned):
    plan = planned({1: 64}, "aggregated", *GRAPHS)
    expected = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 2, 4],
        "max_cudagraph_capture_size": 4,
    }
    assert {cell.workload_kind: graphs_of(plan, cell) for cell in plan.cells} == {
        "prefill": expected,
        "decode": expected,
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_finding_13_a_single_role_keeps_its_own_graphs(planned, role):
    (cell,) = planned({1: 64}, role, *GRAPHS).cells
    assert cell.workload_kind == role
    assert graphs_of(planned({1: 64}, role, *GRAPHS), cell)["cudagraph_capture_sizes"] == [1, 2, 4]


VOLUMES = {
    "pvc": ([], "model"),
    "pvc:/models:org/m": (["/models"], "/models/org/m"),
}


@pytest.mark.parametrize("smoke", [True, False])
@pytest.mark.parametrize("place", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("volume", VOLUMES)
def test_finding_23_every_form_of_a_model_volume_renders_valid_launch_files(tmp_path, dense_plan, volume, place, smoke):
    mounts, model = VOLUMES[volume]
    plan = CollectionPlan.from_document(dense_plan)
    cell = plan.cells[place]
    deployment = read_inputs(None, [], model_cache=volume)
    launch = render_cell(plan, cell, tmp_path, deployment, smoke=smoke)
    words = engine_command(plan, cell, deployment, smoke=smoke)
    launched = words[words.index("--model") + 1]
    assert launched == (plan.model_path if model == "model" else model)
    assert words[words.index("--served-model-name") + 1] == plan.model_path
    text = manifest_text(launch, deployment)
    assert all(f"mountPath: {mount}" in text for mount in mounts)
    assert ("claimName: pvc" in text) is bool(mounts)
