"""The collector's own entry, in this process: its options and its frozen plan.

What is planned and how a campaign goes on is in `fpmsdk.collect`. Source: onboarding.md section 5 (collection gate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fpmsdk.collect.observed_campaign import requested_observation
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
