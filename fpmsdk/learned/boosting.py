"""Gradient boosting of one store: scikit-learn trains, the trees leave as arrays of the artifact.

What is trained on is elsewhere, and so is what serves. Source: regression-and-learned.md section 3.3.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import MissingCapabilityError
from fpmsdk.learned.artifact import StoreForest, Tree

# Where a split separates missing values from all others, scikit-learn has an infinite threshold; JSON has none.
LARGEST = float(np.finfo(np.float64).max)
MISSING_BIN = 255


class BoostingOptions(NamedTuple):
    """How a store is trained.

    `max_iter` trees of at most `max_leaf_nodes` leaves (None: any number) and `max_depth` levels, each leaf with at
    least `min_samples_leaf` rows; `learning_rate` shrinks every leaf, `l2_regularization` is added to its row count.
    `target` is ``log_ms`` or ``ms``. `seed` draws nothing unless rows are so many that bins are found on a sample.
    """

    target: str = "log_ms"
    max_iter: int = 600
    learning_rate: float = 0.05
    max_leaf_nodes: int | None = 31
    min_samples_leaf: int = 5
    max_depth: int | None = None
    l2_regularization: float = 0.0
    seed: int = 0


class TrainingRows(NamedTuple):
    """Rows of one store.

    `row_ids` uint64[n], `features` float64[n, features], `wall_time_ms` float64[n], and `sources`, where each row came
    from, as JSON.
    """

    row_ids: NDArray[np.uint64]
    features: NDArray[np.float64]
    wall_time_ms: NDArray[np.float64]
    sources: tuple[str, ...]


class FittedStore(NamedTuple):
    """A trained store with all that continues its training: rows, bins and settings.

    `y` float64[n] is the target of each row, in the space of the target. `bin_thresholds` holds per feature the upper
    bounds of its bins but the last, ascending.
    """

    forest: StoreForest
    rows: TrainingRows
    y: NDArray[np.float64]
    bin_thresholds: tuple[NDArray[np.float64], ...]
    options: BoostingOptions


def fit_store(rows: TrainingRows, options: BoostingOptions) -> FittedStore:
    """Train the forest of one store.

    Equal rows and options give equal bits: it runs on one thread, as the sums of several depend on their number.

    Parameters
    ----------
    rows: at least one row; wall times are positive.
    options: how it is trained.

    Raises
    ------
    MissingCapabilityError: scikit-learn is not installed.

    Source: regression-and-learned.md section 3.3.

    Example
    -------
    >>> n = np.repeat(np.arange(1.0, 5.0), 5)
    >>> rows = TrainingRows(np.arange(20, dtype=np.uint64), n[:, None], 10.0 * n, ("",) * 20)
    >>> fitted = fit_store(rows, BoostingOptions("ms", 2, 0.1, 2, 2))
    >>> fitted.forest.baseline, [tree.value[1:].round(9).tolist() for tree in fitted.forest.trees]
    (25.0, [[-1.0, 1.0], [-0.9, 0.9]])
    """
    regressor, thread_limits = _load()
    model = regressor(
        loss="squared_error",
        learning_rate=options.learning_rate,
        max_iter=options.max_iter,
        max_leaf_nodes=options.max_leaf_nodes,
        max_depth=options.max_depth,
        min_samples_leaf=options.min_samples_leaf,
        l2_regularization=options.l2_regularization,
        max_bins=MISSING_BIN,
        categorical_features=None,
        early_stopping=False,
        random_state=options.seed,
    )
    y = np.log(rows.wall_time_ms) if options.target == "log_ms" else rows.wall_time_ms.copy()
    with thread_limits(limits=1, user_api="openmp"):
        model.fit(rows.features, y)
    trees = tuple(_tree(stage[0].nodes) for stage in model._predictors)
    thresholds = tuple(np.array(bounds, np.float64) for bounds in model._bin_mapper.bin_thresholds_)
    baseline = float(np.asarray(model._baseline_prediction).reshape(-1)[0])
    return FittedStore(StoreForest(baseline, trees), rows, y, thresholds, options)


def _load() -> tuple[Any, Any]:
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as fault:
        raise MissingCapabilityError(f"training needs {fault.name}; pip install 'fpmsdk[train]'") from None
    return HistGradientBoostingRegressor, threadpool_limits


def _tree(nodes: Any) -> Tree:
    is_leaf = nodes["is_leaf"].astype(bool)
    threshold = np.where(is_leaf, 0.0, nodes["num_threshold"])
    return Tree(
        np.where(is_leaf, -1, nodes["left"].astype(np.int64)).astype(np.int32),
        np.where(is_leaf, -1, nodes["right"].astype(np.int64)).astype(np.int32),
        np.where(is_leaf, 0, nodes["feature_idx"]).astype(np.int16),
        np.minimum(threshold, LARGEST),
        nodes["value"].astype(np.float64),
        nodes["missing_go_to_left"].astype(np.uint8),
    )
