"""How the published samples of an artifact were measured, rank by rank, and what of it nobody observed.

Absent evidence is unestablished; contradictory evidence is refused. Two artifacts are compared in
`measurement_compare.py`. Source: collector.md section 7.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmsdk.collect.faults import fault, mapping, require, sequence, whole
from fpmsdk.collect.measurement_records import (
    WarmupHistory,
    check_measurement,
    check_protocol,
    coordinates_of,
    observed_execution,
    read_warmups,
)
from fpmsdk.collect.rank_file import fields_of, value_of
from fpmsdk.collect.selection import selected_rows
from fpmsdk.collect.worker_files import worker_observations
from fpmsdk.documents.canonical import digest
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import CollectionError

if TYPE_CHECKING:
    from fpmsdk.collect.artifact import NativeCollection

GRAPH_FIELDS = ("expected_cudagraph_mode", "expected_capture_size", "padding_tokens")
RUNTIME_FIELDS = ("limits", "cudagraph", "recurrent_state")
DISPATCH = "observed_per_call_graph_dispatch"
UNOBSERVED = (
    "sampled_continuation_token_ids",
    "kv_cache_tensors",
    "recurrent_state_tensors",
    "execution_history_equivalence",
    DISPATCH,
)
_UNOBSERVED_V2 = (
    "complete_cuda_graph_descriptor",
    "capture_versus_replay",
    "gpu_execution_time",
    "warmup_graph_kernel_and_cache_equivalence",
    "decode_real_kv_chain_warmup_history",
)


def extract_measurements(
    raw_root: str | Path, collection: NativeCollection, *, evidence_version: int = 2
) -> dict[str, Any]:
    """The measurement evidence of a validated collection.

    Parameters
    ----------
    raw_root: the folder that the collection was read from.
    collection: what `validate_native` returned for it.
    evidence_version: 2, or 1 as older assessments have it.

    Returns
    -------
    A JSON document: identities, protocol, runtime and configuration by rank, and `points` by the digest of their
    coordinates, one for every published sample, with `reasons` for what is not established.

    Raises
    ------
    CollectionError: ranks disagree, or evidence contradicts the samples; names file and field.

    Source: collector.md section 7.3.
    """
    version = whole(evidence_version, "evidence_version", 1)
    require(version <= 2, "evidence_version", version, "1 or 2")
    first = fields_of(Path(collection.files[0]))
    has_protocol = "measurement_protocol" in first
    protocol = check_protocol(value_of(first, "measurement_protocol"), collection.files[0]) if has_protocol else None
    selected = selected_rows(collection, "measurement evidence")
    wall_s = collection.wall_s
    points = {
        digest(coordinates_of(collection.points[row])): {
            "point": collection.points[row],
            "kv_seed_regime": collection.regimes[row],
            "regime": {name: collection.points[row].get(name) for name in GRAPH_FIELDS},
            "wall_time_seconds": float(wall_s[row]),
            "ranks": {},
            "reasons": _regime_gaps(collection.points[row], collection.regimes[row]),
        }
        for row in selected
    }
    unobserved = {*UNOBSERVED, *((protocol or {}).get("unobserved", ())), *(_UNOBSERVED_V2 if version == 2 else ())}
    evidence: dict[str, Any] = {
        "schema_version": version,
        "backend_version": collection.backend_version,
        "collector_attempt_id": collection.attempt_id,
        "runtime_run_id": collection.run_id,
        "runtime_grid_digest": collection.grid_digest,
        "measurement_protocol": protocol,
        "runtime_identity": {},
        "benchmark_config": {},
        "points": points,
        "raw_files": [],
        "reasons": [] if has_protocol else ["legacy artifact has no measurement protocol"],
    }
    if version == 2:
        evidence["scheduling"], gaps = _scheduling(Path(raw_root), collection)
        evidence["reasons"] += gaps
        evidence["warmup_evidence"] = {}
    order: list[int] | None = None
    for rank, path in enumerate(collection.files):
        reader = _RankReader(rank, path, collection, protocol, version)
        reader.read_identity(evidence)
        order = reader.read_rows(evidence, {collection.points[row]["benchmark_id"] for row in selected}, order)
    for point in points.values():
        point["status"] = "unestablished" if point["reasons"] else "recorded"
    records_forwards = version == 2 and protocol is not None and "execution_evidence" in protocol
    if records_forwards and all(sample["cudagraph"]["status"] == "observed" for sample in _samples(points.values())):
        unobserved.discard(DISPATCH)
    evidence["unobserved"] = sorted(unobserved)
    is_open = evidence["reasons"] or any(point["reasons"] for point in points.values())
    evidence["status"] = "unestablished" if is_open else "recorded"
    return evidence


def _samples(points: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    for point in points:
        for measurement in point["ranks"].values():
            yield from measurement["observed_execution"]["samples"]


def _regime_gaps(point: Mapping[str, Any], regime: str | None) -> list[str]:
    gaps = [f"missing {name}" for name in GRAPH_FIELDS if name not in point]
    mode = point.get("expected_cudagraph_mode")
    if not isinstance(mode, str) or not mode:
        gaps.append("missing expected CUDA graph mode")
    if mode not in (None, "NONE"):
        capture, padding = point.get("expected_capture_size"), point.get("padding_tokens")
        if type(capture) is not int or capture < 1:
            gaps.append("missing expected CUDA graph capture size")
        if type(padding) is not int or padding < 0:
            gaps.append("missing expected CUDA graph padding")
    if not regime:
        gaps.append("missing KV initialization regime")
    return gaps


class _RankReader:
    """Reads the evidence of one rank file into the document of the attempt."""

    def __init__(
        self, rank: int, path: str, collection: NativeCollection, protocol: dict[str, Any] | None, version: int
    ) -> None:
        self.rank, self.path, self.collection, self.protocol, self.version = rank, path, collection, protocol, version
        self.fields = fields_of(Path(path))
        self.rows = sequence(value_of(self.fields, "results"), f"{path}: results")
        found = value_of(self.fields, "measurement_protocol")
        same = ("measurement_protocol" in self.fields) == (protocol is not None) and found == protocol
        require(same, f"{path}: measurement_protocol", found, f"the same on all ranks as in {collection.files[0]}")
        self.history: WarmupHistory | None = None
        if version == 2 and protocol is not None and "execution_evidence" in protocol:
            self.history = read_warmups(value_of(self.fields, "warmup_evidence"), len(self.rows), path)

    def read_identity(self, evidence: dict[str, Any]) -> None:
        """Run, runtime and configuration of the rank."""
        rank, where = str(self.rank), self.path
        for name, accepted in (("run_id", self.collection.run_id), ("grid_digest", self.collection.grid_digest)):
            value = value_of(self.fields, name)
            require(value == accepted, f"{where}: {name}", value, f"{accepted}, which was validated")
        dp = mapping(value_of(self.fields, "dp"), f"{where}: dp").get("rank")
        require(dp == self.rank, f"{where}: dp.rank", dp, f"{self.rank}, which was validated")
        if self.history is not None:
            evidence["warmup_evidence"][rank] = self.history.document
        elif self.version == 2:
            evidence["reasons"].append(f"rank {rank}: per-sample execution and warmup evidence is unreported")
        runtime = {name: value_of(self.fields, name) for name in RUNTIME_FIELDS}
        evidence["runtime_identity"][rank] = runtime
        for name, block in runtime.items():
            if not isinstance(block, dict) or not block:
                evidence["reasons"].append(f"rank {rank}: missing native {name} evidence")
        config = value_of(self.fields, "config")
        is_config = isinstance(config, dict) and bool(config)
        if not is_config:
            evidence["reasons"].append(f"rank {rank}: missing benchmark config")
        kept = {name: value for name, value in config.items() if name != "output_path"} if is_config else None
        evidence["benchmark_config"][rank] = kept
        evidence["raw_files"].append({"path": self.path, "sha256": file_meta(self.path)["sha256"]})

    def read_rows(self, evidence: dict[str, Any], selected: set[int], order: list[int] | None) -> list[int]:
        """Every row in the order in which it ran; the published ones go into the document."""
        own_order = [row["point"]["benchmark_id"] for row in self.rows]
        is_same_set = sorted(own_order) == list(range(1, self.collection.num_points + 1))
        require(is_same_set, f"{self.path}: results", "other points", "the points that were validated")
        same = order is None or self.protocol is None or own_order == order
        require(same, f"{self.path}: results", "another order", "the same order on all ranks")
        prefix = hashlib.sha256()
        is_prefix_open, previous_forward = False, -1
        for position, row in enumerate(self.rows):
            measurement, gaps, previous_forward = self._row(row, position, previous_forward)
            lacks_prompts = measurement is None or measurement["prompts"]["status"] != "recorded"
            if row["point"]["benchmark_id"] in selected:
                point = evidence["points"][digest(coordinates_of(row["point"]))]
                point["ranks"][str(self.rank)] = (
                    None if measurement is None else {**measurement, "execution_prefix_sha256": prefix.hexdigest()}
                )
                point["reasons"] += gaps
                if is_prefix_open:
                    point["reasons"].append(f"rank {self.rank}: preceding prompt evidence incomplete")
            is_prefix_open |= lacks_prompts
            prefix.update(digest(self._step(row, measurement)).encode())
        return own_order if order is None else order

    def _row(
        self, row: Mapping[str, Any], position: int, previous_forward: int
    ) -> tuple[dict[str, Any] | None, list[str], int]:
        where, at = f"{self.path}: results[{position}]", row["point"]["benchmark_id"] - 1
        sample = row["fpms"][0]
        validated = (
            self.collection.points[at],
            self.collection.regimes[at],
            float(self.collection.rank_wall_s[at, self.rank]),
        )
        found = (row["point"], row.get("kv_seed_regime"), sample["wall_time"])
        require(found == validated, where, "another sample", "the sample that was validated")
        if self.protocol is None:
            is_absent = "benchmark_measurement" not in sample
            require(is_absent, f"{where}.benchmark_measurement", "present", "absent without a measurement_protocol")
            return None, ["missing measurement_protocol and benchmark_measurement"], previous_forward
        measurement, has_prompts = check_measurement(
            sample.get("benchmark_measurement"),
            sample,
            row,
            rank=self.rank,
            grid_digest=self.collection.grid_digest,
            position=position,
            where=where,
        )
        gaps = [] if has_prompts else [f"rank {self.rank}: injected prompt hashes unavailable"]
        if self.history is not None:
            observed, open_points, previous_forward = observed_execution(
                measurement, sample, self.history, previous_forward, where
            )
            measurement["observed_execution"] = observed
            gaps += [f"rank {self.rank}: {reason}" for reason in open_points]
        return measurement, gaps, previous_forward

    def _step(self, row: Mapping[str, Any], measurement: Mapping[str, Any] | None) -> dict[str, Any]:
        preparation = None if measurement is None else dict(measurement["preparation"])
        if self.version == 2 and preparation is not None:
            preparation.pop("warmup_records_before", None)
        prompts = None if measurement is None else measurement["prompts"]
        return {"point": row["point"], "prompts": prompts, "preparation": preparation}


def _scheduling(raw_root: Path, collection: NativeCollection) -> tuple[dict[str, Any], list[str]]:
    # What engines and workers resolved; never what a launch asked for.
    observed: dict[str, list[dict[str, Any]]] = {str(timing.rank): [] for timing in collection.timings}
    for number, (engine, path) in enumerate(zip(collection.engines, collection.files, strict=True)):
        scheduler = None if engine is None or engine.get("capture_error") else engine.get("scheduler")
        if isinstance(scheduler, dict) and "async_scheduling" in scheduler:
            observed[str(number)].append({"async_scheduling": scheduler["async_scheduling"], "source": path})
    for worker in worker_observations(raw_root):
        if worker.document.get("status") != "observed":
            continue
        rank = str(worker.document.get("dp_rank"))
        if not worker.is_of(collection) or rank not in observed:
            raise CollectionError(
                f"{worker.path}: of another attempt, engine version or rank than the results beside it"
            )
        config = worker.document.get("resolved_config")
        scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
        if isinstance(scheduler, dict) and "async_scheduling" in scheduler:
            found = {"async_scheduling": scheduler["async_scheduling"], "source": str(worker.path)}
            observed[rank].append(found)
    scheduling: dict[str, Any] = {}
    gaps = []
    for rank, found_by in observed.items():
        modes = set()
        for one in found_by:
            if type(one["async_scheduling"]) not in (bool, type(None)):
                raise fault(f"{one['source']}: async_scheduling", one["async_scheduling"], "true, false or null")
            modes.add(one["async_scheduling"])
        modes.discard(None)
        if len(modes) > 1:
            raise CollectionError(
                f"rank {rank}: engine and workers disagree on async_scheduling; run the attempt again"
            )
        scheduling[rank] = {"async_scheduling": next(iter(modes), None), "observations": found_by}
        if not modes:
            gaps.append(f"rank {rank}: effective async_scheduling is unreported")
    if len({one["async_scheduling"] for one in scheduling.values()} - {None}) > 1:
        raise CollectionError("ranks disagree on effective async_scheduling; run the attempt again")
    return scheduling, gaps
