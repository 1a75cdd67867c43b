"""Which executor a plan asks for.

Source: collector.md section 4.
"""

from __future__ import annotations

import os

from fpmsdk.collect.engine_runtime import find_engine
from fpmsdk.collect.executor import EXECUTE_TIMEOUT_S, CellExecutor, CellLaunch, ExecutorFactory
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.local_executor import LocalExecutor
from fpmsdk.errors import MissingCapabilityError, OnboardError

LOCAL_TIMEOUT = "FPMSDK_LOCAL_TIMEOUT_SECONDS"


def executor_factory(name: str, *, faults: str = "") -> ExecutorFactory:
    """What makes the executor of each cell.

    Parameters
    ----------
    name: `local` or `fake`; plans for `kubernetes` and `slurm` are rendered, and not driven. `local` starts the engine
        that the environment variable `FPMSDK_LOCAL_ENGINE` names, or the one that is installed beside this package,
        and never the fake one by itself, so that made-up timings never pass for measured ones.
        `FPMSDK_LOCAL_TIMEOUT_SECONDS` is how long a cell may take, 14,400 s at most and by default.
    faults: fault words of the fake engine.

    Raises
    ------
    MissingCapabilityError: this release cannot drive it, or there is no engine.
    OnboardError: what is named is no engine, or no time.
    """
    if name == "fake":
        return lambda launch: _fake(launch, faults)
    if name == "local":
        engine, timeout_s = find_engine(os.environ), _timeout_s(os.environ.get(LOCAL_TIMEOUT))
        return lambda launch: LocalExecutor(launch, engine=engine, faults=faults, timeout_s=timeout_s)
    raise MissingCapabilityError(
        f"executor {name}: this release plans and renders its cells but does not run them; use "
        "--fpm-executor local or fake"
    )


def _fake(launch: CellLaunch, faults: str) -> CellExecutor:
    return FakeExecutor(launch, faults=faults)


def _timeout_s(given: str | None) -> float:
    if given is None:
        return EXECUTE_TIMEOUT_S
    if not (given.isascii() and given.isdecimal() and 0 < int(given) <= EXECUTE_TIMEOUT_S):
        raise OnboardError(
            f"{LOCAL_TIMEOUT}: expected whole seconds from 1 to {EXECUTE_TIMEOUT_S:.0f}, found {given!r}", LOCAL_TIMEOUT
        )
    return float(given)
