"""Observers of a running engine: their manifest, the digest of everything in it, their frozen copy.

Nothing here imports or executes what a bundle holds; inside an engine only the verified importer
(`fpm_runtime_instrumentation`) does.
Source: collector.md section 8.3.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fpmsdk.documents.canonical import canonical_bytes, digest
from fpmsdk.documents.evidence import file_meta
from fpmsdk.documents.yaml_files import parse_yaml
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.files import UnfitFileError, read_regular

INSTRUMENTATION_SCHEMA = "aisimulate-runtime-instrumentation/v1"
OBSERVATION_SCHEMA = "aisimulate-runtime-observation/v1"
IMPORTS_SCHEMA = "aisimulate-runtime-instrumentation-imports/v1"
LOADER_FILE = "fpm_runtime_instrumentation.py"
MANIFEST_FILE = "manifest.json"
_MAX_MANIFEST_BYTES = 4 * 2**20
_REQUIRED = {"schema_version", "runtime", "files", "worker_class", "scheduler_class", "observation_schema"}


@dataclass(frozen=True, slots=True)
class InstrumentationBundle:
    """A manifest with the digests of all files it declares.

    `sha256` covers the manifest and every file; two bundles with one digest observe alike.
    """

    manifest_path: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, str]
    sha256: str

    @property
    def root(self) -> Path:
        """The folder that the declared files are in."""
        return self.manifest_path.parent

    @property
    def runtime(self) -> dict[str, Any]:
        """Framework, version, source revision and source digests that the observers were written for."""
        return copy.deepcopy(dict(self.manifest["runtime"]))


def loader_path() -> Path:
    """The verified importer that is staged beside a bundle."""
    return Path(__file__).with_name(LOADER_FILE)


def loader_binding() -> dict[str, str]:
    """What a launch context says of the importer, so that observations tell which one loaded them.

    >>> sorted(loader_binding())
    ['loader_sha256', 'schema_version']
    """
    return {"schema_version": IMPORTS_SCHEMA, "loader_sha256": file_meta(loader_path())["sha256"]}


def contained_file(root: str | os.PathLike[str], relative: Any) -> Path:
    """The regular file at a relative path below a folder, reached through no symbolic link.

    Raises
    ------
    EvidenceError: the path is absolute, not normalised or leads through a link, or no regular file is there.

    Example
    -------
    >>> contained_file("/results", "../secret")
    Traceback (most recent call last):
        ...
    fpmsdk.errors.EvidenceError: artifact path '../secret' must be relative and normalised, with / between its parts
    """
    place = Path(root)
    for part in PurePosixPath(_relative(relative)).parts:
        place = place / part
        if place.is_symlink():
            raise EvidenceError(f"{place}: evidence may not be a symbolic link; give the file itself", str(place))
    if not place.is_file():
        raise EvidenceError(f"{place}: this file is missing; restore it or record new evidence", str(place))
    return place


def load_instrumentation(path: str | os.PathLike[str], runtime_version: str | None = None) -> InstrumentationBundle:
    """Read a manifest and take the digests of the files it declares.

    Parameters
    ----------
    path: the manifest, JSON or YAML; its files are beside it.
    runtime_version: the engine version that it must be written for; None accepts any.

    Raises
    ------
    OnboardError: the manifest breaks a rule; names the field.
    EvidenceError: a declared file is missing or a symbolic link.
    """
    place = Path(path).absolute()
    try:
        content = read_regular(place, limit_bytes=_MAX_MANIFEST_BYTES, follow_links=False)
    except UnfitFileError as fault:
        raise OnboardError(f"{place}: {fault}", str(place)) from None
    manifest = parse_yaml(content, place)
    _check_manifest(manifest, place, runtime_version)
    files = {name: file_meta(contained_file(place.parent, name))["sha256"] for name in manifest["files"]}
    return InstrumentationBundle(place, manifest, files, digest({"manifest": manifest, "files": files}))


def freeze_instrumentation(bundle: InstrumentationBundle, folder: str | os.PathLike[str]) -> InstrumentationBundle:
    """Copy a bundle into a fresh folder, whole or not at all, and verify the copy.

    Raises
    ------
    OnboardError: something is at `folder` already.
    EvidenceError: the bundle changed since it was loaded.
    OSError: it cannot be written.
    """
    target = Path(folder).absolute()
    if os.path.lexists(target):
        raise OnboardError(f"{target}: a bundle is only frozen into a fresh folder", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".fpmsdk-{os.urandom(8).hex()}")
    try:
        for name in bundle.files:
            copied = draft / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(contained_file(bundle.root, name).read_bytes())
        (draft / MANIFEST_FILE).write_bytes(canonical_bytes(bundle.manifest) + b"\n")
        if load_instrumentation(draft / MANIFEST_FILE).sha256 != bundle.sha256:
            raise EvidenceError(
                f"{bundle.manifest_path}: the instrumentation changed while it was copied; load it again",
                str(bundle.manifest_path),
            )
        os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return load_instrumentation(target / MANIFEST_FILE)


def _relative(value: Any) -> str:
    parts = value.split("/") if isinstance(value, str) else [""]
    if any(part in ("", ".", "..") or "\\" in part or ":" in part or not part.isprintable() for part in parts):
        raise EvidenceError(f"artifact path {value!r} must be relative and normalised, with / between its parts")
    return str(value)


def _check_manifest(manifest: Any, place: Path, runtime_version: str | None) -> None:
    def refuse(field: str, reason: str) -> OnboardError:
        return OnboardError(f"{place}: {field}: {reason}", f"{place}: {field}")

    if not isinstance(manifest, dict):
        raise refuse("manifest", f"must be an object, found {type(manifest).__name__}")
    if missing := sorted(_REQUIRED - manifest.keys()):
        raise refuse(missing[0], "is missing")
    if unknown := sorted(manifest.keys() - _REQUIRED - {"source_notes"}):
        raise refuse(unknown[0], "is no field of an instrumentation manifest")
    for field, expected in (
        ("schema_version", INSTRUMENTATION_SCHEMA),
        ("observation_schema", OBSERVATION_SCHEMA),
    ):
        if manifest[field] != expected:
            raise refuse(field, f"must be {expected!r}, found {manifest[field]!r}")
    _check_runtime(manifest["runtime"], refuse, runtime_version)
    names = manifest["files"]
    if not isinstance(names, list) or not names:
        raise refuse("files", "must list at least one file")
    for name in names:
        _relative(name)
    if len({name.casefold() for name in names}) < len(names):
        raise refuse("files", "names a file twice")
    taken = [name for name in names if name in (MANIFEST_FILE, LOADER_FILE) or name.startswith(f"{LOADER_FILE[:-3]}/")]
    if taken:
        raise refuse("files", f"{taken[0]!r} is a name of the collector itself; rename the file")
    modules = _modules(names, refuse)
    for field in ("worker_class", "scheduler_class"):
        _check_class(field, manifest[field], modules, names, refuse)
    if "source_notes" in manifest and manifest["source_notes"] not in names:
        raise refuse("source_notes", f"must be one of files, found {manifest['source_notes']!r}")


def _check_runtime(runtime: Any, refuse: Any, runtime_version: str | None) -> None:
    fields = {"framework", "version", "source_revision"}
    if not isinstance(runtime, dict) or not fields <= runtime.keys() or runtime.keys() - fields - {"source_files"}:
        raise refuse("runtime", "must have framework, version, source_revision and optionally source_files")
    if runtime["framework"] != "vllm":
        raise refuse("runtime.framework", f"must be 'vllm', found {runtime['framework']!r}")
    version = runtime["version"]
    if not isinstance(version, str) or not version.strip():
        raise refuse("runtime.version", "must be one pinned version")
    if runtime_version is not None and version != runtime_version:
        raise refuse("runtime.version", f"is written for {version!r}, the engine is {runtime_version!r}")
    revision = runtime["source_revision"]
    if not isinstance(revision, str) or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", revision):
        raise refuse("runtime.source_revision", "must be a full lower-case commit")
    sources = runtime.get("source_files", {"-": "0" * 64})
    if not isinstance(sources, dict) or not sources:
        raise refuse("runtime.source_files", "must map installed files to their digests")
    for name, known in sources.items():
        _relative(name)
        if not isinstance(known, str) or not re.fullmatch("[0-9a-f]{64}", known):
            raise refuse(f"runtime.source_files[{name}]", "must be a lower-case SHA-256")


def _modules(names: list[str], refuse: Any) -> set[str]:
    modules: set[str] = set()
    for name in names:
        if not name.endswith(".py"):
            continue
        parts = name.removesuffix(".py").split("/")
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        module = ".".join(parts)
        if not parts or not all(part.isidentifier() for part in parts) or module in modules:
            raise refuse("files", f"{name!r} does not name one Python module of its own")
        modules.add(module)
    return modules


def _check_class(field: str, value: Any, modules: set[str], names: list[str], refuse: Any) -> None:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts) or ".".join(parts[:-1]) not in modules:
        raise refuse(field, f"must be module.Class of a declared Python file, found {value!r}")
    for depth in range(1, len(parts) - 1):
        package = "/".join(parts[:depth]) + "/__init__.py"
        if package not in names:
            raise refuse(field, f"its package needs {package!r} among files")
