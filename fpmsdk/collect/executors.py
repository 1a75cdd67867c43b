"""Which executor a plan asks for.

Source: collector.md section 4.
"""

from __future__ import annotations

from fpmsdk.collect.executor import CellExecutor, CellLaunch, ExecutorFactory
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.local_executor import LocalExecutor
from fpmsdk.errors import MissingCapabilityError


def executor_factory(name: str, *, faults: str = "") -> ExecutorFactory:
    """What makes the executor of each cell.

    Parameters
    ----------
    name: `local` or `fake`; plans for `kubernetes` and `slurm` are rendered, and not driven.
    faults: fault words of the fake engine.

    Raises
    ------
    MissingCapabilityError: this release cannot drive it.
    """
    if name == "fake":
        return lambda launch: _fake(launch, faults)
    if name == "local":
        return lambda launch: LocalExecutor(launch, faults=faults)
    raise MissingCapabilityError(
        f"executor {name}: this release plans and renders its cells but does not run them; use "
        "--fpm-executor local or fake"
    )


def _fake(launch: CellLaunch, faults: str) -> CellExecutor:
    return FakeExecutor(launch, faults=faults)
