"""From recorded iterations to the rows that a store is trained on, and a count of those that teach nothing.

Source: regression-and-learned.md sections 0.1 and 3.3.
"""

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.forest_features import FeatureProgram
from fpmsdk.learned.artifact import STORES_OF
from fpmsdk.learned.boosting import TrainingRows


class Observed(NamedTuple):
    """Iterations as rows per workload kind, in time order, and how many are no rows.

    `idle` had no work, `untimed` no positive finite wall time, `refused` work of another role or no usable lists for
    the request features.
    """

    stores: dict[str, TrainingRows]
    idle: int
    untimed: int
    refused: int

    @property
    def num_rows(self) -> int:
        """Rows of all stores."""
        return sum(len(rows.row_ids) for rows in self.stores.values())


def observed_rows(batch: Any, worker_type: str, features: tuple[str, ...], first_row_id: int = 0) -> Observed:
    """The rows in a batch of iterations.

    Parameters
    ----------
    batch: `FpmBatch` in time order.
    worker_type: role of the worker; work of another role is refused.
    features: names of the columns.
    first_row_id: identity of the first iteration; the others count on.

    Raises
    ------
    MetricsError: an iteration contradicts itself; names it.

    Source: regression-and-learned.md section 3.3.

    Example
    -------
    >>> from fpmsdk.metrics import FpmBatch
    >>> batch = FpmBatch.from_dicts([{}, {"wall_time": 0.004, "scheduled_requests": {"num_decode_requests": 2}}])
    >>> observed = observed_rows(batch, "decode", ("num_decode_requests",))
    >>> observed.stores["pure_decode"].wall_time_ms.tolist(), observed.idle
    ([4.0], 1)
    """
    program = FeatureProgram(features)
    values, complete = program.matrix(batch.columns)
    kinds = batch.workload_kinds()
    wall_ms = _wall_time_ms(batch)
    is_idle = kinds < 0
    is_refused = ~is_idle & ~np.isin(kinds, [WORKLOAD_KINDS.index(kind) for kind in STORES_OF[worker_type]])
    if program.needs_requests:
        is_refused |= ~is_idle & ~complete
    is_untimed = ~is_idle & ~is_refused & ~((wall_ms > 0.0) & np.isfinite(wall_ms))
    stores = {}
    for kind in STORES_OF[worker_type]:
        chosen = np.flatnonzero((kinds == WORKLOAD_KINDS.index(kind)) & ~is_refused & ~is_untimed)
        if len(chosen):
            stores[kind] = TrainingRows(
                (chosen + first_row_id).astype(np.uint64),
                values[chosen],
                wall_ms[chosen],
                tuple(_source(batch, position) for position in chosen.tolist()),
            )
    return Observed(stores, int(is_idle.sum()), int(is_untimed.sum()), int(is_refused.sum()))


def _wall_time_ms(batch: Any) -> NDArray[np.float64]:
    # The slowest rank ends an iteration; 0 where no rank tells a time, infinite where milliseconds cannot hold it.
    seconds = np.where(np.isfinite(batch.wall_time_s) & (batch.wall_time_s > 0.0), batch.wall_time_s, 0.0)
    if not len(batch):
        return np.zeros(0)
    with np.errstate(over="ignore"):
        return np.asarray(np.maximum.reduceat(seconds, batch.iteration_offsets[:-1]) * 1000.0, np.float64)


def _source(batch: Any, position: int) -> str:
    first, last = batch.iteration_offsets[position : position + 2].tolist()
    ranks = zip(batch.counter_id[first:last].tolist(), batch.dp_rank[first:last].tolist(), strict=True)
    return json.dumps([{"counter_id": counter, "dp_rank": rank} for counter, rank in ranks], separators=(",", ":"))
