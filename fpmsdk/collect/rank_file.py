"""One rank file of a native artifact: found, parsed and checked on its own; no more than one is in memory at a time.

How the files of an attempt fit together is in `artifact.py`. Source: collector.md sections 5.1 and 5.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fpmsdk.collect.faults import fault, mapping, require, seconds, sequence, text, whole
from fpmsdk.collect.kvwarm import check_kvwarm, check_regime
from fpmsdk.collect.token_streams import check_config_bound
from fpmsdk.errors import CollectionError
from fpmsdk.files import UnfitFileError, read_large

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell

RESULT_GLOB = "benchmark*.json"
SCHEMA_VERSION = 2
# Files of 150 MB have been seen.
MAX_RANK_FILE_BYTES = 2 * 2**30

_TOTALS = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")
_ENDED_WELL = {
    "status": "complete",
    "valid": True,
    "usable": True,
    "timing_valid": True,
    "stop_reason": None,
    "error": None,
    "skipped_points": [],
    "missing_phases": [],
}
_TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class RankFile:
    """What one rank measured: rows by benchmark id, its samples as digests, and the shared groups still unparsed."""

    path: str
    rank: int
    run_id: str
    grid_digest: str
    kvwarm: dict[str, Any] | None
    elapsed_s: float
    measured_s: float
    points: tuple[dict[str, Any], ...]
    regimes: tuple[str | None, ...]
    wall_s: tuple[float, ...]
    sample_digests: tuple[bytes, ...]
    groups: msgspec.Raw
    engine: dict[str, Any] | None
    input_provenance: dict[str, Any] | None


def rank_files(raw_root: Path) -> tuple[Path, ...]:
    """The rank files below a folder, by path; merged results, which repeat them, are left out.

    Raises
    ------
    CollectionError: a probe of the merged result is of an unknown schema.
    """
    found = []
    for path in sorted(raw_root.rglob(RESULT_GLOB)):
        if path.stem.endswith("_merged_worker_probe"):
            probe = fields_of(path)
            for name, accepted in (("schema", "dynamo.fpm.benchmark_worker_probe"), ("schema_version", 1)):
                value = value_of(probe, name)
                require(value == accepted and type(value) is type(accepted), f"{path}: {name}", value, repr(accepted))
        elif not path.stem.endswith("_merged"):
            fields = fields_of(path)
            kind = decoded(fields["artifact_type"], f"{path}: artifact_type") if "artifact_type" in fields else None
            if kind != "merged":
                found.append(path)
    return tuple(found)


def fields_of(path: Path) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, unparsed.

    Raises
    ------
    CollectionError: no regular file of at most `MAX_RANK_FILE_BYTES`, or no JSON object.
    """
    try:
        return _TOP_LEVEL.decode(read_large(path, limit_bytes=MAX_RANK_FILE_BYTES, follow_links=False))
    except UnfitFileError as error:
        raise CollectionError(f"{path}: {error}; run the attempt again") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CollectionError(f"{path}: expected a JSON object, found {error}; run the attempt again") from None


def value_of(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    """The value of a field, None where it is absent.

    Raises
    ------
    CollectionError: malformed, or a number beyond float64.
    """
    return decoded(fields[name], name) if name in fields else None


def decoded(content: msgspec.Raw | bytes, where: str) -> Any:
    """The value of JSON text.

    Raises
    ------
    CollectionError: malformed, or a number beyond float64; names `where`.
    """
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CollectionError(f"{where}: {error}; run the attempt again") from None


def digest_of(value: Any) -> bytes:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).digest()


def read_rank_file(path: Path, cell: Cell) -> RankFile:
    """Parse a rank file and check everything that it says on its own.

    Parameters
    ----------
    path: the file.
    cell: the cell that was to be measured: phase, ranks, and what its KV must be.

    Raises
    ------
    CollectionError: the first rule of section 5.3 that it breaks; names file and field.
    """
    try:
        return _rank_file(path, cell)
    except CollectionError as fault:
        raise CollectionError(str(fault) if str(path) in str(fault) else f"{path}: {fault}") from None


def _rank_file(path: Path, cell: Cell) -> RankFile:
    where = str(path)
    fields = fields_of(path)
    _check_envelope(fields, cell, where)
    rows = sequence(value_of(fields, "results"), f"{where}: results")
    input_provenance = check_config_bound(cell, fields, rows, path)
    _check_coverage(fields, len(rows), where)
    dp = mapping(value_of(fields, "dp"), f"{where}: dp")
    require(
        type(dp.get("size")) is int and dp["size"] == cell.topology.dp,
        f"{where}: dp.size",
        dp.get("size"),
        f"{cell.topology.dp}",
    )
    rank = whole(dp.get("rank"), f"{where}: dp.rank")
    run_id = text(value_of(fields, "run_id"), f"{where}: run_id")
    grid_digest = text(value_of(fields, "grid_digest"), f"{where}: grid_digest")
    kvwarm = check_kvwarm(cell, value_of(fields, "kvwarm"), where)
    timing = mapping(value_of(fields, "timing"), f"{where}: timing")
    elapsed = seconds(timing.get("benchmark_elapsed_seconds"), f"{where}: timing.benchmark_elapsed_seconds")
    measured = seconds(timing.get("measured_iteration_seconds"), f"{where}: timing.measured_iteration_seconds")
    require(
        measured <= elapsed + 1e-12,
        f"{where}: timing.measured_iteration_seconds",
        measured,
        f"at most the elapsed {elapsed} s",
    )
    checked = [_row(row, cell, rank, kvwarm, f"{where}: results[{at}]") for at, row in enumerate(rows)]
    checked.sort(key=lambda row: row[0]["benchmark_id"])
    ids = [row[0]["benchmark_id"] for row in checked]
    require(ids == list(range(1, len(ids) + 1)), f"{where}: results", ids, "every benchmark id from 1 on, once")
    engine = value_of(fields, "engine")
    points, regimes, wall_s, digests = zip(*checked, strict=True)
    return RankFile(
        where,
        rank,
        run_id,
        grid_digest,
        kvwarm,
        elapsed,
        measured,
        points,
        regimes,
        wall_s,
        digests,
        fields["iteration_groups"],
        engine if isinstance(engine, dict) else None,
        input_provenance,
    )


