"""Which algorithm searches a space, with how many trials.

Source: predict-recommend.md sections 8.1 and 8.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.branches import Branch
from fpmsdk.recommendation.search.grid import Grid
from fpmsdk.recommendation.search.guided import Guided, require_optuna
from fpmsdk.recommendation.search.points import Points
from fpmsdk.recommendation.search.rounds import Rounds
from fpmsdk.recommendation.search.sampling import StratifiedRandom
from fpmsdk.recommendation.search.suggesting import Suggester

# The largest space that `auto` searches whole when the time allows it.
_WHOLE_SPACE = 20_000
# Candidates of a branch that `optuna` draws by chance before it learns from them: at most so many, at most a fourth.
_LEARN_FROM = 10


class Optimizer(Protocol):
    """Section `optimizer` of a configuration."""

    @property
    def algorithm(self) -> str: ...  # noqa: D102
    @property
    def max_trials(self) -> int: ...  # noqa: D102
    @property
    def parallelism(self) -> int: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def candidate_timeout_seconds(self) -> float: ...  # noqa: D102
    @property
    def time_budget_seconds(self) -> float | None: ...  # noqa: D102


class Strategy(Struct, frozen=True):
    """How a space is searched.

    name: `grid`, `random`, `guided`, or `random then guided`.
    implementation: the library that suggests, with its version.
    trials: candidates at most; None for all of them.
    total: candidates of the whole space; None where a knob is continuous.
    batch: suggestions between two looks at the results.
    note: what the user should know about the choice; empty for nothing.
    """

    name: str
    implementation: str
    trials: int | None
    total: int | None
    batch: int
    note: str = ""

    @property
    def planned(self) -> int | None:
        """How many candidates will be suggested."""
        known = [count for count in (self.trials, self.total) if count is not None]
        return min(known, default=None)

    @property
    def waits(self) -> bool:
        """Whether suggestions depend on results."""
        return "guided" in self.name


def choose(
    optimizer: Optimizer, branches: Sequence[Branch], seconds_each: Callable[[], float], *, sharded: bool = False
) -> Strategy:
    """The strategy for a space.

    Parameters
    ----------
    optimizer: what the file asks for.
    branches: the space.
    seconds_each: about how long one candidate takes in s with all workers at work; asked only when the answer depends
        on it.
    sharded: whether only a part of the space is searched here, so that no suggestion may depend on a result.

    Raises
    ------
    OnboardError: fewer trials than branches, a grid that is larger than the trials, a guided search in parts, or no
        Optuna where it is asked for.
    """
    totals = [branch.size for branch in branches]
    total = None if None in totals else sum(count for count in totals if count is not None)
    trials, algorithm = optimizer.max_trials, optimizer.algorithm
    batch = min(optimizer.parallelism, trials)
    if trials < len(branches):
        raise OnboardError(
            f"optimizer.max_trials: found {trials}, but the search has {len(branches)} deployment modes; "
            "give at least as many trials",
            "optimizer.max_trials",
        )
    own = f"fpmsdk {_version()}"
    if algorithm == "grid":
        if total is not None and total > trials:
            raise OnboardError(
                f"optimizer.max_trials: the grid has {total} candidates, found {trials} trials; set max_trials: "
                f"{total}, or use algorithm random",
                "optimizer.max_trials",
            )
        return Strategy("grid", own, None, total, batch)
    if algorithm == "random":
        return Strategy("random", own, trials, total, batch)
    if algorithm in ("optuna", "bayesian"):
        if sharded:
            raise OnboardError(
                f"--shard: algorithm {algorithm} learns from results that other parts do not have; use grid or random",
                "--shard",
            )
        note = ""
        if algorithm == "bayesian":
            note = "algorithm bayesian is Optuna's Parzen estimator here; its proposals are not those of other tools"
        return Strategy("guided", _optuna(), trials, total, batch, note)
    return _automatic(optimizer, total, batch, seconds_each, sharded)


def _automatic(
    optimizer: Optimizer, total: int | None, batch: int, seconds_each: Callable[[], float], sharded: bool
) -> Strategy:
    own, trials, budget = f"fpmsdk {_version()}", optimizer.max_trials, optimizer.time_budget_seconds
    if total is not None and total <= trials:
        return Strategy("grid", own, None, total, batch)
    if total is not None and budget is not None and total <= _WHOLE_SPACE and total * seconds_each() <= budget:
        return Strategy("grid", own, None, total, batch, f"all {total} candidates fit into the time budget")
    size = "a space with a continuous knob" if total is None else f"a space of {total} candidates"
    if sharded:
        return Strategy("random", own, trials, total, batch, f"{trials} of {size} are drawn by chance")
    try:
        guide = _optuna()
    except OnboardError:
        note = f"{trials} of {size} are drawn by chance; with fpmsdk[optuna] the second half would learn from the first"
        return Strategy("random", own, trials, total, batch, note)
    return Strategy("random then guided", guide, trials, total, batch, f"{trials} of {size} are tried")


def rounds_of(
    strategy: Strategy, branches: Sequence[Branch], *, seed: int, objectives: int, cheapest_first: bool = False
) -> Rounds:
    """What a strategy suggests.

    Parameters
    ----------
    strategy: as chosen.
    branches: the space.
    seed: of the search; each branch has its own.
    objectives: how many values a result has.
    cheapest_first: whether arms take turns from few GPUs to many.
    """

    def suggester(branch: Branch) -> Suggester:
        points = Points(branch)
        if strategy.name == "grid":
            return Grid(points)
        own_seed = seed + branch.seed_offset
        if strategy.name == "random":
            return StratifiedRandom(points, own_seed, cheapest_first=cheapest_first)
        assert strategy.trials is not None
        part = -(-strategy.trials // len(branches))
        half = strategy.name == "random then guided"
        first = part // 2 if half else min(_LEARN_FROM, part // 4)
        return Guided(points, own_seed, first=max(1, first), objectives=objectives)

    return Rounds([suggester(branch) for branch in branches], max_trials=strategy.trials, batch=strategy.batch)


def _optuna() -> str:
    version: Any = require_optuna().__version__
    return f"optuna {version}"


def _version() -> str:
    from fpmsdk.version import __version__

    return __version__
