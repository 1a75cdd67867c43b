"""Whether decode on synthetic KV is as good as on real KV: only of a dense model that attends to everything.

The engine's own word for it is not enough; the configuration and the initialised cache of every rank must confirm it.
Source: collector.md section 6.2 (dense_full_attention_v1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fpmsdk.collect.kvwarm import DENSE_SKIP
from fpmsdk.documents.canonical import digest

if TYPE_CHECKING:
    from fpmsdk.collect.artifact import NativeCollection
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan

POLICY = "dense_full_attention_v1"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def reads_synthetic_kv_unbiased(
    plan: CollectionPlan, cell: Cell, collection: NativeCollection, launched_model: Callable[[], str | None]
) -> bool:
    """Whether the decode points of a cell that read synthetic KV may be used like those that read real KV.

    Parameters
    ----------
    plan, cell: a dense model with a known configuration, in tensor parallelism or on one GPU.
    collection: what the engine says of the warm-up, the model, the ranks and the cache groups, rank by rank.
    launched_model: gives the model that the launch files name, asked when the engine reports another than the plan.

    Source: collector.md section 6.2.
    """
    promise = collection.kvwarm or {}
    config = _dense_config(plan, cell)
    if (
        config is None
        or promise.get("enabled") is not True
        or promise.get("warm_eligible") is not False
        or promise.get("skip_reason") != DENSE_SKIP
    ):
        return False
    return all(
        _confirms(engine, rank, cell, config, collection.backend_version)
        and (_model_of(engine) == plan.model_path or _model_of(engine) == launched_model())
        for rank, engine in enumerate(collection.engines)
    )


def _dense_config(plan: CollectionPlan, cell: Cell) -> Mapping[str, Any] | None:
    capability, topology = plan.capability, cell.topology
    if (
        capability.get("is_moe") is not False
        or capability.get("attention_source") != "dense_attention"
        or cell.parallel_strategy not in ("single", "tp")
        or (topology.pp, topology.dp, topology.moe_tp, topology.moe_ep, topology.cp) != (1, 1, 1, 1, 1)
    ):
        return None
    config = (capability.get("model_config") or {}).get("payload")
    if not isinstance(config, dict):
        return None
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    if any(part.get(name) for part in parts for name in _EXPERTS):
        return None
    kind, architectures = config.get("model_type"), config.get("architectures")
    is_named = isinstance(kind, str) and kind and isinstance(architectures, list) and architectures
    return config if is_named else None


def _confirms(engine: Any, rank: int, cell: Cell, config: Mapping[str, Any], version: str) -> bool:
    if not isinstance(engine, dict) or engine.get("capture_error") is not None:
        return False
    names = ("model", "parallel", "versions", "kv_cache")
    blocks: dict[str, dict[str, Any]] = {name: engine[name] for name in names if isinstance(engine.get(name), dict)}
    if len(blocks) < len(names):
        return False
    topology = cell.topology
    expected = {
        "tensor_parallel_size": topology.tp,
        "pipeline_parallel_size": topology.pp,
        "data_parallel_size": topology.dp,
        "prefill_context_parallel_size": topology.cp,
        "decode_context_parallel_size": topology.cp,
        "enable_expert_parallel": False,
        "data_parallel_rank": rank,
    }
    model, parallel, groups = blocks["model"], blocks["parallel"], blocks["kv_cache"].get("groups")
    return (
        model.get("model_type") == config["model_type"]
        and model.get("architectures") == config["architectures"]
        and blocks["versions"].get("vllm") == version
        # Digests tell 1 from true and 1.0, which compare equal.
        and all(digest(parallel.get(name)) == digest(value) for name, value in expected.items())
        and isinstance(groups, list)
        and bool(groups)
        and all(_attends_to_everything(group) for group in groups)
    )


def _model_of(engine: Mapping[str, Any] | None) -> Any:
    return None if engine is None else engine["model"].get("model")


def _attends_to_everything(group: Any) -> bool:
    # The class name alone says too little: full attention also stands for windows and chunks in some allocators.
    if not isinstance(group, dict):
        return False
    if group.get("type") == "UniformTypeKVCacheSpecs":
        specs = group.get("specs")
        return (
            isinstance(specs, list)
            and bool(specs)
            and all(isinstance(spec, dict) and spec.get("type") == "FullAttentionSpec" for spec in specs)
            and all(_attends_to_everything(spec) for spec in specs)
        )
    return (
        group.get("type") == "FullAttentionSpec"
        and "specs" not in group
        and group.get("sliding_window", ...) is None
        and group.get("attention_chunk_size", ...) is None
        and group.get("non_causal") is False
    )
