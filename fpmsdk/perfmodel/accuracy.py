"""How close predictions come to measured iterations, by kind of work, and the predict-then-tune protocol.

Reads telemetry and a model's public methods; it changes a model only where the protocol says tune.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.features import WORKLOAD_KINDS

if TYPE_CHECKING:
    from fpmsdk.metrics import FpmBatch
    from fpmsdk.perfmodel.model import ForwardPassPerfModel

# What users call the workload kinds; two kinds of mixture are one.
KINDS = ("prefill", "decode", "mixed")
_KIND_OF_WORKLOAD = {
    "pure_prefill": "prefill",
    "pure_decode": "decode",
    "contains_locally_mixed": "mixed",
    "cross_rank_aggregated": "mixed",
}


def measured_ms(batch: FpmBatch) -> NDArray[np.float64]:
    """Measured latency of each iteration in ms, that of its slowest rank; NaN for idle or untimed iterations.

    >>> from fpmsdk import FpmBatch
    >>> work = {"num_decode_requests": 1, "sum_decode_kv_tokens": 9}
    >>> measured_ms(FpmBatch.from_dicts([{"wall_time": 0.005, "scheduled_requests": work}, {"wall_time": 1}]))
    array([ 5., nan])
    """
    if len(batch) == 0:
        return np.empty(0)
    wall_s = np.where(np.isfinite(batch.wall_time_s), batch.wall_time_s, 0.0)
    slowest_ms = np.maximum.reduceat(wall_s, batch.iteration_offsets[:-1]) * 1e3
    return np.where((batch.workload_kinds() >= 0) & (slowest_ms > 0), slowest_ms, np.nan)


def kinds_of(batch: FpmBatch) -> NDArray[np.int64]:
    """Position in `KINDS` of each iteration's kind, int64[n]; -1 without work.

    >>> from fpmsdk import FpmBatch
    >>> kinds_of(FpmBatch.from_dicts([{}, {"scheduled_requests": {"num_decode_requests": 1}}])).tolist()
    [-1, 1]
    """
    # Code -1, idle, takes the last entry.
    kind_of_code = np.array([*(KINDS.index(_KIND_OF_WORKLOAD[name]) for name in WORKLOAD_KINDS), -1])
    return kind_of_code[batch.workload_kinds()]


def predict_then_tune(
    model: ForwardPassPerfModel, iterations: Sequence[Any], *, advance: Callable[[int], None] | None = None
) -> NDArray[np.float64]:
    """Predict each iteration, then tune on it: what an online user of the model sees.

    Parameters
    ----------
    model: is tuned on every iteration.
    iterations: in the forms of `estimate_forward_pass_time_ms`.
    advance: called with the number of iterations done since the last call.

    Returns
    -------
    Predictions in ms, float64[n], each made before the model saw the iteration; NaN while it was not ready.
    """
    predictions = np.full(len(iterations), np.nan)
    for position, iteration in enumerate(iterations):
        predicted = model.estimate_forward_pass_time_ms(iteration)
        if predicted is not None:
            predictions[position] = predicted
        model.tune_with_fpms([iteration])
        if advance is not None and position % 256 == 255:
            advance(256)
    return predictions


def error_by_kind(predicted_ms: NDArray[np.float64], batch: FpmBatch) -> dict[str, dict[str, float | int | None]]:
    """Error of predictions against the measured latencies, by kind and over all.

    Returns
    -------
    For `prefill`, `decode`, `mixed` and `all`: `iterations` (measured and predicted), `not_ready` (measured,
    without a prediction), `mape_percent` (mean absolute percentage error) and `bias_percent` (mean of the signed
    one), None where there is nothing to compare.

    >>> from fpmsdk import FpmBatch
    >>> work = {"num_decode_requests": 1, "sum_decode_kv_tokens": 9}
    >>> batch = FpmBatch.from_dicts([{"wall_time": 0.005, "scheduled_requests": work}] * 2)
    >>> error_by_kind(np.array([5.5, 4.0]), batch)["decode"]
    {'iterations': 2, 'not_ready': 0, 'mape_percent': 15.0, 'bias_percent': -5.0}
    """
    measured = measured_ms(batch)
    kinds = kinds_of(batch)
    known = ~np.isnan(measured)
    errors = {name: _error(predicted_ms, measured, known & (kinds == code)) for code, name in enumerate(KINDS)}
    return errors | {"all": _error(predicted_ms, measured, known)}


def _error(
    predicted_ms: NDArray[np.float64], measured: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> dict[str, float | int | None]:
    ready = chosen & ~np.isnan(predicted_ms)
    count = int(ready.sum())
    relative = (predicted_ms[ready] - measured[ready]) / measured[ready] * 100
    return {
        "iterations": count,
        "not_ready": int(chosen.sum()) - count,
        "mape_percent": float(np.abs(relative).mean()) if count else None,
        "bias_percent": float(relative.mean()) if count else None,
    }
