"""What one sample says of how it was measured: prompts, internal samples, graph dispatch, and the warm-ups before it.

Records are checked against themselves and their point; latency is never judged. Source: collector.md section 7.3.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fpmsdk.collect.faults import fault, is_close, mapping, require, seconds, sequence, text, whole
from fpmsdk.documents.canonical import digest

# What the engine promises when it records every forward; an exact object.
EXECUTION_CONTRACT = {
    "schema_version": 1,
    "sample_field": "benchmark_sample",
    "warmup_field": "warmup_evidence",
    "forward_index_scope": "rank_process",
    "timing_clock": "process_local_monotonic",
    "cudagraph_source": "ModelRunnerOutput.cudagraph_stats",
    "warmup_scope": "request_completion_and_existing_shape_validation",
}
_PROTOCOL = {
    "schema_version": 1,
    "content_identity": "coordinate_rank_slot_v1",
    "prompt_hash_encoding": "uint32_le",
    "independent_repetitions": 1,
    "timing_metric": "scheduler_wall_time",
    "input_evidence_scope": "injected_prompt_token_ids",
}
_CONTENTS = ("random", "sharegpt", "sharegpt_chain", "zeros")
_WARMUP_KINDS = ("global", "eager_shape", "real_prefix_seed", "real_prefix_shape")
_GRAPH_MODES = ("NONE", "PIECEWISE", "FULL")
_GRAPH_COUNTS = ("num_unpadded_tokens", "num_padded_tokens", "num_paddings")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def coordinates_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a point within its cell.

    >>> digest(coordinates_of({"point_type": "decode", "batch_size": 4, "total_kv_read_tokens": 128}))[:16]
    '500ee1e846772803'
    """
    found = {name: point[name] for name in ("batch_size", "total_kv_read_tokens")}
    if point["point_type"] == "prefill":
        found["total_prefill_tokens"] = point["total_prefill_tokens"]
        found |= {name: point[name] for name in ("partition", "rows") if point.get(name) is not None}
    return found


def content_key(point: Mapping[str, Any]) -> str:
    """The engine's own identity of the content of a point.

    >>> point = {"point_type": "prefill", "batch_size": 4, "total_prefill_tokens": 257, "total_kv_read_tokens": 128}
    >>> content_key(point)[:16]
    '0b3b0fb964bd2c30'
    """
    identity = {name: point[name] for name in ("point_type", "batch_size")}
    identity |= {name: point.get(name, 0) for name in ("total_prefill_tokens", "total_kv_read_tokens")}
    identity |= {name: point.get(name) for name in ("partition", "rows")}
    return digest(identity)


def check_protocol(protocol: Any, where: str) -> dict[str, Any]:
    """The measurement protocol of an artifact.

    Raises
    ------
    CollectionError: it is none that is known.
    """
    where = f"{where}: measurement_protocol"
    found = dict(mapping(protocol, where))
    for name, accepted in _PROTOCOL.items():
        value = found.get(name)
        require(type(value) is type(accepted) and value == accepted, f"{where}.{name}", value, repr(accepted))
    for name in ("content_seed", "synthetic_pool_tag"):
        require(isinstance(found.get(name), str), f"{where}.{name}", found.get(name), "text")
    content = found.get("synthetic_content")
    require(content in _CONTENTS, f"{where}.synthetic_content", content, ", ".join(_CONTENTS))
    for name in sequence(found.get("unobserved"), f"{where}.unobserved"):
        text(name, f"{where}.unobserved")
    preparation = mapping(found.get("preparation"), f"{where}.preparation")
    for name in ("warmup_iterations", "giant_kv_threshold", "giant_kv_repeats"):
        whole(preparation.get(name), f"{where}.preparation.{name}")
    for name in ("prefill_real_seed", "decode_real_kv_warmup"):
        value = preparation.get(name)
        require(type(value) is bool, f"{where}.preparation.{name}", value, "true or false")
    if "execution_evidence" in found:
        contract = found["execution_evidence"]
        require(contract == EXECUTION_CONTRACT, f"{where}.execution_evidence", contract, str(EXECUTION_CONTRACT))
    return found


