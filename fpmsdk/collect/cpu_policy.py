"""How many CPUs the task of a Slurm node gets, and how they are bound: frozen in new plans, inherited on resume.

What the processes really got is inspected in `fpmsdk.collect.cpu_affinity`.
Source: collector.md section 4.4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.paths import campaign_root, checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import EvidenceError, OnboardError

CPUS_PER_TASK = 16
CPU_BIND = "cores"


def resolve_cpu_policy(
    cpus_per_task: int | None,
    cpu_bind: str | None,
    *,
    resume: bool,
    checkpoint_dir: Path,
    artifact_root: Path,
    smoke: bool,
) -> tuple[int | None, str | None]:
    """The policy of a plan: what is asked for, else on resume that of the archived plan, else 16 CPUs bound to cores.

    An archived plan without a policy stays without one.

    Raises
    ------
    OnboardError: the checkpoint or the archived plan cannot be read.
    EvidenceError: the archived plan is not that of the checkpoint.
    """
    if resume and None in (cpus_per_task, cpu_bind):
        checkpoint = checkpoint_path(checkpoint_dir, smoke=smoke)
        if checkpoint.exists():
            archived = _archived_options(checkpoint, artifact_root, smoke=smoke)
            return (
                archived.get("slurm_cpus_per_task") if cpus_per_task is None else cpus_per_task,
                archived.get("slurm_cpu_bind") if cpu_bind is None else cpu_bind,
            )
    return (CPUS_PER_TASK if cpus_per_task is None else cpus_per_task, CPU_BIND if cpu_bind is None else cpu_bind)


def _archived_options(checkpoint: Path, artifact_root: Path, *, smoke: bool) -> dict[str, Any]:
    document = read_document(checkpoint)
    digest = document.get("plan_sha256") if isinstance(document, dict) else None
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise OnboardError(
            f"{checkpoint}: plan_sha256: expected 64 hexadecimal digits, found {digest!r}", str(checkpoint)
        )
    archived = campaign_root(artifact_root, digest, smoke=smoke) / "collection-plan.json"
    plan = CollectionPlan.read(archived)
    if plan.sha256 != digest:
        raise EvidenceError(
            f"{archived}: expected the plan {digest} of the checkpoint, found {plan.sha256}", str(archived)
        )
    return plan.options


def require_cpu_policy(plan: CollectionPlan) -> None:
    """Refuse to launch a Slurm worker for a plan without a policy, before anything of the campaign is touched.

    Raises
    ------
    OnboardError: the plan has none.
    """
    if plan.executor == "slurm" and plan.options.get("slurm_cpus_per_task") is None:
        raise OnboardError(
            "slurm_cpus_per_task: this plan has no CPU policy, so that no worker is launched for it; keep its "
            "artifacts for recovery, and start new workers in a new campaign",
            "slurm_cpus_per_task",
        )


def allocated_cpus(words: str, hosts: Sequence[str]) -> dict[str, int]:
    """CPUs by host of `SLURM_JOB_CPUS_PER_NODE`.

    Raises
    ------
    OnboardError: malformed, or of another number of hosts.

    Example
    -------
    >>> allocated_cpus("72(x2),36", ["a", "b", "c"])
    {'a': 72, 'b': 72, 'c': 36}
    """
    counts: list[int] = []
    for part in words.split(","):
        found = re.fullmatch(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?", part.strip())
        if found is None:
            raise OnboardError(f"SLURM_JOB_CPUS_PER_NODE: expected counts like 72(x2),36, found {words!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) != len(hosts):
        raise OnboardError(
            f"SLURM_JOB_CPUS_PER_NODE: {words!r} describes {len(counts)} hosts, allocated are {len(hosts)}"
        )
    return dict(zip(hosts, counts, strict=True))


def check_allocation(cpus_by_host: Mapping[str, int], cpus_per_task: int, *, local_schedulers: int) -> None:
    """Refuse a policy that an allocation cannot hold.

    Parameters
    ----------
    cpus_by_host: allocated CPUs of every host.
    cpus_per_task: CPUs of one node's task.
    local_schedulers: data-parallel schedulers of one node; each needs a CPU.

    Raises
    ------
    OnboardError: names the host and both counts.
    """
    if cpus_per_task < local_schedulers:
        raise OnboardError(
            f"slurm_cpus_per_task: {cpus_per_task} are fewer than the {local_schedulers} schedulers of a node; "
            "ask for more",
            "slurm_cpus_per_task",
        )
    for host, cpus in cpus_by_host.items():
        if cpus < cpus_per_task:
            raise OnboardError(
                f"slurm_cpus_per_task: host {host} has {cpus} allocated CPUs, the plan needs {cpus_per_task}; "
                "allocate more",
                "slurm_cpus_per_task",
            )
