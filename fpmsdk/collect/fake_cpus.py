"""What a fake engine's processes say of the CPUs they may run on.

Source: collector.md section 4.4.
"""

from __future__ import annotations

import os
from typing import Any

from fpmsdk.collect.cpu_observation import CPU_SCHEMA, MEASUREMENTS
from fpmsdk.collect.fake_launch import FakeLaunch
from fpmsdk.collect.paths import PROVENANCE
from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_evidence

_LAUNCHER_PID = 1000


def write_cpu_files(launch: FakeLaunch) -> None:
    """Write one snapshot of the launcher, of every worker and of every scheduler. Raises `OSError`."""
    topology = launch.topology
    roles: list[tuple[str, dict[str, int]]] = [("launcher", {})]
    for dp in range(topology.dp):
        roles += [("worker", {"dp_rank": dp, "tp_rank": tp, "pp_rank": 0}) for tp in range(topology.tp)]
        roles.append(("scheduler", {"dp_rank": dp}))
    for number, (kind, ranks) in enumerate(roles):
        document = _snapshot(launch, kind, ranks, _LAUNCHER_PID + number)
        if kind == "launcher":
            document |= {
                "requested_cpus_per_task": int(launch.environment.get("FPM_SLURM_CPUS_PER_TASK", 0)) or None,
                "cpu_bind": launch.environment.get("FPM_SLURM_CPU_BIND"),
                "local_gpu_count": topology.gpus,
            }
        suffix = "".join(f"-{axis.removesuffix('_rank')}{rank}" for axis, rank in ranks.items())
        write_document(launch.results / f"fpm-cpu-{kind}{suffix}.json", document)


def _snapshot(launch: FakeLaunch, kind: str, ranks: dict[str, int], pid: int) -> dict[str, Any]:
    source = launch.results / PROVENANCE
    # All of them share the CPUs of this process.
    has_masks = hasattr(os, "sched_getaffinity")
    cpus = sorted(os.sched_getaffinity(0)) if has_masks else list(range(os.cpu_count() or 1))
    return {
        "schema_name": CPU_SCHEMA,
        "schema_version": 1,
        "kind": kind,
        "measurement": MEASUREMENTS[kind],
        **dict.fromkeys(("dp_rank", "tp_rank", "pp_rank")),
        **ranks,
        "collector_provenance": read_document(source),
        "execution_provenance": None,
        "provenance_source": file_evidence(source),
        "hostname": launch.results.name,
        "pid": pid,
        "observer_thread_id": pid,
        "main_thread_allowed_cpus": cpus,
        "threads": [{"tid": pid, "allowed_cpus": cpus}],
        "thread_ids_before": [pid],
        "thread_ids_after": [pid],
        "thread_errors": [],
        "errors": [],
        "status": "observed",
    }
