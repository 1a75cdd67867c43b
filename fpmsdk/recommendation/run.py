"""A whole search: from a plan to ranked candidates and their files, begun, continued, or put together from its parts.

Source: predict-recommend.md sections 1, 8 and 10.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from fpmsdk.documents.canonical import canonical_bytes, pretty_bytes
from fpmsdk.errors import OnboardError
from fpmsdk.files import whole_file
from fpmsdk.prediction.output import EVENTS, RESOURCES
from fpmsdk.prediction.resources import peak_rss_bytes
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
from fpmsdk.recommendation.files import FOLDER, write_results
from fpmsdk.recommendation.journal import Journal, JournalWriter
from fpmsdk.recommendation.ledger import Result, Search, ledger
from fpmsdk.recommendation.plan import Limits, Plan
from fpmsdk.recommendation.progress import Progress, State
from fpmsdk.recommendation.search.driver import COMPLETE, Sweep
from fpmsdk.recommendation.search.rounds import Suggestion
from fpmsdk.recommendation.sweep import Known, run_known, run_sweep
from fpmsdk.recommendation.uncovered import merged_coverage, write_uncovered
from fpmsdk.recommendation.workspace import Workspace, workspace

SUCCESS, NOTHING_FEASIBLE, LIMITED = 0, 1, 3


class Options(Struct, frozen=True):
    """How a search is run, which changes nothing of what it finds.

    executor: `threads`, `processes` or `dask`.
    workers: candidates evaluated at once; None for the optimizer's parallelism, within the limit of the host.
    scheduler: address of a Dask scheduler.
    resume: go on with the sweep in the output directory.
    overwrite: remove the results in it first.
    on_uncovered: `skip`; `stop` at the first candidate that a table does not cover; or `collect-plan`, which also
        writes what to measure.
    emit: kinds of launch files that are written for every recommendation.
    image: container image that they name; None for that of the engine's version.
    progress: what is said on standard error.

    >>> Options().executor
    'threads'
    """

    executor: str = "threads"
    workers: int | None = None
    scheduler: str | None = None
    resume: bool = False
    overwrite: bool = False
    on_uncovered: str = "skip"
    emit: tuple[str, ...] = ()
    image: str | None = None
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


DEFAULTS = Options()


class Recommendation(Struct, frozen=True):
    """What a search found.

    exit_code: 0 with a feasible candidate, 1 without, 3 where candidates were given up for lack of memory.
    result: all candidates and their order.
    ledger: the document of `recommendation.json`.
    end: `complete`, `time_budget` or `stopped`.
    output_dir: where the files are; None where none were written.
    coverage: what the tables covered over all candidates; None where nothing was counted.

    >>> import tempfile
    >>> from fpmsdk import recommend
    >>> from fpmsdk.sample.quickstart import write_quickstart
    >>> goal = "optimization={target: throughput, constraints: {max_candidate_gpus: 2}}"
    >>> found = recommend(write_quickstart(tempfile.mkdtemp()), overrides=[goal])
    >>> found.end, found.best.outcome.used_gpus, found.to_csv().count("\\n")
    ('complete', 2, 3)
    """

    exit_code: int
    result: Result
    ledger: dict[str, Any]
    end: str
    output_dir: Path | None = None
    coverage: dict[str, Any] | None = None

    @property
    def best(self) -> Candidate | None:
        """The first of the ranking; None where nothing is feasible."""
        return self.result.recommended[0].candidate if self.result.recommended else None

    def to_csv(self) -> str:
        r"""All candidates as CSV text, one line each after the names of the columns, as in `recommendation.csv`.

        >>> from fpmsdk.recommendation.ledger import Result, Search
        >>> from fpmsdk.recommendation.objectives import Objective
        >>> result = Result.of(Search({}, Objective("ttft"), "grid"), [])
        >>> Recommendation(1, result, {}, "complete").to_csv().splitlines()[0][:17]
        'candidate_id,rank'
        """
        from fpmsdk.recommendation.columns import columns, csv_bytes

        return csv_bytes(columns(self.result)).decode()

    def to_pandas(self) -> Any:
        """All candidates as a pandas data frame, one row each, a column for every knob and metric; needs pandas.

        >>> from fpmsdk.recommendation.ledger import Result, Search
        >>> from fpmsdk.recommendation.objectives import Objective
        >>> result = Result.of(Search({}, Objective("ttft"), "grid"), [])
        >>> frame = Recommendation(1, result, {}, "complete").to_pandas()  # doctest: +SKIP
        """
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
    OnboardError: the directory is rejected, and nothing was written or removed; or a launch file cannot be made, and
        all other results are there.
    EvidenceError: an input differs on a worker.
    KeyboardInterrupt: it was interrupted; what came until then is in the journal.
    """
    begun = time.monotonic()
    if options.emit:
        from fpmsdk.recommendation.emit import require_image

        version = plan.document["engine"].get("backend_version")
        require_image(options.emit, version if isinstance(version, str) else None, options.image)
    if output_dir is None:
        return _result(plan, _evaluated(plan, None, options), None)
    opened = workspace(output_dir, head=plan.head, overwrite=options.overwrite, resume=options.resume)
    with opened as place:
        found = _result(plan, _evaluated(plan, place, options), place.folder)
        return _written(found, place, options, begun)


