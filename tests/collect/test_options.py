"""The collector's command line: what is accepted, and what is refused with its option (collector.md section 1.1)."""

import json

import pytest

from fpmsdk.collect.deployment_inputs import check_inputs, deployment_digest, model_in_volume, read_inputs, with_warm_up
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.points import read_points
from fpmsdk.errors import OnboardError

MODEL = ["--model-path", "org/model", "--gpu", "h200_sxm", "--fpm-max-gpus", "6"]


def test_defaults():
    options = parse_arguments(MODEL)
    settings = options.settings
    assert settings.gpu_counts == (1, 2, 4, 6)
    assert (settings.parallel_presets, settings.kv_cache_dtypes, settings.warmup_iterations) == (
        ("auto",),
        ("auto",),
        5,
    )
    assert (str(options.artifact_root), str(options.checkpoint_dir)) == (
        "fpm_forward_artifacts",
        ".collector_checkpoint",
    )


def test_lists_are_sorted_and_unique():
    settings = parse_arguments([*MODEL, "--fpm-gpu-counts", "4", "2", "4", "--fpm-tp-sizes", "4", "2"]).settings
    assert (settings.gpu_counts, settings.tp_sizes) == ((2, 4), (2, 4))


def test_a_slurm_plan_freezes_a_cpu_policy():
    settings = parse_arguments([*MODEL, "--fpm-executor", "slurm", "--fpm-slurm-container-image", "i"]).settings
    assert (settings.slurm_cpus_per_task, settings.slurm_cpu_bind) == (16, "cores")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--fpm-gpu-counts 8", r"--fpm-gpu-counts: \[8\] exceed max_gpus 6"),
        ("--fpm-pp-sizes 2", "--fpm-pp-sizes: only 1 is collected"),
        ("--fpm-parallel-axes pp", "pp is always 1"),
        ("--fpm-parallel-axes tp --fpm-parallel-presets tp", "cannot be combined with --fpm-parallel-presets"),
        ("--fpm-parallel-presets auto tp", "auto stands alone"),
        ("--fpm-max-model-len 0", "or -1 for what fits, found 0"),
        ("--fpm-gpu-memory-utilization 1.5", "up to 1, found 1.5"),
        ("--fpm-gpu-memory-utilization nan", "up to 1, found nan"),
        ("--fpm-max-prefill-isl 1", "at least 2, found 1"),
        ("--fpm-max-prefill-isl 9 --fpm-max-num-batched-tokens 8", "9 exceeds max_num_batched_tokens 8"),
        ("--fpm-max-num-batched-tokens 8 --fpm-max-num-seqs 9", "decode: max_num_batched_tokens 8 must be at least"),
        ("--fpm-max-num-seqs 8193", "prefill: max_num_batched_tokens 8192 must be at least max_num_seqs 8193"),
        ("--fpm-worker-type aggregated --fpm-max-num-seqs 8 --fpm-max-decode-batch-size 4", "share one limit"),
        ("--fpm-cudagraph-mode FULL", "add --fpm-worker-type"),
        ("--fpm-worker-type decode --fpm-cudagraph-capture-sizes 1 2", "needs --fpm-prefill-cudagraph-policy runtime"),
        ("--fpm-worker-type decode --fpm-cudagraph-mode NONE", "NONE captures nothing"),
        (
            "--fpm-worker-type decode --fpm-prefill-cudagraph-policy runtime --fpm-cudagraph-capture-sizes 2 1",
            "rising positive integers",
        ),
        (
            "--fpm-worker-type decode --fpm-prefill-cudagraph-policy runtime --fpm-cudagraph-capture-sizes 1 64 "
            "--fpm-max-num-batched-tokens 32 --fpm-max-num-seqs 8",
            "64 exceeds max_num_batched_tokens 32",
        ),
        ("--fpm-prefill-cudagraph-policy runtime --fpm-max-prefill-cudagraph-size 8", "policy runtime leaves"),
        ("--fpm-executor slurm", "name its image"),
        ("--fpm-slurm-cpu-bind cores", "belongs to executor slurm, found executor kubernetes"),
        ("--limit 1", "with --smoke alone"),
        ("--smoke --limit 0", "a positive number of cells"),
        ("--resume-retry-failed", "needs --resume"),
        ("--smoke --fpm-benchmark-points-file points.json", "its own few points"),
        ("--fpm-runtime-configuration x", "come together"),
        ("--repeatability-output-dir x", "come together"),
        ("--generated-config-version 1", "unrecognized arguments"),
        ("--fpm-max-num-seq 4", "unrecognized arguments"),
        ("--generator-set K8sConfig", "expected K8sConfig.key=value"),
        ("--generator-set params.agg=1", "only K8sConfig is accepted"),
        ("--generator-set K8sConfig.replicas=2", "K8sConfig.replicas: the collector decides this"),
        ("--model-cache :x", "NAME"),
    ],
)
def test_what_contradicts_itself_is_refused(words, reason):
    with pytest.raises(OnboardError, match=reason):
        parse_arguments([*MODEL, *words.split()])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--gpu h200_sxm --fpm-max-gpus 1", "--model-path: name the model"),
        ("--model-path m --fpm-max-gpus 1", "--gpu: name the GPU system"),
        ("--model-path m --gpu g", "--fpm-max-gpus: state"),
    ],
)
def test_what_is_missing_is_named(words, reason):
    with pytest.raises(OnboardError, match=reason):
        parse_arguments(words.split())


