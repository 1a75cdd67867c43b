"""A whole search: from a plan to ranked candidates and their files, begun, continued, or put together from its parts.

Source: predict-recommend.md sections 1, 8 and 10.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.recommendation.candidate import (
    FEASIBLE,
    RESOURCE_LIMITED,
    UNCOVERED,
    Candidate,
    Outcome,
    candidate_id,
)
from fpmsdk.recommendation.executors import open_workers
from fpmsdk.recommendation.executors.opening import cpu_limit
from fpmsdk.recommendation.files import write_results
from fpmsdk.recommendation.journal import Journal, JournalWriter
from fpmsdk.recommendation.ledger import Result, Search, ledger
from fpmsdk.recommendation.plan import Limits, Plan
from fpmsdk.recommendation.progress import Progress, State
from fpmsdk.recommendation.search.driver import COMPLETE, Sweep
from fpmsdk.recommendation.search.rounds import Suggestion
from fpmsdk.recommendation.sweep import Known, run_known, run_sweep
from fpmsdk.recommendation.workspace import Workspace, workspace

SUCCESS, NOTHING_FEASIBLE, LIMITED = 0, 1, 3
STOP, SKIP, COLLECT_PLAN = "stop", "skip", "collect-plan"


@dataclass(frozen=True)
class Options:
    """How a search is run, which changes nothing of what it finds.

    executor: `threads`, `processes` or `dask`.
    workers: candidates evaluated at once; None for the optimizer's parallelism, within the limit of the host.
    scheduler: address of a Dask scheduler.
    resume: go on with the sweep in the output directory.
    overwrite: remove the results in it first.
    on_uncovered: `stop`, `skip` or `collect-plan`.
    progress: what is said on standard error.

    >>> Options().executor
    'threads'
    """

    executor: str = "threads"
    workers: int | None = None
    scheduler: str | None = None
    resume: bool = False
    overwrite: bool = False
    on_uncovered: str = SKIP
    progress: str = "none"

    def capacity(self, parallelism: int, limit: int | None = None) -> int:
        """How many candidates are evaluated at once.

        Parameters
        ----------
        parallelism: of the optimizer.
        limit: of the host; None for all cores but one.

        >>> Options().capacity(16, 4), Options(workers=3).capacity(16)
        (4, 3)
        """
        return self.workers or min(parallelism, limit or cpu_limit())


@dataclass(frozen=True)
class Recommendation:
    """What a search found.

    exit_code: 0 with a feasible candidate, 1 without, 3 where candidates were given up for lack of memory.
    result: all candidates and their order.
    ledger: the document of `recommendation.json`.
    end: `complete`, `time_budget` or `stopped`.
    output_dir: where the files are; None where none were written.
    """

    exit_code: int
    result: Result
    ledger: dict[str, Any]
    end: str
    output_dir: Path | None = None

    @property
    def best(self) -> Candidate | None:
        """The first of the ranking; None where nothing is feasible."""
        return self.result.recommended[0].candidate if self.result.recommended else None

    def to_pandas(self) -> Any:
        """All candidates as a pandas data frame, one row each, a column for every knob and metric."""
        from fpmsdk.recommendation.columns import arrow_table, columns

        return arrow_table(columns(self.result)).to_pandas()


def search(plan: Plan, output_dir: str | os.PathLike[str] | None, options: Options) -> Recommendation:
    """Evaluate the candidates of a plan, rank them and write the results.

    Parameters
    ----------
    plan: what is searched.
    output_dir: where the journal and the results go; None for no files.
    options: how it is run.

    Raises
    ------
    OnboardError: the directory is rejected; nothing was written or removed.
    EvidenceError: an input differs on a worker.
    KeyboardInterrupt: it was interrupted; what came until then is in the journal.
    """
    with ExitStack() as stack:
        place = None
        if output_dir is not None:
            opened = workspace(output_dir, head=plan.head, overwrite=options.overwrite, resume=options.resume)
            place = stack.enter_context(opened)
        return _finish(plan, _evaluated(plan, place, options), place)


def put_together(
    plan: Plan, journal: Journal, output_dir: str | os.PathLike[str], *, overwrite: bool = False
) -> Recommendation:
    """Rank and write what a journal has, without evaluating anything.

    Parameters
    ----------
    plan: the sweep that the journal is of.
    journal: of the whole sweep.
    output_dir: where the results go.
    overwrite: remove the results in it first.

    Raises
    ------
    OnboardError: the directory is rejected.
    EvidenceError: the journal lacks a candidate of the plan.
    """
    with workspace(output_dir, head=plan.head, overwrite=overwrite, resume=False) as place:
        sweep = run_known(plan, Known(plan, journal, finished=True))
        with JournalWriter(place.journal_path, plan.head) as writer:
            writer.add(entry for _, entry in sorted(journal.entries.items()))
            writer.close_sweep(COMPLETE)
        return _finish(plan, sweep, place)


def _evaluated(plan: Plan, place: Workspace | None, options: Options) -> Sweep:
    limits = Limits.of(plan.document)
    known = Known(plan, None if place is None else place.journal)
    state = State(total=plan.planned, known=len(known.outcomes))

    def stop_at(outcome: Outcome) -> bool:
        return options.on_uncovered == STOP and outcome.status == UNCOVERED

    with (
        Progress(options.progress).shown(state) as seen,
        open_workers(
            options.executor,
            options.capacity(plan.optimizer.parallelism, limits.workers),
            scheduler=options.scheduler,
            timeout_seconds=plan.optimizer.candidate_timeout_seconds,
            memory_limit_bytes=limits.memory_bytes,
            start_seconds=limits.start_seconds,
        ) as workers,
    ):
        return run_sweep(plan, workers, place, known, seen, stop_at=stop_at)


def _finish(plan: Plan, sweep: Sweep, place: Workspace | None) -> Recommendation:
    candidates = [_candidate(plan, suggestion, outcome) for suggestion, outcome in sweep.results]
    strategy = plan.strategy
    result = Result.of(Search(plan.document, plan.objective, strategy.name, strategy.implementation), candidates)
    if place is None:
        document, folder = ledger(result, cache_hits=sweep.repetitions), None
    else:
        place.clear_results()
        document, folder = write_results(result, place.folder, cache_hits=sweep.repetitions), place.folder
    return Recommendation(_exit_code(candidates), result, document, sweep.end, folder)


def _candidate(plan: Plan, suggestion: Suggestion, outcome: Outcome) -> Candidate:
    score, objectives = plan.objective.scored(outcome)
    document = plan.concrete(suggestion)
    return Candidate(candidate_id(suggestion.index), suggestion.sample, document, outcome, score, objectives)


def _exit_code(candidates: Sequence[Candidate]) -> int:
    statuses = {candidate.outcome.status for candidate in candidates}
    if RESOURCE_LIMITED in statuses:
        return LIMITED
    return SUCCESS if FEASIBLE in statuses else NOTHING_FEASIBLE
