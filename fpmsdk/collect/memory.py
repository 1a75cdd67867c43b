"""The cache capacity that an attempt's workers and schedulers initialised, as the resources of a profile.

Every group draws pages from one pool of blocks, so that each page costs a whole block of it, padding included.
Source: collector.md section 8.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fpmsdk.collect.artifact import NativeCollection, validate_native
from fpmsdk.collect.cache_pool import cache_groups, pool_accounting
from fpmsdk.collect.provenance import PROVENANCE_FILE
from fpmsdk.collect.runtime_settings import (
    LaunchedSettings,
    check_one_engine,
    check_requested_graphs,
    check_revision,
    checked_settings,
)
from fpmsdk.collect.worker_files import observation_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import CollectionError, EvidenceError

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan

MEMORY_GLOB = "fpm-memory-*.json"
MEMORY_SCHEMA = "aisimulate_fpm_runtime_memory"
SCHEMA_VERSION = 1
# The only engine version whose pools these observers were audited for.
SUPPORTED_VERSION = "0.27.0"

_SCOPE = (
    "memory that the complete collection worker allocated; what else it had loaded is not subtracted for text-only use"
)
_PROVENANCE = (
    "Cache pool of vLLM as initialised, after warm-up; the smallest usable capacity of all ranks, padding and "
    "permanent reservations included."
)

Record = dict[str, Any]


def resolve_memory(
    plan: CollectionPlan,
    cell: Cell,
    raw_root: str | Path,
    *,
    attempt_id: str,
    launched: LaunchedSettings,
    backend_version: str,
    model_revision: str | None = None,
    requested_graphs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Resources of one rank, from the memory observations of a formal attempt.

    Parameters
    ----------
    plan, cell, attempt_id: what the observations must be of.
    raw_root: the folder of the attempt; its timings are validated too.
    launched: limits and precision that every engine process must report.
    backend_version: version of the engine that must have run; only 0.27.0 is supported.
    model_revision: a pinned commit that must not be contradicted.
    requested_graphs: accepted graph settings that the engine must have started with.

    Returns
    -------
    Grouped resources of a profile: limits (tokens, sequences), `cache_groups`, `runtime_memory` with the smallest
    `kv_cache_bytes` of all ranks, and provenance as a JSON text.

    Raises
    ------
    CollectionError: the timings are not valid, or an observation is unresolved.
    EvidenceError: an observation is missing, of something else, or contradicts the launch or another rank.

    Source: collector.md section 8.2.
    """
    if backend_version != SUPPORTED_VERSION:
        raise EvidenceError(
            f"vLLM {backend_version}: memory is resolved for vLLM {SUPPORTED_VERSION} only; declare it, or observe it "
            "with a runtime probe"
        )
    if (cell.topology.pp, cell.topology.cp) != (1, 1):
        raise EvidenceError(f"{cell.cell_id}: runtime memory is resolved for pp 1 and cp 1, found {cell.topology}")
    root = Path(raw_root)
    collection = validate_native(plan, cell, root, attempt_id=attempt_id)
    if collection.backend_version != backend_version:
        raise EvidenceError(f"{root}: vLLM {collection.backend_version} measured, {backend_version} was expected")
    observed = _read(plan, cell, root, collection)
    config: dict[str, Any] | None = None
    for place in (*observed.workers.values(), *observed.schedulers.values()):
        found = _checked(place, launched, model_revision, requested_graphs or {})
        if place.record["kind"] == "worker":
            config = found if config is None else config
            if found != config:
                raise EvidenceError(f"{place.path}: its settings differ from those of the other workers")
    assert config is not None
    groups, capacities = _capacities(observed)
    settings = config | {"cache_config": dict(config["cache_config"])}
    settings["cache_config"].pop("enable_prefix_caching", None)  # phases may differ in it
    provenance = {
        "source": "vllm_initialized_cache",
        "observer_schema_version": SCHEMA_VERSION,
        "plan_sha256": plan.sha256,
        "attempt_id": attempt_id,
        "cell_id": cell.cell_id,
        "runtime_run_id": collection.run_id,
        "runtime_grid_digest": collection.grid_digest,
        "backend_version": backend_version,
        "resolved_config": config,
        "runtime_settings": settings,
        "rank_capacities": capacities,
        "artifacts": observed.files,
        "scope": _SCOPE,
    }
    return {
        "max_num_tokens": launched.max_num_batched_tokens,
        "max_batch_size": launched.max_num_seqs,
        "cache_layout": "grouped",
        "cache_groups": groups,
        "runtime_memory": {
            "kv_cache_bytes": min(one["kv_cache_bytes"] for one in capacities),
            "gpu_memory_utilization": launched.gpu_memory_utilization,
            "max_model_len": launched.max_model_len,
            "provenance": json.dumps(provenance, sort_keys=True, separators=(",", ":"), allow_nan=False),
        },
        "provenance": _PROVENANCE,
    }


class _Placed(NamedTuple):
    path: Path
    record: Record


class _Observed(NamedTuple):
    workers: dict[tuple[int, int], _Placed]
    schedulers: dict[int, _Placed]
    files: list[dict[str, Any]]


