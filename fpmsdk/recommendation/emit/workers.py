"""The vLLM workers of a concrete deployment: how many, on how many GPUs, started with which words.

What the configuration leaves open is what a prediction of it assumes, so that the engine runs what was simulated.
Source: predict-recommend.md sections 2.3, 2.4 and 10.3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpmsdk.config.profile import DeploymentProfile, load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.errors import OnboardError
from fpmsdk.launch.capacity import FRACTION_OF
from fpmsdk.perfmodel.model import ForwardPassPerfModel
from fpmsdk.prediction.compile import timing_config
from fpmsdk.prediction.compile.launch import limits_of
from fpmsdk.prediction.config import Engine, Parallelism, PredictConfig, Worker

PORT, SIDE_CHANNEL_PORT = 8000, 5600
# Ranks of a worker take consecutive side channels.
SIDE_CHANNELS = 64
# Who sends the cache of a prompt and who receives it.
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
# The largest part of the memory that a prediction leaves to vLLM.
_MEMORY_FRACTION = FRACTION_OF["vllm"][1]


@dataclass(frozen=True)
class ServingWorker:
    """The identical workers of one role.

    role: `aggregated`, `prefill` or `decode`.
    hardware: GPU system.
    replicas: how many.
    gpus: of one worker, all on one node.
    model: name on the hub, or absolute path of a checkpoint.
    arguments: words after `vllm serve MODEL`, without the port.
    layout: parallel sizes above 1, in words.
    """

    role: str
    hardware: str
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


def serving_workers(config: PredictConfig) -> tuple[ServingWorker, ...]:
    """The workers of a concrete configuration, prompts before decoding.

    Raises
    ------
    OnboardError: sizes that vLLM has no option for.
    ConfigError: the profile has no such deployment.

    Source: predict-recommend.md section 10.3.

    >>> from fpmsdk.prediction import read_config
    >>> (worker,) = serving_workers(read_config({"engine": {"model": "org/m", "hardware": "h200_sxm", "workers": {
    ...     "aggregated": {"parallelism": {"tensor": 2, "replicas": 3}}}}}))
    >>> worker.replicas, worker.gpus, worker.arguments[:2]
    (3, 2, ('--tensor-parallel-size', '2'))
    """
    return tuple(_serving_worker(config, role, worker) for role, worker in config.roles.items())


def _serving_worker(config: PredictConfig, role: str, worker: Worker) -> ServingWorker:
    engine, sizes = config.engine, worker.parallelism
    if sizes.moe_tensor > 1 and sizes.moe_expert > 1:
        raise OnboardError(
            f"engine.workers.{role}.parallelism: vLLM divides experts either by moe_tensor or by moe_expert, found "
            f"{sizes.moe_tensor} and {sizes.moe_expert}",
            f"engine.workers.{role}.parallelism",
        )
    measured = _measured(config, role)
    arguments = [
        *_revision(engine),
        *_parallel(sizes),
        *_limits(config, role),
        *_cache(worker, measured),
        *_further(engine, role, measured),
    ]
    return ServingWorker(
        role=role,
        hardware=worker.hardware or engine.hardware,
        replicas=sizes.replicas,
        gpus=sizes.gpus,
        model=engine.model,
        arguments=tuple(arguments),
        layout=_layout(sizes),
    )


def _layout(sizes: Parallelism) -> str:
    parts = sizes.model_dump(exclude={"replicas"}, exclude_none=True)
    return ", ".join(f"{name} {size}" for name, size in parts.items() if size > 1) or "one GPU"


def _measured(config: PredictConfig, role: str) -> DeploymentProfile | None:
    """The deployment of the profile that the worker is; None without a profile."""
    if config.engine.fpm_profile is None:
        return None
    canonical = ForwardPassPerfModel.normalize_config(timing_config(config, role))
    return select_deployment(load_fpm_profile(config.engine.fpm_profile), canonical)


def _revision(engine: Engine) -> list[str]:
    # A folder is the revision that it holds.
    if engine.fpm_profile is None or os.path.isabs(engine.model):
        return []
    return ["--revision", engine.fpm_profile["model_revision"]]


def _parallel(sizes: Parallelism) -> list[str]:
    words = ["--tensor-parallel-size", str(sizes.tensor)]
    words += ["--pipeline-parallel-size", str(sizes.pipeline)]
    words += ["--data-parallel-size", str(sizes.attention_data)]
    for option, size in (("prefill", sizes.prefill_context), ("decode", sizes.decode_context)):
        if size is not None and size > 1:
            words += [f"--{option}-context-parallel-size", str(size)]
    return [*words, "--enable-expert-parallel"] if sizes.moe_expert > 1 else words


def _limits(config: PredictConfig, role: str) -> list[str]:
    tokens, sequences, context = limits_of(config, role)
    words = ["--max-num-batched-tokens", str(tokens), "--max-num-seqs", str(sequences)]
    if context is not None:
        words += ["--max-model-len", str(context)]
    chunked = config.engine.enable_chunked_prefill
    if chunked is not None and role != "decode":
        words.append("--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill")
    return words


def _cache(worker: Worker, measured: DeploymentProfile | None) -> list[str]:
    cache, capacity = worker.kv_cache, worker.kv_cache.capacity
    words = []
    # The engine chooses the blocks of several groups itself.
    if measured is None or measured.resources.cache_layout != "grouped":
        words += ["--block-size", str(cache.block_size)]
    if cache.num_blocks is not None:
        words += ["--num-gpu-blocks-override", str(cache.num_blocks)]
    else:
        fraction = _MEMORY_FRACTION if capacity.memory_fraction is None else capacity.memory_fraction
        words += ["--gpu-memory-utilization", str(fraction)]
    return [*words, "--enable-prefix-caching" if cache.prefix_caching else "--no-enable-prefix-caching"]


def _further(engine: Engine, role: str, measured: DeploymentProfile | None) -> list[str]:
    words = []
    precision = engine.kvcache_quant_mode or (measured.kv_cache_dtype if measured else "")
    if precision.startswith("fp8"):
        words += ["--kv-cache-dtype", "fp8"]
    kernel = engine.moe_backend or (measured.moe_backend if measured else "auto")
    if kernel != "auto":
        words += ["--moe-backend", kernel]
    if engine.enable_eplb:
        words.append("--enable-eplb")
    if engine.nextn:
        words += ["--speculative-config", _json({"method": "mtp", "num_speculative_tokens": engine.nextn})]
    elif engine.speculation is not None:
        drafts = engine.speculation.num_speculative_tokens
        words += ["--speculative-config", _json({"method": engine.speculation.kind, "num_speculative_tokens": drafts})]
    if role in _KV_ROLES:
        connector = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role]}
        words += ["--kv-transfer-config", _json(connector)]
    return words


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
