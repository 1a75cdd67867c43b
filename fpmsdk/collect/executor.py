"""What a campaign asks of the place where a cell runs: the same methods for every transport.

Source: collector.md section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fpmsdk.collect.cells import Cell

if TYPE_CHECKING:
    from fpmsdk.collect.plan import CollectionPlan

READY_TIMEOUT_S = 900.0
EXECUTE_TIMEOUT_S = 14400.0


@dataclass(frozen=True)
class CellLaunch:
    """What an executor is made for: one cell whose launch files are rendered.

    Parameters
    ----------
    plan: the frozen plan of the campaign.
    cell: the cell to measure.
    folder: `cells/<cell_id>` of the campaign, with `run.sh`, `fpm_env.sh`, ... and, once collected, `raw/` and `logs/`.
    num_nodes: units that run together.
    gpus_per_node: GPUs of each unit.
    """

    plan: CollectionPlan
    cell: Cell
    folder: Path
    num_nodes: int
    gpus_per_node: int


class CellExecutor(Protocol):
    """Runs one cell. A unit is a pod or a node; its folder `/results` becomes `raw/<unit>` of the cell.

    `cleanup` may be called at any time, also for what an earlier process left behind; it ends only what the campaign
    owns, and raises when it cannot verify that nothing is left.
    """

    def apply(self) -> None:
        """Ask for the resources of the cell."""

    def wait_ready(self, expected_nodes: int, timeout_seconds: float = READY_TIMEOUT_S) -> list[str]:
        """Wait until exactly `expected_nodes` units are there; their names."""

    def pods(self) -> list[str]:
        """The units that exist now."""

    def stage(self, units: Sequence[str], files: Sequence[Path]) -> None:
        """Copy files to every unit and verify their digests there."""

    def prepare_attempt(
        self,
        units: Sequence[str],
        *,
        cell_id: str,
        plan_sha256: str,
        attempt_id: str,
        expected_backend_version: str | None = None,
    ) -> None:
        """Empty `/results` of every unit and write `collector-provenance.json` there.

        The versions are those that the unit itself reports; `expected_backend_version` is compared with them.
        """

    def record_points(self, units: Sequence[str], receipt: Mapping[str, Any]) -> None:
        """Hash the staged points in every unit, compare with the receipt's `sha256`, and write it to `/results`."""

    def execute(self, units: Sequence[str], timeout_seconds: float = EXECUTE_TIMEOUT_S) -> None:
        """Run the engine in all units together, and wait for its end."""

    def collect(self, units: Sequence[str], *, require_benchmark: bool = True) -> None:
        """Copy `/results` of every unit to `raw/<unit>`; every digest must agree."""

    def result_manifest(self, unit: str) -> dict[str, dict[str, int | str]]:
        """Size and SHA-256 of every file that is in `/results` of a unit now, by relative path."""
        ...

    def cleanup(self) -> None:
        """End and remove everything this cell has asked for."""


ExecutorFactory = Callable[[CellLaunch], CellExecutor]
