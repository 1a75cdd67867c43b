"""Launch files of a cell: command, environment, rank discovery, Kubernetes objects (collector.md sections 3, 4.1)."""

import json
import os
import subprocess

import pytest
import yaml

from fpmsdk.collect.command import NODE_RANK_WORD, engine_command
from fpmsdk.collect.deployment_inputs import with_warm_up
from fpmsdk.collect.environment import cell_environment, contract_script, startup_script
from fpmsdk.collect.executor import CellLaunch
from fpmsdk.collect.kubernetes_manifest import manifest_text
from fpmsdk.collect.launch_evidence import launch_flags
from fpmsdk.collect.paths import check_output_path, rank_path, ranks_of_node
from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.collect.render import LAUNCH_FILES, render_cell, require_launch_files
from fpmsdk.collect.shell_words import literal_command, literal_exports
from fpmsdk.documents.canonical import write_document
from fpmsdk.errors import CollectionError, OnboardError

PLANS = ["declared_profile", "decode_role", "dense_runtime", "fp8_caches", "mla_pinned", "moe", "pending_profile"]


def launches(peer_plans, name):
    plan = CollectionPlan.from_document(peer_plans[name]["plan"])
    for cell in plan.cells:
        yield plan, cell, peer_plans[name]["launches"][cell.cell_id]


@pytest.mark.parametrize("name", [*PLANS, "hybrid_native", "slurm_points"])
def test_the_command_ends_as_that_of_the_upstream_collector(peer_plans, name):
    for plan, cell, expected in launches(peer_plans, name):
        for kind in expected.keys() & {"formal", "smoke"}:
            words = engine_command(plan, cell, peer_plans[name]["deployment"], smoke=kind == "smoke")
            begin = words.index("--distributed-executor-backend")
            count = len(expected[kind])
            assert words[begin : begin + count] == expected[kind], (cell.cell_id, kind)
            rest = ["--data-parallel-backend", "mp"] if cell.topology.dp > 1 else []
            assert words[begin + count :] == [
                *rest,
                "--dump-config-to",
                "/results/resolved-config-node0.json",
                "--benchmark-output-path",
                "/results/benchmark.json",
            ]


@pytest.mark.parametrize("name", [*PLANS, "slurm_points"])
def test_the_environment_is_that_of_the_upstream_collector(peer_plans, name):
    for plan, cell, expected in launches(peer_plans, name):
        assert cell_environment(plan, cell, peer_plans[name]["deployment"]) == expected["environment"]


def test_the_head_of_a_command(peer_plans):
    plan = CollectionPlan.from_document(peer_plans["mla_pinned"]["plan"])
    cell = next(cell for cell in plan.cells if cell.parallel_strategy == "tep")
    deployment = {"K8sConfig": {"k8s_pvc_mount_path": "/models", "k8s_model_path_in_pvc": "org/m"}}
    words = engine_command(plan, cell, deployment, smoke=False, num_nodes=2)
    head = "python3 -m dynamo.vllm --model /models/org/m --served-model-name example/mla --tensor-parallel-size 8"
    assert words[: len(head.split())] == head.split()
    assert "--enable-expert-parallel" in words
    assert f"/results/resolved-config-node{NODE_RANK_WORD}.json" in words


def with_policy(document, arguments, phase="decode"):
    cells = [cell for cell in document["cells"] if cell["workload_kind"] == phase]
    for cell in cells:
        cell["backend_policy"]["generator_overrides"] = {"params": {"agg": {"extra_cli_args": arguments}}}
    return CollectionPlan(document, CollectionPlan.from_document(_rehashed(document)).cells), phase


def _rehashed(document):
    document["sha256"] = plan_digest(document)
    return document


