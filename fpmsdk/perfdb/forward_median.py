"""One pair from three launches of the same measurement: the median latency of every point.

Launches of one engine differ by more than the noise within one; the median of three is what the format knows of.
Source: fpm-interpolation.md section 1.3 (measurement_policy).
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.errors import FpmDataError
from fpmsdk.perfdb.forward_commit import sidecar_document
from fpmsdk.perfdb.forward_pair import read_pair
from fpmsdk.perfdb.forward_schema import (
    COORDINATE_COLUMNS,
    EXECUTION_COLUMNS,
    LEGACY_EXECUTION,
    REPEATS_OF_POLICY,
    SINGLE_SAMPLE,
    required_columns,
    sidecar_path,
)
from fpmsdk.perfdb.forward_writer import WRITTEN_VERSION, Published, publish_rows, read_origin

MEDIAN_POLICY = "kvwarm_median_of_3"
LAUNCHES = REPEATS_OF_POLICY[MEDIAN_POLICY]

_KEY = required_columns(WRITTEN_VERSION)[:-1]
# What tells launches apart.
_RUN = ("runtime_run_id", "collector_attempt_id")
_KEPT_FACTS = ("aic_revision", "kv_seed_classification", "knees")

Row = dict[str, Any]


def median_pair(target: str, launches: Sequence[str]) -> Published:
    """Publish the per-point median of three launches of one measurement.

    Parameters
    ----------
    target: the table to publish into; created when it does not exist.
    launches: tables of the pairs that the launches were published as, each on its own.

    Returns
    -------
    What `publish_rows` did. Latencies (ms) are medians, `measurement_policy` and `measurement_repeats` say so, and the
    identity of the run is a digest of the three identities.

    Raises
    ------
    FpmDataError: not three launches; a faulty pair; launches with other points, identities or facts; rows that are no
        single samples; or one launch given twice. Nothing is written then.

    Example
    -------
    >>> import tempfile
    >>> import fpmsdk.sample
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     median_pair(f"{folder}/t.parquet", [fpmsdk.sample.forward_pair()])
    Traceback (most recent call last):
        ...
    fpmsdk.errors.FpmDataError: a median is made of 3 launches, found 1; give 3 pairs
    """
    if len(launches) != LAUNCHES:
        raise FpmDataError(f"a median is made of {LAUNCHES} launches, found {len(launches)}; give {LAUNCHES} pairs")
    tables = [_rows_by_key(path) for path in launches]
    facts = [_facts(path) for path in launches]
    first = tables[0]
    for path, table, fact in zip(launches[1:], tables[1:], facts[1:], strict=True):
        if unshared := sorted(first.keys() ^ table.keys()):
            raise FpmDataError(
                f"{path}: {len(unshared)} points are not in both this pair and {launches[0]}, {_shown(unshared[0])} "
                "among them; launches must measure one grid"
            )
        if differing := sorted(name for name in _KEPT_FACTS if fact.get(name) != facts[0].get(name)):
            raise FpmDataError(f"{path}: {', '.join(differing)} of the sidecar differs from {launches[0]}")
    rows = [_median(launches, [table[key] for table in tables]) for key in first]
    return publish_rows(target, rows, facts=facts[0])


def _rows_by_key(path: str) -> dict[tuple[str, ...], Row]:
    import pyarrow.parquet as pq

    read_pair(path, *read_origin(path))  # every check of the format
    legacy = dict(zip(EXECUTION_COLUMNS, LEGACY_EXECUTION, strict=True))
    rows: list[Row] = [legacy | row for row in pq.read_table(path, use_threads=False).to_pylist()]
    return {tuple(str(row[name]) for name in _KEY): row for row in rows}


def _facts(path: str) -> dict[str, Any]:
    sidecar = sidecar_document(sidecar_path(str(Path(path))))
    return {name: sidecar[name] for name in _KEPT_FACTS if name in sidecar}


def _median(launches: Sequence[str], rows: Sequence[Row]) -> Row:
    first = rows[0]
    for path, row in zip(launches, rows, strict=True):
        if (row.get("measurement_policy"), row.get("measurement_repeats")) != (SINGLE_SAMPLE, 1):
            raise FpmDataError(
                f"{path}: {_place(row)} is {row.get('measurement_policy')} of {row.get('measurement_repeats')}, a "
                "median is made of single samples"
            )
        if differing := sorted(
            name for name in {*first, *row} - {*_RUN, "latency_ms"} if first.get(name) != row.get(name)
        ):
            raise FpmDataError(f"{path}: {_place(row)}: {', '.join(differing)} differs from {launches[0]}")
    for name in _RUN:
        values = [row.get(name) for row in rows]
        if len(set(values)) != LAUNCHES or not all(isinstance(value, str) and value for value in values):
            raise FpmDataError(
                f"{launches[0]}: {_place(first)}: {name} must tell the launches apart, found {values}; give "
                f"{LAUNCHES} launches, each once"
            )
    return first | {
        "latency_ms": statistics.median(row["latency_ms"] for row in rows),
        "measurement_policy": MEDIAN_POLICY,
        "measurement_repeats": LAUNCHES,
        **{name: _joint([str(row[name]) for row in rows]) for name in _RUN},
    }


def _joint(identities: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(identities)).encode()).hexdigest()[:32]


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['cell_id']} at {[row[name] for name in COORDINATE_COLUMNS]}"


def _shown(key: tuple[str, ...]) -> str:
    named = dict(zip(_KEY, key, strict=True))
    return f"{named['workload_kind']} {[named[name] for name in COORDINATE_COLUMNS]} of {named['cell_id']}"
