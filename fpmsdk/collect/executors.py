"""Which executor a plan asks for.

Source: collector.md section 4.
"""

from __future__ import annotations

import os
import shlex

from fpmsdk.collect.executor import CellExecutor, CellLaunch, ExecutorFactory
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.local_executor import LocalExecutor
from fpmsdk.errors import MissingCapabilityError

LOCAL_ENGINE = "FPMSDK_LOCAL_ENGINE"


def executor_factory(name: str, *, faults: str = "") -> ExecutorFactory:
    """What makes the executor of each cell.

    Parameters
    ----------
    name: `local` or `fake`; plans for `kubernetes` and `slurm` are rendered, and not driven. `local` starts the engine
        whose command the environment variable `FPMSDK_LOCAL_ENGINE` holds; it has no default, so that made-up timings
        never pass for measured ones.
    faults: fault words of the fake engine.

    Raises
    ------
    MissingCapabilityError: this release cannot drive it.
    """
    if name == "fake":
        return lambda launch: _fake(launch, faults)
    if name == "local":
        engine = tuple(shlex.split(os.environ.get(LOCAL_ENGINE, "")))
        if not engine:
            raise MissingCapabilityError(
                f"executor local: {LOCAL_ENGINE} is not set; give the command that stands in for "
                "`python3 -m dynamo.vllm`, or use the executor fake to try the stages with made-up timings"
            )
        return lambda launch: LocalExecutor(launch, engine=engine, faults=faults)
    raise MissingCapabilityError(
        f"executor {name}: this release plans and renders its cells but does not run them; use "
        "--fpm-executor local or fake"
    )


def _fake(launch: CellLaunch, faults: str) -> CellExecutor:
    return FakeExecutor(launch, faults=faults)
