"""An executor that runs the engine as a process of this machine.

Source: collector.md section 4.3.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.engine_results import Progress, results_progress
from fpmsdk.collect.engine_runtime import FAKE_MODULE, EngineRuntime
from fpmsdk.collect.environment import FINALIZATION
from fpmsdk.collect.executor import EXECUTE_TIMEOUT_S, READY_TIMEOUT_S, CellLaunch
from fpmsdk.collect.fake_executor import fake_environment, fake_version
from fpmsdk.collect.local_checks import metric_ports, require_ports, require_space
from fpmsdk.collect.local_observers import observer_environment
from fpmsdk.collect.local_process import TIMED_OUT, OwnedProcess
from fpmsdk.collect.paths import ranks_of_node
from fpmsdk.collect.unit_folder import UnitFolder
from fpmsdk.errors import CollectionError

UNIT = "node0000"
FAKE_ENGINE = EngineRuntime((sys.executable, "-m", FAKE_MODULE), None, None)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_FINALIZATION_S = 120.0
# One node needs nobody to find it: no etcd and no NATS are started, unless the user has some.
_ALONE = {"DYN_DISCOVERY_BACKEND": "mem", "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp"}


class LocalExecutor:
    """Runs one cell as a process group of this machine; only what belongs to the cell is ever ended.

    The engine may be of any device: it gets the variables of this process, those of the launch files and nothing else
    about the machine.

    Parameters
    ----------
    launch: the cell and its launch files.
    engine: what stands in for `python3 -m dynamo.vllm`; the fake engine by default.
    faults: fault words of the fake engine.
    grace_s: seconds that the engine has to end when it is asked to.
    timeout_s: seconds that the engine has in all, where that is less than a caller allows.
    poll_s: seconds between two looks at its results.
    """

    def __init__(
        self,
        launch: CellLaunch,
        *,
        engine: EngineRuntime = FAKE_ENGINE,
        faults: str = "",
        grace_s: float = 30.0,
        timeout_s: float = EXECUTE_TIMEOUT_S,
        poll_s: float = 2.0,
    ) -> None:
        self._launch = launch
        self._engine = engine
        self._faults = faults
        self._unit = UnitFolder(launch, UNIT)
        self._process = OwnedProcess(launch.folder / "local-owner.json", grace_s=grace_s)
        self._timeout_s = timeout_s
        self._poll_s = poll_s

    def engine_version(self) -> str:
        """The version of the installed engine; the fake one reports what the plan expects."""
        if self._engine.vllm_version is not None:
            return self._engine.vllm_version
        return "0.0.0" if "--wrong-version" in self._faults else fake_version(self._launch)

    def engine_environment(self) -> dict[str, str]:
        """Variables of the engine: those of this process but for proxies, then those of `run.sh`."""
        own = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        if "ETCD_ENDPOINTS" not in own:
            own = {**_ALONE, **own}
        own |= self._unit.environment()
        own.setdefault("DYN_FPM_WORKER_ID", f"{self._launch.cell.cell_id}-{UNIT}")
        if not self._engine.is_fake:
            return own | observer_environment(self._unit, own.get("PYTHONPATH", ""))
        # It starts in another folder, where a package that is not installed would not be found. A real engine has its
        # own packages, and must not get ours.
        found = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
        places = os.pathsep.join(place for place in found if place)
        own |= {**fake_environment(self._launch, self._unit, faults=self._faults), "PYTHONPATH": places}
        return own | observer_environment(self._unit, places)

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
        """Empty the results and write the provenance, with the versions that are installed."""
        self._unit.prepare(
            cell_id=cell_id,
            plan_sha256=plan_sha256,
            attempt_id=attempt_id,
            label=expected_backend_version,
            found_version=self.engine_version(),
            dynamo_version=self._engine.dynamo_version,
        )

    def record_points(self, units: Sequence[str], receipt: Mapping[str, Any]) -> None:
        """Write the receipt of the points."""
        self._unit.record_points(receipt)

    def execute(self, units: Sequence[str], timeout_seconds: float = EXECUTE_TIMEOUT_S) -> None:
        """Run the engine until its results are complete, and end it.

        Raises
        ------
        CollectionError: no room or port for it; it ends with an error, before its results are complete, or takes too
            long; a result is not what was asked for.
        """
        environment = self.engine_environment()
        ranks = tuple(ranks_of_node(0, data_parallel=self._launch.cell.topology.dp, nodes=1))
        require_space(self._launch.folder)
        if not self._engine.is_fake:
            require_ports(metric_ports(environment, ranks))
        logs = (self._unit.logs / f"{UNIT}.run.stdout.log", self._unit.logs / f"{UNIT}.run.stderr.log")
        allowed_s = min(timeout_seconds, self._timeout_s)
        watch = _Watch(self._unit.results, self._launch.cell.workload_kind, ranks, environment)
        code = self._process.run(
            self._unit.command(self._engine.command),
            environment,
            self._unit.work,
            logs,
            allowed_s,
            is_finished=watch.is_finished,
            poll_s=self._poll_s,
        )
        if code == TIMED_OUT:
            raise CollectionError(
                f"{UNIT}: exit code {code}: the engine was ended after {allowed_s:g} s; see {logs[1]}"
            )
        if code:
            raise CollectionError(f"{UNIT}: the engine ended with exit code {code}: {_last_line(logs)}")

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


class _Watch:
    """Whether an engine is done; its merged results may take only so long after those of all ranks."""

    def __init__(self, results: Path, phase: str, ranks: Sequence[int], environment: Mapping[str, str]) -> None:
        self._results = results
        self._phase = phase
        self._ranks = ranks
        self._allowed_s = float(environment.get(FINALIZATION, _FINALIZATION_S))
        self._complete_since: float | None = None

    def is_finished(self) -> bool:
        progress = results_progress(self._results, phase=self._phase, ranks=self._ranks)
        if progress is Progress.RANKS:
            now = time.monotonic()
            self._complete_since = self._complete_since or now
            if now - self._complete_since > self._allowed_s:
                raise CollectionError(
                    f"{UNIT}: exit code {TIMED_OUT}: every rank has written its results, but the engine has not merged "
                    f"them for {self._allowed_s:g} s; the results are kept, and --resume takes them over"
                )
        return progress is Progress.COMPLETE


def _last_line(logs: Sequence[Path]) -> str:
    # The fault of a plain engine is the last thing that it says; a real one says more before, in the log.
    last = logs[1].read_text(errors="replace").strip().splitlines()[-1:]
    return f"{' '.join(last)[:500]} (see {logs[1]})" if last else f"see {logs[1]} and {logs[0]}"
