"""Which algorithm searches which space."""

import sys

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.search.choice import choose
from fpmsdk.version import __version__
from tests.recommendation.search.spaces import Optimizer, branch

SMALL = branch({"a": {"choices": list(range(50))}}, gpus=(1, 2))  # 100 candidates
HUGE = branch({"a": {"range": {"min": 0, "max": 20_000, "step": 1}}}, gpus=(1,))
CONTINUOUS = branch({"a": {"range": {"min": 0.5, "max": 0.9}}})


@pytest.fixture(autouse=True)
def without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)


def chosen(space, optimizer, seconds_each=lambda: 1.0, **options):
    return choose(optimizer, space, seconds_each, **options)


def never():
    raise AssertionError("nobody asked for the time")


AUTO = [
    ("as many trials as candidates", [SMALL], Optimizer(max_trials=100), never, "grid", 100),
    ("fewer trials", [SMALL], Optimizer(max_trials=99), never, "random", 99),
    ("of all branches together", [SMALL, SMALL], Optimizer(max_trials=199), never, "random", 199),
    ("the time is enough", [SMALL], Optimizer(max_trials=9, time_budget_seconds=50.0), lambda: 0.5, "grid", 100),
    ("the time is short", [SMALL], Optimizer(max_trials=9, time_budget_seconds=49.0), lambda: 0.5, "random", 9),
    ("larger than anybody waits for", [HUGE], Optimizer(time_budget_seconds=1e9), never, "random", 320),
    ("continuous", [CONTINUOUS], Optimizer(time_budget_seconds=1e9), never, "random", 320),
]


@pytest.mark.parametrize(
    ("name", "space", "optimizer", "seconds", "algorithm", "planned"), AUTO, ids=[case[0] for case in AUTO]
)
def test_auto_searches_whole_spaces_when_it_can(name, space, optimizer, seconds, algorithm, planned):
    strategy = chosen(space, optimizer, seconds)
    assert (strategy.name, strategy.planned, strategy.waits) == (algorithm, planned, False)
    assert strategy.implementation == f"fpmsdk {__version__}"


def test_auto_says_what_it_cannot_search_whole_and_what_would_help():
    note = chosen([SMALL], Optimizer(max_trials=99)).note
    assert note == (
        "99 of a space of 100 candidates are drawn by chance; with fpmsdk[optuna] the second half would learn from the "
        "first"
    )
    assert chosen([SMALL], Optimizer(max_trials=99), sharded=True).note.endswith("are drawn by chance")


@pytest.mark.parametrize("algorithm", ["optuna", "bayesian"])
def test_a_guided_search_needs_its_library(algorithm):
    with pytest.raises(OnboardError, match=r"needs the Optuna library; pip install 'fpmsdk\[optuna\]', or use random"):
        chosen([SMALL], Optimizer(algorithm))


@pytest.mark.parametrize("algorithm", ["optuna", "bayesian"])
def test_a_guided_search_has_no_parts(algorithm):
    with pytest.raises(OnboardError, match=f"--shard: algorithm {algorithm} learns from results that other parts"):
        chosen([SMALL], Optimizer(algorithm), sharded=True)


def test_a_batch_is_no_larger_than_the_trials():
    assert chosen([SMALL], Optimizer("random", max_trials=5, parallelism=16)).batch == 5