def _check_envelope(fields: Mapping[str, msgspec.Raw], cell: Cell, where: str) -> None:
    expected = {"schema_version": SCHEMA_VERSION, "artifact_type": "rank", **_ENDED_WELL}
    for name, accepted in expected.items():
        value = value_of(fields, name)
        is_same = type(value) is type(accepted) and value == accepted
        require(is_same and (name in fields or accepted is None), f"{where}: {name}", value, repr(accepted))
    mode = mapping(value_of(fields, "config"), f"{where}: config").get("mode")
    require(mode == cell.workload_kind, f"{where}: config.mode", mode, repr(cell.workload_kind))


def _check_coverage(fields: Mapping[str, msgspec.Raw], rows: int, where: str) -> None:
    coverage = mapping(value_of(fields, "coverage"), f"{where}: coverage")
    expected = whole(coverage.get("expected_points"), f"{where}: coverage.expected_points", 1)
    for name, accepted in (("completed_points", expected), ("skipped_points", 0)):
        value = coverage.get(name)
        require(type(value) is int and value == accepted, f"{where}: coverage.{name}", value, str(accepted))
    require(rows == expected, f"{where}: results", f"{rows} rows", f"{expected} rows, as coverage.expected_points says")
    require("iteration_groups" in fields, f"{where}: iteration_groups", None, "a list")


def _row(
    row: Any, cell: Cell, rank: int, kvwarm: Mapping[str, Any] | None, where: str
) -> tuple[dict[str, Any], str | None, float, bytes]:
    row = mapping(row, where)
    point = dict(mapping(row.get("point"), f"{where}.point"))
    kind = point.get("point_type")
    require(kind == cell.workload_kind, f"{where}.point.point_type", kind, repr(cell.workload_kind))
    whole(point.get("benchmark_id"), f"{where}.point.benchmark_id", 1)
    reasons = point.get("sample_reasons") or []
    are_words = isinstance(reasons, list) and all(isinstance(reason, str) for reason in reasons)
    require(are_words, f"{where}.point.sample_reasons", reasons, "a list of words")
    sample = only_sample(row, where)
    wall_s = check_sample(sample, point, rank, where)
    return point, check_regime(row.get("kv_seed_regime"), point, kvwarm, where), wall_s, digest_of(sample)


def only_sample(row: Mapping[str, Any], where: str) -> Any:
    """The one sample of a row.

    Raises
    ------
    CollectionError: there is none, or more.
    """
    samples = sequence(row.get("fpms"), f"{where}.fpms")
    require(len(samples) == 1, f"{where}.fpms", f"{len(samples)} samples", "exactly one sample")
    return samples[0]


def check_sample(sample: Any, point: Mapping[str, Any], rank: int, where: str) -> float:
    """Seconds that a sample says the rank took for a point, which must be what it scheduled.

    Raises
    ------
    CollectionError: the sample is of another point or rank, its time is none, or it scheduled something else.
    """
    sample = mapping(sample, f"{where}.fpms[0]")
    for name, accepted in (("counter_id", point["benchmark_id"]), ("dp_rank", rank)):
        value = sample.get(name)
        require(type(value) is int and value == accepted, f"{where}.fpms[0].{name}", value, str(accepted))
    wall_s = seconds(sample.get("wall_time"), f"{where}.fpms[0].wall_time", positive=True)
    scheduled = mapping(sample.get("scheduled_requests"), f"{where}.fpms[0].scheduled_requests")
    for name, expected in _scheduled(point, f"{where}.point").items():
        value = scheduled.get(name)
        if type(value) is not int or value != expected:
            raise fault(f"{where}.fpms[0].scheduled_requests.{name}", value, f"{expected}, as its point says")
    return wall_s


def _scheduled(point: Mapping[str, Any], where: str) -> dict[str, int]:
    batch = whole(point.get("batch_size"), f"{where}.batch_size", 1)
    is_prefill = point["point_type"] == "prefill"
    tokens = whole(point.get("total_prefill_tokens"), f"{where}.total_prefill_tokens", batch if is_prefill else 0)
    kv = whole(point.get("total_kv_read_tokens"), f"{where}.total_kv_read_tokens", 0 if is_prefill else batch)
    if is_prefill:
        return dict(zip(_TOTALS, (batch, tokens, kv), strict=True)) | {
            "num_decode_requests": 0,
            "sum_decode_kv_tokens": 0,
        }
    require(tokens == 0, f"{where}.total_prefill_tokens", tokens, "0 on a decode point")
    return dict.fromkeys(_TOTALS, 0) | {"num_decode_requests": batch, "sum_decode_kv_tokens": kv}
