"""A small model whose table covers single short prompts alone, measured by the fake engine."""

import json

import pytest
import yaml

from fpmsdk.collect.__main__ import main as collect
from tests.onboard.finished import CONFIG

SYSTEM, VERSION = "h200_sxm", "0.27.0"
HARDWARE = {
    "data_dir": "data/h200_sxm",
    "gpu": {"mem_bw": 4.8e12, "mem_capacity": 151397597184, "bfloat16_tc_flops": 989.0e12, "sm_version": 90},
    "node": {"num_gpus_per_node": 8, "intra_node_bw": 4.5e11, "inter_node_bw": 5.0e10},
    "misc": {"nccl_mem": {1: 0}, "other_mem": 0},
}
# What was measured first: one request at a time, up to 32 tokens.
MEASURED = {
    "schema_version": 1,
    "prefill": [{"batch_size": 1, "total_prefill_tokens": n, "total_kv_read_tokens": 0} for n in (8, 16, 32)],
    "decode": [{"batch_size": 1, "total_kv_read_tokens": n} for n in (8, 16, 32)],
}


def measured_in(folder):
    """Write a checkpoint, and a systems root with its table, into a folder."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    (folder / "systems").mkdir()
    (folder / "systems/h200_sxm.yaml").write_text(yaml.safe_dump(HARDWARE))
    (folder / "points.json").write_text(json.dumps(MEASURED))
    (folder / "profile.json").write_text(json.dumps(profile(folder)))
    words = ["--model-path", folder / "model", "--gpu", SYSTEM, "--fpm-backend-version", VERSION, "--fpm-max-gpus", 1]
    words += ["--fpm-max-num-batched-tokens", 64, "--fpm-max-num-seqs", 4, "--fpm-executor", "fake"]
    words += ["--fpm-model-profile", folder / "profile.json", "--fpm-benchmark-points-file", folder / "points.json"]
    words += ["--checkpoint-dir", folder / "checkpoint", "--fpm-artifact-root", folder / "artifacts"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPMSDK_SYSTEMS_PATH", str(folder / "systems"))
        assert collect([*map(str, words), "--fpm-database-root", str(folder / "systems/data")]) == 0


def profile(folder):
    modes = {"gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16"}
    sizes = ("weights_bytes", "activations_bytes", "runtime_overhead_bytes", "comm_overhead_bytes")
    resources = dict.fromkeys(sizes, 1) | {"cache_layout": "linear", "kv_bytes_per_token": 64}
    resources |= {"max_num_tokens": 64, "max_batch_size": 4, "provenance": "declared"}
    return {
        "schema_version": 1,
        "model": str(folder / "model"),
        "model_revision": "1" * 40,
        "architecture": "LlamaForCausalLM",
        "context_length": 128,
        "num_experts": 0,
        "provenance": "test",
        "deployments": [
            {"system": SYSTEM, "backend": "vllm", "backend_version": VERSION, "tp": 1, "dp": 1, "moe_tp": 1}
            | {"moe_ep": 1, "comm_quant_mode": "half", "kv_cache_dtype": "bfloat16", **modes, "resources": resources}
        ],
    }


def candidate(place, concurrency, **engine):
    """A deployment that computes prompts of 40 tokens, so many at a time."""
    worker = {"kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 64}}}
    return {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": 40, "output_tokens": 3},
            "load": {"type": "concurrency", "concurrency": concurrency},
            "stop": {"requests": 4},
        },
        "engine": {
            "model": str(place / "model"),
            "hardware": SYSTEM,
            "backend_version": VERSION,
            "systems_paths": [str(place / "systems")],
            "fpm_profile": profile(place),
            "estimation_mode": "fpm_interpolation",
            "estimator_config": {"fpm_interpolation": {"method": "direct", "collect_coverage": True}},
            "context_length": 128,
            "workers": {"aggregated": worker},
            **engine,
        },
    }
