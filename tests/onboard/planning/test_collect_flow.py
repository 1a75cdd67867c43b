"""`collect-fpm` from a request to a published table, on the terminal, with the fake engine: roles, topologies, labels.

Everything is the product's own, from planning to readiness; only the engine is made up.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import fpmsdk
from fpmsdk.collect import run as collector_run
from fpmsdk.collect.executors import executor_factory
from fpmsdk.documents.strict import checked
from fpmsdk.documents.yaml_files import write_yaml
from fpmsdk.onboard.request import SupportRequest
from tests.cli.test_commands import rejection_of, run

REVISION = "a" * 40
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
MOE = DENSE | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
MOE |= {"num_experts_per_tok": 2}
# Sizes of tp, dp, moe_tp and moe_ep.
TP1, TP2, DEP2, TEP2 = (1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 2)


@pytest.fixture(autouse=True)
def known_collector(monkeypatch):
    """A collector of a known revision."""
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40)


@pytest.fixture
def request_file(tmp_path):
    """A function that writes a model and the request to collect it; the path of the request."""

    def write(sizes=TP1, *, role=None, version="0.27.0", collection=None):
        config = DENSE if sizes == TP1 else MOE
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config))
        topology = dict(zip(("tp", "dp", "moe_tp", "moe_ep"), sizes, strict=True))
        deployment = {
            "system": "h200_sxm",
            "backend": "vllm",
            "backend_version": version,
            **topology,
            "gemm_quant_mode": "bfloat16",
            "moe_quant_mode": "bfloat16",
            "fmha_quant_mode": "bfloat16",
            "comm_quant_mode": "half",
            "kv_cache_dtype": "bfloat16",
            "resources": {
                "cache_layout": "linear",
                "kv_bytes_per_token": 64,
                "max_num_tokens": 64,
                "max_batch_size": 4,
                "weights_bytes": 13472,
                "activations_bytes": 73400320,
                "runtime_overhead_bytes": 0,
                "comm_overhead_bytes": 0,
                "provenance": "by hand",
            },
        }
        if role is not None:
            deployment["worker_type"] = role
        names = ("tensor_parallel", "attention_data_parallel", "moe_tensor_parallel", "moe_expert_parallel")
        document = {
            "identity": {
                "model": str(model),
                "model_revision": REVISION,
                "model_kind": "dense" if sizes == TP1 else "moe",
                "gpu": "h200_sxm",
                "interconnect": "nvswitch",
                **({} if version is None else {"framework_version": version}),
            },
            "workload": {"input_tokens": 16, "output_tokens": 4, "request_count": 1},
            "search": {"context_length": 128, **dict(zip(names, sizes, strict=True))},
            "collection": {"prefill_cudagraph_policy": "runtime", "gpu_memory_utilization": 0.9, **(collection or {})},
            "fpm_profile": {
                "schema_version": 1,
                "model": str(model),
                "model_revision": REVISION,
                "architecture": config["architectures"][0],
                "context_length": 128,
                "num_experts": config.get("num_local_experts", 0),
                "provenance": "by hand",
                "deployments": [deployment],
            },
        }
        if role is not None:
            document["worker_type"] = role
        request = checked(SupportRequest, document, "request")
        (tmp_path / "request.yaml").write_bytes(write_yaml(request.document()))
        return str(tmp_path / "request.yaml")

    return write


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "collection"


@pytest.fixture
def plan(request_file, folder):
    """A function that plans a request."""

    def planned(*arguments, **options):
        path = request_file(*arguments, **options)
        ran = run("onboard", "plan", "-c", path, "--output-dir", str(folder))
        assert ran.exit_code == 0, ran.output
        return path

    return planned


@pytest.fixture
def collect(folder):
    """A function that runs `collect-fpm` with an exit code, and returns what it printed as JSON."""

    def run_with(path, *options, code=0):
        ran = run("onboard", "collect-fpm", "-c", path, "--output-dir", str(folder), *options)
        assert ran.exit_code == code, ran.output
        return json.loads(ran.stdout)

    return run_with


FAKE = ("--executor", "fake")
CASES = [
    (TP1, None, {"prefill", "decode"}),
    (TP2, "aggregated", {"prefill", "decode"}),
    (DEP2, "prefill", {"prefill"}),
    (TEP2, "decode", {"decode"}),
]


@pytest.mark.parametrize(("sizes", "role", "phases"), CASES)
def test_a_request_becomes_a_published_table(plan, collect, folder, sizes, role, phases):
    path = plan(sizes, role=role)
    report = collect(path, *FAKE, "--execute", "--smoke")
    assert report["status"] == "ready" and report["collector_exit_status"] == 0
    resolved = folder / "runtime-resolved"
    assert not any((resolved / "systems" / "data").iterdir())
    assert {cell["cell"]["workload_kind"] for cell in report["selected_cells"]} == phases
    assert collect(path, "--check-readiness")["ready_for_full_collection"] is True
    assert "execution_error" not in collect(path, "--execute")
    table = pq.read_table(resolved / "systems/data/h200_sxm/vllm/0.27.0/fpm_forward_perf.parquet")
    assert set(table["workload_kind"].to_pylist()) == phases
    assert {str(value) for value in table["tp"].to_pylist()} == {str(sizes[0])}
    # Continued, there is nothing left to do.
    before = (resolved / "fpm-checkpoint" / "fpm_forward.json").read_bytes()
    assert collect(path, "--execute", "--resume")["recovery_only"] is True
    assert (
        json.loads(before)["database"]
        == json.loads((resolved / "fpm-checkpoint" / "fpm_forward.json").read_bytes())["database"]
    )


def test_a_formal_run_without_smoke_is_refused_with_a_report(plan, collect, folder):
    path = plan()
    report = collect(path, *FAKE, "--execute", code=1)
    assert "run --execute --smoke first" in report["execution_error"]
    assert report["status"] == "incomplete" and report["collector_exit_status"] is None
    assert json.loads((folder / "runtime-resolved" / "fpm-readiness.json").read_text()) == report


def test_readiness_before_anything_was_collected(plan, collect):
    report = collect(plan(), "--check-readiness", code=1)
    assert report["status"] == "incomplete" and len(report["blockers"]) == 1
    assert (report["campaigns"], report["selected_cells"], report["runtime_compatibility"]) == ([], [], None)


def test_a_label_of_its_own_over_the_engine_that_ran(plan, collect, folder, monkeypatch):
    monkeypatch.setenv("FPMSDK_FAKE_VERSION", "0.31.0")
    path = plan(version="cpu-lab")
    collect(path, *FAKE, "--execute", "--smoke")
    collect(path, "--execute")
    table = pq.read_table(
        folder / "runtime-resolved/systems/data/h200_sxm/vllm/cpu-lab/fpm_forward_perf.parquet",
        columns=["backend_version", "runtime_backend_version"],
    )
    assert set(map(tuple, zip(*(column.to_pylist() for column in table.columns), strict=True))) == {
        ("cpu-lab", "0.31.0")
    }


def test_a_plan_without_a_label_takes_the_version_that_runs(plan, collect, folder):
    path = plan(version=None)
    status = collect(path, *FAKE)
    assert (status["status"], status["simulation_ready"]) == ("pending_runtime_version", False)
    assert collect(path, "--check-readiness", code=1)["status"] == "pending_runtime_version"
    collect(path, *FAKE, "--execute", "--smoke")
    collect(path, "--execute")
    assert (folder / "runtime-resolved/systems/data/h200_sxm/vllm/0.27.0/fpm_forward_perf.parquet").exists()
    assert collect(path, "--check-readiness")["status"] == "ready"


def test_the_resolved_plan_can_be_addressed_itself(plan, collect, folder):
    path = plan()
    collect(path, *FAKE, "--execute", "--smoke")
    resolved = folder / "runtime-resolved"
    ran = run(
        *("onboard", "collect-fpm", "-c", str(resolved / "request.yaml")),
        *("--output-dir", str(resolved), "--check-readiness"),
    )
    assert ran.exit_code == 0 and json.loads(ran.stdout)["ready_for_full_collection"] is True


def test_another_image_needs_a_fresh_plan(plan, collect, folder):
    path = plan()
    collect(path, *FAKE, "--execute", "--smoke")
    common = ("onboard", "collect-fpm", "-c", path, "--output-dir", str(folder), "--execute", "--resume")
    assert "a fresh plan" in rejection_of(*common, "--image", "registry/other:2")
    assert "a fresh plan" in rejection_of(*common, "--executor", "local")


def test_a_dynamo_label_is_no_part_of_the_identity(plan, collect):
    path = plan()
    smoke = collect(path, *FAKE, "--execute", "--smoke")
    report = collect(path, "--execute", "--dynamo-version", "1.6.1")
    assert report["status"] == "ready" and "execution_error" not in report
    assert {cell["plan_sha256"] for cell in report["selected_cells"]} == {
        cell["plan_sha256"] for cell in smoke["selected_cells"]
    }


@pytest.mark.parametrize("fault", ["--wrong-version", "--fail-at launch", "--rank-missing", "--partial"])
def test_an_engine_that_fails_blocks_the_formal_run(plan, collect, folder, monkeypatch, fault):
    monkeypatch.setenv("FPMSDK_FAKE_FAULTS", fault)
    path = plan()
    report = collect(path, *FAKE, "--execute", "--smoke", code=1)
    assert report["ready_for_full_collection"] is False
    assert json.loads((folder / "runtime-resolved" / "fpm-readiness.json").read_text()) == report
    formal = collect(path, "--execute", code=1)
    assert "run --execute --smoke first" in formal["execution_error"]


def test_ctrl_c_exits_with_130_and_is_resumed(plan, collect, folder, monkeypatch):
    path = plan()
    pressed = collector_run.run_campaign

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(collector_run, "run_campaign", interrupted)
    ran = run("onboard", "collect-fpm", "-c", path, "--output-dir", str(folder), *FAKE, "--execute", "--smoke")
    assert ran.exit_code == 130 and "pass --resume" in ran.stderr
    monkeypatch.setattr(collector_run, "run_campaign", pressed)
    assert collect(path, "--execute", "--smoke", "--resume")["status"] == "ready"


KILLED = """
import os, signal
from fpmsdk.collect import campaign
from fpmsdk.collect.fake_executor import FakeExecutor