class WarmupHistory(NamedTuple):
    """The warm-ups of a rank process, and the digest of the first 0, 1, 2, … of them."""

    document: dict[str, Any]
    prefixes: tuple[str, ...]

    @property
    def is_recorded(self) -> bool:
        """Whether the engine recorded them."""
        return bool(self.document["status"] == "recorded")

    @property
    def records(self) -> list[dict[str, Any]]:
        """The warm-ups in order."""
        return list(self.document["records"])


def read_warmups(document: Any, points: int, where: str) -> WarmupHistory:
    """The warm-ups that a rank file records.

    Parameters
    ----------
    document: the value of `warmup_evidence`.
    points: number of points that the rank measured.

    Raises
    ------
    CollectionError: a record contradicts itself or the order of the others.
    """
    where = f"{where}: warmup_evidence"
    history = dict(mapping(document, where))
    status = history.get("status")
    require(status in ("recorded", "unavailable"), f"{where}.status", status, "recorded or unavailable")
    records = sequence(history.get("records"), f"{where}.records")
    require(status == "recorded" or not records, f"{where}.records", records, "none while unavailable")
    prefixes, running = [digest([])], hashlib.sha256()
    completed_before = started = 0
    for at, entry in enumerate(records):
        place = f"{where}.records[{at}]"
        record = mapping(entry, place)
        completed, start = _check_warmup(record, place)
        in_order = completed_before <= completed <= points and (start is None or start >= started)
        require(in_order, f"{place}", record, "records in the order in which they ran")
        is_first = record["kind"] != "global" or completed == 0
        require(is_first, f"{place}.completed_points_before", completed, "0 for a global warm-up")
        completed_before, started = completed, started if start is None else start
        running.update(digest(record).encode())
        prefixes.append(running.hexdigest())
    return WarmupHistory(history, tuple(prefixes))


def _check_warmup(record: Mapping[str, Any], where: str) -> tuple[int, int | None]:
    kind, status = record.get("kind"), record.get("status")
    require(kind in _WARMUP_KINDS, f"{where}.kind", kind, ", ".join(_WARMUP_KINDS))
    require(status in ("running", "completed", "failed"), f"{where}.status", status, "running, completed or failed")
    validation = mapping(record.get("validation"), f"{where}.validation").get("status")
    accepted = {"running": ("not_performed",), "completed": ("not_performed", "passed")}.get(
        str(status), ("not_performed", "failed")
    )
    require(validation in accepted, f"{where}.validation.status", validation, " or ".join(accepted))
    completed = whole(record.get("completed_points_before"), f"{where}.completed_points_before")
    count = whole(record.get("observed_forward_count"), f"{where}.observed_forward_count")
    start, end = record.get("forward_index_start"), record.get("forward_index_end")
    for name, value in (("forward_index_start", start), ("forward_index_end", end)):
        if value is not None:
            whole(value, f"{where}.{name}")
    require((status == "running") == (end is None), f"{where}.forward_index_end", end, "null only while running")
    never_ran = kind == "eager_shape" and status == "failed" and count == 0
    require(start is not None or never_ran, f"{where}.forward_index_start", start, "null only for a failed eager_shape")
    if start is not None and end is not None:
        require(end - start == count, f"{where}.observed_forward_count", count, f"{end - start}, from start to end")
    return completed, start


def check_measurement(
    measurement: Any,
    sample: Mapping[str, Any],
    row: Mapping[str, Any],
    *,
    rank: int,
    grid_digest: str,
    position: int,
    where: str,
) -> tuple[dict[str, Any], bool]:
    """The measurement record of a retained sample, and whether the prompts were recorded.

    Parameters
    ----------
    measurement: the value of `benchmark_measurement`.
    sample: the retained sample.
    row: the result row of it.
    rank, grid_digest, position: rank and grid of the file, and the position of the row in it.

    Raises
    ------
    CollectionError: the record is of another rank, point, grid or position, or contradicts the retained time.
    """
    where = f"{where}.benchmark_measurement"
    found = dict(mapping(measurement, where))
    point = row["point"]
    for name, accepted in (("schema_version", 1), ("dp_rank", rank), ("point_key", content_key(point))):
        value = found.get(name)
        require(type(value) is type(accepted) and value == accepted, f"{where}.{name}", value, repr(accepted))
    preparation = mapping(found.get("preparation"), f"{where}.preparation")
    require(preparation.get("grid_digest") == grid_digest, f"{where}.preparation.grid_digest", preparation, grid_digest)
    before = whole(preparation.get("completed_points_before"), f"{where}.preparation.completed_points_before")
    require(before == position, f"{where}.preparation.completed_points_before", before, f"{position}, the position")
    regime = preparation.get("kv_seed_regime")
    accepted_regime = row.get("kv_seed_regime")
    require(regime == accepted_regime, f"{where}.preparation.kv_seed_regime", regime, repr(accepted_regime))
    has_prompts = _check_prompts(found.get("prompts"), f"{where}.prompts")
    _check_estimate(found, sample, rank, point["benchmark_id"], where)
    return found, has_prompts


