"""A timing for replay fitted in one go, to telemetry or to a measured table: least squares on six features of a pass.

Not a model that learns on: for that, and for attention-DP ranks, see `fpmsdk.perfmodel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpmsdk._ext.fitted import FEATURES, LinearPassTiming, feature_matrix
from fpmsdk.errors import TimingError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fpmsdk.metrics import FpmBatch
    from fpmsdk.perfdb.forward_cells import ForwardCell

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
    return LinearPassTiming(_least_squares(features, wall_ms).tolist())


def fit_table_timing(cell: ForwardCell, *, max_p95_error: float = 0.25) -> LinearPassTiming:
    """Fit the same law to the measured points of one cell of a whole-forward table.

    Single points of a table carry the noise of the moment in which they were measured, and points of prefill and of
    decode say nothing of a pass that has both. One law over all of them averages the noise out, prices such a pass as
    the one forward it is, and covers what lies between and beyond the points. It describes engines whose latency
    grows smoothly, such as those without captured graphs; a table with steps is refused, and priced by interpolation.

    Parameters
    ----------
    cell: of `fpmsdk.perfdb.forward_cells.open_forward_table`. Points of decode that were measured without KV of their
        own are left out.
    max_p95_error: relative error at the points that 95 % of them may not exceed.

    Raises
    ------
    TimingError: one phase has no usable points, there are fewer points than features, or the law misses them by more
        than `max_p95_error`.

    Example
    -------
    >>> from fpmsdk.perfdb.forward_cells import ForwardCell, Points
    >>> def points(*columns):
    ...     return Points(*(np.array(column) for column in columns), np.full(len(columns[0]), True))
    >>> prefill = points([1, 1, 2, 1], [8, 16, 16, 8], [0, 0, 0, 32], [6.0, 8.0, 8.0, 6.0])
    >>> decode = points([1, 2, 4, 4], [0, 0, 0, 0], [8, 16, 32, 64], [3.0, 4.0, 6.0, 6.0])
    >>> cell = ForwardCell("org/m", {}, ("cell",), prefill, decode, 0, 0)
    >>> [round(value, 6) + 0.0 for value in fit_table_timing(cell).coefficients_ms]
    [2.0, 0.25, 0.0, 1.0, 0.0, 2.0]
    """
    prefill, decode = cell.prefill.only_genuine(), cell.decode.only_genuine()
    if not (len(prefill) and len(decode)):
        lacking = "decode" if len(prefill) else "prefill"
        raise TimingError(f"the table has no usable {lacking} points of {cell.model_path}; collect that phase too")
    if len(prefill) + len(decode) < len(FEATURES):
        raise TimingError(
            f"{len(prefill) + len(decode)} points are usable; a fit of {len(FEATURES)} features needs as many"
        )
    absent = np.zeros(len(prefill)), np.zeros(len(decode))
    columns = (
        (prefill.batch, absent[1]),
        (prefill.tokens, absent[1]),
        (prefill.kv, absent[1]),
        (absent[0], decode.batch),
        (absent[0], decode.kv),
    )
    features = feature_matrix(*(np.concatenate(column).astype(np.float64) for column in columns))
    latency_ms = np.concatenate((prefill.latency_ms, decode.latency_ms))
    coefficients = _least_squares(features, latency_ms)
    p95_error = float(np.quantile(np.abs(features @ coefficients / latency_ms - 1), 0.95))
    if p95_error > max_p95_error:
        raise TimingError(
            f"one law over the {len(latency_ms)} points of {cell.model_path} misses them by {p95_error:.0%} (95th "
            f"percentile, {max_p95_error:.0%} allowed), as it does where graphs make steps; price with the "
            "fpm_interpolation estimator instead"
        )
    return LinearPassTiming(coefficients.tolist())


def _least_squares(features: NDArray[np.float64], wall_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    # Coefficients that make the squares of the relative errors least. Columns of one size, so that a small one is not
    # taken for no column at all; one of zeros has coefficient zero.
    weighted = features / wall_ms[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    coefficients: NDArray[np.float64] = np.linalg.lstsq(weighted / scale, np.ones(len(wall_ms)), rcond=None)[0] / scale
    return coefficients
