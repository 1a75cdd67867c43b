"""Candidates that a model of the results so far expects to be good; the model is Optuna's.

What it suggests a second time costs no trial: it is told the result again, and asked for another.
Source: predict-recommend.md sections 6.5, 8.4 and 16.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.domains import Domain, FloatRange, IntegerRange
from fpmsdk.recommendation.search.points import Points
from fpmsdk.recommendation.search.sampling import StratifiedRandom

# Repetitions in a row after which an unseen candidate is drawn by chance instead.
_REPETITIONS = 16
_ARM = "arm"


class Guided:
    """Optuna's tree-structured Parzen estimator over arms and knobs, after a first part drawn by `StratifiedRandom`.

    Parameters
    ----------
    points: the branch.
    seed: of this branch.
    first: how many candidates are drawn by chance, to learn from.
    objectives: how many values a result has.

    Raises
    ------
    OnboardError: Optuna is not installed.
    """

    def __init__(self, points: Points, seed: int, *, first: int, objectives: int) -> None:
        optuna = require_optuna()
        self._optuna, self._points = optuna, points
        self._chance = StratifiedRandom(points, seed)
        self._first = first
        self._results: dict[Sample, Sequence[float] | None] = {}
        self._asked: dict[Sample, Any] = {}
        self._suggested: set[Sample] = set()
        self.repetitions = 0
        with _Quiet(optuna), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # options of the sampler that the library calls experimental
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)
            self._study = optuna.create_study(directions=["maximize"] * objectives, sampler=sampler)
        self._axes = {path: _Axis(domain, optuna.distributions) for path, domain in points.knobs}
        self._distributions = {_ARM: optuna.distributions.CategoricalDistribution(range(len(points.branch.arms)))}
        self._distributions |= {path: axis.distribution for path, axis in self._axes.items()}

    @property
    def waits(self) -> bool:
        """Whether the part that is drawn by chance is over."""
        return self._first <= 0

    def suggest(self, count: int) -> list[Sample]:
        """The next candidates; one call never mixes both parts."""
        if self._first > 0:
            found = self._chance.suggest(min(count, self._first))
            self._first -= len(found)
        else:
            found = []
            while len(found) < count and (sample := self._ask()) is not None:
                self._suggested.add(sample)
                found.append(sample)
        self._suggested.update(found)
        return found

    def tell(self, sample: Sample, values: Sequence[float] | None) -> None:
        """What became of a candidate."""
        self._results[sample] = values
        trial = self._asked.pop(sample, None)
        with _Quiet(self._optuna):
            if trial is None:
                self._study.add_trial(self._trial(sample, values))
            else:
                self._tell(trial, values)

    def _ask(self) -> Sample | None:
        for _ in range(_REPETITIONS):
            with _Quiet(self._optuna):
                trial = self._study.ask(self._distributions)
            sample = self._sample(trial.params)
            if sample not in self._suggested:
                self._asked[sample] = trial
                self._chance.exclude(sample)
                return sample
            self.repetitions += 1
            with _Quiet(self._optuna):
                self._tell(trial, self._results.get(sample))
        return next(iter(self._chance.suggest(1)), None)

    def _tell(self, trial: Any, values: Sequence[float] | None) -> None:
        if values is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, list(map(float, values)))

    def _trial(self, sample: Sample, values: Sequence[float] | None) -> Any:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state=states.FAIL if values is None else states.COMPLETE,
            values=None if values is None else list(map(float, values)),
            params={_ARM: sample.arm, **{path: self._axes[path].param(value) for path, value in sample.knobs}},
            distributions=self._distributions,
        )

    def _sample(self, params: dict[str, Any]) -> Sample:
        values = [(path, axis.value(params[path])) for path, axis in self._axes.items()]
        return self._points.of(params[_ARM], values)


class _Axis:
    """A knob as the library sees it: by position where it can be counted, so that any kind of value will do."""

    def __init__(self, domain: Domain, kinds: Any) -> None:
        self._domain = domain
        self._by_value = domain.count is None or domain.logarithmic
        if isinstance(domain, FloatRange) and self._by_value:
            self.distribution = kinds.FloatDistribution(domain.min, domain.max, log=domain.logarithmic)
        elif isinstance(domain, IntegerRange) and self._by_value:
            self.distribution = kinds.IntDistribution(domain.min, domain.max, log=True)
        else:
            assert domain.count is not None
            self.distribution = kinds.IntDistribution(0, domain.count - 1)
            self._positions = {domain.at(position): position for position in range(domain.count)}

    def value(self, param: Any) -> Any:
        """The value of the knob that a parameter stands for."""
        return param if self._by_value else self._domain.at(param)

    def param(self, value: Any) -> Any:
        """The parameter that stands for a value."""
        return value if self._by_value else self._positions[value]


def require_optuna() -> Any:
    """The Optuna library.

    Raises
    ------
    OnboardError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise OnboardError(
            "optimizer.algorithm: it needs the Optuna library; pip install 'fpmsdk[optuna]', or use random",
            "optimizer.algorithm",
        ) from None
    return optuna


class _Quiet:
    """No messages of the library below warnings, and its own level again afterwards."""

    def __init__(self, optuna: Any) -> None:
        self._logging = optuna.logging

    def __enter__(self) -> None:
        self._before = self._logging.get_verbosity()
        self._logging.set_verbosity(self._logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logging.set_verbosity(self._before)
