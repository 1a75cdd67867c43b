"""Systems roots: directories of performance data that a configuration names.

Only names are resolved here; what is inside a root is read by `fpmsdk.perfdb`.
"""

import os
from collections.abc import Sequence

from fpmsdk.errors import SystemsPathError

ENVIRONMENT = ("FPMSDK_SYSTEMS_PATH", "AICONFIGURATOR_SYSTEMS_PATH")
# Distribution that ships a systems root -> the package that holds it.
DATA_PACKAGES = {"aiconfigurator-core": "aiconfigurator_core", "aisimulate": "aisimulate_core"}
HOW_TO_GET_DATA = (
    "install performance data with `pip install 'fpmsdk[data]'`, set FPMSDK_SYSTEMS_PATH to a systems root, "
    "or name one in systems_paths"
)


def installed_systems_roots() -> dict[str, str | None]:
    """Return the systems root of every known data package, None where there is none.

    Packages are found without importing them.
    """
    return {
        distribution: next(iter(directories_in_package(package, "systems")), None)
        for distribution, package in DATA_PACKAGES.items()
    }


def directories_in_package(package: str, name: str) -> list[str]:
    """Return the directories of this name in a package, which is found without importing it.

    >>> [directory.endswith("fpmsdk/sample") for directory in directories_in_package("fpmsdk", "sample")]
    [True]
    >>> directories_in_package("no_such_package", "sample")
    []
    """
    import importlib.util  # a configuration with its own roots, or without any, does not look for packages

    found = importlib.util.find_spec(package)
    places = found.submodule_search_locations if found else None
    return [path for place in places or () if os.path.isdir(path := os.path.join(place, name))]


def packaged_systems_root() -> str | None:
    """Return the systems root of the first data package that is installed, or None when there is none.

    Source: clients.md section 2.2.

    Example
    -------
    >>> packaged_systems_root() in (None, *installed_systems_roots().values())
    True
    """
    return next(filter(None, installed_systems_roots().values()), None)


def default_systems_root() -> str | None:
    """Return the root that `"default"` means, or None when there is none.

    The environment variable `FPMSDK_SYSTEMS_PATH`, then `AICONFIGURATOR_SYSTEMS_PATH` (one directory each), then
    the data of an installed package.
    Raises: `SystemsPathError` for a variable that does not name a directory.
    """
    for variable in ENVIRONMENT:
        entry = os.environ.get(variable)
        if entry and entry.lower() != "default":
            return _directory(entry, variable)
    return packaged_systems_root()


def resolve_systems_paths(entries: Sequence[object] = ()) -> list[str]:
    """Return absolute, existing, distinct systems roots in the order given.

    Parameters: `entries`, directories; `"default"` in any case is `default_systems_root`, `~` is expanded,
    relative ones start at the working directory. Empty means the default when there is one, else nothing.
    Raises: `SystemsPathError` for an entry that is not a non-empty string or not a directory, and for
    `"default"` when there is no data.
    Source: clients.md section 2.2.

    >>> resolve_systems_paths(["/", "/."])
    ['/']
    """
    if not entries:
        root = default_systems_root()
        return [] if root is None else [root]
    return list(dict.fromkeys(_resolve(entry) for entry in entries))


def _resolve(entry: object) -> str:
    if not isinstance(entry, str) or not entry:
        raise SystemsPathError(f"systems_paths entries must be non-empty strings, found {entry!r}", "systems_paths")
    if entry.lower() != "default":
        return _directory(entry, "systems_paths entry")
    root = default_systems_root()
    if root is None:
        raise SystemsPathError(
            f"systems_paths: 'default' found no performance data; {HOW_TO_GET_DATA}", "systems_paths"
        )
    return root


def _directory(entry: str, origin: str) -> str:
    path = os.path.abspath(os.path.expanduser(entry))
    if not os.path.isdir(path):
        raise SystemsPathError(f"{origin} is not a directory: {path}", "systems_paths")
    return path
