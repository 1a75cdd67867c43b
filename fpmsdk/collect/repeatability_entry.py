"""The collector's options of a repetition: freezes it, or runs it.

Source: collector.md sections 1.1 and 7.4.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from fpmsdk.collect.executor import ExecutorFactory
from fpmsdk.collect.options import CollectorOptions
from fpmsdk.collect.repeatability_plan import RepeatPolicy, freeze, read_source
from fpmsdk.collect.repeatability_run import repeat_campaign
from fpmsdk.documents.strict import checked


def run_repetition(options: CollectorOptions, executors: Callable[[str], ExecutorFactory]) -> int:
    """Print the frozen plan with `--plan-only`, else repeat the campaign and print the statuses of its report.

    Parameters
    ----------
    options: with `repeatability`.
    executors: the executor of a name, for the one that the campaign ran on.

    Returns
    -------
    0 when a plan was asked for, or the repetition passed; else 1.

    Raises
    ------
    OnboardError, EvidenceError, CollectionError: as `freeze` and `repeat_campaign`.
    """
    asked = options.repeatability
    assert asked is not None
    source = read_source(asked.source_campaign)
    policy = checked(
        RepeatPolicy,
        {
            "samples": asked.samples,
            "max_points_per_cell": asked.max_points,
            "cv_threshold": asked.cv_threshold,
            "comparison_mode": asked.comparison_mode,
            "max_attempts_per_sample": asked.max_attempts,
            "source_agreement_threshold": asked.source_agreement_threshold,
        },
        "--repeatability",
    )
    if options.plan_only:
        frozen = freeze(source, asked.source_campaign, asked.source_checkpoint, policy)
        print(json.dumps(frozen, indent=2, sort_keys=True))
        return 0
    report = repeat_campaign(
        source,
        campaign_root=asked.source_campaign,
        checkpoint=asked.source_checkpoint,
        output_dir=asked.output_dir,
        executor=executors(source.executor),
        policy=policy,
        resume=options.resume,
        retry_failed=options.retry_failed,
    )
    names = ("repeatability", "new_population", "source_qualification", "execution")
    statuses = {"status": report["status"], **{name: report[name]["status"] for name in names}}
    print(json.dumps(statuses, indent=2, sort_keys=True))
    return 0 if report["status"] == "passed" else 1