def _read(plan: CollectionPlan, cell: Cell, root: Path, collection: NativeCollection) -> _Observed:
    observed = _Observed({}, {}, [])
    for path in sorted(root.rglob(MEMORY_GLOB)):
        inside = path.relative_to(root)
        if len(inside.parts) != 2:
            raise EvidenceError(f"{path}: a memory observation must lie in the folder of its unit", str(path))
        record = observation_document(path)
        _check_identity(plan, cell, path, record, collection)
        if record.get("status") != "resolved":
            raise CollectionError(f"{path}: memory is unresolved: {record.get('error')}")
        _place(cell, observed, _Placed(path, record))
        observed.files.append(
            {"path": str(inside), "sha256": file_meta(path)["sha256"], "evidence": record},
        )
    sizes = cell.topology
    expected = {(dp, tp) for dp in range(sizes.dp) for tp in range(sizes.tp)}
    if missing := sorted(expected - observed.workers.keys()):
        raise EvidenceError(f"{root}: no memory observation of worker ranks (dp, tp) {missing}")
    if missing_dp := sorted(set(range(sizes.dp)) - observed.schedulers.keys()):
        raise EvidenceError(f"{root}: no memory observation of the schedulers of dp ranks {missing_dp}")
    return observed


def _check_identity(plan: CollectionPlan, cell: Cell, path: Path, record: Record, collection: NativeCollection) -> None:
    version = record.get("schema_version")
    if record.get("schema_name") != MEMORY_SCHEMA or type(version) is not int or version != SCHEMA_VERSION:
        raise EvidenceError(f"{path}: expected schema {MEMORY_SCHEMA} {SCHEMA_VERSION}", str(path))
    provenance = observation_document(path.parent / PROVENANCE_FILE)
    expected = {
        "plan_sha256": plan.sha256,
        "cell_id": cell.cell_id,
        "attempt_id": collection.attempt_id,
    }
    is_own = expected.items() <= provenance.items() and record.get("collector_provenance") == provenance
    if not is_own or record.get("backend_version") != collection.backend_version:
        raise EvidenceError(
            f"{path}: of another plan, cell, attempt or engine version than {expected} and vLLM "
            f"{collection.backend_version}",
            str(path),
        )


def _place(cell: Cell, observed: _Observed, placed: _Placed) -> None:
    record, path = placed.record, placed.path
    kind, dp, tp, pp = (record.get(name) for name in ("kind", "dp_rank", "tp_rank", "pp_rank"))
    is_dp = type(dp) is int and 0 <= dp < cell.topology.dp
    if kind == "worker":
        is_rank = is_dp and type(tp) is int and 0 <= tp < cell.topology.tp and type(pp) is int and pp == 0
        is_new = (dp, tp) not in observed.workers
        if is_rank and is_new:
            observed.workers[dp, tp] = placed  # type: ignore[index]
            return
    elif kind == "scheduler" and is_dp and tp is None and pp is None and dp not in observed.schedulers:
        observed.schedulers[dp] = placed  # type: ignore[index]
        return
    raise EvidenceError(
        f"{path}: {kind!r} of dp {dp!r}, tp {tp!r}, pp {pp!r}: expected each worker rank and each scheduler of "
        f"{cell.topology} once",
        str(path),
    )


def _checked(
    placed: _Placed, launched: LaunchedSettings, revision: str | None, requested_graphs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        config = checked_settings(placed.record, launched)
        if revision is not None:
            check_revision(config, revision)
        check_requested_graphs(placed.record, config, requested_graphs)
    except EvidenceError as error:
        raise EvidenceError(f"{placed.path}: {error}", str(placed.path)) from None
    return config


def _capacities(observed: _Observed) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # Groups, equal on all ranks, and the bytes of each rank.
    groups: list[dict[str, Any]] | None = None
    geometry: list[dict[str, Any]] | None = None
    capacities = []
    for (dp, tp), (path, worker) in sorted(observed.workers.items()):
        scheduler = observed.schedulers[dp].record
        try:
            check_one_engine(worker, scheduler)
            cache, scheduled = worker.get("cache"), scheduler.get("cache")
            if not isinstance(cache, dict) or not isinstance(scheduled, dict):
                raise EvidenceError("cache: the worker and its scheduler must report their pool")
            pool = pool_accounting(cache, scheduled)
            found = cache_groups(cache, scheduled, pool.page_size_bytes)
        except EvidenceError as error:
            raise EvidenceError(f"{path}: {error}", str(path)) from None
        shape = [{name: one[name] for name in one if name != "layer_classes"} for one in cache["groups"]]
        groups, geometry = (found, shape) if groups is None else (groups, geometry)
        if found != groups or shape != geometry:
            raise EvidenceError(
                f"{path}: cache groups or the cost of a page differ from those of other ranks", str(path)
            )
        capacities.append({"dp_rank": dp, "tp_rank": tp, "kv_cache_bytes": pool.kv_cache_bytes})
    assert groups is not None
    return groups, capacities
