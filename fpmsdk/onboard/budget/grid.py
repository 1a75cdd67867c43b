"""The whole grid that the engine would measure, from the limits that it reported in a smoke run.

Source: collector.md section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.grid import EngineLimits, Point, Samples, decode_points, prefill_points
from fpmsdk.collect.paths import checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.rank_file import decoded, fields_of, rank_files
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError

# int64[n, 3]: batch size, prefill tokens, KV tokens read.
Grid = NDArray[np.int64]
Grids = dict[str, Grid]


def whole_grid(plan: CollectionPlan, checkpoint: Path) -> Grids:
    """The points of each phase of a plan, ascending.

    Parameters
    ----------
    plan: of one layout.
    checkpoint: folder of the checkpoints of its campaigns, with a smoke run of both phases.

    Raises
    ------
    CollectionError: there is no smoke run of a phase that passed.

    Source: collector.md section 5.2.
    """
    grids: Grids = {}
    for cell in plan.cells:
        points = _points(plan, cell, engine_limits(plan, cell, checkpoint))
        rows = {(point.batch_size, point.total_prefill_tokens, point.total_kv_read_tokens) for point in points}
        grids[cell.workload_kind] = np.array(sorted(rows), np.int64)
    return grids


def engine_limits(plan: CollectionPlan, cell: Cell, checkpoint: Path) -> EngineLimits:
    """What the engine reported of itself in the smoke run of a cell, with the scheduler limits of the collection.

    Raises
    ------
    CollectionError: as `whole_grid`.
    """
    path = checkpoint_path(checkpoint, smoke=True)
    states: Mapping[str, Any] = read_document(path)["cells"] if path.exists() else {}
    state = states.get(cell.cell_id) or {}
    if state.get("status") != "passed":
        raise CollectionError(
            f"{path}: no smoke run of {cell.workload_kind} that passed, which tells the engine's limits; run "
            "collect-fpm --execute --smoke first"
        )
    file = rank_files(Path(state["artifact_dir"]) / "raw")[0]
    fields = fields_of(file)
    reported, graphs = decoded(fields["limits"], str(file)), decoded(fields["cudagraph"], str(file))
    options = plan.document["options"]
    return EngineLimits(
        max_model_len=reported["max_model_len"],
        # A smoke run may be launched with smaller limits than the collection.
        max_num_batched_tokens=options["max_num_batched_tokens"] or reported["max_num_scheduled_tokens"],
        max_num_seqs=options["max_num_seqs"] or reported["max_num_running_reqs"],
        block_size=reported["block_size"],
        usable_blocks=reported["num_gpu_blocks"] - 1,
        captures=tuple(graphs["prefill_capture_sizes"]),
        decode_captures=tuple(graphs["decode_capture_sizes"]),
    )


def _points(plan: CollectionPlan, cell: Cell, limits: EngineLimits) -> list[Point]:
    sampling, defaults = plan.document["options"]["prefill_sampling"], Samples()
    if cell.workload_kind == "decode":
        return decode_points(limits, defaults, warm_kv=cell.needs_warm_kv)
    captured = sampling["cudagraph_capture_sizes"] is not None
    samples = Samples(
        prefill_new_tokens=sampling["prefill_max_new_token_samples"] if captured else defaults.prefill_new_tokens,
        prefill_kv_tokens=sampling["prefill_max_kv_read_token_samples"],
    )
    return prefill_points(limits, samples, prefix_caching=True)
