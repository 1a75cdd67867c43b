"""The flat report of a prediction.

Source: predict-recommend.md section 9, engine-and-replay.md section 5.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.deployment import SizedRole
from fpmsdk.replay.report import ReplayReport

_OF_LATENCY = ("ttft", "ttst", "tpot", "itl", "e2e_latency", "output_token_throughput_per_user")
_OF_THROUGHPUT = ("throughput_rps", "throughput_tok_s", "tokens_per_s")
NO_REQUESTS = (
    "No request completed: latency and throughput do not exist. Compare the KV capacity with the lengths of the "
    "requests, the context length, and where traffic stops."
)


def flat_report(
    config: PredictConfig,
    roles: Mapping[str, SizedRole],
    replay: ReplayReport,
    provenance: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Summary figures, options and provenance in one level.

    Without a completed request it says so, and every latency and throughput is None.
    """
    summary = dict(replay.summary)
    summary["gpu_hours"] = gpu_hours(config, summary)
    if any(source["estimator"] == "op_level" for source in provenance.values()):
        summary["power_coverage"] = 0.0  # operators could tell their energy, and no table does
    if not summary["completed_requests"]:
        summary = {name: None if _is_figure(name) else value for name, value in summary.items()}
        summary |= {
            "prediction_status": "invalid",
            "stop_reason": "no_completed_requests",
            "prediction_diagnostic": NO_REQUESTS,
        }
    report: dict[str, Any] = {
        **summary,
        "options": replay.options,
        "prediction_provenance": dict(provenance),
        "kv_capacity": {name: capacity_of(role) for name, role in roles.items()},
    }
    if replay.fpm_query_coverage is not None:
        report["fpm_query_coverage"] = replay.fpm_query_coverage
    if precisions := {name: found for name, role in roles.items() if (found := _precision(config, name, role))}:
        report["kv_cache_precision"] = precisions
    return report


def capacity_of(role: SizedRole) -> dict[str, Any]:
    """The cache of one rank: blocks and their tokens, or bytes of a grouped cache; and how many ranks there are."""
    engine, ranks = role.launch.engine, role.launch.dp_size * role.num_workers
    if engine.kv_cache_groups:
        return {"kv_cache_capacity_bytes": engine.kv_cache_capacity_bytes, "num_ranks": ranks}
    return {
        "num_gpu_blocks": engine.num_gpu_blocks,
        "kv_cache_tokens": engine.num_gpu_blocks * engine.block_size,
        "num_ranks": ranks,
    }


def gpu_hours(config: PredictConfig, summary: Mapping[str, Any]) -> float:
    """GPU hours of all workers, pipeline stages and context shards included."""
    seconds = {"prefill": summary["prefill_worker_seconds"], "decode": summary["decode_worker_seconds"]}
    total = 0.0
    for role, worker in config.roles.items():
        total += seconds["decode" if role == "aggregated" else role] * worker.parallelism.gpus
    return total / 3600


def _is_figure(name: str) -> bool:
    return name.endswith(_OF_THROUGHPUT) or any(f"_{kind}" in name and "samples" not in name for kind in _OF_LATENCY)


def _precision(config: PredictConfig, name: str, role: SizedRole) -> dict[str, str] | None:
    """Type of the cache, and who says so, where its size was estimated."""
    if role.memory is None:
        return None
    if config.engine.fpm_profile is not None:
        assert role.model is not None
        canonical = role.model.diagnostics()["provenance"]["config"]
        deployment = select_deployment(load_fpm_profile(config.engine.fpm_profile), canonical)
        return {"dtype": str(deployment.kv_cache_dtype), "source": "fpm_profile"}
    dtype = role.memory.get("kvcache_quant_mode")
    if dtype is None:
        return None
    timing = config.roles[name].timing
    asked = getattr(timing, "kvcache_quant_mode", None) or config.engine.kvcache_quant_mode
    return {"dtype": dtype, "source": "checkpoint" if asked is None else "user_override"}
