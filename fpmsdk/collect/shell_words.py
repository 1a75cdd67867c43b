"""Reading a generated shell file as text: its literal command and its exports, never running it.

Source: collector.md section 3.2.
"""

from __future__ import annotations

import re
import shlex

from fpmsdk.errors import CollectionError

_COMMAND = re.compile(r"^engine_command=\((.*)\)$", re.MULTILINE)
_EXPORT = re.compile(r"^export ([A-Z][A-Z0-9_]*)=(\S.*|)$", re.MULTILINE)


def literal_command(text: str) -> list[str]:
    """The words of the one command array of a `run.sh`.

    Raises
    ------
    CollectionError: there is none, or there are several.

    Example
    -------
    >>> literal_command("engine_command=(python3 -m dynamo.vllm '--x={}')")
    ['python3', '-m', 'dynamo.vllm', '--x={}']
    """
    found = _COMMAND.findall(text)
    if len(found) != 1:
        raise CollectionError(f"run.sh: expected one literal engine_command, found {len(found)}")
    return shlex.split(found[0])


def literal_exports(text: str) -> dict[str, str]:
    """Exported variables with literal values.

    >>> literal_exports("export A=1\\nexport B='x y'\\nexport C=\\"${D}\\"")
    {'A': '1', 'B': 'x y'}
    """
    return {name: shlex.split(value)[0] if value else "" for name, value in _EXPORT.findall(text) if "$" not in value}
