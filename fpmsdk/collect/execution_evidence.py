"""Whether an attempt ran as planned: what its workers observed, apart from what the launch asked for.

Missing observations leave it incomplete; only contradictions fail it. Timings are not touched by either.
Source: collector.md section 7.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmsdk.collect.command import EXECUTION_OBSERVER_VERSIONS
from fpmsdk.collect.cpu_affinity import inspect_cpu_affinity
from fpmsdk.collect.execution_settings import Flags, WorkerSettings
from fpmsdk.collect.faults import fault, require, whole
from fpmsdk.collect.launch_evidence import (
    MANIFEST_FILE,
    MissingLaunchError,
    launch_flags,
    launched_nodes,
    requested_choice,
)
from fpmsdk.collect.measurement import DISPATCH, extract_measurements
from fpmsdk.collect.rank_file import fields_of, value_of
from fpmsdk.collect.worker_files import EXECUTION_SCHEMA, WorkerObservation, worker_observations
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import CollectionError

if TYPE_CHECKING:
    from fpmsdk.collect.artifact import NativeCollection
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan

_RANKS = ("dp_rank", "tp_rank", "pp_rank")


def inspect_execution(
    plan: CollectionPlan, cell: Cell, raw_root: str | Path, collection: NativeCollection, *, evidence_version: int = 2
) -> dict[str, Any]:
    """Inspect the execution evidence of a validated collection.

    Parameters
    ----------
    plan, cell: what was to be run.
    raw_root: the folder of the attempt, `raw` beside the launch files of the cell.
    collection: what `validate_native` returned for it.
    evidence_version: 2, or 1 as older assessments have it: without scheduling and measurement evidence.

    Returns
    -------
    `status`: `failed` with `failures`, else `incomplete` with `missing_evidence`, else `qualified`; and the
    observations it rests on.

    Raises
    ------
    CollectionError: an observation is of another plan, cell, attempt, version or rank, or no object.

    Source: collector.md section 7.2.
    """
    version = whole(evidence_version, "evidence_version", 1)
    require(version <= 2, "evidence_version", version, "1 or 2")
    root = Path(raw_root)
    missing: list[str] = []
    failures: list[str] = []
    flags = _flags(plan, root.parent, missing, failures)
    pinned = plan.runtime_backend_version
    if pinned is not None and collection.backend_version != pinned:
        failures.append(f"engine version: planned is {pinned}, observed {collection.backend_version}")
    if collection.backend_version not in EXECUTION_OBSERVER_VERSIONS:
        missing.append(f"settings of vLLM {collection.backend_version} are not audited")
    workers = _workers(plan, cell, root, collection)
    for rank, worker in workers.items():
        _inspect_worker(plan, cell, rank, worker, flags, missing, failures)
    sizes = cell.topology
    expected = {(dp, tp, pp) for dp in range(sizes.dp) for tp in range(sizes.tp) for pp in range(sizes.pp)}
    if unseen := sorted(expected - workers.keys()):
        missing.append(f"no execution observation of worker ranks {unseen}")
    scheduling = _scheduling(flags, workers, len(expected))
    if version == 2 and scheduling["status"] == "mismatch":
        failures.append("workers disagree on async_scheduling")
    graphs = _native_graphs(collection, missing)
    regimes = Counter(regime or "unreported" for regime in collection.regimes)
    if "unreported" in regimes:
        missing.append("kv_seed_regime of points is not reported")
    cpu = _cpu_affinity(plan, cell, root, collection)
    if cpu["policy_required"]:
        missing += [f"CPU affinity: {message}" for message in cpu["missing_evidence"]]
        failures += [f"CPU affinity: {message}" for message in cpu["failures"]]
    dispatch = _dispatch(root, collection, missing) if version == 2 else "unreported"
    return {
        "status": "failed" if failures else "incomplete" if missing else "qualified",
        "missing_evidence": sorted(set(missing)),
        "failures": sorted(set(failures)),
        "observed_workers": [worker.document | {"source": worker.source} for worker in workers.values()],
        "native_graph_config": graphs,
        "kv_seed_regime_counts": dict(regimes),
        "cpu_affinity": cpu,
        **({"scheduling": scheduling} if version == 2 else {}),
        "per_point_dispatch": dispatch,
        "scope": "attention backends and graph settings as workers initialised them; dispatch of single points: "
        f"{dispatch}",
    }


def _flags(plan: CollectionPlan, cell_dir: Path, missing: list[str], failures: list[str]) -> Flags | None:
    try:
        return launch_flags(plan, cell_dir)
    except MissingLaunchError as error:
        missing.append(str(error))
    except (CollectionError, ValueError) as error:
        failures.append(str(error))
    return None


def _workers(
    plan: CollectionPlan, cell: Cell, root: Path, collection: NativeCollection
) -> dict[tuple[int, ...], WorkerObservation]:
    found: dict[tuple[int, ...], WorkerObservation] = {}
    identity = {"plan_sha256": plan.sha256, "cell_id": cell.cell_id}
    sizes = (cell.topology.dp, cell.topology.tp, cell.topology.pp)
    for worker in worker_observations(root):
        provenance = worker.provenance
        if not worker.is_of(collection) or not identity.items() <= provenance.items():
            raise fault(
                str(worker.path),
                {name: provenance.get(name) for name in (*identity, "attempt_id")},
                f"schema {EXECUTION_SCHEMA} 1 of plan {plan.sha256}, {cell.cell_id}, attempt {collection.attempt_id} "
                f"and vLLM {collection.backend_version}",
            )
        rank = tuple(worker.document.get(name) for name in _RANKS)
        is_rank = all(type(value) is int and 0 <= value < size for value, size in zip(rank, sizes, strict=True))
        require(is_rank and rank not in found, f"{worker.path}: {', '.join(_RANKS)}", rank, "a worker rank, once")
        found[rank] = worker  # type: ignore[index]
    return found


def _inspect_worker(
    plan: CollectionPlan,
    cell: Cell,
    rank: tuple[int, ...],
    worker: WorkerObservation,
    flags: Flags | None,
    missing: list[str],
    failures: list[str],
) -> None:
    document = worker.document
    if document.get("status") != "observed":
        missing.append(f"worker {rank}: {document.get('error', 'its settings are unresolved')}")
        return
    if not _are_attention_groups(document.get("attention_groups")):
        failures.append(f"worker {rank}: attention_groups must name the backend and the layers of every group")
    settings = WorkerSettings(plan, cell, document, flags)
    missing += [f"worker {rank}: {message}" for message in settings.missing]
    failures += [f"worker {rank}: {message}" for message in settings.failures]


def _are_attention_groups(groups: Any) -> bool:
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(
            isinstance(group, dict)
            and isinstance(group.get("backend_class"), str)
            and bool(group["backend_class"])
            and isinstance(group.get("layer_names"), list)
            and bool(group["layer_names"])
            and all(isinstance(name, str) and name for name in group["layer_names"])
            for group in groups
        )
    )


def _scheduling(
    flags: Flags | None, workers: Mapping[tuple[int, ...], WorkerObservation], expected: int
) -> dict[str, Any]:
    choice = None if flags is None else requested_choice(dict(flags), "async-scheduling")
    source = "unreported" if flags is None else "runtime_default" if choice is None else "generated_flag"
    observed = []
    for rank, worker in workers.items():
        if worker.document.get("status") != "observed":
            continue
        config = worker.document.get("resolved_config")
        scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
        mode = scheduler.get("async_scheduling") if isinstance(scheduler, dict) else None
        observed.append({"rank": list(rank), "async_scheduling": mode, "source": worker.source})
    modes = [one["async_scheduling"] for one in observed if type(one["async_scheduling"]) is bool]
    if len(set(modes)) > 1:
        status = "mismatch"
    else:
        status = "observed" if len(modes) == len(observed) == expected else "unestablished"
    return {
        "requested": {"source": source, "async_scheduling": choice},
        "observed_workers": observed,
        "effective_async_scheduling": modes[0] if len(set(modes)) == 1 else None,
        "status": status,
    }


def _native_graphs(collection: NativeCollection, missing: list[str]) -> list[dict[str, Any]]:
    graphs = []
    for rank, path in enumerate(collection.files):
        config = value_of(fields_of(Path(path)), "cudagraph")
        graphs.append({"dp_rank": rank, "config": config, "source": file_evidence(path)})
        if not isinstance(config, dict):
            missing.append(f"{Path(path).name}: cudagraph is not reported")
    return graphs


def _cpu_affinity(plan: CollectionPlan, cell: Cell, root: Path, collection: NativeCollection) -> dict[str, Any]:
    manifest, nodes, source = root.parent / MANIFEST_FILE, None, None
    problems: dict[str, Sequence[str]] = {"missing_evidence": (), "failures": ()}
    if plan.options.get("slurm_cpus_per_task") is not None:
        try:
            nodes = launched_nodes(root.parent)
            source = file_evidence(manifest)
        except MissingLaunchError as error:
            problems["missing_evidence"] = (str(error),)
        except CollectionError as error:
            problems["failures"] = (str(error),)
    cpu = inspect_cpu_affinity(plan, cell, root, collection, expected_nodes=nodes)
    cpu["launch_geometry_source"] = source
    for name, messages in problems.items():
        cpu[name] += messages
    if problems["failures"]:
        cpu["status"] = "failed"
    return cpu


def _dispatch(root: Path, collection: NativeCollection, missing: list[str]) -> str:
    measurements = extract_measurements(root, collection)
    reasons = [*measurements["reasons"], *(why for one in measurements["points"].values() for why in one["reasons"])]
    missing += [f"measurement evidence: {reason}" for reason in reasons]
    if not measurements["warmup_evidence"]:
        return "unreported"
    return "incomplete" if DISPATCH in measurements["unobserved"] else "observed"