@pytest.mark.parametrize(
    ("name", "phase", "arguments", "reason"),
    [
        ("dense_runtime", "decode", ["--enforce-eager"], "eager execution is an option"),
        ("dense_runtime", "decode", ["--benchmark-points-file=x"], "points are an option"),
        ("dense_runtime", "decode", ["--enable-prefix-caching"], "decode of single decides about prefix caching"),
        ("moe", "decode", ["--no-enable-prefix-caching"], "decode of dep decides about prefix caching"),
        ("dense_runtime", "prefill", ["--compilation-config", "{}"], "policy runtime leaves captured graphs"),
        ("declared_profile", "decode", ["--gpu-memory-utilization", "0.5"], "the share of memory is an option"),
        ("pending_profile", "decode", ["--worker-cls", "x.Y"], "observers of the engine"),
        ("pending_profile", "decode", ["--num-gpu-blocks-override=3"], "sizes its own cache"),
        ("pending_profile", "prefill", ["--async-scheduling"], "synchronous scheduling"),
    ],
)
def test_a_policy_may_not_decide_what_the_campaign_decides(peer_plans, name, phase, arguments, reason):
    plan, phase = with_policy(json.loads(json.dumps(peer_plans[name]["plan"])), arguments, phase)
    with pytest.raises(OnboardError, match=reason):
        for cell in plan.cells:
            if cell.workload_kind == phase:
                engine_command(plan, cell, {}, smoke=False)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"name": "FPM_NODE_RANK", "value": "0"}, "FPM_NODE_RANK is set by the launch files"),
        ({"name": "FPM_RUN_ID", "value": "other"}, "FPM_RUN_ID has two values"),
        ({"name": "FPM_READINESS_TIMEOUT_SECONDS", "value": "3601"}, "expected 1 to 3600 seconds"),
        ({"name": "FPM_READINESS_TIMEOUT_SECONDS", "value": "0"}, "expected 1 to 3600 seconds"),
    ],
)
def test_a_contradicting_environment_is_refused(dense_plan, entry, reason):
    plan = CollectionPlan.from_document(dense_plan)
    with pytest.raises(OnboardError, match=reason):
        cell_environment(plan, plan.cells[0], {"K8sConfig": {"extra_env": [entry]}})


def test_the_startup_environment_is_literal():
    text = startup_script({"PYTHONPATH": "/a b", "OTHER": "x"})
    assert literal_exports(text) == {"PYTHONPATH": "/a b"}
    with pytest.raises(OnboardError, match="PYTHONPATH: expected a literal string"):
        startup_script({"PYTHONPATH": {"valueFrom": {}}})


def discover(tmp_path, plan, num_nodes, **environment):
    cell = plan.cells[0]
    (tmp_path / "fpm_env.sh").write_text(contract_script(plan, cell, {}, num_nodes))
    done = subprocess.run(
        ["bash", "-c", f'source {tmp_path}/fpm_env.sh; echo "$FPM_NODE_RANK $FPM_MASTER_ADDR $FPM_BENCHMARK_MODE"'],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("num_nodes", "environment", "code", "found"),
    [
        (1, {}, 0, "0 127.0.0.1 prefill"),
        (2, {"FPM_NODE_RANK": "1", "FPM_MASTER_ADDR": "a", "LWS_WORKER_INDEX": "0"}, 0, "1 a prefill"),
        (2, {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "b"}, 0, "1 b prefill"),
        (
            2,
            {"GROVE_PCLQ_POD_INDEX": "0", "GROVE_PCLQ_NAME": "w", "GROVE_HEADLESS_SERVICE": "svc"},
            0,
            "0 w-0.svc prefill",
        ),
        (2, {}, 2, ""),
        (1, {"FPM_NODE_RANK": "0"}, 2, ""),
        (2, {"FPM_NODE_RANK": "2", "FPM_MASTER_ADDR": "a"}, 2, ""),
        (2, {"FPM_NODE_RANK": "x", "FPM_MASTER_ADDR": "a"}, 2, ""),
    ],
)
def test_a_node_finds_its_rank_or_stops(tmp_path, dense_plan, num_nodes, environment, code, found):
    assert discover(tmp_path, CollectionPlan.from_document(dense_plan), num_nodes, **environment) == (code, found)


def test_launch_files_are_all_there_and_say_what_was_asked(tmp_path, dense_plan):
    plan = CollectionPlan.from_document(dense_plan)
    folder = tmp_path / "cells" / plan.cells[0].cell_id
    folder.mkdir(parents=True)
    with pytest.raises(CollectionError, match="launch files are missing: k8s_deploy.yaml"):
        require_launch_files(folder)
    launch = render_cell(plan, plan.cells[0], folder, {})
    require_launch_files(folder)
    assert (launch.num_nodes, launch.gpus_per_node) == (1, 1)
    assert os.access(folder / "run.sh", os.X_OK)
    words = literal_command((folder / "run.sh").read_text())
    assert words == engine_command(plan, plan.cells[0], {}, smoke=False)
    # As execution evidence reads it later.
    write_document(tmp_path / "generator-overrides.json", with_warm_up({}))
    assert launch_flags(plan, folder)["--benchmark-mode"] == "prefill"
    assert all((folder / name).stat().st_size for name in LAUNCH_FILES)


