"""Evaluates what is suggested, on whatever executor, and tells the results in the order of suggestion.

How many workers there are, how fast they are and which of them ends first change nothing but the time it takes.
Source: predict-recommend.md sections 6.5, 8.1, 8.3 and 8.5.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from msgspec import Struct, field

from fpmsdk.recommendation.candidate import RESOURCE_LIMITED, TIMED_OUT, Outcome
from fpmsdk.recommendation.executors import CandidateTimeoutError, WorkerLostError
from fpmsdk.recommendation.search.rounds import Rounds, Suggestion
from fpmsdk.recommendation.shards import WHOLE, Shard

COMPLETE, OUT_OF_TIME, STOPPED = "complete", "time_budget", "stopped"
# Candidates that are under way or wait for a worker, for each worker; suggestions of the rest are not made yet.
_AHEAD = 4


class Keeper(Protocol):
    """Where results are kept."""

    def add(self, results: Sequence[tuple[Suggestion, Outcome]]) -> None:
        """Keep results that have just come; they may come in any order."""
        ...


class Sweep(Struct):
    """What a search found: suggestions with their outcomes, in the order of suggestion, and why it ended.

    repetitions: suggestions that came up again and were not evaluated again.
    """

    results: list[tuple[Suggestion, Outcome]] = field(default_factory=list)
    end: str = COMPLETE
    repetitions: int = 0


class _Task(Struct):
    suggestion: Suggestion
    future: Future[Outcome] | None
    outcome: Outcome | None


class Driver:
    """One search.

    Parameters
    ----------
    rounds: what is suggested.
    evaluate: starts the evaluation of a suggestion.
    values: the objectives of an outcome, more is better; None where it cannot be ranked.
    keeper: where results are kept as they come.
    capacity: how many candidates are evaluated at once.
    used_gpus: of a suggestion, for one that leaves no figures.
    known: the outcome of a suggestion that was evaluated before; None where it was not.
    shard: the part of the suggestions that is evaluated.
    time_budget_seconds: no candidate is begun later than so many s after the start.
    stop_at: ends the search after an outcome.
    """

    def __init__(
        self,
        rounds: Rounds,
        evaluate: Callable[[Suggestion], Future[Outcome]],
        *,
        values: Callable[[Outcome], Sequence[float] | None],
        keeper: Keeper,
        capacity: int,
        used_gpus: Callable[[Suggestion], int],
        known: Callable[[Suggestion], Outcome | None] = lambda suggestion: None,
        shard: Shard = WHOLE,
        time_budget_seconds: float | None = None,
        stop_at: Callable[[Outcome], bool] = lambda outcome: False,
    ) -> None:
        self._rounds, self._evaluate, self._values, self._keeper = rounds, evaluate, values, keeper
        self._known, self._shard, self._stop_at = known, shard, stop_at
        self._ahead, self._used_gpus = _AHEAD * capacity, used_gpus
        self._deadline = None if time_budget_seconds is None else time.monotonic() + time_budget_seconds
        self._under_way: deque[_Task] = deque()
        self._running: dict[Future[Outcome], _Task] = {}
        self._sweep = Sweep()
        self._exhausted = False

    def run(self) -> Sweep:
        """Search until there is nothing left to suggest, or another end is reached.

        Raises
        ------
        Whatever an evaluation raises that is not the candidate's own failure, and KeyboardInterrupt; what had come
        until then is kept.
        """
        try:
            while True:
                self._fill()
                self._tell()
                if not self._running:
                    if self._over() and not self._under_way:
                        self._sweep.repetitions = self._rounds.repetitions
                        return self._sweep
                    continue
                self._collect()
        except BaseException:
            self._keep([task for future, task in self._running.items() if _has_result(future)])
            raise

    def _over(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        if late and self._sweep.end == COMPLETE and not self._exhausted:
            self._sweep.end = OUT_OF_TIME
        return self._exhausted or self._sweep.end != COMPLETE

    def _fill(self) -> None:
        while not self._over() and len(self._running) < self._ahead:
            if self._under_way and self._rounds.waits:
                return
            batch = self._rounds.next()
            self._exhausted = not batch
            for suggestion in batch:
                self._begin(suggestion)

    def _begin(self, suggestion: Suggestion) -> None:
        if not self._shard.has(suggestion.index):
            return
        known = self._known(suggestion)
        task = _Task(suggestion, None if known else self._evaluate(suggestion), known)
        self._under_way.append(task)
        if task.future is not None:
            self._running[task.future] = task

    def _collect(self) -> None:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        # In the order of suggestion, so that a failure of the sweep itself is the same one every time.
        self._keep([task for future, task in list(self._running.items()) if future in done])

    def _keep(self, tasks: list[_Task]) -> None:
        for task in tasks:
            assert task.future is not None
            task.outcome = outcome_of(task.future, self._used_gpus(task.suggestion))
            del self._running[task.future]
        self._keeper.add([(task.suggestion, task.outcome) for task in tasks if task.outcome is not None])

    def _tell(self) -> None:
        while self._under_way and (outcome := self._under_way[0].outcome) is not None:
            suggestion = self._under_way.popleft().suggestion
            self._rounds.suggesters[suggestion.branch].tell(suggestion.sample, self._values(outcome))
            self._sweep.results.append((suggestion, outcome))
            if self._sweep.end == COMPLETE and self._stop_at(outcome):
                self._sweep.end = STOPPED


def _has_result(future: Future[Outcome]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def outcome_of(future: Future[Outcome], used_gpus: int) -> Outcome:
    """What a finished evaluation says, also when its worker was killed or died."""
    try:
        return future.result()
    except CandidateTimeoutError as fault:
        return Outcome(TIMED_OUT, "runtime_timeout", str(fault), used_gpus=used_gpus)
    except WorkerLostError as fault:
        reason = f"{fault}, as it does when memory runs out"
        return Outcome(RESOURCE_LIMITED, "resource_limit", reason, used_gpus=used_gpus)
