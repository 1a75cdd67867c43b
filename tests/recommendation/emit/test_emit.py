import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from fpmsdk import __version__
from fpmsdk.errors import OnboardError
from fpmsdk.prediction import read_config
from fpmsdk.recommendation.emit import FILE_OF, emit, emit_ranked, parse_kinds, require_image
from fpmsdk.recommendation.emit.workers import serving_workers

from .deployments import DEPLOYMENTS, deployment

HERE = Path(__file__).parent
# Every option that `vllm serve` of this release has: `flags` take no value.
VLLM = json.loads((HERE / "vllm_0_32_options.json").read_text())


def workers_of(document):
    return serving_workers(read_config(document))


@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize("kind", FILE_OF)
def test_the_files_of_a_deployment_are_these(name, kind, tmp_path):
    (path,) = emit(DEPLOYMENTS[name], [kind], tmp_path / "0001", node_gpus=8)
    golden = (HERE / "golden" / name / FILE_OF[kind]).read_text()
    assert path.read_text() == golden.replace("VERSION", __version__)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_engine_has_every_option_that_it_is_started_with(name):
    for worker in workers_of(DEPLOYMENTS[name]):
        words = list(worker.arguments)
        while words:
            option = words.pop(0)
            if option in VLLM["flags"]:
                continue
            assert option in VLLM["values"]
            value = words.pop(0)
            assert value in VLLM["choices"].get(option, [value])


@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize("kind", ["vllm-cmd", "slurm"])
def test_a_script_is_one_that_bash_reads(name, kind, tmp_path):
    (path,) = emit(DEPLOYMENTS[name], [kind], tmp_path, node_gpus=8)
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)


