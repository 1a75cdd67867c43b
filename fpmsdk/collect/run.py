"""Running the campaign of a plan as its options say, on the executor that it names.

Source: collector.md section 2.4.
"""

from __future__ import annotations

import os
from typing import Any

from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.executor import ExecutorFactory
from fpmsdk.collect.executors import executor_factory
from fpmsdk.collect.fake_launch import FAULTS
from fpmsdk.collect.observed_campaign import observation_archive
from fpmsdk.collect.options import CollectorOptions
from fpmsdk.collect.plan import CollectionPlan


def chosen_executor(name: str) -> ExecutorFactory:
    """What makes the executor of each cell; faults of a fake engine are those that the environment asks for.

    Raises
    ------
    MissingCapabilityError: this release cannot drive it.
    """
    return executor_factory(name, faults=os.environ.get(FAULTS, ""))


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
        executor=chosen_executor(plan.executor),
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
