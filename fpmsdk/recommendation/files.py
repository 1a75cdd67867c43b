"""The files of a search: the ledger, the table of all candidates, and a configuration for every recommended one.

Source: predict-recommend.md sections 9.4, 10.1 and 10.2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from fpmsdk.documents.canonical import pretty_bytes
from fpmsdk.files import whole_file
from fpmsdk.recommendation.columns import arrow_table, columns, csv_bytes
from fpmsdk.recommendation.concrete import concrete_config
from fpmsdk.recommendation.ledger import Result, config_path, ledger

LEDGER, TABLE, PARQUET = "recommendation.json", "recommendation.csv", "recommendation.parquet"
FOLDER = "recommendations"
_CONFIG = re.compile(r"[0-9]{4,}\.yaml")
# Written by compiled code where PyYAML has it: in Python a configuration with a profile takes hundreds of times longer
# than its simulation.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def write_results(
    result: Result, folder: str | os.PathLike[str], *, created_at: datetime | None = None, cache_hits: int = 0
) -> dict[str, Any]:
    """Write what a search found; the ledger comes last, so that where it is, everything is.

    Parameters
    ----------
    result: candidates and their order.
    folder: an existing directory without the results of another search (`remove_results`).
    created_at, cache_hits: as `ledger` takes them.

    Returns
    -------
    The ledger.

    Raises
    ------
    OSError: something cannot be written.

    Source: predict-recommend.md sections 10.1 and 10.2.
    """
    place = Path(folder)
    if result.recommended:
        (place / FOLDER).mkdir(exist_ok=True)
    for rank, entry in enumerate(result.recommended, start=1):
        path = place / config_path(rank)
        _write(path, yaml_bytes(portable(concrete_config(entry.candidate), path.parent)))
    table = columns(result)
    _write(place / TABLE, csv_bytes(table))
    _write_parquet(place / PARQUET, table)
    document = ledger(result, created_at=created_at, cache_hits=cache_hits)
    _write(place / LEDGER, pretty_bytes(document))
    return document


def remove_results(folder: str | os.PathLike[str]) -> None:
    """Remove the results of an earlier search and nothing else; a link is removed, never followed.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> for name in (LEDGER, "notes.txt"):
    ...     _ = (place / name).write_text("")
    >>> remove_results(place)
    >>> [file.name for file in place.iterdir()]
    ['notes.txt']
    """
    place = Path(folder)
    for name in (LEDGER, TABLE, PARQUET):
        (place / name).unlink(missing_ok=True)
    configs = place / FOLDER
    if not configs.is_dir() or configs.is_symlink():
        return
    for path in configs.iterdir():
        if _CONFIG.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
            path.unlink()
    if not any(configs.iterdir()):
        configs.rmdir()


def yaml_bytes(document: Mapping[str, Any]) -> bytes:
    """The YAML text of a configuration, in the order of its keys and without references."""
    return yaml.dump(_unshared(document), Dumper=_DUMPER, sort_keys=False, encoding="utf-8")  # type: ignore[no-any-return]


def portable(document: Mapping[str, Any], folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A configuration whose local paths are relative to the folder of its file where they are below it.

    Parameters
    ----------
    document: a concrete configuration with absolute paths.
    folder: where its file will be.

    >>> portable({"traffic": {"source": {"type": "trace", "paths": ["/runs/a/t.jsonl", "/data/t.jsonl"]}}}, "/runs/a")
    {'traffic': {'source': {'type': 'trace', 'paths': ['t.jsonl', '/data/t.jsonl']}}}
    """
    place = os.path.abspath(folder)

    def relative(path: str) -> str:
        inside = path.startswith(os.path.join(place, ""))
        return os.path.relpath(path, place) if inside else path

    copy: dict[str, Any] = _unshared(document)
    _each_path(copy, relative)
    return copy


def _each_path(document: dict[str, Any], change: Callable[[str], str]) -> None:
    """Change every local path of a configuration in its place."""
    engine = document.get("engine", {})
    workers = engine.get("workers", {}).values()
    source = document.get("traffic", {}).get("source", {})
    _change(source, "paths", change)
    _change(engine, "model", change)
    for policy in (engine, *(worker.get("timing", {}) for worker in workers)):
        _change(policy, "systems_paths", change)
        _change(policy, "systems_path", change)
        _change(policy, "fpm_parquet_path", change)
        estimators = policy.get("estimator_config") or {}
        _change(estimators.get("state_snapshot") or {}, "path", change)
        _change(estimators.get("fpm_interpolation") or {}, "fpm_parquet_path", change)


def _change(mapping: dict[str, Any], name: str, change: Callable[[str], str]) -> None:
    value = mapping.get(name)
    if isinstance(value, str):
        mapping[name] = change(value)
    elif isinstance(value, list):
        mapping[name] = [change(item) for item in value]


def _unshared(value: Any) -> Any:
    # Parts that several documents or places have in common would be written as references to each other.
    if isinstance(value, Mapping):
        return {key: _unshared(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_unshared(item) for item in value]
    return value


def _write(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)


def _write_parquet(path: Path, table: dict[str, list[Any]]) -> None:
    import pyarrow.parquet

    with whole_file(path) as file:
        pyarrow.parquet.write_table(arrow_table(table), file)