def _check_prompts(prompts: Any, where: str) -> bool:
    found = mapping(prompts, where)
    status, requests = found.get("status"), sequence(found.get("requests"), f"{where}.requests")
    require(status in ("recorded", "unavailable"), f"{where}.status", status, "recorded or unavailable")
    if status == "unavailable":
        is_empty = found.get("sha256") is None and not requests
        require(is_empty, f"{where}.requests", requests, "no digests while unavailable")
        return False
    require(bool(requests), f"{where}.requests", requests, "at least one request")
    for slot, entry in enumerate(requests):
        place = f"{where}.requests[{slot}]"
        request = mapping(entry, place)
        require(whole(request.get("slot"), f"{place}.slot") == slot, f"{place}.slot", request.get("slot"), str(slot))
        whole(request.get("num_tokens"), f"{place}.num_tokens")
        value = request.get("sha256")
        is_digest = isinstance(value, str) and _DIGEST.fullmatch(value) is not None
        require(is_digest, f"{place}.sha256", value, "64 lowercase hexadecimal digits")
    require(
        found.get("sha256") == digest(requests), f"{where}.sha256", found.get("sha256"), "the digest of the requests"
    )
    return True


def _check_estimate(
    measurement: Mapping[str, Any], sample: Mapping[str, Any], rank: int, benchmark_id: int, where: str
) -> None:
    expected = whole(measurement.get("expected_internal_samples"), f"{where}.expected_internal_samples", 1)
    raw = sequence(measurement.get("raw_fpms"), f"{where}.raw_fpms")
    require(1 <= len(raw) <= expected, f"{where}.raw_fpms", f"{len(raw)} samples", f"1 to {expected} samples")
    for at, entry in enumerate(raw):
        place = f"{where}.raw_fpms[{at}]"
        one = mapping(entry, place)
        for name, accepted in (("dp_rank", rank), ("counter_id", benchmark_id)):
            value = one.get(name)
            require(type(value) is int and value == accepted, f"{place}.{name}", value, str(accepted))
        seconds(one.get("wall_time"), f"{place}.wall_time", positive=True)
    estimate = mapping(measurement.get("estimate"), f"{where}.estimate")
    indices = _indices(estimate.get("method"), len(raw), expected)
    if indices is None:
        raise fault(
            f"{where}.estimate.method", estimate.get("method"), f"a method for {len(raw)} of {expected} samples"
        )
    found = estimate.get("raw_sample_indices")
    same = isinstance(found, list) and found == indices and all(type(index) is int for index in found)
    require(same, f"{where}.estimate.raw_sample_indices", found, str(indices))
    walls = sorted(raw[index]["wall_time"] for index in indices)
    retained = sample["wall_time"]
    upper_median = walls[len(walls) // 2]
    require(is_close(upper_median, retained), f"{where}.estimate", retained, f"{upper_median} s, of the raw samples")


def _indices(method: Any, found: int, expected: int) -> list[int] | None:
    if method == "single_step" and found == 1:
        return [0]
    if method == "last_step" and found == expected > 1:
        return [found - 1]
    if method == "adjacent_upper_median" and expected > 2 and found > 1:
        return list(range(1, found))
    return None


def observed_execution(
    measurement: Mapping[str, Any], sample: Mapping[str, Any], history: WarmupHistory, previous_forward: int, where: str
) -> tuple[dict[str, Any], list[str], int]:
    """What the forwards behind a sample were: their order in the process, clock, graph, and the warm-ups before them.

    Parameters
    ----------
    measurement, sample: the measurement record and the retained sample.
    history: the warm-ups of the rank process.
    previous_forward: index of the last forward that was measured; -1 before the first.

    Returns
    -------
    The observation, what it leaves open, and the index of its last forward.

    Raises
    ------
    CollectionError: indices, times, graph or warm-ups contradict each other.
    """
    require("benchmark_sample" not in sample, f"{where}.benchmark_sample", "present", "absent on a retained estimate")
    gaps: list[str] = []
    observed: list[dict[str, Any]] = []
    last = previous_forward
    for at, raw in enumerate(measurement["raw_fpms"]):
        place = f"{where}.raw_fpms[{at}].benchmark_sample"
        record = mapping(raw.get("benchmark_sample"), place)
        index = whole(record.get("sample_index"), f"{place}.sample_index")
        require(index == at, f"{place}.sample_index", index, str(at))
        last = whole(record.get("forward_index"), f"{place}.forward_index", last + 1)
        basis = _check_clock(record.get("timing"), raw["wall_time"], f"{place}.timing", gaps)
        graph = _check_graph(record.get("cudagraph"), f"{place}.cudagraph", gaps)
        observed.append({"sample_index": at, "forward_index": last, "timing_basis": basis, "cudagraph": graph})
    first = observed[0]["forward_index"]
    prefix = _warmup_prefix(measurement["preparation"], history, first, previous_forward, where, gaps)
    return {"samples": observed, "warmup_prefix_sha256": prefix}, gaps, last


def _check_clock(timing: Any, wall_s: float, where: str, gaps: list[str]) -> str:
    found = mapping(timing, where)
    basis, start, end = found.get("basis"), found.get("start_monotonic"), found.get("end_monotonic")
    require(
        basis in ("schedule_to_output", "inter_output"), f"{where}.basis", basis, "schedule_to_output or inter_output"
    )
    for name, value in (("start_monotonic", start), ("end_monotonic", end)):
        if name == "end_monotonic" or value is not None:
            is_time = isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
            require(is_time, f"{where}.{name}", value, "a finite number")
    if start is None:
        gaps.append("sample timing start is unavailable")
    else:
        agrees = start <= end and math.isclose(end - start, wall_s, rel_tol=1e-9, abs_tol=1e-9)
        require(agrees, f"{where}", found, f"an interval of {wall_s} s")
    return str(basis)


def _check_graph(graph: Any, where: str, gaps: list[str]) -> dict[str, Any]:
    found = dict(mapping(graph, where))
    status = found.get("status")
    require(status in ("observed", "unavailable"), f"{where}.status", status, "observed or unavailable")
    names = ("runtime_mode", *_GRAPH_COUNTS)
    if status == "unavailable":
        require(all(found.get(name) is None for name in names), where, found, "no values while unavailable")
        gaps.append("per-sample CUDA graph dispatch is unavailable")
        return found
    require(
        found.get("runtime_mode") in _GRAPH_MODES, f"{where}.runtime_mode", found.get("runtime_mode"), "a graph mode"
    )
    bare, padded, padding = (whole(found.get(name), f"{where}.{name}") for name in _GRAPH_COUNTS)
    require(padded - bare == padding, f"{where}.num_paddings", padding, str(padded - bare))
    return found


def _warmup_prefix(
    preparation: Mapping[str, Any], history: WarmupHistory, first: int, previous: int, where: str, gaps: list[str]
) -> str | None:
    count = preparation.get("warmup_records_before")
    where = f"{where}.preparation.warmup_records_before"
    if not history.is_recorded:
        require(count is None, where, count, "null while the warm-ups are unavailable")
        gaps.append("warmup history is unavailable")
        return None
    completed = preparation["completed_points_before"]
    expected = sum(record["completed_points_before"] <= completed for record in history.records)
    require(whole(count, where) == expected, where, count, f"{expected}, as the warm-ups say")
    prefix: str | None = history.prefixes[expected]
    for record in history.records[:expected]:
        indices = [record[name] for name in ("forward_index_start", "forward_index_end") if record[name] is not None]
        require(all(index <= first for index in indices), where, record, f"warm-ups that end before forward {first}")
        if record["completed_points_before"] == completed:
            after = all(index > previous for index in indices)
            require(after, where, record, f"warm-ups after forward {previous}, which this point's preparation follows")
        if record["status"] == "running":
            prefix = None
            gaps.append("referenced warmup preparation is still running")
    return prefix