def test_deployment_inputs_are_laid_over_one_another(tmp_path):
    (tmp_path / "inputs.yaml").write_text("K8sConfig: {k8s_namespace: a, k8s_image: i}")
    inputs = read_inputs(
        tmp_path / "inputs.yaml", ["K8sConfig.k8s_image=j"], namespace="b", model_cache="pvc:/models:org/m"
    )
    assert inputs == {
        "K8sConfig": {
            "k8s_namespace": "b",
            "k8s_image": "j",
            "k8s_pvc_name": "pvc",
            "k8s_pvc_mount_path": "/models",
            "k8s_model_path_in_pvc": "org/m",
        }
    }


def test_the_release_label_is_no_part_of_the_identity():
    assert deployment_digest({"generator_dynamo_version": "1.6.1"}) == deployment_digest({})


def test_declared_switches_stay():
    declared = {"name": "DYN_BENCH_KV_WARMUP", "value": "off"}
    resolved = with_warm_up({"K8sConfig": {"extra_env": [declared]}})
    assert resolved["K8sConfig"]["extra_env"] == [declared, {"name": "DYN_BENCH_PREFILL_REAL_SEED", "value": "on"}]


def test_a_switch_is_a_word():
    with pytest.raises(OnboardError, match="found True"):
        with_warm_up({"K8sConfig": {"extra_env": [{"name": "DYN_BENCH_KV_WARMUP", "value": True}]}})


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({}, None),
        ({"k8s_pvc_name": "pvc"}, None),
        ({"k8s_pvc_mount_path": "/models", "k8s_model_path_in_pvc": "org/m"}, "/models/org/m"),
        ({"k8s_pvc_mount_path": "/models/", "k8s_model_path_in_pvc": "m"}, "/models/m"),
    ],
)
def test_a_checkpoint_in_a_volume(section, path):
    assert model_in_volume(section) == path


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"k8s_pvc_mount_path": "/models"}, "come together"),
        ({"k8s_model_path_in_pvc": "m"}, "come together"),
        ({"k8s_pvc_mount_path": "/models", "k8s_model_path_in_pvc": "/m"}, "inside the volume"),
        ({"k8s_pvc_mount_path": "/models", "k8s_model_path_in_pvc": "../m"}, "inside the volume"),
        ({"extra_env": {"A": "b"}}, "list of {name, value}"),
        ({"transport": "tcp"}, "nvlink or ib or efa"),
    ],
)
def test_malformed_deployment_inputs_are_refused(section, reason):
    with pytest.raises(OnboardError, match=reason):
        check_inputs({"K8sConfig": section})


PREFILL = {"batch_size": 2, "total_prefill_tokens": 64, "total_kv_read_tokens": 0}
DECODE = {"batch_size": 4, "total_kv_read_tokens": 128}


def points_of(tmp_path, **fields):
    manifest = {"schema_version": 1, "prefill": [PREFILL], "decode": [DECODE], **fields}
    (tmp_path / "points.json").write_text(json.dumps(manifest))
    return read_points(tmp_path / "points.json")


def test_points_are_frozen_with_the_digest_of_their_bytes(tmp_path):
    points = points_of(tmp_path)
    assert points["payload"]["decode"] == [DECODE]
    assert len(points["sha256"]) == 64


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schema_version": 4}, "schema_version: expected 1, 2 or 3"),
        ({"prefill": [], "decode": []}, "at least one point"),
        ({"extra": 1}, "manifest: expected the keys"),
        ({"prefill": [{**PREFILL, "total_prefill_tokens": 1}]}, "at least batch_size 2, found 1"),
        ({"prefill": [{**PREFILL, "batch_size": True}]}, r"prefill\[0\].batch_size: expected an integer"),
        ({"decode": [{**DECODE, "total_kv_read_tokens": 3}]}, "at least batch_size 4, found 3"),
        ({"decode": [{**DECODE, "total_prefill_tokens": 1}]}, "0, or nothing"),
    ],
)
def test_malformed_points_are_refused(tmp_path, fields, reason):
    with pytest.raises(OnboardError, match=reason):
        points_of(tmp_path, **fields)
