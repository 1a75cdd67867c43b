"""The two written forms of a JSON document: the one that is hashed and the one that is kept in a file.

Source: collector.md (conventions), onboarding.md section 0.
"""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

from fpmsdk.config.jsontext import JsonFault, read_json
from fpmsdk.errors import OnboardError
from fpmsdk.files import UnfitFileError, read_regular, sha256, whole_file

# Rank artifacts have readers of their own; every other document is far smaller.
MAX_DOCUMENT_BYTES = 256 * 2**20


def canonical_bytes(value: Any) -> bytes:
    """The form that is hashed: sorted keys, no spaces, ASCII.

    >>> canonical_bytes({"b": 1, "a": [True, None]})
    b'{"a":[true,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """SHA-256 of the canonical form, as 64 hexadecimal digits.

    >>> digest({})
    '44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return sha256(canonical_bytes(value))


def pretty_bytes(value: Any) -> bytes:
    r"""The form that is kept in files: two spaces, sorted keys, one line feed at the end.

    >>> pretty_bytes({"b": 1})
    b'{\n  "b": 1\n}\n'
    """
    # Compiled code writes and indents; the standard library indents in Python, which takes seconds for a large report.
    return msgspec.json.format(json.dumps(value, sort_keys=True, allow_nan=False).encode(), indent=2) + b"\n"


def write_document(path: str | os.PathLike[str], value: Any) -> None:
    """Put a document in the place of whatever is at `path`, whole or not at all.

    Raises
    ------
    OnboardError: a symbolic link is there.
    OSError: it cannot be written; names `path`.

    Example
    -------
    >>> import tempfile
    >>> from pathlib import Path
    >>> target = Path(tempfile.mkdtemp()) / "plan.json"
    >>> write_document(target, {"cells": 2})
    >>> read_document(target)
    {'cells': 2}
    """
    content = pretty_bytes(value)
    if os.path.islink(path):
        raise OnboardError(f"{path}: a symbolic link is not written through; remove it", os.fspath(path))
    with whole_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def parse_document(content: bytes, where: str | os.PathLike[str]) -> Any:
    """The value of JSON bytes; repeated keys and non-finite numbers are refused.

    Raises
    ------
    OnboardError: no such JSON; names `where`.
    """
    try:
        return read_json(content.decode())
    except UnicodeDecodeError as fault:
        raise OnboardError(f"{where}: invalid JSON: not UTF-8 at byte {fault.start}", os.fspath(where)) from None
    except JsonFault as fault:
        place = f" at {fault.path}" if fault.path else ""
        raise OnboardError(f"{where}: invalid JSON{place}: {fault}", os.fspath(where)) from None


def read_document(path: str | os.PathLike[str], *, follow_links: bool = False) -> Any:
    """The value of a JSON file.

    Parameters
    ----------
    path: a regular file.
    follow_links: whether `path` may be a symbolic link; evidence may not.

    Raises
    ------
    OnboardError: no regular file, or no JSON without repeated keys; names the file.
    OSError: it cannot be read.
    """
    try:
        content = read_regular(path, limit_bytes=MAX_DOCUMENT_BYTES, follow_links=follow_links)
    except UnfitFileError as fault:
        raise OnboardError(f"{path}: {fault}", os.fspath(path)) from None
    return parse_document(content, path)
