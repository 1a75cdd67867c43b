"""An executor that runs the fake engine inside this process: all states of a campaign, and no waiting.

Source: collector.md sections 4 and 11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect import fake_launch
from fpmsdk.collect.executor import EXECUTE_TIMEOUT_S, READY_TIMEOUT_S, CellLaunch
from fpmsdk.collect.fake_engine import run_fake_engine
from fpmsdk.collect.paths import rank_path, ranks_of_node
from fpmsdk.collect.provenance import PROVENANCE_FILE
from fpmsdk.collect.shell_words import literal_exports
from fpmsdk.collect.unit_folder import UnitFolder
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.errors import CollectionError

_OWNED = "fake-owner.json"


class FakeExecutor:
    """Runs one cell with the fake engine.

    Parameters
    ----------
    launch: the cell and its launch files.
    faults: fault words of the fake engine, as `--fail-at mid --drift 1.08`.
    environment: further variables of the engine, as `FPMSDK_FAKE_NUM_BLOCKS`.
    """

    def __init__(self, launch: CellLaunch, *, faults: str = "", environment: Mapping[str, str] | None = None) -> None:
        self._launch = launch
        self._faults = faults
        self._environment = dict(environment or {})
        self._units = [UnitFolder(launch, f"node{node:04d}") for node in range(launch.num_nodes)]

    def apply(self) -> None:
        """Claim the cell."""
        write_document(self._launch.folder / _OWNED, {"units": self.pods()})

    def wait_ready(self, expected_nodes: int, timeout_seconds: float = READY_TIMEOUT_S) -> list[str]:
        """The units, at once."""
        if expected_nodes != len(self._units):
            raise CollectionError(f"expected {expected_nodes} units, the cell has {len(self._units)}")
        return self.pods()

    def pods(self) -> list[str]:
        """The units."""
        return [unit.unit for unit in self._units]

    def stage(self, units: Sequence[str], files: Sequence[Path]) -> None:
        """Copy files into every unit."""
        for unit in self._of(units):
            unit.stage(files)

    def prepare_attempt(
        self,
        units: Sequence[str],
        *,
        cell_id: str,
        plan_sha256: str,
        attempt_id: str,
        expected_backend_version: str | None = None,
    ) -> None:
        """Empty every unit and write its provenance."""
        version = "0.0.0" if "--wrong-version" in self._faults else fake_version(self._launch)
        for unit in self._of(units):
            unit.prepare(
                cell_id=cell_id,
                plan_sha256=plan_sha256,
                attempt_id=attempt_id,
                label=expected_backend_version,
                found_version=version,
            )

    def record_points(self, units: Sequence[str], receipt: Mapping[str, Any]) -> None:
        """Write the receipt of the points into every unit."""
        for unit in self._of(units):
            unit.record_points(receipt)

    def execute(self, units: Sequence[str], timeout_seconds: float = EXECUTE_TIMEOUT_S) -> None:
        """Run the engine. Raises `CollectionError` when it fails."""
        first = self._of(units)[0]
        command = first.command(())
        environment = fake_environment(self._launch, first, faults=self._faults) | self._environment
        code = run_fake_engine(command, environment)
        self._spread(self._of(units))
        if code:
            raise CollectionError(f"{first.unit}: the engine ended with exit code {code}")

    def collect(self, units: Sequence[str], *, require_benchmark: bool = True) -> None:
        """Results are where they belong already; require that there are some."""
        if require_benchmark:
            self._of(units)[0].require_results()

    def result_manifest(self, unit: str) -> dict[str, dict[str, int | str]]:
        """Size and digest of every result of a unit."""
        return self._of([unit])[0].manifest()

    def cleanup(self) -> None:
        """Give the cell back. Raises `CollectionError` where the launch is told to fail at its teardown."""
        owned = self._launch.folder / _OWNED
        if "--fail-at teardown" in self._faults and owned.exists():
            raise CollectionError(f"{self._launch.cell.cell_id}: the engine does not end")
        owned.unlink(missing_ok=True)

    def _of(self, units: Sequence[str]) -> list[UnitFolder]:
        return [unit for unit in self._units if unit.unit in units]

    def _spread(self, units: Sequence[UnitFolder]) -> None:
        # The engine ran on one node; files of ranks belong to the node that hosts them.
        first, topology = units[0], self._launch.cell.topology
        output = first.results / "benchmark.json"
        for node, unit in enumerate(units[1:], 1):
            for rank in ranks_of_node(node, data_parallel=topology.dp, nodes=len(units)) if topology.dp > 1 else ():
                result = Path(rank_path(str(output), rank))
                for file in [result, *first.results.glob(f"fpm-*-dp{rank}[-.]*")]:
                    if file.exists():
                        file.rename(unit.results / file.name)


def fake_version(launch: CellLaunch) -> str:
    """The version that a fake engine reports: what was observed before planning, else the label."""
    return launch.plan.runtime_backend_version or launch.plan.label


def fake_environment(launch: CellLaunch, unit: UnitFolder, *, faults: str) -> dict[str, str]:
    """The variables of a fake engine: those of `run.sh`, and what stands in for a checkpoint."""
    model = launch.folder / "local-runtime" / "fake-model.json"
    model.parent.mkdir(exist_ok=True)
    capability = launch.plan.capability
    config = (capability.get("model_config") or {}).get("payload") or {}
    known = {name: capability.get(name) for name in ("is_moe", "architecture")}
    profile = launch.plan.fpm_profile
    if profile is not None:
        known["revision"] = profile["model_revision"]
    write_document(model, {"config": config, "capability": known})
    attempt = read_document(unit.results / PROVENANCE_FILE)["attempt_id"]
    return {
        **literal_exports((launch.folder / "run.sh").read_text()),
        "DYN_FPM_WORKER_ID": f"{launch.cell.cell_id}-{unit.unit}",
        fake_launch.MODEL_FILE: str(model),
        fake_launch.LAUNCH: attempt,
        fake_launch.VERSION: fake_version(launch),
        fake_launch.FAULTS: faults,
    }
