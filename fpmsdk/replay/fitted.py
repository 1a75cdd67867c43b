"""A timing for replay fitted to telemetry in one go: least squares on six features of a pass.

Not a model that learns on: for that, and for attention-DP ranks, see `fpmsdk.perfmodel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpmsdk._ext.fitted import FEATURES, LinearPassTiming, feature_matrix
from fpmsdk.errors import TimingError

if TYPE_CHECKING:
    from fpmsdk.metrics import FpmBatch

_COLUMNS = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)


def fit_pass_timing(batch: FpmBatch) -> LinearPassTiming:
    """Fit the latency of a pass to recorded iterations, all kinds together, and return what prices a replay.

    The squares of the relative errors are made least. The features are a constant, prefill tokens, prefill
    attention pairs, decode requests, decode KV tokens, and whether there is prefill. Iterations without work or
    without a positive finite wall time are left out.

    Parameters
    ----------
    batch: iterations of one rank each; all that is given counts the same, so give enough of the traffic to come.

    Raises
    ------
    TimingError: an iteration has several ranks, or fewer iterations than features are usable.

    Example
    -------
    >>> from fpmsdk import FpmBatch
    >>> batch = FpmBatch.from_dicts(
    ...     {"wall_time": 0.004 + 0.001 * n, "scheduled_requests": {"num_decode_requests": n}} for n in range(1, 9)
    ... )
    >>> [round(value, 6) for value in fit_pass_timing(batch).coefficients_ms]
    [4.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    """
    if batch.num_ranks != len(batch):
        raise TimingError(
            f"{len(batch)} iterations have {batch.num_ranks} ranks; a pass timing is fitted to iterations of one rank"
        )
    has_work = (batch.sum_prefill_tokens > 0) | (batch.num_decode_requests > 0)
    usable = has_work & (batch.wall_time_s > 0) & np.isfinite(batch.wall_time_s)
    if np.count_nonzero(usable) < len(FEATURES):
        raise TimingError(
            f"{np.count_nonzero(usable)} of {len(batch)} iterations are usable; "
            f"a fit of {len(FEATURES)} features needs as many"
        )
    wall_ms = batch.wall_time_s[usable] * 1e3
    features = feature_matrix(*(getattr(batch, name)[usable].astype(np.float64) for name in _COLUMNS))
    # Columns of one size, so that a small one is not taken for no column at all; one of zeros has coefficient zero.
    weighted = features / wall_ms[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    coefficients = np.linalg.lstsq(weighted / scale, np.ones(len(wall_ms)), rcond=None)[0] / scale
    return LinearPassTiming(coefficients)