def test_run_sh_becomes_the_engine_with_the_rank_of_its_node(tmp_path, dense_plan):
    plan = CollectionPlan.from_document(dense_plan)
    render_cell(plan, plan.cells[0], tmp_path, {})
    engine = tmp_path / "bin"
    engine.mkdir()
    (engine / "python3").write_text('#!/bin/bash\nprintf "%s\\n" "$@" "$FPM_RUN_ID" "$DYN_FPM_WORKER_ID"\nexit 7\n')
    (engine / "python3").chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "run.sh")],
        env={"PATH": f"{engine}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    lines = done.stdout.split()
    assert lines[:2] == ["-m", "dynamo.vllm"]
    assert lines[-2:] == [plan.cells[0].cell_id, f"{plan.cells[0].cell_id}-node0"]


def manifest(plan, num_nodes=1, **section):
    launch = CellLaunch(plan, plan.cells[0], None, num_nodes, 4)
    return yaml.safe_load(manifest_text(launch, {"K8sConfig": section}))


VOLUME = {"k8s_pvc_name": "pvc", "k8s_pvc_mount_path": "/models", "k8s_model_path_in_pvc": "org/m"}


@pytest.mark.parametrize(
    ("given", "mounted"),
    [
        ((), False),
        (("k8s_pvc_name",), False),
        (("k8s_pvc_mount_path",), False),
        (("k8s_model_path_in_pvc",), False),
        (("k8s_pvc_name", "k8s_pvc_mount_path"), True),
        (("k8s_pvc_name", "k8s_model_path_in_pvc"), False),
        (("k8s_pvc_mount_path", "k8s_model_path_in_pvc"), False),
        (tuple(VOLUME), True),
    ],
)
def test_a_volume_is_mounted_when_its_name_and_place_are_known(dense_plan, given, mounted):
    pod = manifest(CollectionPlan.from_document(dense_plan), **{name: VOLUME[name] for name in given})["spec"]
    claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    places = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    assert claims == ([{"claimName": "pvc"}] if mounted else [])
    assert ("/models" in places) is mounted
    assert {"/results", "/dev/shm"} <= set(places)


def test_a_single_node_is_a_pod_that_waits(dense_plan):
    document = manifest(
        CollectionPlan.from_document(dense_plan), k8s_image="i", k8s_namespace="ns", k8s_image_pull_secret="s"
    )
    assert (document["kind"], document["metadata"]["namespace"]) == ("Pod", "ns")
    container = document["spec"]["containers"][0]
    assert (container["name"], container["image"]) == ("fpm-resource", "i")
    assert (container["command"], container["args"]) == (["/bin/bash", "-lc"], ["exec sleep infinity"])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert document["spec"]["imagePullSecrets"] == [{"name": "s"}]
    assert document["spec"]["restartPolicy"] == "Always"


def test_several_nodes_are_one_group(dense_plan):
    plan = CollectionPlan.from_document(dense_plan)
    group = manifest(plan, 2)
    assert group["kind"] == "LeaderWorkerSet"
    assert (group["spec"]["replicas"], group["spec"]["startupPolicy"]) == (1, "LeaderCreated")
    assert (group["spec"]["leaderWorkerTemplate"]["size"], len(group["metadata"]["name"]) <= 50) == (2, True)
    clique = manifest(plan, 2, fpm_orchestrator="grove")
    assert clique["kind"] == "PodCliqueSet"
    assert clique["spec"]["template"]["cliques"][0]["spec"]["replicas"] == 2


def test_pods_are_selected_by_a_label_that_only_this_cell_has(dense_plan):
    plan = CollectionPlan.from_document(dense_plan)
    labels = manifest(plan, fpm_resource_labels={"team": "a"})["metadata"]["labels"]
    assert labels["aiconfigurator.nvidia.com/cell"] == plan.cells[0].cell_id
    assert (labels["team"], labels["aiconfigurator.nvidia.com/plan"]) == ("a", plan.sha256[:16])
    with pytest.raises(OnboardError, match="must be fpm-"):
        manifest(plan, fpm_resource_labels={"aiconfigurator.nvidia.com/cell": "fpm-other"})


@pytest.mark.parametrize(
    "path",
    [
        "benchmark.json",
        "/tmp/benchmark.json",
        "/results/../benchmark.json",
        "/results/./benchmark.json",
        "/results/b.json",
        "/results/benchmark_merged.json",
    ],
)
def test_results_lie_in_results(path):
    with pytest.raises(OnboardError, match="benchmark output"):
        check_output_path(path)


def test_ranks_have_files_and_nodes():
    assert [rank_path("/results/benchmark.json", rank) for rank in (0, 3)] == [
        "/results/benchmark.json",
        "/results/benchmark_dp3.json",
    ]
    assert [list(ranks_of_node(node, data_parallel=8, nodes=2)) for node in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(ranks_of_node(0, data_parallel=1, nodes=1)) == [0]
