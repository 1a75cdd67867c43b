"""What all ranks and phases of a configuration have to agree in, and what each adds to it.

Source: collector.md section 8.5 (import).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fpmsdk.collect.cache_pool import PoolAccounting
from fpmsdk.collect.observation import not_established, same
from fpmsdk.collect.topology import Topology
from fpmsdk.errors import EvidenceError

_HARDWARE = ("gpu", "device_name", "sm")


@dataclass
class Collected:
    """What the ranks seen so far have in common, and what each of them adds."""

    settings: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None
    geometry: list[dict[str, Any]] | None = None
    groups: list[dict[str, Any]] | None = None
    capacities: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    launch_artifacts: list[dict[str, Any]] = field(default_factory=list)
    runtime_artifacts: list[dict[str, Any]] = field(default_factory=list)
    bound_imports: list[bool] = field(default_factory=list)
    not_established: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


def add_rank(
    record: Mapping[str, Any], topology: Topology, workers: dict[tuple[int, int], Any], schedulers: dict[int, Any]
) -> None:
    """Put a record under its rank. Raises `EvidenceError` for a rank that is unknown or has one already."""
    dp, tp, pp = (record.get(name) for name in ("dp_rank", "tp_rank", "pp_rank"))
    if type(dp) is not int or not 0 <= dp < topology.dp:
        raise EvidenceError(f"dp_rank: expected one of {topology.dp} ranks, found {dp!r}")
    if record["kind"] == "scheduler":
        if tp is not None or pp is not None or dp in schedulers:
            raise EvidenceError(f"dp_rank: a second scheduler of rank {dp}, or one with tp_rank {tp!r}, pp_rank {pp!r}")
        schedulers[dp] = record
        return
    if type(tp) is not int or not 0 <= tp < topology.tp or type(pp) is not int or pp != 0:
        raise EvidenceError(f"tp_rank: expected one of {topology.tp} ranks with pp_rank 0, found {tp!r} and {pp!r}")
    if (dp, tp) in workers:
        raise EvidenceError(f"tp_rank: a second worker of rank (dp {dp}, tp {tp})")
    workers[dp, tp] = record


def agree(collected: Collected, record: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Compare a worker with those before it. Raises `EvidenceError` for other hardware, settings or graphs."""
    hardware = {name: record["hardware"][name] for name in _HARDWARE}
    if collected.hardware is None:
        collected.hardware = hardware
    same(hardware, collected.hardware, "hardware of phases and ranks")
    settings = copy.deepcopy(config)
    # The two phases differ in it by design.
    settings["cache_config"].pop("enable_prefix_caching", None)
    if collected.settings is None:
        collected.settings = settings
    graphs, others = settings["compilation_config"], collected.settings["compilation_config"]
    if graphs != others:
        raise EvidenceError(
            f"compilation_config: {graphs} differs from {others} of another phase or rank; a profile that both phases "
            "share needs the same graphs in both. Give prefill and decode serving roles of their own when their "
            "engines are meant to differ"
        )
    same(settings, collected.settings, "settings of phases and ranks")
    collected.not_established = not_established(record)


def add_capacity(
    collected: Collected,
    worker: Mapping[str, Any],
    groups: list[dict[str, Any]],
    pool: PoolAccounting,
    rank: Mapping[str, Any],
) -> None:
    """Note the capacity of a rank. Raises `EvidenceError` for another geometry than the ranks before it have."""
    geometry = [
        {name: value for name, value in group.items() if name != "pool_id"} for group in worker["cache"]["groups"]
    ]
    if collected.geometry is None:
        collected.geometry, collected.groups = geometry, groups
    same(geometry, collected.geometry, f"cache.groups of {dict(rank)} and other phases or ranks")
    same(groups, collected.groups, f"page bytes of {dict(rank)} and other phases or ranks")
    collected.capacities.append({**rank, **pool._asdict(), "kv_cache_bytes": pool.kv_cache_bytes})
