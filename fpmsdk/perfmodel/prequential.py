"""Estimators beside each other on one stream: each predicts every iteration before it learns from it.

Nothing is looked at ahead of time: what is compared is what an online user of each would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import ConfigError, MetricsError, PerfDataNotAvailableError, TuningRejectedError
from fpmsdk.perfmodel.accuracy import KINDS, kinds_of, measured_ms
from fpmsdk.perfmodel.model import ForwardPassPerfModel

if TYPE_CHECKING:
    from fpmsdk.metrics import FpmBatch


def _regression(**section: Any) -> dict[str, Any]:
    return {"estimation_mode": "fpm_regression", "estimator_config": {"fpm_regression": section}}


_MANY_ROWS = {"bins_per_axis": [16, 16], "max_observations": 1024}

# What is compared by default: name and configuration, without the identity of the deployment.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "linear": _regression(),
    "linear-1024": _regression(sampling=_MANY_ROWS),
    "spline": _regression(fit={"kind": "spline"}),
    "spline-1024": _regression(sampling=_MANY_ROWS, fit={"kind": "spline"}),
    "recursive": _regression(fit={"kind": "recursive"}),
    "automatic": _regression(fit={"kind": "automatic"}),
}

# Errors are kept in four bytes and stay finite: none is above this, absolute in ms or relative.
LARGEST_ERROR = float(np.finfo(np.float32).max)

# Answers behind one point of a curve of errors, at first, and the most points of one.
SERIES_ANSWERS = 64
MAX_SERIES_POINTS = 2048


def build_estimators(
    identity: Mapping[str, Any], names: Sequence[str] | None = None
) -> dict[str, ForwardPassPerfModel]:
    """Fresh models of the known estimators.

    Parameters
    ----------
    identity: model, system, backend, worker type and what else tells one deployment from another.
    names: which of `ESTIMATORS`; all without it.

    Raises
    ------
    ConfigError: an unknown name, or one given twice.

    Example
    -------
    >>> from fpmsdk import sample
    >>> list(build_estimators(sample.MODEL, ["spline", "linear"]))
    ['spline', 'linear']
    """
    chosen = list(ESTIMATORS) if names is None else list(names)
    for name in chosen:
        if name not in ESTIMATORS:
            known = ", ".join(repr(one) for one in ESTIMATORS)
            raise ConfigError(f"estimator: expected one of {known}, found {name!r}", "estimator")
        if chosen.count(name) > 1:
            raise ConfigError(f"estimator: {name!r} is named {chosen.count(name)} times; name each once", "estimator")
    return {name: ForwardPassPerfModel.best_available({**identity, **ESTIMATORS[name]}) for name in chosen}


def compare_estimators(
    models: Mapping[str, ForwardPassPerfModel],
    stream: Iterable[FpmBatch],
    *,
    train: Iterable[FpmBatch] = (),
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Run models over a stream, each predicting every iteration before learning from it.

    Parameters
    ----------
    models: by name; they are tuned.
    stream: the portions of the stream, in order. Four bytes are kept of each iteration and model, and nothing else.
    train: the portions of a stream that all models learn from first, without being judged.
    advance: called with the number of iterations read since the last call, of both streams.

    Returns
    -------
    `train_iterations`, `iterations`, and by name of the `estimators` a dict with `error` and `series`.

    `error` has for `prefill`, `decode`, `mixed` and `all`: `iterations` (measured ones), `cold_start_iterations` (those
    before the first answer; for `all` the sum), `not_ready` (without an answer), `mape_percent`, `bias_percent`,
    `median_error_ms` and `p95_error_ms` (of the absolute error; None without an answer) and `update_us` (mean time to
    learn from one iteration and publish, None where nothing was learned). An error counts `LARGEST_ERROR` at most.

    `series` has `answers_per_point`, and per point `iteration` (its last one) and `mape_percent` (the mean over it); no
    more than `MAX_SERIES_POINTS` points, however long the stream.

    Raises
    ------
    MetricsError, PerfDataNotAvailableError, TuningRejectedError: an estimator cannot answer or learn; names it.

    Example
    -------
    >>> from fpmsdk import FpmBatch, sample
    >>> told = compare_estimators(
    ...     build_estimators(sample.MODEL, ["linear"]), [FpmBatch.from_frames(sample.burst_frames())])
    >>> told["iterations"], told["estimators"]["linear"]["error"]["mixed"]["cold_start_iterations"]
    (1654, 5)
    """
    tallies = {name: _Tally() for name in models}
    counts = {"train_iterations": 0, "iterations": 0}
    for portion in train:
        for name, model in models.items():
            _attempt(name, counts["train_iterations"], model.tune_with_fpms, portion)
        counts["train_iterations"] += len(portion)
        if advance is not None:
            advance(len(portion))
    for portion in stream:
        measured, kinds = measured_ms(portion), kinds_of(portion)
        for name, model in models.items():
            predicted, update_ns = _attempt(name, counts["iterations"], model.predict_then_tune, portion)
            tallies[name].add(counts["iterations"], predicted, update_ns, measured, kinds)
        counts["iterations"] += len(portion)
        if advance is not None:
            advance(len(portion))
    return counts | {"estimators": {name: tally.report() for name, tally in tallies.items()}}