# Tells the command, then waits for the others; the last one ends with an exit code of its own.
_ENGINE = """\
#!/usr/bin/env bash
printf '%s\\0' "$CUDA_VISIBLE_DEVICES" "$VLLM_NIXL_SIDE_CHANNEL_HOST" "$@" > "$TOLD/$$.part"
mv "$TOLD/$$.part" "$TOLD/$$.told"
until [ "$(ls "$TOLD" | grep -c told)" = "$WORKERS" ]; do sleep 0.01; done
exit 3
"""
_SRUN = """\
#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def run(path, tmp_path, workers):
    """What the engines of a script were started with, and how the script ended."""
    programs, told = tmp_path / "programs", tmp_path / "told"
    programs.mkdir()
    told.mkdir()
    for name, text in {"vllm": _ENGINE, "srun": _SRUN}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TOLD": str(told),
        "WORKERS": str(workers),
        "SLURMD_NODENAME": "node7",
    }
    ended = subprocess.run(["bash", path], env=environment, check=False, timeout=60)
    return sorted(file.read_text().split("\0")[:-1] for file in told.glob("*.told")), ended.returncode


def test_a_script_starts_every_worker_on_gpus_of_its_own_and_ends_with_the_first(tmp_path):
    (path,) = emit(DEPLOYMENTS["disaggregated"], ["vllm-cmd"], tmp_path)
    told, exit_code = run(path, tmp_path, 3)
    assert [words[0] for words in told] == ["0,1", "2,3", "4,5,6,7,8,9,10,11"]
    assert {tuple(words[2:4]) for words in told} == {("serve", "/models/dense 8b")}
    assert [words[words.index("--port") + 1] for words in told] == ["8000", "8001", "8002"]
    roles = [json.loads(words[words.index("--kv-transfer-config") + 1])["kv_role"] for words in told]
    assert roles == ["kv_producer", "kv_producer", "kv_consumer"]
    assert exit_code == 3


def test_workers_of_a_job_are_reached_under_the_name_of_their_node(tmp_path):
    (path,) = emit(DEPLOYMENTS["disaggregated"], ["slurm"], tmp_path, node_gpus=8)
    told, _ = run(path, tmp_path, 3)
    assert [words[1] for words in told] == ["node7"] * 3


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_kubernetes_accepts_the_objects(name, tmp_path):
    validate = pytest.importorskip("kubernetes_validate").validate
    (path,) = emit(DEPLOYMENTS[name], ["k8s"], tmp_path, node_gpus=8)
    objects = list(yaml.safe_load_all(path.read_text()))
    for one in objects:
        validate(one, "1.33", strict=True)
    pairs = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert len(pairs) == len(objects) == 2 * len(workers_of(DEPLOYMENTS[name]))


def settings(**engine):
    (worker,) = workers_of(deployment(**engine))
    return " ".join(worker.arguments)


@pytest.mark.parametrize(
    "engine, words",
    [
        ({"nextn": 2, "nextn_accepted": 1.2}, '--speculative-config {"method":"mtp","num_speculative_tokens":2}'),
        (
            {"speculation": {"kind": "ngram", "num_speculative_tokens": 3, "acceptance_rates": [0.5, 0.4, 0.3]}},
            '--speculative-config {"method":"ngram","num_speculative_tokens":3}',
        ),
        ({"kvcache_quant_mode": "fp8"}, "--kv-cache-dtype fp8"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
        (
            {"workers": {"aggregated": {"parallelism": {"tensor": 4, "decode_context": 2}}}},
            "--decode-context-parallel-size 2",
        ),
        ({"context_length": 99}, "--max-model-len 99"),
        # What a prediction assumes where the configuration is silent.
        ({}, "--max-num-batched-tokens 8192 --max-num-seqs 256 --block-size 64 --gpu-memory-utilization 0.9"),
    ],
)
def test_a_setting_is_started_with_these_words(engine, words):
    assert words in settings(**engine)


def test_the_longest_context_is_left_to_the_engine_where_nothing_states_it():
    assert "--max-model-len" not in settings(context_length="max")


def test_an_image_is_that_of_the_version_or_the_one_that_is_named(tmp_path):
    (path,) = emit(deployment(backend_version="9.9.9-vec"), ["k8s"], tmp_path, image="registry/vllm:lab", node_gpus=8)
    assert "image: registry/vllm:lab\n" in path.read_text()
    (path,) = emit(deployment(), ["slurm"], tmp_path, image="registry/vllm:lab", node_gpus=8)
    assert " --container-image=registry/vllm:lab " in path.read_text()


@pytest.mark.parametrize(
    "document, kinds, said",
    [
        (deployment(backend="sglang"), ["vllm-cmd"], "engine.backend: must be 'vllm'"),
        (deployment(backend_version="9.9.9-vec"), ["vllm-cmd", "k8s"], "name one with --image"),
        (
            deployment(workers={"aggregated": {"parallelism": {"tensor": 16}}}),
            ["vllm-cmd", "slurm"],
            "one worker takes 16 GPUs and a node has 8",
        ),
        (
            deployment(mode="disaggregated", workers={"prefill": {"hardware": "h100_sxm"}, "decode": {}}),
            ["slurm"],
            "the workers need h100_sxm and h200_sxm; use k8s",
        ),
        (
            deployment(workers={"aggregated": {"parallelism": {"moe_tensor": 2, "moe_expert": 2}}}),
            ["k8s"],
            "either by moe_tensor or by moe_expert",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is_written(document, kinds, said, tmp_path):
    with pytest.raises(OnboardError) as caught:
        emit(document, kinds, tmp_path / "0001", node_gpus=8)
    assert said in str(caught.value)
    assert not (tmp_path / "0001").exists()


@pytest.mark.parametrize("text", ["", "k8s,helm"])
def test_unknown_kinds_are_refused_with_those_that_there_are(text):
    with pytest.raises(OnboardError, match="accepted are vllm-cmd, k8s, slurm"):
        parse_kinds(text)


def test_every_recommendation_has_a_folder_by_rank(tmp_path):
    emit_ranked([DEPLOYMENTS["replicas"], DEPLOYMENTS["disaggregated"]], ["vllm-cmd", "slurm"], tmp_path, node_gpus=8)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert found == ["0001/job.sbatch", "0001/serve.sh", "0002/job.sbatch", "0002/serve.sh"]
    assert "disaggregated prefill" in (tmp_path / "0002/serve.sh").read_text()


def test_a_missing_image_is_told_before_a_search():
    with pytest.raises(OnboardError, match="name one with --image"):
        require_image(["k8s"], "cpu-lab", None)
    require_image(["vllm-cmd", "slurm"], "cpu-lab", None)
