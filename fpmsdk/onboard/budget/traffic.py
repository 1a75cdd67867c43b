"""How much each point of the grid counts: the share of the traffic's passes that are nearest to it.

The traffic is replayed on the deployment of the request, priced by one law over what is measured so far: which passes
form depends little on their exact times. Source: engine-and-replay.md section 4; predict-recommend.md section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from fpmsdk.collect.grid import EngineLimits
from fpmsdk.errors import CollectionError, OnboardError, ReplayError
from fpmsdk.onboard.budget.choose import Float64, distances
from fpmsdk.onboard.budget.grid import Grid, Grids
from fpmsdk.onboard.pilot import PILOT
from fpmsdk.perfdb.forward_cells import ForwardCell
from fpmsdk.prediction.compile import replay_options
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.documents import read_document
from fpmsdk.prediction.simulate import prepare, system_of
from fpmsdk.replay import fit_table_timing, replay_trace

# Of every phase, what is spread over the whole grid: traffic changes.
_EVEN_SHARE = 0.1
# Passes at a time whose nearest points are looked for.
_PORTION = 4096


def even_weights(grids: Grids) -> dict[str, Float64]:
    """Every point of a phase counts the same; the sum of each phase is 1."""
    return {phase: np.full(len(grid), 1 / len(grid)) for phase, grid in grids.items()}


def read_traffic(path: Path, folder: Path, limits: EngineLimits) -> PredictConfig:
    """The prediction of a traffic on the deployment of a plan.

    Parameters
    ----------
    path: a YAML file with the section `traffic` of a prediction.
    folder: the plan folder.
    limits: of the engine, whose cache the replay has.

    Raises
    ------
    OnboardError: no such traffic, or a plan of a single role, which serves no requests alone.
    """
    pilot = folder / f"predict/{PILOT}.yaml"
    if not pilot.exists():
        raise OnboardError(
            f"--traffic: {folder} plans one role, which serves no traffic alone; leave it out", "--traffic"
        )
    document = read_document(path).document
    if set(document) != {"traffic"}:
        raise OnboardError(
            f"{path}: expected the section traffic of a prediction and nothing else, found {sorted(document)}",
            str(path),
        )
    template = read_document(pilot).document | document
    # Another law prices this replay; there is no table yet.
    for name in ("systems_paths", "fpm_profile"):
        template["engine"].pop(name)
    for worker in template["engine"]["workers"].values():
        capacity = {"type": "fixed", "blocks": limits.usable_blocks}
        worker["kv_cache"] = worker["kv_cache"] | {"block_size": limits.block_size, "capacity": capacity}
        worker["timing"] = {"type": "fixed", "prefill_ms": 1.0, "decode_ms": 1.0}
    return read_document(template).checked(PredictConfig)


def traffic_weights(config: PredictConfig, cell: ForwardCell, grids: Grids) -> dict[str, Float64]:
    """What each point of a grid counts, by phase; the sum of each phase is 1.

    Parameters
    ----------
    config: as `read_traffic` returns it.
    cell: what is measured.

    Raises
    ------
    CollectionError: the replay failed.
    """
    timing = fit_table_timing(cell, max_p95_error=math.inf)
    prepared = prepare(config)
    roles = {name: structs.replace(role, timing=timing) for name, role in prepared.roles.items()}
    try:
        replay = replay_trace(prepared.trace, **system_of(roles), **prepared.load, **replay_options(config))
    except ReplayError as fault:
        raise CollectionError(f"--traffic: the replay failed: {fault}") from fault
    return {phase: _shares(phase, replay.pass_columns, grid) for phase, grid in grids.items()}


def _shares(phase: str, passes: Mapping[str, Any], grid: Grid) -> Float64:
    if phase == "prefill":
        columns = [passes[name] for name in ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")]
    else:
        requests = passes["num_decode_requests"]
        columns = [requests, np.zeros_like(requests), passes["sum_decode_kv_tokens"]]
    shapes = np.stack(columns, axis=1).astype(np.int64)
    shapes = shapes[shapes[:, 0] > 0]
    counts = np.zeros(len(grid))
    for begin in range(0, len(shapes), _PORTION):
        nearest = distances(shapes[begin : begin + _PORTION], grid).argmin(axis=1)
        counts += np.bincount(nearest, minlength=len(grid))
    even = np.full(len(grid), 1 / len(grid))
    if not counts.sum():
        return even
    shares: Float64 = (1 - _EVEN_SHARE) * counts / counts.sum() + _EVEN_SHARE * even
    return shares