def _attempt(name: str, first: int, call: Callable[[FpmBatch], Any], portion: FpmBatch) -> Any:
    try:
        return call(portion)
    except (MetricsError, PerfDataNotAvailableError, TuningRejectedError) as fault:
        counted = f", counted from iteration {first:,}" if first else ""
        raise type(fault)(f"estimator {name!r}{counted}: {fault}") from None


def _errors(
    predicted: NDArray[np.float64], measured: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # Signed errors in ms, and relative ones.
    with np.errstate(over="ignore"):
        error = np.clip(predicted - measured, -LARGEST_ERROR, LARGEST_ERROR)
        return error, np.clip((predicted - measured) / measured, -LARGEST_ERROR, LARGEST_ERROR)


class _KindTally:
    """Sums over the iterations of one kind."""

    def __init__(self) -> None:
        self.measured = self.answered = self.cold = self.updates = 0
        self.update_ns = 0
        self.relative = self.signed = 0.0
        self.absolute_ms: list[NDArray[np.float32]] = []

    def add(self, predicted: NDArray[np.float64], update_ns: NDArray[np.int64], measured: NDArray[np.float64]) -> None:
        ready = ~np.isnan(predicted)
        if self.answered == 0:
            self.cold += int(np.argmax(ready)) if ready.any() else len(ready)
        error, relative = _errors(predicted[ready], measured[ready])
        self.measured += len(measured)
        self.answered += len(error)
        self.relative += float(np.abs(relative).sum())
        self.signed += float(relative.sum())
        self.absolute_ms.append(np.abs(error).astype(np.float32))
        learned = update_ns[update_ns >= 0]
        self.updates += len(learned)
        self.update_ns += int(learned.sum())

    @classmethod
    def sum_of(cls, parts: Iterable[_KindTally]) -> _KindTally:
        total = cls()
        for part in parts:
            for name, value in vars(part).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def report(self) -> dict[str, float | int | None]:
        median = p95 = None
        if self.answered:
            # Quantiles between large errors pass through sums that four bytes do not hold.
            median, p95 = map(float, np.quantile(np.concatenate(self.absolute_ms).astype(np.float64), (0.5, 0.95)))
        return {
            "iterations": self.measured,
            "cold_start_iterations": self.cold,
            "not_ready": self.measured - self.answered,
            "mape_percent": self.relative / self.answered * 100 if self.answered else None,
            "bias_percent": self.signed / self.answered * 100 if self.answered else None,
            "median_error_ms": median,
            "p95_error_ms": p95,
            "update_us": self.update_ns / self.updates / 1e3 if self.updates else None,
        }


class _Series:
    """Mean errors of consecutive answers; points are merged in pairs rather than become too many."""

    def __init__(self) -> None:
        self._per_point = SERIES_ANSWERS
        self._iterations = np.empty(0, np.int64)
        self._means = np.empty(0)
        self._pending = np.empty((2, 0))

    def add(self, iterations: NDArray[np.int64], percent: NDArray[np.float64]) -> None:
        self._pending = np.concatenate([self._pending, [iterations, percent]], axis=1)
        whole = self._pending.shape[1] // self._per_point * self._per_point
        last, errors = self._pending[:, :whole].reshape(2, -1, self._per_point)
        self._pending = self._pending[:, whole:]
        self._iterations = np.append(self._iterations, last[:, -1].astype(np.int64))
        self._means = np.append(self._means, errors.mean(axis=1))
        while len(self._means) > MAX_SERIES_POINTS:
            self._merge()

    def _merge(self) -> None:
        # An odd last point goes back to the answers that make no whole point yet.
        if len(self._means) % 2:
            held = np.array([[self._iterations[-1]] * self._per_point, [self._means[-1]] * self._per_point])
            self._pending = np.concatenate([held, self._pending], axis=1)
            self._iterations, self._means = self._iterations[:-1], self._means[:-1]
        self._iterations = self._iterations[1::2]
        self._means = self._means.reshape(-1, 2).mean(axis=1)
        self._per_point *= 2

    def report(self) -> dict[str, Any]:
        return {
            "answers_per_point": self._per_point,
            "iteration": self._iterations.tolist(),
            "mape_percent": self._means.tolist(),
        }


class _Tally:
    """What one estimator did, by kind, and how its error went."""

    def __init__(self) -> None:
        self._kinds = [_KindTally() for _ in KINDS]
        self._series = _Series()

    def add(
        self,
        first: int,
        predicted: NDArray[np.float64],
        update_ns: NDArray[np.int64],
        measured: NDArray[np.float64],
        kinds: NDArray[np.int64],
    ) -> None:
        known = ~np.isnan(measured)
        for code, tally in enumerate(self._kinds):
            chosen = known & (kinds == code)
            tally.add(predicted[chosen], update_ns[chosen], measured[chosen])
        answered = np.flatnonzero(known & ~np.isnan(predicted))
        _, relative = _errors(predicted[answered], measured[answered])
        self._series.add(answered + first, np.abs(relative) * 100)

    def report(self) -> dict[str, Any]:
        errors = {kind: tally.report() for kind, tally in zip(KINDS, self._kinds, strict=True)}
        errors["all"] = _KindTally.sum_of(self._kinds).report()
        return {"error": errors, "series": self._series.report()}
