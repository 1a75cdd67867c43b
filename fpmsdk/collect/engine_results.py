"""How far the results of a running engine are: still awaited, written by every rank, or merged as well.

An engine serves on after its benchmark, so that whoever started it has to see when it is done. What the files say is
validated later, by `artifact.py`; here only what is wrong already ends the wait. Source: collector.md section 3.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from fpmsdk.collect.paths import BENCHMARK, rank_path
from fpmsdk.errors import CollectionError

_SCHEMA_VERSION = 2
_IDENTITY = ("run_id", "grid_digest")


class Progress(Enum):
    """What there is of the results of a unit."""

    WAITING = 10
    RANKS = 11
    COMPLETE = 0


def results_progress(results: Path, *, phase: str, ranks: Sequence[int]) -> Progress:
    """How far the results in a folder are.

    Parameters
    ----------
    results: the folder of the unit's results.
    phase: `prefill` or `decode`.
    ranks: data-parallel ranks of this unit.

    Raises
    ------
    CollectionError: a file that is whole, and not what was asked for; there is nothing to wait for any more.

    Source: collector.md section 3.4.
    """
    output = str(results / BENCHMARK)
    documents = {rank: _whole(Path(rank_path(output, rank))) for rank in ranks}
    read = {rank: document for rank, document in documents.items() if document is not None}
    for rank, document in read.items():
        _check_rank(document, Path(rank_path(output, rank)), rank, phase)
    if len(read) < len(ranks):
        return Progress.WAITING
    first = read[ranks[0]]
    if any(document.get(name) != first.get(name) for document in read.values() for name in _IDENTITY):
        return Progress.WAITING
    place = Path(rank_path(output, ranks[0]))
    merged_path = place.with_name(f"{place.stem}_merged{place.suffix}")
    merged = _whole(merged_path)
    if merged is None:
        return Progress.RANKS
    expected = {"artifact_type": "merged", "schema_version": _SCHEMA_VERSION, "status": "complete", "valid": True}
    _require(merged, merged_path, {**expected, **{name: first.get(name) for name in _IDENTITY}})
    _require(merged.get("config"), merged_path, {"mode": phase}, "config.")
    _require(merged.get("dp"), merged_path, {"source_ranks": list(ranks)}, "dp.")
    return Progress.COMPLETE


def _whole(path: Path) -> dict[str, Any] | None:
    # A file that is absent or cut short is still being written.
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(document, dict):
        raise CollectionError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def _check_rank(document: Mapping[str, Any], path: Path, rank: int, phase: str) -> None:
    reason = document.get("error") or document.get("stop_reason")
    if document.get("status") != "complete" or document.get("valid") is not True:
        raise CollectionError(
            f"{path}: the engine ended its benchmark with status {document.get('status')!r}, valid "
            f"{document.get('valid')!r}{f': {reason}' if reason else ''}; expected 'complete' and true; see the logs"
        )
    _require(document, path, {"schema_version": _SCHEMA_VERSION})
    _require(document.get("config"), path, {"mode": phase}, "config.")
    results = document.get("results")
    measured = len(results) if isinstance(results, list) else None
    _require(document.get("coverage"), path, {"skipped_points": 0}, "coverage.")
    counts = [document["coverage"].get(name) for name in ("expected_points", "completed_points")]
    if not measured or counts != [measured, measured]:
        raise CollectionError(
            f"{path}: expected as many results as expected and completed points and at least one, found {measured} "
            f"results, {counts[0]} expected, {counts[1]} completed"
        )
    for place, result in enumerate(results or ()):
        passes = result.get("fpms") if isinstance(result, dict) else None
        if not passes or any(entry.get("dp_rank") != rank for entry in passes):
            raise CollectionError(f"{path}: results[{place}].fpms: expected passes of rank {rank}")


def _require(found: Any, path: Path, expected: Mapping[str, Any], prefix: str = "") -> None:
    for name, value in expected.items():
        given = found.get(name) if isinstance(found, dict) else None
        if given != value or type(given) is not type(value):
            raise CollectionError(f"{path}: {prefix}{name}: expected {value!r}, found {given!r}")