def put_together(
    plan: Plan, journal: Journal, output_dir: str | os.PathLike[str], options: Options = DEFAULTS
) -> Recommendation:
    """Rank and write what a journal has, without evaluating anything.

    Parameters
    ----------
    plan: the sweep that the journal is of.
    journal: of the whole sweep.
    output_dir: where the results go.
    options: what is written, and whether it takes the place of other results.

    Raises
    ------
    OnboardError: as `search`.
    EvidenceError: the journal lacks a candidate of the plan.
    """
    begun = time.monotonic()
    with workspace(output_dir, head=plan.head, overwrite=options.overwrite, resume=False) as place:
        sweep = run_known(plan, Known(plan, journal, finished=True))
        with JournalWriter(place.journal_path, plan.head) as writer:
            writer.add(entry for _, entry in sorted(journal.entries.items()))
            writer.close_sweep(COMPLETE)
        return _written(_result(plan, sweep, place.folder), place, options, begun)


def _evaluated(plan: Plan, place: Workspace | None, options: Options) -> Sweep:
    limits = Limits.of(plan.document)
    known = Known(plan, None if place is None else place.journal)
    state = State(total=plan.planned, known=len(known.outcomes))

    def stop_at(outcome: Outcome) -> bool:
        return options.on_uncovered == "stop" and outcome.status == UNCOVERED

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


def _result(plan: Plan, sweep: Sweep, folder: Path | None) -> Recommendation:
    candidates = [_candidate(plan, suggestion, outcome) for suggestion, outcome in sweep.results]
    strategy = plan.strategy
    search_of = Search(plan.document, plan.objective, strategy.name, strategy.implementation)
    result = Result.of(search_of, candidates)
    document = ledger(result, cache_hits=sweep.repetitions)
    return Recommendation(_exit_code(candidates), result, document, sweep.end, folder, merged_coverage(candidates))


def _candidate(plan: Plan, suggestion: Suggestion, outcome: Outcome) -> Candidate:
    score, objectives = plan.objective.scored(outcome)
    document = plan.concrete(suggestion)
    return Candidate(candidate_id(suggestion.index), suggestion.sample, document, outcome, score, objectives)


def _exit_code(candidates: Sequence[Candidate]) -> int:
    statuses = {candidate.outcome.status for candidate in candidates}
    if RESOURCE_LIMITED in statuses:
        return LIMITED
    return SUCCESS if FEASIBLE in statuses else NOTHING_FEASIBLE


def _written(found: Recommendation, place: Workspace, options: Options, begun: float) -> Recommendation:
    place.clear_results()
    write_uncovered(found.result.candidates, place.folder, options.on_uncovered)
    repetitions = found.ledger["counts"]["cache_hits"]
    document = write_results(found.result, place.folder, cache_hits=repetitions)
    _account(place.folder, found, time.monotonic() - begun)
    if options.emit:
        _emit(found, place.folder, options)
    return structs.replace(found, ledger=document)


def _emit(found: Recommendation, folder: Path, options: Options) -> None:
    from fpmsdk.recommendation.emit import emit_ranked

    documents = [entry.candidate.document for entry in found.result.recommended]
    try:
        emit_ranked(documents, options.emit, folder / FOLDER, image=options.image)
    except OnboardError as fault:
        raise OnboardError(f"launch files cannot be made, all other results are there: {fault}", "--emit") from None


def _account(folder: Path, found: Recommendation, wall_seconds: float) -> None:
    """What the run took."""
    ended = {"exit_code": found.exit_code, "wall_seconds": wall_seconds}
    event = {"event": "recommendation_ended", "end": found.end, "counts": found.ledger["counts"], **ended}
    for name, content in (
        (EVENTS, canonical_bytes(event) + b"\n"),
        (RESOURCES, pretty_bytes(ended | {"peak_rss_bytes": peak_rss_bytes()})),
    ):
        with whole_file(folder / name) as file:
            file.write(content)
