"""YAML files of a systems root: one reader that names the file when something is wrong.

Knows nothing about what a document means.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from fpmsdk.errors import PerfDataCorruptError, PerfDataNotAvailableError
from fpmsdk.perfdb import cache


def read_mapping(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the top-level mapping of a YAML file; an empty file is an empty mapping.

    Raises: `FileNotFoundError` when absent, so that callers decide what absence means;
    `PerfDataNotAvailableError` when it cannot be read; `PerfDataCorruptError` when it is not a YAML mapping.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as fault:
        raise PerfDataNotAvailableError(f"perf database error: cannot read {path}: {fault.strerror}") from fault
    document = _parse(content, path)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise PerfDataCorruptError(
            f"{path}: expected a YAML mapping, found {type(document).__name__}; reinstall or repair the data",
            str(path),
        )
    return document


def _parse(content: bytes, path: str | os.PathLike[str]) -> Any:
    # Parsing the sharing manifest, and importing the parser, cost more than loading a compiled table.
    key = cache.key("yaml", content)
    if (stored := cache.load(key)) is not None:
        return msgspec.msgpack.decode(stored)
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(content, loader)
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        raise PerfDataCorruptError(
            f"{path}: not valid YAML: {fault}; reinstall or repair the data", str(path)
        ) from fault
    packed = msgspec.msgpack.encode(document)
    if msgspec.msgpack.decode(packed) == document:
        cache.store(key, [packed])
    return document
