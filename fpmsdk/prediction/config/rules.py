"""Rules between sections of a configuration.

Source: predict-recommend.md sections 2.7, 2.5 and 5.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpmsdk.prediction.config.engine import MODEL_CONTROLS, ROLES
from fpmsdk.prediction.config.timing import QUANTISATION_FIELDS, DefaultTiming
from fpmsdk.prediction.config.traffic import TraceSource

if TYPE_CHECKING:
    from fpmsdk.prediction.config.root import PredictConfig

_SKELETON = "workers: {prefill: {parallelism: {tensor: 1}}, decode: {parallelism: {tensor: 1}}}"


def check_rules(config: PredictConfig) -> None:
    """Raise `ValueError` for the first rule that two sections break together."""
    _check_roles(config)
    source = config.traffic.source
    if isinstance(source, TraceSource) and source.format == "mooncake-delta" and config.engine.mode != "aggregated":
        raise ValueError(
            f"traffic.source.format: mooncake-delta needs engine.mode aggregated, found {config.engine.mode}"
        )
    _check_timing(config)
    _check_profile(config)
    if config.engine.hardware == "auto":
        raise ValueError("engine.hardware auto is for recommend; name the system, such as h200_sxm")


def _check_roles(config: PredictConfig) -> None:
    engine = config.engine
    given = {role for role in ("aggregated", "prefill", "decode") if getattr(engine.workers, role) is not None}
    wanted = set(ROLES[engine.mode])
    if unused := given - wanted:
        raise ValueError(
            f"engine.workers: mode {engine.mode} has no {' and '.join(sorted(unused))} workers; leave them out"
        )
    if engine.mode == "disaggregated" and given != wanted:
        raise ValueError(f"engine.workers: mode disaggregated needs prefill and decode workers; add {_SKELETON}")
    if engine.mode == "aggregated":
        if engine.kv_transfer is not None:
            raise ValueError("engine.kv_transfer belongs to mode disaggregated; leave it out")
        worker = config.roles["aggregated"]
        for field in ("hardware", "context_length"):
            if getattr(worker, field) is not None:
                raise ValueError(f"engine.workers.aggregated.{field}: an aggregated worker has that of the engine")
        sizes = worker.parallelism
        if (sizes.prefill_context or 1) > 1 and (sizes.decode_context or 1) > 1:
            raise ValueError("engine.workers.aggregated.parallelism: only one of the context sizes may exceed 1")
    if engine.mode == "disaggregated":
        _check_context_sizes(config)
    for role, worker in config.roles.items():
        decode = worker.parallelism.decode_context
        if decode is not None and worker.parallelism.tensor % decode:
            raise ValueError(
                f"engine.workers.{role}.parallelism: decode_context {decode} must divide tensor "
                f"{worker.parallelism.tensor}"
            )


def _check_context_sizes(config: PredictConfig) -> None:
    """A cache that prefill ranks share out must be one that decode ranks can take over."""
    prefill, decode = config.roles["prefill"].parallelism, config.roles["decode"].parallelism
    copies, shards = prefill.prefill_context or 1, prefill.decode_context or 1
    if shards not in (1, copies):
        raise ValueError(
            f"engine.workers.prefill.parallelism: decode_context must be 1 or prefill_context {copies}, found {shards}"
        )
    taken = decode.decode_context or 1
    if copies > 1 and shards == 1 and taken > 1:
        raise ValueError(
            f"engine.workers.decode.parallelism: decode_context {taken} cannot take over the whole cache that each of "
            f"prefill_context {copies} ranks holds; use decode_context 1, or {copies} in both workers"
        )
    if max(shards, taken) % min(shards, taken):
        raise ValueError(
            f"engine.workers.decode.parallelism: decode_context {taken} and that of prefill workers, {shards}, must "
            "divide one another"
        )


def _check_timing(config: PredictConfig) -> None:
    engine = config.engine
    others = [role for role, worker in config.roles.items() if not isinstance(worker.timing, DefaultTiming)]
    if not others:
        return
    active = [name for name in engine.given_policy() if name != "estimation_mode" or engine.estimation_mode != "auto"]
    active += [name for name in MODEL_CONTROLS if getattr(engine, name)]
    active += [name for name in ("decoder_replay", "fpm_profile") if getattr(engine, name)]
    if active:
        role = others[0]
        raise ValueError(
            f"engine.{active[0]} is read by an estimator, and engine.workers.{role}.timing has type "
            f"{config.roles[role].timing.type}; use timing type default in every worker, or leave {active[0]} out"
        )


def _check_profile(config: PredictConfig) -> None:
    engine = config.engine
    if engine.fpm_profile is None:
        return
    for role, worker in config.roles.items():
        assert isinstance(worker.timing, DefaultTiming)
        own = [name for name in QUANTISATION_FIELDS if getattr(worker.timing, name) is not None]
        if own:
            raise ValueError(
                f"engine.workers.{role}.timing.{own[0]}: the precision of a deployment is that of fpm_profile"
            )
        sizes = worker.parallelism
        if sizes.pipeline != 1 or (sizes.prefill_context or 1) != 1:
            raise ValueError(f"engine.workers.{role}.parallelism: fpm_profile needs pipeline and prefill_context 1")
