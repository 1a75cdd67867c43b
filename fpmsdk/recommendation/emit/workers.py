"""The vLLM workers of a concrete deployment: how many, on how many GPUs, started with which words.

What is not said in the configuration is what a prediction of it assumes, so that the engine runs what was simulated.
Source: predict-recommend.md sections 2.3, 2.4 and 10.3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpmsdk.errors import OnboardError

PORT, SIDE_CHANNEL_PORT = 8000, 5600
# Ranks of a worker take consecutive side channels.
SIDE_CHANNELS = 64
_SIZES = ("tensor", "pipeline", "attention_data", "moe_tensor", "moe_expert", "prefill_context", "decode_context")
# Who sends the cache of a prompt and who receives it.
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_MAX_BATCHED_TOKENS = 8192
_MAX_SEQUENCES = {"aggregated": 256, "prefill": 1, "decode": 256}
_BLOCK_TOKENS, _MEMORY_FRACTION = 64, 0.9


@dataclass(frozen=True)
class ServingWorker:
    """The identical workers of one role.

    role: `aggregated`, `prefill` or `decode`.
    replicas: how many.
    gpus: of one worker, all on one node.
    model: name on the hub, or absolute path of a checkpoint.
    arguments: words after `vllm serve MODEL`, without the port.
    layout: parallel sizes above 1, in words.
    """

    role: str
    replicas: int
    gpus: int
    model: str
    arguments: tuple[str, ...]
    layout: str

    @property
    def is_local(self) -> bool:
        """Whether the model is a folder of the machine that serves it."""
        return os.path.isabs(self.model)

    @property
    def transfers_kv(self) -> bool:
        """Whether the worker sends cache contents to another one, or receives them."""
        return self.role in _KV_ROLES


def serving_workers(document: Mapping[str, Any]) -> tuple[ServingWorker, ...]:
    """The workers of a concrete configuration, prompts before decoding.

    Parameters
    ----------
    document: of one prediction, validated, with absolute paths.

    Raises
    ------
    OnboardError: another backend than vLLM, or sizes without a vLLM option.

    Source: predict-recommend.md section 10.3.

    >>> (worker,) = serving_workers({"engine": {"model": "org/m", "hardware": "h200_sxm", "workers": {
    ...     "aggregated": {"parallelism": {"tensor": 2, "replicas": 3}}}}})
    >>> worker.replicas, worker.gpus, worker.arguments[:2]
    (3, 2, ('--tensor-parallel-size', '2'))
    """
    engine = document["engine"]
    backend = engine.get("backend", "vllm")
    if backend != "vllm":
        raise OnboardError(
            f"engine.backend: found {backend!r}, deployment files are written for vllm alone; leave --emit out",
            "engine.backend",
        )
    is_disaggregated = engine.get("mode", "aggregated") == "disaggregated"
    roles = ("prefill", "decode") if is_disaggregated else ("aggregated",)
    workers = engine.get("workers") or {}
    return tuple(_worker(engine, role, workers.get(role) or {}) for role in roles)


def _worker(engine: Mapping[str, Any], role: str, worker: Mapping[str, Any]) -> ServingWorker:
    given = worker.get("parallelism") or {}
    sizes = {name: given.get(name) or 1 for name in _SIZES}
    if sizes["moe_tensor"] > 1 and sizes["moe_expert"] > 1:
        raise OnboardError(
            f"engine.workers.{role}.parallelism: vLLM divides experts either by moe_tensor or by moe_expert, found "
            f"{sizes['moe_tensor']} and {sizes['moe_expert']}",
            f"engine.workers.{role}.parallelism",
        )
    profile = engine.get("fpm_profile") or {}
    measured = _measured(profile, sizes, engine, role)
    words = [
        *_parallel(sizes),
        *_limits(engine, role, worker, profile, measured),
        *_cache(worker.get("kv_cache") or {}, measured),
        *_further(engine, role, measured),
    ]
    return ServingWorker(
        role=role,
        replicas=given.get("replicas") or 1,
        gpus=sizes["tensor"] * sizes["pipeline"] * sizes["attention_data"] * sizes["prefill_context"],
        model=engine["model"],
        arguments=(*_revision(engine["model"], profile), *words),
        layout=", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU",
    )


def _measured(
    profile: Mapping[str, Any], sizes: Mapping[str, int], engine: Mapping[str, Any], role: str
) -> Mapping[str, Any]:
    """The deployment of the profile with these sizes; empty without a profile."""
    wanted = {
        "system": engine.get("hardware"),
        "tp": sizes["tensor"],
        "dp": sizes["attention_data"],
        "moe_tp": sizes["moe_tensor"],
        "moe_ep": sizes["moe_expert"],
    }
    for deployment in profile.get("deployments", ()):
        if deployment.get("worker_type") in (None, role) and all(deployment[name] == wanted[name] for name in wanted):
            found: Mapping[str, Any] = deployment
            return found
    return {}


def _revision(model: str, profile: Mapping[str, Any]) -> list[str]:
    # A folder is the revision that it holds.
    revision = profile.get("model_revision")
    return ["--revision", revision] if revision and not os.path.isabs(model) else []


def _parallel(sizes: Mapping[str, int]) -> list[str]:
    words = ["--tensor-parallel-size", str(sizes["tensor"])]
    words += ["--pipeline-parallel-size", str(sizes["pipeline"])]
    words += ["--data-parallel-size", str(sizes["attention_data"])]
    for name in ("prefill_context", "decode_context"):
        if sizes[name] > 1:
            words += [f"--{name.replace('_', '-')}-parallel-size", str(sizes[name])]
    return [*words, "--enable-expert-parallel"] if sizes["moe_expert"] > 1 else words


def _limits(
    engine: Mapping[str, Any],
    role: str,
    worker: Mapping[str, Any],
    profile: Mapping[str, Any],
    measured: Mapping[str, Any],
) -> list[str]:
    scheduler, resources = worker.get("scheduler") or {}, measured.get("resources") or {}
    tokens = scheduler.get("max_batched_tokens") or resources.get("max_num_tokens") or _MAX_BATCHED_TOKENS
    sequences = scheduler.get("max_sequences") or resources.get("max_batch_size") or _MAX_SEQUENCES[role]
    words = ["--max-num-batched-tokens", str(tokens), "--max-num-seqs", str(sequences)]
    context = worker.get("context_length") or engine.get("context_length") or "max"
    if context == "max":
        context = profile.get("context_length")
    if context is not None:
        words += ["--max-model-len", str(context)]
    chunked = engine.get("enable_chunked_prefill")
    if chunked is not None and role != "decode":
        words.append("--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill")
    return words


def _cache(cache: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    words = []
    # The engine chooses the blocks of several groups itself.
    if (measured.get("resources") or {}).get("cache_layout") != "grouped":
        words += ["--block-size", str(cache.get("block_size") or _BLOCK_TOKENS)]
    capacity = cache.get("capacity") or {}
    if capacity.get("type", "default") == "default":
        fraction = capacity.get("memory_fraction")
        words += ["--gpu-memory-utilization", str(_MEMORY_FRACTION if fraction is None else fraction)]
    elif capacity.get("blocks") is not None:
        words += ["--num-gpu-blocks-override", str(capacity["blocks"])]
    else:
        words += ["--kv-cache-memory-bytes", str(capacity["bytes"])]
    caching = cache.get("prefix_caching", True)
    return [*words, "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]


def _further(engine: Mapping[str, Any], role: str, measured: Mapping[str, Any]) -> list[str]:
    words = []
    precision = engine.get("kvcache_quant_mode") or measured.get("kv_cache_dtype") or ""
    if precision.startswith("fp8"):
        words += ["--kv-cache-dtype", "fp8"]
    kernel = engine.get("moe_backend") or measured.get("moe_backend") or "auto"
    if kernel != "auto":
        words += ["--moe-backend", kernel]
    if engine.get("enable_eplb"):
        words.append("--enable-eplb")
    if engine.get("nextn"):
        words += ["--speculative-config", _json({"method": "mtp", "num_speculative_tokens": engine["nextn"]})]
    elif speculation := engine.get("speculation"):
        settings = {"method": speculation["kind"], "num_speculative_tokens": speculation["num_speculative_tokens"]}
        words += ["--speculative-config", _json(settings)]
    if role in _KV_ROLES:
        connector = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role]}
        words += ["--kv-transfer-config", _json(connector)]
    return words


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
