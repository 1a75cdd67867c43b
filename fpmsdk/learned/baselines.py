"""Two simple predictors that a trained forest has to beat: the last value per bucket, and a linear regression.

Both see the training rows alone, like the forest. Source: regression-and-learned.md section 3.3.
"""

import numpy as np
from numpy.typing import NDArray

from fpmsdk.learned.boosting import TrainingRows

FLOOR_MS = 1e-6


def last_value_ms(rows: TrainingRows, queries: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each query the newest wall time of its bucket; of the store where its bucket is empty.

    A bucket is the whole logarithms to base 2 of all features.

    Parameters
    ----------
    rows: training rows in time order, at least one.
    queries: float64[n, features].

    Returns
    -------
    float64[n], ms.

    Example
    -------
    >>> features, wall_time_ms = np.array([[1.0], [9.0], [10.0]]), np.array([5.0, 6.0, 7.0])
    >>> rows = TrainingRows(np.arange(3, dtype=np.uint64), features, wall_time_ms, ())
    >>> last_value_ms(rows, np.array([[1.0], [12.0], [99.0]])).tolist()
    [5.0, 7.0, 7.0]
    """
    newest = dict(zip(_buckets(rows.features), rows.wall_time_ms.tolist(), strict=True))
    otherwise = float(rows.wall_time_ms[-1])
    return np.array([newest.get(bucket, otherwise) for bucket in _buckets(queries)])


def linear_ms(rows: TrainingRows, queries: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares over standardised features with an intercept.

    Parameters and result as `last_value_ms`; results are at least 1e-6.

    Example
    -------
    >>> features, wall_time_ms = np.array([[1.0], [2.0], [3.0]]), np.array([5.0, 7.0, 9.0])
    >>> rows = TrainingRows(np.arange(3, dtype=np.uint64), features, wall_time_ms, ())
    >>> linear_ms(rows, np.array([[10.0]])).round(9).tolist()
    [23.0]
    """
    mean, scale = rows.features.mean(axis=0), rows.features.std(axis=0)
    scale[scale == 0.0] = 1.0

    def design(features: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.column_stack([np.ones(len(features)), (features - mean) / scale])

    coefficients = np.linalg.lstsq(design(rows.features), rows.wall_time_ms, rcond=None)[0]
    return np.maximum(design(queries) @ coefficients, FLOOR_MS)


def _buckets(features: NDArray[np.float64]) -> list[bytes]:
    levels = np.floor(np.log2(1.0 + np.maximum(features, 0.0))).astype(np.int64)
    return [row.tobytes() for row in levels]
