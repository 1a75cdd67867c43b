"""Build the simulated workers of a replay from a launch configuration.

Not the replay: nothing runs here. Source: engine-and-replay.md sections 2 and 5.4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from fpmsdk._ext.pages import KvCache, PrefixKeys
from fpmsdk._ext.placement import KvAwarePlacement, Placement
from fpmsdk._ext.pricing import FixedTiming, PassPricer
from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.rolling import RollingKeys
from fpmsdk._ext.scheduler import Requests, Role, Scheduler
from fpmsdk._ext.speculation import DraftAcceptance
from fpmsdk._ext.workers import WorkerPool
from fpmsdk.config.schema import shown
from fpmsdk.errors import ConfigError, MissingCapabilityError
from fpmsdk.launch.config import EngineConfig, EngineLaunchConfig
from fpmsdk.replay.groups import grouped_cache
from fpmsdk.replay.portions import Portion
from fpmsdk.replay.trace import Trace

ROLES = {"aggregated": Role.AGGREGATED, "prefill": Role.PREFILL, "decode": Role.DECODE}


class PoolPlan(Struct, frozen=True):
    """One pool of identical workers: what is launched, how often, and how passes and requests are treated.

    `settings` are the scheduler arguments of `replay_trace` that a launch does not carry. With `pass_by_pass` every
    pass touches every request, with equal results.
    """

    launch: EngineLaunchConfig
    num_workers: int
    pricer: PassPricer
    placement: str
    settings: Mapping[str, Any]
    pass_by_pass: bool = False

    def build(self, trace: Trace, requests: Requests, recorder: Recorder) -> WorkerPool:
        """Return the pool, ready to serve the requests of the trace."""
        return self._pool(requests, recorder, self._keys(trace), None)

    def build_rolling(
        self, trace_block_tokens: int, few_keys: int, requests: Requests, recorder: Recorder
    ) -> WorkerPool:
        """Return the pool, ready to serve requests that come and go.

        Their hash ids stand for so many tokens; few keys are kept although nobody needs them.
        """
        keys = None
        if self._needs_keys:
            keys = RollingKeys(requests.count, trace_block_tokens, self.launch.engine.block_size, few_keys)
        return self._pool(requests, recorder, keys, keys)

    def _pool(
        self, requests: Requests, recorder: Recorder, keys: PrefixKeys | None, rolling: RollingKeys | None
    ) -> WorkerPool:
        num_ranks = self.num_workers * self.launch.dp_size
        schedulers = [self._scheduler(requests, keys, rank) for rank in range(num_ranks)]
        placement: Placement
        if self.placement == "kv_aware" and keys is not None:
            placement = KvAwarePlacement(self.num_workers, self.launch.dp_size, requests, keys)
        else:
            fills_workers = self.launch.engine.worker_type != "aggregated"
            placement = Placement(self.num_workers, self.launch.dp_size, fills_workers)
        return WorkerPool(schedulers, self.pricer, placement, recorder, self.pass_by_pass, rolling)

    def build_rank(self, trace_block_tokens: int, requests: Requests) -> Scheduler:
        """Return one rank without a pool, for requests that come and go; it keeps its KV events."""
        keys = None
        if self.launch.engine.enable_prefix_caching:
            keys = RollingKeys(requests.count, trace_block_tokens, self.launch.engine.block_size)
        return structs.replace(self, placement="kv_aware")._scheduler(requests, keys, 0)

    def refusals(self, portion: Portion) -> NDArray[np.int8]:
        """What a rank says to each request that comes alone, int8[n] of `Refusal`."""
        requests = Requests(portion.prompt_tokens, portion.output_tokens, portion.priority)
        return self._scheduler(requests, None, 0).refusals()

    @property
    def _needs_keys(self) -> bool:
        return self.launch.engine.enable_prefix_caching or self.placement == "kv_aware"

    def _keys(self, trace: Trace) -> PrefixKeys | None:
        engine = self.launch.engine
        if not self._needs_keys:
            return None
        return PrefixKeys(
            trace.prompt_tokens,
            trace.output_tokens,
            trace.hash_offsets,
            trace.hash_ids,
            trace.block_tokens,
            engine.block_size,
        )

    @property
    def num_gpus_per_worker(self) -> int:
        """Tensor-parallel times attention-DP size."""
        return self.launch.tensor_parallel_size * self.launch.dp_size

    def _grouped_cache(self, requests: Requests) -> KvCache | None:
        if not self.launch.engine.kv_cache_groups:
            return None
        return grouped_cache(
            self.launch.engine, requests.column("prompt_tokens").astype(np.int64), self.settings["scheduler_rules"]
        )

    def _scheduler(self, requests: Requests, keys: PrefixKeys | None, rank: int) -> Scheduler:
        engine = self.launch.engine
        return Scheduler(
            requests,
            num_gpu_blocks=engine.num_gpu_blocks,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            preemption_mode=engine.preemption_mode,
            keys=keys if engine.enable_prefix_caching else None,
            kv_cache=self._grouped_cache(requests),
            drafts=_draft_acceptance(engine, rank),
            role=ROLES[engine.worker_type],
            never_evicts=engine.backend == "trtllm",
            logs_residency=self.placement == "kv_aware",
            # The cadence keeps the ranks of a group in step; a lone rank has nobody to wait for.
            prefill_schedule_interval=engine.prefill_schedule_interval if self.launch.dp_size > 1 else 1,
            **{**self.settings, "vllm_version": parsed_version(self.settings["vllm_version"])},
        )


# What vLLM does when nothing is said.
VLLM_DEFAULTS: Mapping[str, Any] = {
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "vllm_version": "0.32",
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
}


def refusals(portion: Portion, launch: EngineLaunchConfig, scheduler_rules: str) -> NDArray[np.int8]:
    """What an engine says to each of some requests that comes alone, int8[n] of `Refusal`.

    Raises MissingCapabilityError or ConfigError when the engine cannot be simulated under these rules.
    """
    check_simulated(launch.engine, scheduler_rules)
    pricer = PassPricer(FixedTiming(0.0, 0.0), False, 0.0, 0.0)
    settings = {"scheduler_rules": scheduler_rules, **VLLM_DEFAULTS}
    return PoolPlan(launch, 1, pricer, "round_robin", settings).refusals(portion)


def check_simulated(engine: EngineConfig, scheduler_rules: str) -> None:
    """Raise MissingCapabilityError or ConfigError for a rank that cannot be simulated under these rules."""
    if engine.backend == "sglang":
        raise MissingCapabilityError(
            "engine.backend = 'sglang' cannot be replayed by this release; it simulates vllm and trtllm"
        )
    if scheduler_rules == "vllm" and engine.backend != "vllm":
        raise ConfigError(
            f"engine.backend is {engine.backend!r}, but scheduler_rules 'vllm' are those of vLLM; take 'simulator'",
            "engine.backend",
        )
    if scheduler_rules == "vllm" and not engine.kv_cache_groups and engine.num_gpu_blocks < 2:
        raise ConfigError(
            "engine.num_gpu_blocks is 1; vLLM reserves one block, give at least 2", "engine.num_gpu_blocks"
        )


def parsed_version(text: Any) -> tuple[int, int]:
    """Return (major, minor) of a vLLM version.

    >>> parsed_version("0.32.1")
    (0, 32)
    """
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"vllm_version is {shown(text)}; give the text MAJOR.MINOR, as 0.32", "vllm_version")
    return int(match[1]), int(match[2])


def _draft_acceptance(engine: EngineConfig, rank: int) -> DraftAcceptance | None:
    if engine.aic_nextn is None:
        return None
    rates = [float(rate) for rate in (engine.aic_nextn_accept_rates or "").split(",")]
    return DraftAcceptance(rates, engine.aic_mtp_seed + rank)