owner = {"campaign": campaign, "executor": FakeExecutor}[OWNER]
step, count = getattr(owner, NAME), iter(range(99))

def killed(*arguments, **options):
    if next(count) == BEFORE:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments, **options)

setattr(owner, NAME, killed)
from fpmsdk.cli import main
main()
"""


@pytest.mark.parametrize(
    ("owner", "name", "before", "num_passed"),
    [
        ("campaign", "campaign_lock", 0, None),
        ("campaign", "write_document", 0, None),
        ("campaign", "write_document", 1, None),
        ("executor", "execute", 0, 0),
        ("campaign", "run_attempt", 1, 1),
        ("executor", "execute", 1, 1),
        ("campaign", "publish", 0, 2),
    ],
)
def test_a_collection_that_was_killed_keeps_what_it_has_and_goes_on(
    plan, collect, folder, owner, name, before, num_passed
):
    path = plan()
    collect(path, *FAKE, "--execute", "--smoke")
    script = f"OWNER, NAME, BEFORE = {owner!r}, {name!r}, {before}\n{KILLED}"
    words = ["onboard", "collect-fpm", "-c", path, "--output-dir", str(folder), "--execute"]
    environment = os.environ | {"PYTHONPATH": str(Path(fpmsdk.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    checkpoint = folder / "runtime-resolved" / "fpm-checkpoint" / "fpm_forward.json"
    first = {}
    if num_passed is None:
        assert not checkpoint.exists()
        assert "execution_error" not in collect(path, "--execute")
    else:
        entries = json.loads(checkpoint.read_text())["cells"].items()
        first = {cell: entry["attempt_id"] for cell, entry in entries if entry["status"] == "passed"}
        assert len(first) == num_passed
        assert "pass --resume" in rejection_of(*words)
        assert "execution_error" not in collect(path, "--execute", "--resume")
    cells = json.loads(checkpoint.read_text())["cells"]
    assert {cell["status"] for cell in cells.values()} == {"passed"} and len(cells) == 2
    # An attempt that had passed was not run again.
    assert first.items() <= {name: cell["attempt_id"] for name, cell in cells.items()}.items()


@pytest.mark.parametrize("executor", [("--image", "registry/x:1"), ("--executor", "slurm", "--image", "x.sqsh")])
def test_a_cluster_that_is_not_there_is_told(plan, folder, monkeypatch, tmp_path, executor):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    path = plan()
    told = rejection_of("onboard", "collect-fpm", "-c", path, "--output-dir", str(folder), "--execute", *executor)
    assert "detecting the version of the engine in the image failed" in told
    assert not (folder / "runtime-version.json").exists()


def test_execution_on_a_cluster_needs_an_image(plan, folder):
    told = rejection_of("onboard", "collect-fpm", "-c", plan(), "--output-dir", str(folder), "--execute")
    assert "--image" in told


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--executor", "slurm"), "--executor slurm needs --image"),
        (("--container-mount", "/m"), "--executor kubernetes does not take --container-mount"),
        (("--checkpoint-dir", "/elsewhere"), "--checkpoint-dir"),
        (("--limit", "1"), "needs --smoke"),
        (("--check-readiness", "--smoke"), "--check-readiness: only reads"),
        (("--model-cache", "a:b:c:d"), "model_cache"),
        (("--namespace", "Team"), "namespace"),
    ],
)
def test_rejected_options_exit_with_2_and_write_nothing(plan, folder, options, reason):
    path = plan()
    before = {place: place.read_bytes() for place in folder.rglob("*") if place.is_file()}
    assert reason in rejection_of("onboard", "collect-fpm", "-c", path, "--output-dir", str(folder), *options)
    assert {place: place.read_bytes() for place in folder.rglob("*") if place.is_file()} == before


def missing_module(_name, **_options):
    raise ModuleNotFoundError("No module named 'of_the_executor'", name="of_the_executor")


def undriven(_name, **options):
    return executor_factory("slurm", **options)


@pytest.mark.parametrize(("factory", "words"), [(missing_module, "of_the_executor"), (undriven, "slurm")])
def test_finding_14_a_collector_that_cannot_run_launches_nothing_and_keeps_a_report(
    plan, collect, folder, monkeypatch, factory, words
):
    path = plan()
    monkeypatch.setattr(collector_run, "executor_factory", factory)
    report = collect(path, *FAKE, "--execute", "--smoke", code=1)
    assert words in report["execution_error"]
    assert (report["collector_exit_status"], report["ready_for_full_collection"]) == (None, False)
    assert json.loads((folder / "runtime-resolved" / "fpm-readiness.json").read_text()) == report
    assert not list((folder / "runtime-resolved").rglob("benchmark*.json"))
