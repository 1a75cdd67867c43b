r"""YAML and JSON files that people write: read strictly, written in field order.

Source: onboarding.md section 0.
"""

from __future__ import annotations

import json
import os
from typing import Any

import yaml

from fpmsdk.errors import OnboardError
from fpmsdk.files import UnfitFileError, read_regular

_MAX_BYTES = 64 * 2**20


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader of plain values in whose mappings every key is text and is given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _Refused(f"keys must be text, found {key!r}; put it in quotes")
            if key in seen:
                raise _Refused(f"the key {key!r} is given twice; keep one")
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Refused(ValueError):
    pass


def parse_yaml(content: str | bytes, where: str | os.PathLike[str]) -> Any:
    """The value of YAML or JSON text.

    Raises
    ------
    OnboardError: no such text, a repeated key, a key that is not text, or a value that JSON has no form for, such as a
        date; names `where`.

    >>> parse_yaml("a: [1, 2]", "answer")
    {'a': [1, 2]}
    """
    where = os.fspath(where)
    try:
        text = content if isinstance(content, str) else content.decode()
        value = yaml.load(text, Loader=_StrictLoader)
        json.dumps(value)
    except _Refused as fault:
        raise OnboardError(f"{where}: {fault}", where) from None
    except UnicodeDecodeError as fault:
        raise OnboardError(f"{where}: not UTF-8 at byte {fault.start}", where) from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as fault:
        reason = " ".join(str(fault).split())
        raise OnboardError(f"{where}: invalid YAML or JSON: {reason}", where) from None
    return value


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The value of a YAML or JSON file.

    Raises
    ------
    OnboardError: no regular file, or no such text; names the file.
    OSError: it cannot be read.
    """
    where = os.fspath(path)
    try:
        content = read_regular(where, limit_bytes=_MAX_BYTES)
    except UnfitFileError as fault:
        raise OnboardError(f"{where}: {fault}", where) from None
    return parse_yaml(content, where)


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a YAML or JSON file holds. Raises as `read_yaml`, also for any other value."""
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise OnboardError(f"{path}: must hold one mapping, found {type(value).__name__}", os.fspath(path))
    return value


def write_yaml(value: Any) -> bytes:
    r"""YAML text in the order of the keys.

    >>> write_yaml({"b": 1, "a": None})
    b'b: 1\na: null\n'
    """
    text: str = yaml.safe_dump(value, sort_keys=False)
    return text.encode()
