"""Systems roots: directories of performance data that a configuration names.

Only names are resolved here; what is inside a root is read elsewhere.
"""

import os
from collections.abc import Sequence

from fpmsdk.errors import SystemsPathError

ENVIRONMENT = ("FPMSDK_SYSTEMS_PATH", "AICONFIGURATOR_SYSTEMS_PATH")
PACKAGED_ROOT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "systems")


def packaged_systems_root() -> str | None:
    """Return the data root shipped inside the package, or None when this build ships none."""
    return os.fspath(PACKAGED_ROOT) if os.path.isdir(PACKAGED_ROOT) else None


def resolve_systems_paths(entries: Sequence[object] = ()) -> list[str]:
    """Return absolute, existing, distinct systems roots in the order given.

    Parameters: `entries`, directories; `"default"` in any case is the packaged root, `~` is expanded,
    relative ones start at the working directory. Empty means the environment variable `FPMSDK_SYSTEMS_PATH`
    (one directory), then `AICONFIGURATOR_SYSTEMS_PATH`, then the packaged root, then nothing.
    Raises: `SystemsPathError` for an entry that is not a non-empty string or not a directory.
    Source: clients.md section 2.2.

    >>> resolve_systems_paths(["/", "/."])
    ['/']
    """
    return list(dict.fromkeys(_resolve(entry) for entry in entries or _configured()))


def _configured() -> list[str]:
    for variable in ENVIRONMENT:
        if entry := os.environ.get(variable):
            return [entry]
    return [] if packaged_systems_root() is None else ["default"]


def _resolve(entry: object) -> str:
    if not isinstance(entry, str) or not entry:
        raise SystemsPathError(f"systems_paths entries must be non-empty strings, found {entry!r}", "systems_paths")
    if entry.lower() == "default":
        root = packaged_systems_root()
        if root is None:
            raise SystemsPathError(
                "systems_paths: this build ships no performance data for 'default'; name a directory",
                "systems_paths",
            )
        return root
    path = os.path.abspath(os.path.expanduser(entry))
    if not os.path.isdir(path):
        raise SystemsPathError(f"systems_paths entry is not a directory: {path}", "systems_paths")
    return path
