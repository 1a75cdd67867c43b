"""What a search would do: sizes, algorithm and time, with nothing written.

Source: predict-recommend.md section 8.4 (--dry-run).
"""

from __future__ import annotations

from typing import Any

from fpmsdk.recommendation.plan import Plan


def dry_run(plan: Plan, seconds_each: float, capacity: int) -> dict[str, Any]:
    """The sizes of a search and about how long it takes.

    Parameters
    ----------
    plan: the search.
    seconds_each: about how long one candidate takes in s.
    capacity: how many candidates are evaluated at once.

    Returns
    -------
    `{branches: [{mode, arms, knobs: {path: values}, candidates}], skipped, rejected, algorithm, implementation, notes,
    candidates, planned, seconds_each, expected_seconds}`; None for what is not known, such as the number of values of
    a continuous knob.

    Source: predict-recommend.md section 8.4.
    """
    planned = plan.planned
    return {
        "branches": [
            {
                "mode": branch.mode,
                "arms": len(branch.arms),
                "knobs": {path: domain.count for path, domain in branch.domains},
                "candidates": branch.size,
            }
            for branch in plan.space.branches
        ],
        "skipped": [dict(skipped) for skipped in plan.space.skipped],
        "rejected": [dict(rejected) for rejected in plan.space.rejected],
        "algorithm": plan.strategy.name,
        "implementation": plan.strategy.implementation,
        "notes": list(plan.notes),
        "candidates": plan.strategy.total,
        "planned": planned,
        "seconds_each": seconds_each,
        "expected_seconds": None if planned is None else planned * seconds_each / capacity,
    }
