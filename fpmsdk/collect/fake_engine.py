"""An engine that measures nothing: it accepts the command of a real one and writes all that a real one would.

Times come from a law with noise and graph steps, at once. Source: collector.md section 11.1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

from fpmsdk.collect.fake_launch import read_launch
from fpmsdk.collect.fake_sweep import Sweep
from fpmsdk.collect.fake_workers import write_resolved_config, write_worker_files
from fpmsdk.errors import OnboardError


def run_fake_engine(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure what a command asks for.

    Parameters
    ----------
    words: the arguments of the engine; paths are those of this machine.
    environment: the variables of the launch, with the `FPMSDK_FAKE_*` ones.

    Returns
    -------
    0, or 1 for a launch that was told to fail.

    Raises
    ------
    OnboardError: the command cannot be understood. OSError: a result cannot be written.
    """
    launch = read_launch(words, environment)
    faults = launch.faults
    if faults.fail_at == "launch":
        return 1
    write_resolved_config(launch)
    while faults.hang:
        time.sleep(0.1)
    write_worker_files(launch)
    Sweep(launch).write()
    return 1 if faults.fail_at == "mid" else 0


def main() -> None:
    """Run as `python -m fpmsdk.fake_engine`; ends with exit code 2 for a command that cannot be understood."""
    try:
        sys.exit(run_fake_engine(sys.argv[1:], os.environ))
    except OnboardError as fault:
        print(fault, file=sys.stderr)
        sys.exit(2)
