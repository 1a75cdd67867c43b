"""`recommendation.json`: every candidate with what became of it, the order of the good ones, and the inputs.

Source: predict-recommend.md sections 6.5 and 10.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from fpmsdk.documents.canonical import digest
from fpmsdk.recommendation.candidate import STATUSES, UNCOVERED, Candidate
from fpmsdk.recommendation.concrete import concrete_config
from fpmsdk.recommendation.objectives import PARETO, Objective
from fpmsdk.recommendation.ranking import Recommended, flat_config, folded, ranked
from fpmsdk.version import __version__

SCHEMA_VERSION = "1.1"
# Suggestions of these statuses were run, or would have been but for the candidate itself.
_EVALUATED = ("feasible", "infeasible", "timed_out", "failed", UNCOVERED)


class Search(Struct, frozen=True):
    """Which search it was.

    config: the whole configuration as JSON.
    objective: what candidates were compared by.
    strategy: `grid`, `random`, `guided`, ...
    implementation: library that suggested, with its version.
    """

    config: Mapping[str, Any]
    objective: Objective
    strategy: str
    implementation: str = f"fpmsdk {__version__}"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical configuration, as 64 hexadecimal digits."""
        return digest(self.config)

    @property
    def run_id(self) -> str:
        """Name of every run of these inputs."""
        return f"run-{self.fingerprint[:16]}"


class Result(Struct, frozen=True):
    """What a search found.

    search: which one.
    candidates: all of them, as they were suggested.
    order: the feasible ones, best first; of a Pareto search its front.
    recommended: that order without repetitions, which are the candidates that are written.
    """

    search: Search
    candidates: tuple[Candidate, ...]
    order: tuple[Candidate, ...]
    recommended: tuple[Recommended, ...]

    @classmethod
    def of(cls, search: Search, candidates: Sequence[Candidate]) -> Result:
        """The result of candidates in the order of suggestion."""
        order = ranked(candidates, search.objective)
        return cls(search, tuple(candidates), tuple(order), tuple(folded(order)))

    def counts(self, cache_hits: int = 0) -> dict[str, int]:
        """Candidates by status; `evaluated` are those that were run, `cache_hits` suggestions made a second time."""
        by_status = Counter(candidate.outcome.status for candidate in self.candidates)
        return {
            **{status: by_status[status] for status in STATUSES},
            "evaluated": sum(by_status[status] for status in _EVALUATED),
            "cache_hits": cache_hits,
        }


def config_path(rank: int) -> str:
    """Where the configuration of a recommendation is, below the folder of the results; ranks count from 1.

    >>> config_path(12)
    'recommendations/0012.yaml'
    """
    return f"recommendations/{rank:04d}.yaml"


def ledger(result: Result, *, created_at: datetime | None = None, cache_hits: int = 0) -> dict[str, Any]:
    """The document of a result.

    Parameters
    ----------
    result: candidates and their order.
    created_at: time of the run; None for now. Nothing else in the document depends on when or where it was made.
    cache_hits: suggestions that had been made before.

    Returns
    -------
    Strict JSON. `views` names the feasible candidates, best first, in `top_n` or, of a Pareto search, its front in
    `pareto_front`; `recommendations` has an entry for every written configuration with the candidates folded into it.

    Source: predict-recommend.md section 10.1.
    """
    search = result.search
    order = [candidate.candidate_id for candidate in result.order]
    pareto = search.objective.target == PARETO
    return {
        "schema_version": SCHEMA_VERSION,
        "candidate_retention": "all",
        "counts": result.counts(cache_hits),
        "candidates": [_record(candidate, search.objective) for candidate in result.candidates],
        "views": {"top_n": [] if pareto else order, "pareto_front": order if pareto else []},
        "recommendations": [
            {
                "rank": rank,
                "candidate_id": entry.candidate.candidate_id,
                "config_path": config_path(rank),
                "folded": [candidate.candidate_id for candidate in entry.folded],
            }
            for rank, entry in enumerate(result.recommended, start=1)
        ],
        "provenance": {
            "search_strategy": search.strategy,
            "implementation": search.implementation,
            "implementation_version": __version__,
            "run_id": search.run_id,
            "created_at": (created_at or datetime.now(UTC)).isoformat(timespec="seconds"),
            "input_fingerprint": search.fingerprint,
            "config": dict(search.config),
        },
    }


def _record(candidate: Candidate, objective: Objective) -> dict[str, Any]:
    outcome = candidate.outcome
    return {
        "candidate_id": candidate.candidate_id,
        "status": outcome.status,
        "config": flat_config(candidate),
        "prediction_config": concrete_config(candidate),
        "used_gpus": outcome.used_gpus,
        "score": candidate.score,
        "metrics": outcome.metrics,
        "objectives": candidate.objectives,
        "reason_category": outcome.reason_category,
        "reason": outcome.reason,
        "provenance": _provenance(candidate, objective),
    }


def _provenance(candidate: Candidate, objective: Objective) -> dict[str, Any]:
    document, outcome = candidate.document, candidate.outcome
    engine = document.get("engine", {})
    coverage = outcome.coverage
    return {
        "model": engine.get("model"),
        "hardware": engine.get("hardware"),
        "backend": candidate.sample.backend,
        "backend_version": engine.get("backend_version"),
        "performance_data": [{"role": role, **data} for role, data in outcome.provenance.items()],
        "topology": {role: worker.get("parallelism", {}) for role, worker in engine.get("workers", {}).items()},
        "workload": document.get("traffic", {}),
        "objective": objective.to_json(),
        "sla": document.get("evaluation", {}).get("sla"),
        "runner_metadata": {
            "kv_load": outcome.kv_load,
            # The gaps of all candidates are merged in fpm-coverage.json.
            "fpm_query_coverage": None if coverage is None else {key: coverage[key] for key in ("status", "queries")},
        },
    }
