"""YAML (and so JSON) text that people write: no repeated keys, keys are strings, values are those of JSON.

Source: onboarding.md section 0 (strict models), collector.md section 8.3.
"""

from __future__ import annotations

import os
from typing import Any

from fpmsdk.documents.canonical import canonical_bytes
from fpmsdk.errors import OnboardError


def parse_yaml(content: bytes, where: str | os.PathLike[str]) -> Any:
    """The value of YAML bytes.

    Raises
    ------
    OnboardError: malformed, a repeated or non-string key, or a value that JSON cannot carry; names `where`.

    Example
    -------
    >>> parse_yaml(b"files: [observer.py]", "manifest.yaml")
    {'files': ['observer.py']}
    >>> parse_yaml(b"a: 1\\na: 2", "manifest.yaml")
    Traceback (most recent call last):
        ...
    fpmsdk.errors.OnboardError: manifest.yaml: invalid YAML: repeated key 'a' at line 2
    """
    import yaml

    class Strict(yaml.SafeLoader):  # type: ignore[misc]
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.YAMLError(f"keys must be strings, found {key!r} at line {line}")
            if key in found:
                raise yaml.YAMLError(f"repeated key {key!r} at line {line}")
            found[key] = loader.construct_object(value_node, deep=True)
        return found

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        value = yaml.load(content.decode(), Loader=Strict)
        canonical_bytes(value)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError, RecursionError) as fault:
        reason = " ".join(str(fault).split())
        raise OnboardError(f"{where}: invalid YAML: {reason}", os.fspath(where)) from None
    return value
