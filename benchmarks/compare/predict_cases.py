"""The configurations that `predict.py` runs on both sides: five deployments, and two searches."""

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

from table_rows import MODES, SIZES, table_row

from fpmsdk.perfdb.forward_writer import publish_rows

# The rules by which the public peer schedules and prices; ours has the real scheduler's by default.
PEER_RULES = {"mixed_pass_pricing": "separate", "scheduler_rules": "simulator"}

ORIGIN = {"system": "h200_sxm", "backend": "vllm", "backend_version": "9.9.9-bench"}
RESOURCES = {
    "weights_bytes": 16_400_000_000,
    "activations_bytes": 1_000_000_000,
    "runtime_overhead_bytes": 500_000_000,
    "comm_overhead_bytes": 0,
    "cache_layout": "linear",
    "kv_bytes_per_token": 147456,
    "max_num_tokens": 512,
    "max_batch_size": 8,
    "provenance": "made up for this benchmark",
}
REVISION = "0123456789abcdef0123456789abcdef01234567"
TRACE_BLOCK_TOKENS = 64


def predictions(place: Path) -> dict[str, dict[str, Any]]:
    """A name for each deployment and its configuration."""
    model = str(_checkpoint(place))
    fixed = {"timing": {"type": "fixed", "prefill_ms": 12.0, "decode_ms": 3.0}}
    return {
        "fixed timing, closed loop": {
            "traffic": _closed_loop(300, 20, 4, 40),
            "engine": {"model": model, "hardware": "h200_sxm", "workers": {"aggregated": _worker(200, **fixed)}},
        },
        "disaggregated with transfers": {
            "traffic": _closed_loop(300, 15, 5, 30),
            "engine": {
                "mode": "disaggregated",
                "model": model,
                "hardware": "h200_sxm",
                "workers": {"prefill": _worker(200, **fixed), "decode": _worker(200, **fixed)},
                "kv_transfer": {"bytes_per_token": 147456, "bandwidth_gb_per_second": 20.0},
            },
        },
        "trace of 2,000 requests": {
            "traffic": {
                "source": {
                    "type": "trace",
                    "paths": [str(_trace(place))],
                    "format": "mooncake",
                    "block_size": TRACE_BLOCK_TOKENS,
                },
                "load": {"type": "trace_timestamps", "speedup": 2.0},
            },
            "engine": {"model": model, "hardware": "h200_sxm", "workers": {"aggregated": _worker(2000, **fixed)}},
        },
        "measured table": {"traffic": _closed_loop(200, 12, 3, 60), "engine": _table_engine(place, model)},
        "op-level": {"traffic": _closed_loop(1000, 60, 8, 100), "engine": _op_level_engine()},
    }


def sweep_of_12(place: Path) -> dict[str, Any]:
    """Three layouts of at most two GPUs, four pairs of scheduler limits each, and goodput per GPU."""
    worker = _worker(300, timing={"type": "fixed", "prefill_ms": 8.0, "decode_ms": 3.0})
    worker["scheduler"] = {"max_batched_tokens": {"choices": [256, 512]}, "max_sequences": {"choices": [2, 8]}}
    worker["parallelism"] = {"preset": [_sizes(1, 1), _sizes(2, 1), _sizes(1, 2)]}
    return {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": 256, "output_tokens": 16},
            "load": {"type": "constant_rate", "requests_per_second": 60.0},
            "stop": {"requests": 40},
        },
        "engine": {
            "mode": "aggregated",
            "backend": "vllm",
            "model": str(_checkpoint(place)),
            "hardware": "h200_sxm",
            "context_length": 2048,
            "workers": {"aggregated": worker},
        },
        "evaluation": {"sla": {"ttft_ms": 60.0, "itl_ms": 8.0}},
        "optimization": {"target": "goodput_per_gpu", "constraints": {"max_candidate_gpus": 2}},
        "optimizer": {"algorithm": "random", "max_trials": 12, "parallelism": 2, "seed": 5},
        "execution": {"resources": {"cpu_limit": 2}},
    }


def sweep_of_200(place: Path) -> dict[str, Any]:
    """Five layouts of at most eight GPUs, forty pairs of scheduler limits each, priced by the peer's op-level data."""
    engine = _op_level_engine()
    worker = engine["workers"]["aggregated"]
    worker["scheduler"] = {
        "max_batched_tokens": {"choices": [1024, 2048, 4096, 8192]},
        "max_sequences": {"choices": [4, 8, 12, 16, 24, 32, 48, 64, 96, 128]},
    }
    worker["parallelism"] = {"preset": [_sizes(1, 2), _sizes(2, 2), _sizes(1, 4), _sizes(2, 4), _sizes(1, 8)]}
    return {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": 1000, "output_tokens": 60},
            "load": {"type": "constant_rate", "requests_per_second": 20.0},
            "stop": {"requests": 2000},
        },
        "engine": engine | {"mode": "aggregated"},
        "optimization": {"target": "throughput_per_gpu", "constraints": {"max_candidate_gpus": 8}},
        "optimizer": {"algorithm": "random", "max_trials": 200, "parallelism": 16, "seed": 1},
        "execution": {"resources": {"cpu_limit": 2}},
    }


