"""YAML files of a systems root: one reader that names the file when something is wrong.

Knows nothing about what a document means.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fpmsdk.errors import PerfDataCorruptError, PerfDataNotAvailableError
from fpmsdk.perfdb import cache
from fpmsdk.perfdb.parquet import refuse_pointer

# What the parser lets its converters raise for a date or number that is none, or that is beyond all range.
_CONVERSION_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def read_mapping(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the top-level mapping of a YAML file; an empty file is an empty mapping.

    Raises: `FileNotFoundError` when absent, so that callers decide what absence means;
    `PerfDataNotAvailableError` when it cannot be read or is only a Git LFS pointer; `PerfDataCorruptError` when it
    is not a YAML mapping or says something twice.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as fault:
        raise PerfDataNotAvailableError(f"perf database error: cannot read {path}: {fault.strerror}") from fault
    refuse_pointer(content, path)
    document = _parse(content, path)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise PerfDataCorruptError(
            f"{path}: expected a YAML mapping, found {type(document).__name__}; reinstall or repair the data",
            str(path),
        )
    return document


def ill_formed(path: str, key: str, found: object, accepted: str) -> PerfDataCorruptError:
    """The error for a value of a document that is not what it must be; `accepted` says that in words.

    >>> str(ill_formed("x100.yaml", "gpu.power", -1, "a positive number"))
    'x100.yaml: gpu.power must be a positive number, found -1'
    """
    return PerfDataCorruptError(f"{path}: {key} must be {accepted}, found {found!r}", path)


def as_mapping(value: object, name: str, path: str) -> Mapping[Any, Any]:
    """Return an optional mapping inside a document; null counts as absent.

    Parameters: `name` and `path`, what it is called and the file it is in, for messages.
    Raises: `PerfDataCorruptError` for anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ill_formed(path, name, value, "a mapping")
    return value


def _parse(content: bytes, path: str | os.PathLike[str]) -> Any:
    # Parsing the sharing manifest, and importing the parser, cost more than loading a compiled table.
    key = cache.key("yaml", content)
    if (stored := cache.load(key)) is not None:
        return msgspec.msgpack.decode(stored)
    import yaml

    try:
        document = yaml.load(content, _loader())
        packed = msgspec.msgpack.encode(document)
    except (yaml.YAMLError, *_CONVERSION_FAULTS) as fault:
        raise PerfDataCorruptError(
            f"{path}: not valid YAML: {' '.join(str(fault).split())}; reinstall or repair the data", str(path)
        ) from fault
    if msgspec.msgpack.decode(packed) == document:
        cache.store(key, [packed])
    return document


@functools.cache
def _loader() -> Any:
    """A safe loader that refuses a mapping with one key twice, of which YAML libraries keep the last."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            if repeated := {key for key in written if written.count(key) > 1}:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{', '.join(sorted(repeated))} given more than once", node.start_mark
                )
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    return Loader
