"""A plan folder with the table that its collection would have published, for what comes after a collection."""

import json
from pathlib import Path

import yaml

from fpmsdk.documents.strict import checked
from fpmsdk.onboard.plan import create_plan
from fpmsdk.onboard.request import SupportRequest
from tests.perfdb.pairs import row, write_pair
from tests.perfdb.synthetic import HARDWARE

VERSION = "0.31.0"
REVISION = "0123456789abcdef0123456789abcdef01234567"
BYTES = {"weights_bytes": 13472, "activations_bytes": 73400320, "runtime_overhead_bytes": 0, "comm_overhead_bytes": 0}
PLAY = {
    "id": "play-a",
    "block_size": 16,
    "requests": [
        {"type": "n", "t": 0.0, "in": 16, "out": 3, "hash_ids": [1]},
        {"type": "n", "t": 0.1, "in": 32, "out": 4, "hash_ids": [1, 2]},
    ],
}


def systems(place, monkeypatch):
    """A root that describes one GPU system, named by the environment."""
    root = place / "installed-systems"
    root.mkdir(exist_ok=True)
    gpu = HARDWARE["gpu"] | {"mem_capacity": 151397597184}
    (root / "h200_sxm.yaml").write_text(yaml.safe_dump(HARDWARE | {"data_dir": "data/h200_sxm", "gpu": gpu}))
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(root))
    return root


def checkpoint(place):
    """The checkpoint folder of a small model."""
    folder = place / "small-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


def deployment_of(version, resources):
    """A dense worker on one GPU, as a profile records it."""
    return {
        "system": "h200_sxm",
        "backend": "vllm",
        "backend_version": version,
        "tp": 1,
        "dp": 1,
        "moe_tp": 1,
        "moe_ep": 1,
        "gemm_quant_mode": "bfloat16",
        "moe_quant_mode": "bfloat16",
        "fmha_quant_mode": "bfloat16",
        "comm_quant_mode": "half",
        "kv_cache_dtype": "bfloat16",
        "resources": resources,
    }


def request_of(model, *, role=None, memory=BYTES, version=VERSION):
    """A request with the profile of one worker; `memory` is what is declared of it."""
    resources = {
        "cache_layout": "linear",
        "kv_bytes_per_token": 64,
        "max_num_tokens": 64,
        "max_batch_size": 4,
        "provenance": "by hand",
    }
    deployment = deployment_of(version, resources | memory)
    if role is not None:
        deployment["worker_type"] = role
    profile = {
        "schema_version": 1,
        "model": str(model),
        "model_revision": REVISION,
        "architecture": "LlamaForCausalLM",
        "context_length": 128,
        "num_experts": 0,
        "provenance": "by hand",
        "deployments": [deployment],
    }
    document = {
        "identity": {
            "model": str(model),
            "model_revision": REVISION,
            "model_kind": "dense",
            "gpu": "h200_sxm",
            "interconnect": "nvswitch",
            "framework_version": version,
        },
        "workload": {"input_tokens": 16, "output_tokens": 4, "request_count": 1},
        "search": {"context_length": 128},
        "collection": {"prefill_cudagraph_policy": "runtime", "gpu_memory_utilization": 0.9},
        "fpm_profile": profile,
    }
    if role is not None:
        document["worker_type"] = role
    return checked(SupportRequest, document, "request")


def collected(place, request):
    """The plan folder of a request, its table over all lengths of up to 128 tokens, and the file of the request."""
    folder = place / "collection"
    create_plan(request, folder)
    model, identity = request.identity.model, {"system": "h200_sxm", "backend_version": VERSION}
    rows = [
        row("prefill", batch, tokens, kv, 1.0 + tokens / 100 + kv / 1000, model=model, **identity)
        for batch in (1, 2, 4)
        for tokens in (4, 64)
        for kv in (0, 32, 128)
    ]
    rows += [
        row("decode", batch, 0, kv, 2.0 + kv / 1000, model=model, **identity)
        for batch in (1, 2, 4)
        for kv in (batch, 64, 512)
    ]
    data = folder / "systems/data/h200_sxm/vllm" / VERSION
    write_pair(data, rows, system="h200_sxm", backend_version=VERSION)
    file = place / "request.yaml"
    file.write_bytes(request.yaml_bytes())
    return folder, file


def trace_file(place, *plays):
    """A file of Weka plays."""
    file = Path(place) / "plays.jsonl"
    file.write_text("".join(json.dumps(play) + "\n" for play in plays or (PLAY,)))
    return file
