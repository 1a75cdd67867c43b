"""An executor that runs the engine as a process of this machine.

Source: collector.md section 4.3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.executor import EXECUTE_TIMEOUT_S, READY_TIMEOUT_S, CellLaunch
from fpmsdk.collect.fake_executor import fake_environment, fake_version
from fpmsdk.collect.local_observers import observer_environment
from fpmsdk.collect.local_process import OwnedProcess
from fpmsdk.collect.shell_words import literal_exports
from fpmsdk.collect.unit_folder import UnitFolder
from fpmsdk.errors import CollectionError

UNIT = "node0000"
FAKE_ENGINE = (sys.executable, "-m", "fpmsdk.fake_engine")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class LocalExecutor:
    """Runs one cell as a process group of this machine; only what carries the cell's token is ever ended.

    Parameters
    ----------
    launch: the cell and its launch files.
    engine: the words that stand in for `python3 -m dynamo.vllm`; the fake engine by default.
    faults: fault words of the fake engine.
    grace_s: seconds that the engine has to end when it is asked to.
    """

    def __init__(
        self, launch: CellLaunch, *, engine: Sequence[str] = FAKE_ENGINE, faults: str = "", grace_s: float = 30.0
    ) -> None:
        self._launch = launch
        self._engine = engine
        self._faults = faults
        self._unit = UnitFolder(launch, UNIT)
        self._process = OwnedProcess(launch.folder / "local-owner.json", grace_s=grace_s)

    def engine_version(self) -> str:
        """The version that the engine reports."""
        return "0.0.0" if "--wrong-version" in self._faults else fake_version(self._launch)

    def engine_environment(self) -> dict[str, str]:
        """Variables of the engine besides those of this process and of `run.sh`."""
        # The engine starts in another folder, where a package that is not installed would not be found.
        found = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
        places = os.pathsep.join(place for place in found if place)
        environment = {**fake_environment(self._launch, self._unit, faults=self._faults), "PYTHONPATH": places}
        return environment | observer_environment(self._unit, places)

    def apply(self) -> None:
        """Claim the process of the cell, before there is one."""
        self._process.claim()

    def wait_ready(self, expected_nodes: int, timeout_seconds: float = READY_TIMEOUT_S) -> list[str]:
        """This machine is the one unit. Raises `CollectionError` when more are needed."""
        if expected_nodes != 1:
            raise CollectionError(f"executor local has one node, the cell needs {expected_nodes}")
        return self.pods()

    def pods(self) -> list[str]:
        """The one unit."""
        return [UNIT]

    def stage(self, units: Sequence[str], files: Sequence[Path]) -> None:
        """Copy files beside the engine."""
        self._unit.stage(files)

    def prepare_attempt(
        self,
        units: Sequence[str],
        *,
        cell_id: str,
        plan_sha256: str,
        attempt_id: str,
        expected_backend_version: str | None = None,
    ) -> None:
        """Empty the results and write the provenance."""
        self._unit.prepare(
            cell_id=cell_id,
            plan_sha256=plan_sha256,
            attempt_id=attempt_id,
            label=expected_backend_version,
            found_version=self.engine_version(),
        )

    def record_points(self, units: Sequence[str], receipt: Mapping[str, Any]) -> None:
        """Write the receipt of the points."""
        self._unit.record_points(receipt)

    def execute(self, units: Sequence[str], timeout_seconds: float = EXECUTE_TIMEOUT_S) -> None:
        """Run the engine to its end. Raises `CollectionError` when it fails or takes too long."""
        inherited = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        exports = literal_exports((self._launch.folder / "run.sh").read_text())
        logs = (self._unit.logs / f"{UNIT}.run.stdout.log", self._unit.logs / f"{UNIT}.run.stderr.log")
        code = self._process.run(
            self._unit.command(self._engine),
            {**inherited, **exports, **self.engine_environment()},
            self._unit.work,
            logs,
            timeout_seconds,
        )
        if code:
            last = logs[1].read_text(errors="replace").strip().splitlines()[-1:]
            raise CollectionError(f"{UNIT}: the engine ended with exit code {code}: {' '.join(last) or logs[1]}")

    def collect(self, units: Sequence[str], *, require_benchmark: bool = True) -> None:
        """Results are where they belong already; require that there are some."""
        if require_benchmark:
            self._unit.require_results()

    def result_manifest(self, unit: str) -> dict[str, dict[str, int | str]]:
        """Size and digest of every result."""
        return self._unit.manifest()

    def cleanup(self) -> None:
        """End the engine of this cell, also one that an earlier process started."""
        self._process.end()
