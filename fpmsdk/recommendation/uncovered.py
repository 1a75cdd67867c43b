"""Candidates that a measured table does not cover: what becomes of a search, and what is missing over all of them.

How the missing points become a campaign is in `collect_plan.py`.
Source: predict-recommend.md section 5.4; fpm-interpolation.md section 8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fpmsdk.recommendation.candidate import FEASIBLE, INFEASIBLE, UNCOVERED, Candidate
from fpmsdk.replay.coverage import COUNTING_UNIT, replay_coverage, write_coverage

# What `--on-uncovered` takes: the search goes on; it ends after the batch of the first such candidate; it goes on, and
# afterwards the uncovered candidates are replayed once more for all points that they miss.
SKIP, STOP, COLLECT_PLAN = ON_UNCOVERED = ("skip", "stop", "collect-plan")
_COUNTED = ("queries", "prefill", "decode", "mixed_decode_baseline")


def merged_coverage(candidates: Sequence[Candidate]) -> dict[str, Any] | None:
    """The `fpm-coverage.json` of a search.

    Parameters
    ----------
    candidates: in the order of suggestion.

    Returns
    -------
    The coverage object of a replay with sums over all candidates: `roles` has an entry for every worker type, whose
    `gaps` are those of all candidates, most frequent first, each with `occurrences` over all and the `candidate_ids`;
    `candidates` counts the covered, the uncovered and those without counters. `covered` says that no lookup of any
    candidate was without an answer. None where no candidate counted lookups.

    Source: predict-recommend.md section 5.4.

    >>> from fpmsdk.recommendation.candidate import Outcome, Sample
    >>> merged_coverage([Candidate("candidate-000001", Sample("aggregated", "vllm", 0), {}, Outcome("feasible"))])
    """
    counted = [candidate for candidate in candidates if candidate.outcome.coverage is not None]
    if not counted:
        return None
    merged: dict[str, _Role] = {}
    for candidate in counted:
        for role in (candidate.outcome.coverage or {}).get("roles", ()):
            merged.setdefault(role["worker_type"], _Role()).add(candidate.candidate_id, role["coverage"])
    statuses = [candidate.outcome.status for candidate in counted]
    roles = [(worker_type, role.document()) for worker_type, role in merged.items()]
    document = replay_coverage(roles, completed=all(status in (FEASIBLE, INFEASIBLE) for status in statuses))
    uncovered = statuses.count(UNCOVERED)
    covered = sum((candidate.outcome.coverage or {}).get("status") == "covered" for candidate in counted)
    return document | {
        "candidates": {"covered": covered, "uncovered": uncovered, "not_counted": len(candidates) - len(counted)}
    }


def write_uncovered(
    candidates: Sequence[Candidate], folder: str | os.PathLike[str], on_uncovered: str
) -> dict[str, Any] | None:
    """Write what the tables lack: `fpm-coverage.json` and, with `collect-plan`, the campaigns that collect it.

    The uncovered candidates stay uncovered: what the plan is made from is replayed apart and never scored.

    Parameters
    ----------
    candidates: in the order of suggestion.
    folder: an existing directory without the files of another search.
    on_uncovered: one of `ON_UNCOVERED`.

    Returns
    -------
    The content of `missing-points.json`; None where there is no plan.

    Raises
    ------
    OSError: a file cannot be written.

    Source: predict-recommend.md section 5.4.

    >>> import tempfile
    >>> write_uncovered([], tempfile.mkdtemp(), "skip")
    """
    write_coverage(folder, merged_coverage(candidates))
    uncovered = [
        (candidate.candidate_id, candidate.document)
        for candidate in candidates
        if candidate.outcome.status == UNCOVERED
    ]
    if on_uncovered != COLLECT_PLAN or not uncovered:
        return None
    # Simulation and collector load for a plan alone.
    from fpmsdk.recommendation.collect_plan import write_collect_plan
    from fpmsdk.recommendation.missing import missing_points

    return write_collect_plan(missing_points(uncovered), folder)


class _Role:
    """Counters of one worker type over all candidates."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._gaps: dict[str, dict[str, Any]] = {}
        self._omitted = 0

    def add(self, candidate_id: str, coverage: Mapping[str, Any]) -> None:
        """Add the counters of one candidate."""
        for name in _COUNTED:
            kept = self._counts.setdefault(name, {})
            for outcome, count in coverage.get(name, {}).items():
                kept[outcome] = kept.get(outcome, 0) + count
        self._omitted += coverage.get("omitted_gap_queries", 0)
        for gap in coverage.get("gaps", ()):
            # As in the counters of one model: all fields but the occurrences make a gap.
            fields = {name: value for name, value in gap.items() if name != "occurrences"}
            known = self._gaps.setdefault(
                json.dumps(fields, sort_keys=True), fields | {"occurrences": 0, "candidate_ids": []}
            )
            known["occurrences"] += gap["occurrences"]
            if candidate_id not in known["candidate_ids"]:
                known["candidate_ids"].append(candidate_id)

    def document(self) -> dict[str, Any]:
        """The counters in the form of those of one model; there is no limit to the gaps."""
        return {
            "counting_unit": COUNTING_UNIT,
            **self._counts,
            "gaps": sorted(self._gaps.values(), key=lambda gap: -gap["occurrences"]),
            "gap_limit": None,
            "omitted_gap_queries": self._omitted,
        }
