"""Features that a learned forest may name, presets of them, and their values for whole batches.

The arithmetic is `ext/forest_features.pyx`; source: regression-and-learned.md section 3.2.
"""

from typing import TYPE_CHECKING, Any

from fpmsdk._ext.forest_features import AGGREGATES, NAMES, REQUESTS, SLOTS, FeatureProgram

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ATOMIC_5 = ("req_batch_size", "req_sum_past", "req_max_past", "req_min_past", "req_sum_past_squared")
_ATOMIC_10 = (
    "req_batch_size",
    *("req_sum_extend", "req_max_extend", "req_min_extend"),
    *("req_sum_past", "req_max_past", "req_min_past"),
    *("req_sum_extend_x_past", "req_sum_extend_squared", "req_sum_past_squared"),
)
# What five counts of a message cannot tell.
_BEYOND_FIVE_COUNTS = (
    "var_prefill_length",
    "var_decode_kv_tokens",
    "sum_decode_kv_squared",
    "log1p_sum_decode_kv_squared",
)

# Lists of features under the names that the field uses.
PRESETS: dict[str, tuple[str, ...]] = {
    "v1": AGGREGATES,
    "fpm5": tuple(name for name in AGGREGATES if name not in _BEYOND_FIVE_COUNTS),
    "atomic5": _ATOMIC_5,
    "atomic10": _ATOMIC_10,
    "sglang18": REQUESTS,
    "hisim": ("req_batch_size", *SLOTS),
    "all": NAMES,
}


def feature_matrix(batch: Any, names: tuple[str, ...]) -> "tuple[NDArray[np.float64], NDArray[np.bool_]]":
    """Values of features for every iteration of a batch.

    Parameters
    ----------
    batch: `FpmBatch`.
    names: features, in the order of the columns.

    Returns
    -------
    float64[n, features], and bool[n]: whether the per-request lists were usable; without them request features are NaN
    and slots 0.

    Source: regression-and-learned.md section 3.2.

    Example
    -------
    >>> from fpmsdk.metrics import FpmBatch
    >>> batch = FpmBatch.from_dicts([{"scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 3}}])
    >>> rows, complete = feature_matrix(batch, ("sum_prefill_tokens", "prefill_attention_pairs"))
    >>> rows.tolist(), complete.tolist()
    ([[3.0, 6.0]], [True])
    """
    return FeatureProgram(names).matrix(batch.columns)
