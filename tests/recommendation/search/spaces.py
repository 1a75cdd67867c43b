"""Small spaces, and a search of one whose candidates are worth what a formula says."""

from concurrent.futures import Future
from dataclasses import dataclass

from fpmsdk.recommendation.branches import Arm, Branch
from fpmsdk.recommendation.candidate import Outcome
from fpmsdk.recommendation.domains import INTEGER, NUMBER, parse_domain
from fpmsdk.recommendation.search.choice import choose, rounds_of
from fpmsdk.recommendation.search.driver import Driver


def branch(knobs, *, gpus=(1, 2, 4), mode="aggregated", seed_offset=0):
    """A branch with one arm for each number of GPUs. `knobs`: domains as in a file, by path."""
    arms = tuple(Arm("vllm", {mode: {"tensor": count}}, count) for count in gpus)
    domains = tuple((path, parse_domain(spec, path, kind_of(spec))) for path, spec in sorted(knobs.items()))
    return Branch(mode, arms, domains, seed_offset)


def kind_of(spec):
    values = spec["choices"] if "choices" in spec else [spec["range"]["min"]]
    return NUMBER if any(isinstance(value, float) for value in values) else INTEGER


@dataclass
class Optimizer:
    algorithm: str = "auto"
    max_trials: int = 320
    parallelism: int = 16
    seed: int = 42
    time_budget_seconds: float | None = None
    candidate_timeout_seconds: float = 600.0


def distance(suggestion):
    """The worth of a candidate: more the nearer its knobs are to 4 and the fewer arms come before it."""
    return -sum(abs(value - 4) for _, value in suggestion.sample.knobs) - suggestion.sample.arm


def done(outcome):
    future = Future()
    future.set_result(outcome)
    return future


@dataclass
class Kept:
    """What the driver handed over to be kept, in the order in which it came."""

    indices: list

    def add(self, results):
        self.indices += [suggestion.index for suggestion, _ in results]


def search(branches, optimizer, *, evaluate=None, objectives=1, cheapest_first=False, seconds_each=None, **driver):
    """Search; returns the strategy and the sweep."""
    strategy = choose(optimizer, branches, seconds_each or (lambda: 1.0))
    rounds = rounds_of(strategy, branches, seed=optimizer.seed, objectives=objectives, cheapest_first=cheapest_first)
    options = {"keeper": Kept([]), "capacity": 2, "used_gpus": lambda suggestion: 1} | driver
    run = Driver(
        rounds,
        evaluate or (lambda suggestion: done(Outcome("feasible", metrics={"worth": distance(suggestion)}))),
        values=lambda outcome: [outcome.metrics["worth"]] * objectives if outcome.status == "feasible" else None,
        **options,
    )
    return strategy, run.run()


def points(sweep):
    return [
        (suggestion.branch, suggestion.sample.arm, dict(suggestion.sample.knobs)) for suggestion, _ in sweep.results
    ]
