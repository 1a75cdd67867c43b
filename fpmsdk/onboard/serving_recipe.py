"""The recipe of a serving run: what is asked of the benchmark, bound to every file it rests on.

Source: onboarding.md section 8.5.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence, verify_evidence
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.prediction.config import DefaultTiming, PredictConfig, TimestampsLoad, TraceSource

SCHEMA = "aisimulate-serving-validation/v1"
BENCHMARK = {
    "repository": "https://github.com/ai-dynamo/aiperf",
    "revision": "7db2ba37a62aa80c882bc90eaf61cc8073e2387b",
}
EXECUTION_FIELDS = (
    "model",
    "model_revision",
    "backend",
    "backend_version",
    "image_digest",
    "hardware",
    "parallelism",
    "precision",
    "attention_groups",
    "graph_config",
    "scheduler",
    "context_length",
    "gpu_memory_utilization",
    "runtime_config",
)
_OWN_FILES = ("trace", "prediction_config", "prediction_report", "benchmark_trace")
_MATCHED_FILES = (
    "helper",
    "input",
    "payloads",
    "tokenization",
    "trace",
    "prediction_config",
    "prediction_report",
    "coverage_report",
)


def serving_scope(config: PredictConfig, trace: Path) -> dict[str, Any]:
    """What a serving run must share with the replay of a play, from the configuration of that replay.

    Raises
    ------
    OnboardError: it is no cold replay of this file in one lane on one worker priced strictly by direct lookups.
    """
    source, load = config.traffic.source, config.traffic.load
    worker = config.roles["aggregated"]
    timing = worker.timing if isinstance(worker.timing, DefaultTiming) else DefaultTiming()
    mode = timing.estimation_mode or config.engine.estimation_mode
    policy = timing.fallback_policy or config.engine.fallback_policy or "deny"
    estimators = timing.estimator_config if timing.estimator_config is not None else config.engine.estimator_config
    method = ((estimators or {}).get("fpm_interpolation") or {}).get("method")
    rules = {
        "the replay of the given Weka file, with absolute nested timestamps": isinstance(source, TraceSource)
        and source.format == "weka"
        and Path(source.paths[0]).resolve() == trace.resolve()
        and source.nested_timestamp_basis in (None, "absolute"),
        "one lane at the recorded speed": isinstance(load, TimestampsLoad)
        and load.agentic_lanes == 1
        and load.speedup == 1.0,
        "one worker": worker.parallelism.replicas == 1,
        "strict direct lookups": (mode, policy, method) == ("fpm_interpolation", "deny", "direct"),
    }
    missing = [rule for rule, holds in rules.items() if not holds]
    if missing:
        raise OnboardError(
            f"the prediction cannot be matched by a serving run: it is not {'; not '.join(missing)}; use the "
            "predict.yaml that validate-fpm has written",
            "prediction_config",
        )
    return {
        "qualification": "one_complete_single_stream_weka_play",
        "replay": "cold_aggregated",
        "load_policy": "single_session_absolute_and_completion_bounds",
        "agentic_lanes": 1,
        "prefix_caching": worker.kv_cache.prefix_caching,
        "cache_state_at_start": "cold",
        "kv_initialization": "real_request_history",
        "cache_storage": "hbm_only",
        "speculation": "disabled",
        "model_projection": config.engine.model,
        "token_count_source": "server_usage",
    }


def benchmark_arguments(recipe: Mapping[str, Any]) -> list[str]:
    """Arguments of the benchmark's Python, the same for every recipe but for its endpoint, model, files and play."""
    matched = recipe.get("matched_workload")
    requests = matched["payloads"] if matched else recipe["benchmark_trace"]
    fixed = recipe["timing_subset"] == "zero_idle_gaps"
    options = {
        "--url": recipe["endpoint"],
        "--model": recipe["scope"]["model_projection"],
        "--tokenizer": recipe["tokenizer"],
        "--endpoint-type": "chat",
        "--streaming": None,
        "--use-server-token-count": None,
        "--input-file": requests["path"],
        "--custom-dataset-type": "mooncake_trace" if matched else "weka_trace",
        "--fixed-schedule" if fixed else "--no-fixed-schedule": None,
        "--concurrency": "1",
        "--num-sessions": "1",
        "--request-count": str(recipe["request_count"]),
        "--extra-inputs": "ignore_eos:true",
        "--random-seed": "0",
        "--export-level": "records",
        "--artifact-dir": recipe["artifacts_dir"],
    }
    words = [word for option, value in options.items() for word in (option, value) if word is not None]
    return ["-m", "aiperf", "profile", *words]


def checked_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A recipe that is ready, with every file it names unchanged.

    Raises
    ------
    OnboardError: no recipe, one whose preparation is incomplete, or one that asks for another benchmark.
    EvidenceError: a file changed after the preparation, or the observer's provenance belongs to another recipe.
    """
    where = os.fspath(path)
    recipe = read_document(path)
    if not isinstance(recipe, dict) or recipe.get("schema_version") != SCHEMA:
        raise OnboardError(f"{where}: no recipe of schema {SCHEMA}", where)
    if recipe.get("status") != "ready":
        issues = "; ".join(recipe.get("issues", [])) or "no reason is given"
        raise OnboardError(f"{where}: its preparation is incomplete: {issues}; prepare a new one", where)
    try:
        if recipe["aiperf"] != BENCHMARK or recipe["command_arguments"] != benchmark_arguments(recipe):
            raise OnboardError(f"{where}: it asks for another benchmark than it was prepared for; prepare anew", where)
        for reference in _files(recipe):
            verify_evidence(reference)
        provenance = read_document(recipe["serving_observer"]["provenance_path"])
        bound = (provenance.get("recipe"), provenance.get("observer_modules"))
    except (KeyError, TypeError, AttributeError) as fault:
        raise OnboardError(f"{where}: incomplete or malformed: {type(fault).__name__} {fault}", where) from None
    if bound != (file_evidence(path), recipe["serving_observer"]["module_files"]):
        raise EvidenceError(f"{where}: the observer's provenance belongs to another recipe; prepare anew", where)
    return recipe


def _files(recipe: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from (recipe[name] for name in _OWN_FILES)
    yield from (recipe["matched_workload"][name] for name in _MATCHED_FILES)
    for name in ("tokenizer_files", "timing_artifacts"):
        yield from recipe[name]
    yield from recipe["serving_observer"]["module_files"]
