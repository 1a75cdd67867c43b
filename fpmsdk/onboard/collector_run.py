"""The collector's own entry, in this process: its options, its frozen plan, and the run of it.

What is planned and how a campaign goes on is in `fpmsdk.collect`. Source: onboarding.md section 5 (collection gate).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.executors import executor_factory
from fpmsdk.collect.fake_launch import FAULTS
from fpmsdk.collect.observed_campaign import observation_archive, requested_observation
from fpmsdk.collect.options import CollectorOptions, parse_arguments
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.planner import build_plan
from fpmsdk.onboard.collector_command import COLLECTOR


def collector_plan(words: Sequence[str]) -> tuple[CollectorOptions, CollectionPlan]:
    """The options and the frozen plan of a collector's command.

    A smoke run without a limit covers every cell: both phases must be seen to work.

    Parameters
    ----------
    words: as `collector_command.collector_arguments` makes them.

    Raises
    ------
    OnboardError: the collector refuses the options, for example a precision that is not the checkpoint's.
    OSError: a file that they name cannot be read.
    """
    options = parse_arguments(words[len(COLLECTOR) :])
    plan = build_plan(options, runtime_observation=requested_observation(options))
    if options.smoke and options.limit is None:
        options = replace(options, limit=len(plan.cells))
    return options, plan


def run_collector(options: CollectorOptions, plan: CollectionPlan) -> list[dict[str, Any]]:
    """Run the campaign of a plan; the errors of its cells, empty when there are none.

    Raises
    ------
    MissingCapabilityError: this release cannot drive the executor of the plan.
    OnboardError: the checkpoint is of another plan, or another process runs the campaign.
    OSError: a file of the campaign cannot be written; what was reached is continued by `resume`.
    KeyboardInterrupt: after the running cell was salvaged and cleaned up.
    """
    outcome = run_campaign(
        plan,
        executor=executor_factory(plan.executor, faults=os.environ.get(FAULTS, "")),
        artifact_root=options.artifact_root,
        checkpoint_dir=options.checkpoint_dir,
        database_root=options.database_root,
        deployment=options.deployment,
        smoke=options.smoke,
        limit=options.limit,
        resume=options.resume,
        retry_failed=options.retry_failed,
        publish_partial=options.publish_partial,
        observations=observation_archive(options, plan),
    )
    return outcome.errors
