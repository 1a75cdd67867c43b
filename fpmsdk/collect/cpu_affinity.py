"""Whether the processes of an attempt had the CPUs that the plan asked for.

Masks at three moments are compared; they prove neither use nor exclusive cores. Source: collector.md section 4.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmsdk.collect.cpu_observation import CPU_GLOB, CPU_SCHEMA, MEASUREMENTS, check_snapshot
from fpmsdk.collect.faults import fault, require
from fpmsdk.collect.worker_files import observation_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import CollectionError, EvidenceError

if TYPE_CHECKING:
    from fpmsdk.collect.artifact import NativeCollection
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan

_RANKS = ("dp_rank", "tp_rank", "pp_rank")
_SCOPE = (
    "logical CPUs that threads may run on, as seen when the launcher started, workers had warmed up and schedulers "
    "were initialised; it says nothing of load, exclusive cores, NUMA or later forwards"
)

Record = dict[str, Any]


def inspect_cpu_affinity(
    plan: CollectionPlan, cell: Cell, raw_root: str | Path, collection: NativeCollection, *, expected_nodes: int | None
) -> dict[str, Any]:
    """Inspect the CPU observations of an attempt.

    Parameters
    ----------
    plan, cell: the frozen CPU policy and the ranks.
    raw_root, collection: the attempt.
    expected_nodes: units of the launch; None when the launch files do not say.

    Returns
    -------
    `status` (`failed`, `incomplete` or `qualified`), the policy, `missing_evidence`, `failures`, `observations` and
    `nodes`. Whether the verdict counts is in `policy_required`.

    Source: collector.md section 4.4.
    """
    inspection = _Inspection(plan, cell, collection, expected_nodes)
    for path in sorted(Path(raw_root).rglob(CPU_GLOB)):
        inspection.read(path)
    inspection.compare_ranks()
    nodes = [inspection.node(host) for host in inspection.hosts()]
    if not inspection.launchers:
        inspection.missing.append("no launcher observation at all")
    missing, failures = sorted(set(inspection.missing)), sorted(set(inspection.failures))
    return {
        "status": "failed" if failures else "incomplete" if missing else "qualified",
        "policy_required": inspection.is_required,
        "policy": {"executor": plan.executor, "cpus_per_task": inspection.cpus, "cpu_bind": inspection.binding},
        "expected_nodes": expected_nodes,
        "missing_evidence": missing,
        "failures": failures,
        "observations": inspection.observations,
        "nodes": nodes,
        "scope": _SCOPE,
    }


class _Inspection:
    """The observations of an attempt by role, and what they lack or contradict."""

    def __init__(
        self, plan: CollectionPlan, cell: Cell, collection: NativeCollection, expected_nodes: int | None
    ) -> None:
        self.cpus, self.binding = plan.options.get("slurm_cpus_per_task"), plan.options.get("slurm_cpu_bind")
        self.is_required = plan.executor == "slurm" and (self.cpus, self.binding) != (None, None)
        self.identity = {
            "plan_sha256": plan.sha256,
            "cell_id": cell.cell_id,
            "attempt_id": collection.attempt_id,
        }
        sizes = cell.topology
        self.ranks = {(dp, tp, pp) for dp in range(sizes.dp) for tp in range(sizes.tp) for pp in range(sizes.pp)}
        self.num_schedulers = sizes.dp
        self.expected_nodes = expected_nodes
        self.workers: dict[tuple[int, ...], Record] = {}
        self.schedulers: dict[int, Record] = {}
        self.launchers: dict[str, Record] = {}
        self.processes: set[tuple[Any, ...]] = set()
        self.observations: list[Record] = []
        self.missing: list[str] = []
        self.failures: list[str] = []
        self._check_policy()

    def _check_policy(self) -> None:
        is_policy = type(self.cpus) is int and self.cpus >= 1 and self.binding in ("cores", "none")
        if not self.is_required:
            self.missing.append("the plan froze no CPU policy that observations could qualify")
        elif not is_policy:
            self.failures.append(
                f"frozen CPU policy: expected positive cpus_per_task and cpu_bind cores or none, found {self.cpus!r} "
                f"and {self.binding!r}"
            )
        if self.is_required and self.expected_nodes is None:
            self.missing.append("the launch files do not say how many nodes were asked for")

    def read(self, path: Path) -> None:
        """Take one observation file in; a fault of it is a failure of the inspection."""
        try:
            record = observation_document(path) | {"source": file_evidence(path)}
            self.observations.append(record)
            self._sort_in(record, path.name)
        except (CollectionError, EvidenceError) as error:
            self.failures.append(f"{path.name}: {error}")

    def _sort_in(self, record: Record, name: str) -> None:
        for field, accepted in (("schema_name", CPU_SCHEMA), ("schema_version", 1)):
            value = record.get(field)
            require(type(value) is type(accepted) and value == accepted, field, value, repr(accepted))
        provenance = record.get("collector_provenance")
        is_own = isinstance(provenance, dict) and self.identity.items() <= provenance.items()
        require(is_own, "collector_provenance", provenance, f"{self.identity}, of this attempt")
        kind, measurement = record.get("kind"), record.get("measurement")
        require(kind in MEASUREMENTS, "kind", kind, ", ".join(MEASUREMENTS))
        require(measurement == MEASUREMENTS[str(kind)], "measurement", measurement, MEASUREMENTS[str(kind)])
        check_snapshot(record)
        process = (kind, record["hostname"], record["pid"])
        require(process not in self.processes, "pid", process, "one observation a process and role")
        self.processes.add(process)
        suffix = self._place(str(kind), record)
        require(name == f"fpm-cpu-{kind}{suffix}.json", "file name", name, f"fpm-cpu-{kind}{suffix}.json")
        if record["status"] != "observed":
            rank = tuple(record.get(axis) for axis in _RANKS)
            self.missing.append(f"{kind} {rank} on {record['hostname']}: its snapshot is {record['status']}")

    def _place(self, kind: str, record: Record) -> str:
        # Under its role; the suffix that the name of its file must have.
        rank = tuple(record.get(axis) for axis in _RANKS)
        if kind == "worker":
            is_whole = all(type(value) is int for value in rank)
            if not is_whole or rank not in self.ranks or rank in self.workers:
                raise fault("rank", rank, "a rank of the topology, once")
            self.workers[rank] = record
            return "-dp{}-tp{}-pp{}".format(*rank)
        if kind == "scheduler":
            dp = rank[0]
            if type(dp) is not int or not 0 <= dp < self.num_schedulers or rank[1:] != (None, None):
                raise fault("rank", rank, "a dp_rank of the topology alone")
            require(dp not in self.schedulers, "dp_rank", dp, "one scheduler a dp_rank")
            self.schedulers[dp] = record
            return f"-dp{dp}"
        host = record["hostname"]
        require(rank == (None, None, None), "rank", rank, "no rank of a launcher")
        require(host not in self.launchers, "hostname", host, "one launcher a host")
        self.launchers[host] = record
        return ""

    def compare_ranks(self) -> None:
        """Ranks without an observation, schedulers away from their workers, and hosts that the launch has not."""
        if unseen := sorted(self.ranks - self.workers.keys()):
            self.missing.append(f"no worker observation of ranks {unseen}")
        if unseen_dp := sorted(set(range(self.num_schedulers)) - self.schedulers.keys()):
            self.missing.append(f"no scheduler observation of DP ranks {unseen_dp}")
        for dp, scheduler in self.schedulers.items():
            worker = self.workers.get((dp, 0, 0))
            if worker is not None and worker["hostname"] != scheduler["hostname"]:
                self.failures.append(
                    f"scheduler of DP rank {dp} ran on {scheduler['hostname']}, its worker on {worker['hostname']}"
                )
        if self.expected_nodes is not None and self.has_all_workers:
            hosts = {worker["hostname"] for worker in self.workers.values()}
            has_all_launchers = len(self.launchers) == len(hosts)
            if len(hosts) != self.expected_nodes or (has_all_launchers and self.launchers.keys() != hosts):
                self.failures.append(
                    f"workers ran on {sorted(hosts)}, launchers on {sorted(self.launchers)}; {self.expected_nodes} "
                    "nodes were asked for"
                )
            if len(self.launchers) > self.expected_nodes:
                self.failures.append(f"{len(self.launchers)} launchers on {self.expected_nodes} nodes")

    @property
    def has_all_workers(self) -> bool:
        """Whether every rank has an observation."""
        return len(self.workers) == len(self.ranks)

    def hosts(self) -> list[str]:
        """Every host that anything was observed on."""
        observed = [*self.workers.values(), *self.schedulers.values(), *self.launchers.values()]
        return sorted({record["hostname"] for record in observed})

    def node(self, host: str) -> dict[str, Any]:
        """What was observed on a host, held against the pool of its launcher."""
        workers = [one for one in self.workers.values() if one["hostname"] == host]
        schedulers = [one for one in self.schedulers.values() if one["hostname"] == host]
        launcher = self.launchers.get(host)
        node: dict[str, Any] = {
            "hostname": host,
            "worker_ranks": [{axis: one[axis] for axis in _RANKS} for one in workers],
            "scheduler_dp_ranks": [one["dp_rank"] for one in schedulers],
            "launcher_allowed_cpus": None if launcher is None else launcher["main_thread_allowed_cpus"],
        }
        if launcher is None:
            self.missing.append(f"no launcher observation of {host}")
            return node
        if not workers and self.has_all_workers:
            self.failures.append(f"no worker ran beside the launcher of {host}")
        if self.is_required:
            self._check_launcher(host, launcher, len(schedulers))
        self._check_gpus(host, launcher, len(workers))
        self._check_pool(host, launcher, [launcher, *workers, *schedulers])
        masks = [one["main_thread_allowed_cpus"] for one in schedulers]
        if masks and all(masks):
            has_room = can_run_at_once(masks)
            node["scheduler_main_threads_have_distinct_cpu_capacity"] = has_room
            if not has_room:
                self.failures.append(f"the schedulers of {host} cannot run on a CPU each")
        return node

    def _check_launcher(self, host: str, launcher: Record, num_schedulers: int) -> None:
        asked = launcher.get("requested_cpus_per_task")
        if type(asked) is not int or (asked, launcher.get("cpu_bind")) != (self.cpus, self.binding):
            self.failures.append(
                f"launcher of {host}: another CPU policy than {self.cpus} CPUs, bound to {self.binding}"
            )
        if type(self.cpus) is not int:
            return
        pool = launcher["main_thread_allowed_cpus"]
        if pool and len(pool) < self.cpus:
            self.failures.append(f"launcher of {host}: {len(pool)} CPUs, {self.cpus} were asked for")
        if self.cpus < num_schedulers:
            self.failures.append(f"launcher of {host}: {self.cpus} CPUs for {num_schedulers} schedulers")

    def _check_gpus(self, host: str, launcher: Record, num_workers: int) -> None:
        gpus = launcher.get("local_gpu_count")
        if type(gpus) is not int or gpus < 1:
            self.failures.append(f"launcher of {host}: local_gpu_count must be a positive integer, found {gpus!r}")
        elif gpus != num_workers and self.has_all_workers:
            self.failures.append(f"launcher of {host}: {gpus} GPUs for {num_workers} workers")
        if self.expected_nodes is not None and gpus != len(self.ranks) / self.expected_nodes:
            self.failures.append(
                f"launcher of {host}: {gpus!r} GPUs, the launch gives a node {len(self.ranks) / self.expected_nodes:g}"
            )

    def _check_pool(self, host: str, launcher: Record, processes: list[Record]) -> None:
        pool = set(launcher["main_thread_allowed_cpus"])
        if not pool:
            return
        for one in processes:
            if not set(one["main_thread_allowed_cpus"]) <= pool:
                self.failures.append(f"{one['kind']} on {host}: its main thread may leave the CPUs of the launcher")
            self.failures += [
                f"{one['kind']} on {host}: thread {thread['tid']} may leave the CPUs of the launcher"
                for thread in one["threads"]
                if not set(thread["allowed_cpus"]) <= pool
            ]


def can_run_at_once(masks: list[list[int]]) -> bool:
    """Whether every thread can have a CPU of its own; masks may overlap.

    >>> can_run_at_once([[0, 1], [0]]), can_run_at_once([[0], [0]])
    (True, False)
    """
    holders: dict[int, int] = {}

    def place(thread: int, tried: set[int]) -> bool:
        for cpu in masks[thread]:
            if cpu not in tried:
                tried.add(cpu)
                if cpu not in holders or place(holders[cpu], tried):
                    holders[cpu] = thread
                    return True
        return False

    return all(place(thread, set()) for thread in range(len(masks)))
