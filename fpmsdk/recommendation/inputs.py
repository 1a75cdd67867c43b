"""Everything besides the configuration that decides a sweep: traces, tables and snapshots, each with its digest.

A sweep is only continued, merged or given to another machine where all of it is the same.
Source: predict-recommend.md sections 8.5 and 17 (the table is referenced by digest).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fpmsdk.config.state_snapshot import MANIFEST_FILE
from fpmsdk.config.systems import resolve_systems_paths
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import EvidenceError

# By what is read: a file, or a systems root with one system and perhaps a table outside of it. Values are digests.
Inputs = dict[str, str]

_ESTIMATED = ("auto", "op_level", "fpm_interpolation")


def inputs_of(documents: Iterable[Mapping[str, Any]]) -> Inputs:
    """What predictions read, with digests, sorted.

    Parameters
    ----------
    documents: predict documents with absolute paths.

    Raises
    ------
    EvidenceError: a file that a document names is missing.
    PerfDataNotAvailableError: a systems root cannot be read.

    >>> import tempfile
    >>> from pathlib import Path
    >>> trace = Path(tempfile.mkdtemp()) / "trace.jsonl"
    >>> _ = trace.write_text("{}")
    >>> (digest,) = inputs_of([{"traffic": {"source": {"paths": [str(trace)]}}}]).values()
    >>> digest[:8]
    '44136fa3'
    """
    names = {name for document in documents for name in _names(document)}
    return {name: _digest(name) for name in sorted(names)}


def verify_inputs(inputs: Mapping[str, str]) -> None:
    """Compare what this machine reads with the digests of the sweep; each set of inputs is looked at once a process.

    Raises
    ------
    EvidenceError: something is missing or differs; names it.

    >>> verify_inputs({})
    """
    _verify(tuple(sorted(inputs.items())))


@functools.lru_cache(maxsize=8)
def _verify(inputs: tuple[tuple[str, str], ...]) -> None:
    for name, expected in inputs:
        found = _digest(name)
        if found != expected:
            raise EvidenceError(
                f"{name}: differs from what the sweep began with: expected sha256 {expected}, found {found}; every "
                "worker must read the same files",
                name,
            )


def _digest(name: str) -> str:
    if name.startswith("{"):
        # Most of a start, and not needed where no worker is priced by tables.
        from fpmsdk.perfdb.fingerprint import measure_fingerprint
        from fpmsdk.perfdb.roots import SystemsRoot

        place = json.loads(name)
        try:
            return measure_fingerprint(SystemsRoot(place["systems"]), place["system"], place.get("table")).digest
        except OSError as fault:
            raise EvidenceError(f"{place['systems']}: {fault.strerror}", place["systems"]) from None
    try:
        digest: str = file_meta(os.path.realpath(name))["sha256"]
    except OSError as fault:
        raise EvidenceError(f"{name}: {fault.strerror}; a worker needs the same file at the same path", name) from None
    return digest


def _names(document: Mapping[str, Any]) -> Iterator[str]:
    source = document.get("traffic", {}).get("source", {})
    yield from source.get("paths", ())
    engine = document.get("engine", {})
    checkpoint = os.path.join(str(engine.get("model", "")), "config.json")
    if os.path.isabs(checkpoint) and os.path.isfile(checkpoint):
        yield checkpoint
    for worker in engine.get("workers", {}).values():
        timing = worker.get("timing", {})
        if timing.get("type", "default") != "default":
            continue
        policy = {**engine, **timing}
        yield from _of_estimator(policy, worker.get("hardware") or engine.get("hardware"))


def _of_estimator(policy: Mapping[str, Any], system: Any) -> Iterator[str]:
    estimator = policy.get("estimator_config") or {}
    snapshot = (estimator.get("state_snapshot") or {}).get("path")
    if snapshot is not None:
        yield os.path.join(snapshot, MANIFEST_FILE)  # which has the digests of the rest
    if policy.get("estimation_mode", "auto") not in _ESTIMATED or not isinstance(system, str):
        return
    table = (estimator.get("fpm_interpolation") or {}).get("fpm_parquet_path") or policy.get("fpm_parquet_path")
    roots = policy.get("systems_paths")
    for root in resolve_systems_paths(["default"] if roots in (None, "default") else roots):
        place = {"systems": root, "system": system} | ({} if table is None else {"table": table})
        yield json.dumps(place, sort_keys=True)