def _peer_data() -> Path:
    found = importlib.util.find_spec("aisimulate_core")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _checkpoint(place: Path) -> Path:
    folder = place / "checkpoint"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(_peer_data() / "model_configs/Qwen--Qwen3-8B_config.json", folder / "config.json")
    return folder


def _closed_loop(input_tokens: int, output_tokens: int, concurrency: int, requests: int) -> dict[str, Any]:
    return {
        "source": {"type": "synthetic", "input_tokens": input_tokens, "output_tokens": output_tokens},
        "load": {"type": "concurrency", "concurrency": concurrency},
        "stop": {"requests": requests},
    }


def _worker(blocks: int, **more: Any) -> dict[str, Any]:
    return {
        "scheduler": {"max_batched_tokens": 512, "max_sequences": 8},
        "kv_cache": {
            "block_size": 16,
            "bytes_per_token": 147456,
            "capacity": {"type": "fixed", "blocks": blocks},
        },
        **more,
    }


def _sizes(replicas: int, tensor: int) -> dict[str, int]:
    return {
        "replicas": replicas,
        "tensor": tensor,
        "pipeline": 1,
        "attention_data": 1,
        "moe_tensor": 1,
        "moe_expert": 1,
    }


def _trace(place: Path) -> Path:
    draw = random.Random(11)
    file = place / "trace.jsonl"
    rows = []
    for i in range(2000):
        blocks = draw.randint(1, 8)
        # Half of the prompts begin as one of twenty others do.
        start = draw.randrange(20) * 8 if draw.random() < 0.5 else 1000 + 8 * i
        rows.append(
            {
                "timestamp": 40 * i + draw.randrange(40),
                "input_length": TRACE_BLOCK_TOKENS * blocks - draw.randrange(TRACE_BLOCK_TOKENS),
                "output_length": draw.randint(2, 40),
                "hash_ids": [start + j for j in range(blocks)],
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _op_level_engine() -> dict[str, Any]:
    return {
        "model": "Qwen/Qwen3-32B",
        "hardware": "h200_sxm",
        "backend": "vllm",
        "backend_version": "current",
        "systems_paths": [str(_peer_data() / "systems")],
        "estimation_mode": "op_level",
        "context_length": 4096,
        "workers": {
            "aggregated": {
                "parallelism": {"tensor": 4},
                "scheduler": {"max_batched_tokens": 2048, "max_sequences": 32},
                "kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 8000}},
            }
        },
    }


def _table_engine(place: Path, model: str) -> dict[str, Any]:
    """A whole-forward table whose points lie where the closed loop asks."""
    root = place / "systems"
    root.mkdir(exist_ok=True)
    shutil.copyfile(_peer_data() / "systems/h200_sxm.yaml", root / "h200_sxm.yaml")
    table = root / "data/h200_sxm/vllm" / ORIGIN["backend_version"] / "fpm_forward_perf.parquet"
    table.parent.mkdir(parents=True, exist_ok=True)
    publish_rows(str(table), list(_table_rows(model)))
    deployment = {**ORIGIN, **SIZES, **MODES}
    return {
        "model": model,
        "hardware": "h200_sxm",
        "backend_version": ORIGIN["backend_version"],
        "systems_paths": [str(root)],
        "estimation_mode": "fpm_interpolation",
        "estimator_config": {"fpm_interpolation": {"method": "direct", "collect_coverage": True}},
        "fpm_profile": {
            "schema_version": 1,
            "model": model,
            "model_revision": REVISION,
            "architecture": "Qwen3ForCausalLM",
            "context_length": 2048,
            "num_experts": 0,
            "provenance": "made up for this benchmark",
            "deployments": [deployment | {"resources": RESOURCES}],
        },
        "context_length": 2048,
        "workers": {"aggregated": _worker(500)},
    }


def _table_rows(model: str) -> Any:
    for batch in range(1, 9):
        for tokens in (8, 64, 256, 512, 1024):
            for kv in (0, 32, 64, 128, 256, 512, 2048, 8192) if tokens >= batch else ():
                yield table_row(
                    model, ORIGIN, "prefill", batch, tokens, kv, 1.5 + 0.01 * tokens + 0.0004 * kv + 0.05 * batch
                )
        for kv in (batch, 256, 1024, 4096, 16384):
            yield table_row(model, ORIGIN, "decode", batch, 0, kv, 2.0 + 0.08 * batch + 0.0003 * kv)
