"""Whether the installed engine is the one whose sources were read for these observers.

Source: collector.md section 8.3, vllm-facts.md section 4.6.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class SourceChangedError(RuntimeError):
    """A source file is not the one that was read for these observers."""


def installed_file(name: str) -> Path | None:
    """The installed file of a name such as `vllm/v1/core/block_pool.py`, found without importing its package.

    >>> installed_file("json/decoder.py").name, installed_file("json/no_such.py")
    ('decoder.py', None)
    """
    package, _, inside = name.partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (place := Path(folder, inside)).is_file():
            return place
    return None


def check_sources(runtime: Mapping[str, Any], find: Callable[[str], Path | None] = installed_file) -> None:
    """Compare every source file that was read with the installed one.

    Parameters
    ----------
    runtime: `version` and `source_files` (name: SHA-256) of the manifest.
    find: finds the installed file of a name.

    Raises
    ------
    SourceChangedError: names every file that is missing or has other bytes.

    Example
    -------
    >>> check_sources({"version": "1", "source_files": {"json/no_such.py": "0" * 64}})
    Traceback (most recent call last):
        ...
    fpmsdk.collect.observers.vllm_observers.sources.SourceChangedError: these observers were written for vLLM 1; \
json/no_such.py is not installed; use observers that were written for this engine (--instrumentation)
    """
    faults = []
    for name, known in sorted(runtime["source_files"].items()):
        place = find(name)
        if place is None:
            faults.append(f"{name} is not installed")
        elif (found := hashlib.sha256(place.read_bytes()).hexdigest()) != known:
            faults.append(f"{name} has sha256 {found}, not {known}")
    if faults:
        raise SourceChangedError(
            f"these observers were written for vLLM {runtime['version']}; {'; '.join(faults)}; use observers that were "
            "written for this engine (--instrumentation)"
        )


def check_version(runtime: Mapping[str, Any], version: str, commit: str | None) -> None:
    """Compare the version and, where the build tells one, the commit of the engine.

    Parameters
    ----------
    runtime: `version` and `source_revision` of the manifest. A revision of 64 digits is a digest of the sources, with
        which no commit can be compared.
    version, commit: `vllm.__version__` without its local part, and `commit_id` of the build, which may be short.

    Raises
    ------
    SourceChangedError: names both.

    Example
    -------
    >>> check_version({"version": "0.27.0", "source_revision": "ab" * 20}, "0.27.0", "gabab")
    """
    if version != runtime["version"]:
        raise SourceChangedError(f"these observers were written for vLLM {runtime['version']}, found {version}")
    revision = runtime["source_revision"]
    told = (commit or "").removeprefix("g").lower()
    if re.fullmatch("[0-9a-f]{4,40}", told) and len(revision) == 40 and not revision.startswith(told):
        raise SourceChangedError(f"these observers were written for commit {revision}, the engine was built of {told}")


def require_engine(runtime: Mapping[str, Any]) -> None:
    """Refuse every engine but the one that these observers were written for. Raises `SourceChangedError`.

    Source: collector.md section 8.3.
    """
    import vllm
    from vllm import _version

    check_version(runtime, vllm.__version__.partition("+")[0], getattr(_version, "commit_id", None))
    check_sources(runtime)


def is_pinned_class(kind: type, runtime: Mapping[str, Any]) -> bool:
    """Whether a class comes from a source file that was read for these observers.

    >>> is_pinned_class(Path, {"source_files": {}})
    False
    """
    source = inspect.getsourcefile(kind)
    return source is not None and any(
        (place := installed_file(name)) is not None and place.samefile(source) for name in runtime["source_files"]
    )
