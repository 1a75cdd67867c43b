"""`python -m fpmsdk.collect`: plan a campaign, or run it.

Source: collector.md sections 1.1 and 2.4.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from fpmsdk.collect.observed_campaign import requested_observation
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.planner import build_plan
from fpmsdk.collect.repeatability_entry import run_repetition
from fpmsdk.collect.run import chosen_executor, run_collector
from fpmsdk.errors import FpmSdkError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the collector.

    Returns
    -------
    0; 1 when the campaign has errors, which are printed as JSON; 2 when its input is wrong; 130 when interrupted.
    """
    try:
        options = parse_arguments(sys.argv[1:] if argv is None else argv)
        if options.repeatability is not None:
            return run_repetition(options, chosen_executor)
        plan = build_plan(options, runtime_observation=requested_observation(options))
        if options.plan_only:
            print(json.dumps(plan.document, indent=2, sort_keys=True))
            return 0
        errors = run_collector(options, plan)
    except (FpmSdkError, OSError) as fault:
        print(fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the running cell was cleaned up, and --resume continues the campaign", file=sys.stderr)
        return 130
    if errors:
        print(json.dumps(errors, indent=2, sort_keys=True), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
