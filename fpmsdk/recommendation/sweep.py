"""Has the candidates of a plan evaluated, and keeps what comes so that a sweep that was stopped goes on.

Source: predict-recommend.md sections 6.5, 8.5 and 17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from fpmsdk.errors import EvidenceError
from fpmsdk.recommendation.candidate import RESOURCE_LIMITED, TIMED_OUT, Outcome
from fpmsdk.recommendation.executors import Workers
from fpmsdk.recommendation.inputs import verify_inputs
from fpmsdk.recommendation.journal import Journal, JournalWriter
from fpmsdk.recommendation.plan import Plan
from fpmsdk.recommendation.progress import Seen
from fpmsdk.recommendation.search.driver import Driver, Sweep
from fpmsdk.recommendation.search.rounds import Suggestion
from fpmsdk.recommendation.workspace import Workspace

# What another try, on another day or machine, may end otherwise.
_TRIED_AGAIN = (TIMED_OUT, RESOURCE_LIMITED)


def evaluate(document: Mapping[str, Any], objective: Mapping[str, Any], inputs: Mapping[str, str]) -> Outcome:
    """What a worker does: one candidate, after the inputs of its sweep were found to be those of this machine.

    Raises
    ------
    EvidenceError: they are others; the fault of no candidate.
    """
    from fpmsdk.recommendation.evaluate import evaluate_document  # merging and planning load no simulation

    verify_inputs(inputs)
    return evaluate_document(document, objective)


def run_sweep(
    plan: Plan,
    workers: Workers,
    place: Workspace | None,
    known: Known,
    seen: Seen,
    *,
    stop_at: Callable[[Outcome], bool],
) -> Sweep:
    """Every candidate of a plan with its outcome, in the order of suggestion.

    Parameters
    ----------
    plan: what is searched, and how.
    workers: who evaluates.
    place: where the journal is; None for no journal.
    known: what an earlier run evaluated.
    seen: called with every outcome and its score.
    stop_at: ends the sweep after an outcome.

    Raises
    ------
    EvidenceError: the journal has other candidates than this plan, or a worker has other inputs.
    KeyboardInterrupt: what had come until then is in the journal.
    """
    objective = plan.objective.to_json()

    def begin(suggestion: Suggestion) -> Future[Outcome]:
        return workers.executor.submit(evaluate, plan.concrete(suggestion), objective, plan.inputs)

    with ExitStack() as stack:
        writer = None
        if place is not None:
            writer = stack.enter_context(JournalWriter(place.journal_path, plan.head, place.journal))
        keeper = _Keeper(plan, writer, seen)
        for outcome in known.outcomes.values():
            keeper.tell(outcome)
        sweep = Driver(
            plan.rounds(),
            begin,
            keeper=keeper,
            capacity=workers.capacity,
            known=known.outcome,
            shard=plan.shard,
            time_budget_seconds=plan.optimizer.time_budget_seconds,
            stop_at=stop_at,
            **_of(plan),
        ).run()
        if writer is not None:
            writer.close_sweep(sweep.end)
    return sweep


def run_known(plan: Plan, known: Known) -> Sweep:
    """Every candidate of a plan with the outcome that is known of it, in the order of suggestion.

    Raises
    ------
    EvidenceError: one is not known.
    """

    def missing(suggestion: Suggestion) -> Future[Outcome]:
        raise EvidenceError(
            f"candidate {suggestion.index} is in no journal; go on with its part by --resume, then merge again"
        )

    keeper = _Keeper(plan, None, lambda outcome, score: None)
    return Driver(plan.rounds(), missing, keeper=keeper, capacity=1, known=known.outcome, **_of(plan)).run()


def _of(plan: Plan) -> dict[str, Any]:
    return {"values": plan.objective.signed, "used_gpus": plan.used_gpus}


class Known:
    """What a journal knows of the candidates of a plan.

    outcomes: by index in the order of suggestion.

    Parameters
    ----------
    plan: the sweep.
    journal: of the sweep; None where it begins.
    finished: whether nothing will be evaluated any more, so that what could be tried again counts, too.
    """

    def __init__(self, plan: Plan, journal: Journal | None, *, finished: bool = False) -> None:
        self._plan = plan
        self._entries = {} if journal is None else journal.entries
        found = {index: Outcome.from_json(entry["outcome"]) for index, entry in self._entries.items()}
        again = () if finished else _TRIED_AGAIN
        self.outcomes = {index: outcome for index, outcome in found.items() if outcome.status not in again}

    def outcome(self, suggestion: Suggestion) -> Outcome | None:
        """The outcome of a suggestion; None where it has to be evaluated.

        Raises
        ------
        EvidenceError: another candidate has its number.
        """
        outcome = self.outcomes.get(suggestion.index)
        if outcome is not None:
            recorded = self._entries[suggestion.index]["fingerprint"]
            if recorded != self._plan.fingerprint(suggestion):
                raise EvidenceError(
                    f"candidate {suggestion.index} of the journal is another one than this sweep suggests; "
                    "the journal was written by another search, begin anew with --overwrite"
                )
        return outcome


class _Keeper:
    """Writes results into the journal and tells them to whoever watches."""

    def __init__(self, plan: Plan, writer: JournalWriter | None, seen: Seen) -> None:
        self._plan, self._writer, self._seen = plan, writer, seen

    def add(self, results: Sequence[tuple[Suggestion, Outcome]]) -> None:
        if self._writer is not None and results:
            self._writer.add(
                {
                    "index": suggestion.index,
                    "fingerprint": self._plan.fingerprint(suggestion),
                    "sample": suggestion.sample.to_json(),
                    "outcome": outcome.to_json(),
                }
                for suggestion, outcome in results
            )
        for _, outcome in results:
            self.tell(outcome)

    def tell(self, outcome: Outcome) -> None:
        score, _ = self._plan.objective.scored(outcome)
        self._seen(outcome, score)
