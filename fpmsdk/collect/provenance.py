"""Whose result a folder holds: the plan, cell and attempt that its unit was prepared for, and the engine it ran.

Source: collector.md sections 0 and 5.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fpmsdk.collect.faults import mapping, require, text
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell

PROVENANCE_FILE = "collector-provenance.json"
SCHEMA_NAME = "aic_fpm_collector_provenance"
SCHEMA_VERSION = 1


class Provenance(NamedTuple):
    """The attempt that wrote a folder, and the version of the engine."""

    backend_version: str
    attempt_id: str


def provenance_document(
    *, cell_id: str, plan_sha256: str, attempt_id: str, backend_version: str, dynamo_version: str | None = None
) -> dict[str, Any]:
    """What is written into a unit before the engine starts; the version of Dynamo only where it is known.

    >>> provenance_document(cell_id="fpm-1", plan_sha256="a" * 64, attempt_id="b", backend_version="0.27.0")["runtime"]
    {'backend': 'vllm', 'backend_version': '0.27.0'}
    """
    runtime = {"backend": "vllm", "backend_version": backend_version}
    if dynamo_version is not None:
        runtime["dynamo_version"] = dynamo_version
    return {
        "schema_name": SCHEMA_NAME,
        "schema_version": SCHEMA_VERSION,
        "cell_id": cell_id,
        "plan_sha256": plan_sha256,
        "attempt_id": attempt_id,
        "runtime": runtime,
    }


def check_provenance(
    cell: Cell, raw_root: Path, files: Iterable[Path], *, plan_sha256: str | None, attempt_id: str | None
) -> Provenance:
    """Read the provenance of every unit that wrote a rank file, and require one attempt of this cell.

    Parameters
    ----------
    raw_root: the folder whose folders are the units.
    files: rank files below it.
    plan_sha256, attempt_id: what it must be of; None accepts any.

    Raises
    ------
    CollectionError: a rank file outside a unit; a provenance missing, of something else, or differing between units.
    """
    units = set()
    for file in files:
        inside = file.relative_to(raw_root).parts
        if len(inside) < 2:
            raise CollectionError(
                f"{file}: a rank file must lie in the folder of the unit that wrote it, not beside it"
            )
        units.add(inside[0])
    first: tuple[Path, dict[str, Any]] | None = None
    for unit in sorted(units):
        path = raw_root / unit / PROVENANCE_FILE
        document = _read(path)
        _check(document, str(path), cell.cell_id, plan_sha256, attempt_id)
        compared = _without_dynamo(document)
        if first is None:
            first = path, compared
        elif compared != first[1]:
            raise CollectionError(f"{path}: the provenance differs from {first[0]}; all units must be of one attempt")
    assert first is not None
    return Provenance(first[1]["runtime"]["backend_version"], first[1]["attempt_id"])


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(mapping(read_document(path), str(path)))
    except FileNotFoundError:
        raise CollectionError(
            f"{path}: the provenance is missing, so that nobody knows which attempt these results are of; run it again"
        ) from None


def _check(document: dict[str, Any], where: str, cell_id: str, plan_sha256: str | None, attempt_id: str | None) -> None:
    for name, accepted in (("schema_name", SCHEMA_NAME), ("schema_version", SCHEMA_VERSION), ("cell_id", cell_id)):
        found = document.get(name)
        require(type(found) is type(accepted) and found == accepted, f"{where}: {name}", found, repr(accepted))
    for name, expected in (("plan_sha256", plan_sha256), ("attempt_id", attempt_id)):
        value = text(document.get(name), f"{where}: {name}")
        require(expected in (None, value), f"{where}: {name}", value, repr(expected))
    runtime = mapping(document.get("runtime"), f"{where}: runtime")
    require(runtime.get("backend") == "vllm", f"{where}: runtime.backend", runtime.get("backend"), "'vllm'")
    text(runtime.get("backend_version"), f"{where}: runtime.backend_version")


def _without_dynamo(document: dict[str, Any]) -> dict[str, Any]:
    # Release labels of Dynamo may differ between units; nothing else may.
    runtime = {name: value for name, value in document["runtime"].items() if name != "dynamo_version"}
    return {name: value for name, value in document.items() if name != "dynamo_version"} | {"runtime": runtime}
