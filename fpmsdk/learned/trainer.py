"""Trains the forests of a deployment on recorded iterations and reports how well they predict later ones.

Source: regression-and-learned.md section 3.3.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.forest_features import NAMES
from fpmsdk.errors import ConfigError
from fpmsdk.learned.artifact import TARGETS, Artifact
from fpmsdk.learned.baselines import last_value_ms, linear_ms
from fpmsdk.learned.boosting import BoostingOptions, FittedStore, TrainingRows, fit_store
from fpmsdk.learned.features import PRESETS
from fpmsdk.learned.training_checkpoint import TrainingCheckpoint, TrainingStore
from fpmsdk.learned.training_rows import Observed, observed_rows

MIN_STORE_ROWS = 20
DEFAULT_PRESET = {"decode": "atomic5", "prefill": "atomic10", "aggregated": "atomic10"}


class Trained(NamedTuple):
    """What training made.

    `artifact` holds the forests, `stores` all that continues their training, `report` the errors of the forests and of
    both baselines on later iterations: predictor -> workload kind, and `all` -> figures. `left_out` counts the
    iterations of training that nothing was learned from: `refused`, `untimed`, `idle`, and those of kinds with
    `too_few` rows.
    """

    artifact: Artifact
    stores: dict[str, FittedStore]
    report: dict[str, Any]
    left_out: dict[str, int]


def feature_names(written: str | None, worker_type: str) -> tuple[str, ...]:
    """The features that a preset or a comma list names.

    Parameters
    ----------
    written: a preset, or names with commas between; None for the default of the role.
    worker_type: role of the worker.

    Raises
    ------
    ConfigError: an unknown or repeated name.

    Example
    -------
    >>> feature_names("num_decode_requests, sum_decode_kv_tokens", "decode")
    ('num_decode_requests', 'sum_decode_kv_tokens')
    >>> feature_names(None, "decode")[0]
    'req_batch_size'
    """
    written = DEFAULT_PRESET[worker_type] if written is None else written
    if written in PRESETS:
        return PRESETS[written]
    names = tuple(name.strip() for name in written.split(","))
    for position, name in enumerate(names):
        if name in PRESETS:
            raise ConfigError(f"features: the preset {name!r} stands alone; name it alone, or features", "features")
        if name not in NAMES:
            raise ConfigError(
                f"features: expected one of the presets {', '.join(PRESETS)} or known feature names, found {name!r}",
                "features",
            )
        if name in names[:position]:
            raise ConfigError(f"features: {name!r} is named twice", "features")
    return names


def train(
    training: Any,
    validation: Any,
    worker_type: str,
    features: tuple[str, ...],
    options: BoostingOptions,
    *,
    identity: Mapping[str, Any] | None = None,
    min_store_rows: int = MIN_STORE_ROWS,
    advance: Callable[[int], None] = lambda steps: None,
) -> Trained:
    """Train a forest for every workload kind that was seen often enough.

    Parameters
    ----------
    training, validation: `FpmBatch`es in time order; the second is what errors are measured on, and comes later.
    worker_type: role of the worker.
    features: names of the features.
    options: how each store is trained.
    identity: the deployment, result of `learned_identity`; None for an artifact that does not say.
    min_store_rows: kinds with fewer rows are not trained.
    advance: called with 1 after each store.

    Raises
    ------
    ConfigError: an option is out of its range, or no kind has enough rows.
    MetricsError: an iteration contradicts itself.
    MissingCapabilityError: scikit-learn is not installed.

    Source: regression-and-learned.md section 3.3.

    Example
    -------
    >>> from fpmsdk.metrics import FpmBatch
    >>> batch = FpmBatch.from_dicts([{"wall_time": n / 1000, "scheduled_requests": {"num_decode_requests": n}}
    ...     for n in (1, 2, 3, 4) * 10])
    >>> options = BoostingOptions(max_iter=200, learning_rate=0.1)
    >>> trained = train(batch[:30], batch[30:], "decode", ("num_decode_requests",), options)
    >>> round(trained.report["forest"]["all"]["mape_percent"], 1)
    0.0
    """
    check_options(options, min_store_rows)
    seen = observed_rows(training, worker_type, features)
    enough = {kind: rows for kind, rows in seen.stores.items() if len(rows.row_ids) >= min_store_rows}
    if not enough:
        counts = ", ".join(f"{kind} {len(rows.row_ids)}" for kind, rows in seen.stores.items()) or "none"
        lists = any(name.startswith(("req_", "slot")) for name in features)
        advice = "features of the counts alone, such as fpm5, refuse none for want of request lists; " if lists else ""
        raise ConfigError(
            f"min_store_rows: no workload kind has {min_store_rows} rows (found: {counts}; {seen.refused} iterations "
            f"refused, {seen.untimed} without a time, {seen.idle} idle); {advice}record more, or lower it",
            "min_store_rows",
        )
    stores = {}
    for kind in WORKLOAD_KINDS:
        if kind in enough:
            stores[kind] = fit_store(enough[kind], options)
            advance(1)
    metadata: dict[str, Any] = {
        "trainer": "fpmsdk",
        "model": "sklearn.HistGradientBoostingRegressor",
        "hyperparameters": options._asdict(),
        "train_rows": {kind: len(store.y) for kind, store in stores.items()},
        "trees_fitted": {kind: len(store.forest.trees) for kind, store in stores.items()},
    }
    if identity is not None:
        metadata["identity"] = dict(identity)
    forests = {kind: store.forest for kind, store in stores.items()}
    artifact = Artifact(worker_type, options.target, features, forests, metadata)
    later = observed_rows(validation, worker_type, features, first_row_id=len(training))
    too_few = seen.num_rows - sum(len(rows.row_ids) for rows in enough.values())
    left_out = {"refused": seen.refused, "untimed": seen.untimed, "idle": seen.idle, "too_few": too_few}
    return Trained(artifact, stores, validation_report(artifact, stores, later), left_out)


def training_checkpoint(trained: Trained) -> TrainingCheckpoint:
    """What an online learner goes on from: the forests with the rows and bins that they were trained on.

    Raises
    ------
    ConfigError: the artifact does not say which deployment it is of; give `train` an identity.

    Source: regression-and-learned.md section 3.4.

    Example
    -------
    >>> from fpmsdk.metrics import FpmBatch
    >>> batch = FpmBatch.from_dicts([{"wall_time": n / 1000, "scheduled_requests": {"num_decode_requests": n}}
    ...     for n in (1, 2, 3, 4) * 10])
    >>> trained = train(batch, batch[:0], "decode", ("num_decode_requests",), BoostingOptions(), identity={"tp": 1})
    >>> training_checkpoint(trained).stores["pure_decode"].bin_thresholds[0].tolist()
    [1.5, 2.5, 3.5]
    """
    identity = trained.artifact.identity
    if identity is None:
        raise ConfigError("identity: a training checkpoint needs one; train with that of the deployment", "identity")
    stores = {
        kind: TrainingStore(
            store.rows.features,
            store.y,
            store.rows.wall_time_ms,
            store.rows.row_ids.astype(np.int64),
            store.bin_thresholds,
            store.options.learning_rate,
            store.options.l2_regularization,
            store.options.min_samples_leaf,
            store.options.max_depth,
            store.options.max_leaf_nodes,
            store.rows.sources,
        )
        for kind, store in trained.stores.items()
    }
    return TrainingCheckpoint(trained.artifact, identity, stores)


def check_options(options: BoostingOptions, min_store_rows: int = MIN_STORE_ROWS) -> None:
    """Raise `ConfigError` for the first option out of its range; names it."""
    rules = {
        "target": (options.target in TARGETS, f"one of {', '.join(TARGETS)}"),
        "max_iter": (1 <= options.max_iter <= 100_000, "1 to 100000"),
        "learning_rate": (0.0 < options.learning_rate <= 1.0, "above 0, at most 1"),
        "max_leaf_nodes": (options.max_leaf_nodes is None or options.max_leaf_nodes >= 2, "at least 2, or null"),
        "min_samples_leaf": (options.min_samples_leaf >= 1, "at least 1"),
        "max_depth": (options.max_depth is None or options.max_depth >= 1, "at least 1, or null"),
        "l2_regularization": (0.0 <= options.l2_regularization < float("inf"), "finite, at least 0"),
        "seed": (0 <= options.seed < 2**32, "0 to 4294967295"),
        "min_store_rows": (min_store_rows >= 1, "at least 1"),
    }
    values = options._asdict() | {"min_store_rows": min_store_rows}
    for name, (holds, accepted) in rules.items():
        if not holds:
            raise ConfigError(f"{name}: expected {accepted}, found {values[name]!r}", name)


def validation_report(artifact: Artifact, stores: Mapping[str, FittedStore], later: Observed) -> dict[str, Any]:
    """Errors of the forests and of both baselines on later rows.

    Returns
    -------
    `forest`, `last_value` and `linear`: by kind, and `all`, `iterations`, `mape_percent`, `median_percent` and
    `p95_percent` of the absolute percentage errors; and the numbers of `refused`, `unpredicted` (no store), `untimed`
    and `idle` iterations.
    """
    errors: dict[str, dict[str, list[float]]] = {name: {} for name in ("forest", "last_value", "linear")}
    unpredicted = 0
    for kind, rows in later.stores.items():
        if kind not in stores:
            unpredicted += len(rows.row_ids)
            continue
        seen = stores[kind].rows
        predictions = {
            "forest": stores[kind].forest.compiled(artifact.target).predict_rows(rows.features),
            "last_value": last_value_ms(seen, rows.features),
            "linear": linear_ms(seen, rows.features),
        }
        for name, predicted in predictions.items():
            errors[name][kind] = _percentages(predicted, rows)
    report: dict[str, Any] = {
        name: {kind: _figures(values) for kind, values in by_kind.items()}
        | {"all": _figures([value for values in by_kind.values() for value in values])}
        for name, by_kind in errors.items()
    }
    counts = {"refused": later.refused, "unpredicted": unpredicted, "untimed": later.untimed, "idle": later.idle}
    return report | counts


def _percentages(predicted_ms: NDArray[np.float64], rows: TrainingRows) -> list[float]:
    values: list[float] = (100.0 * np.abs(predicted_ms - rows.wall_time_ms) / rows.wall_time_ms).tolist()
    return values


def _figures(percentages: list[float]) -> dict[str, Any]:
    count = len(percentages)
    if not count:
        return {"iterations": 0, "mape_percent": None, "median_percent": None, "p95_percent": None}
    ordered = sorted(percentages)
    return {
        "iterations": count,
        "mape_percent": sum(ordered) / count,
        "median_percent": ordered[count // 2],
        "p95_percent": ordered[int(0.95 * (count - 1))],
    }
