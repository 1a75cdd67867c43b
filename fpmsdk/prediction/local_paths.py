"""Files and folders that a configuration names, made absolute; a profile in a file of its own is read.

Source: predict-recommend.md sections 2.3, 5.4 and 15.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fpmsdk.documents.yaml_files import read_mapping
from fpmsdk.errors import OnboardError

_WORKING_DIRECTORY = "cwd:"
_WORKERS = ("aggregated", "prefill", "decode")


def absolute_paths(document: dict[str, Any], base: Path, where: str) -> dict[str, Any]:
    """The document with its local paths absolute, and the profile in place of its file.

    Parameters
    ----------
    base: what relative paths are below; those after `cwd:` are below the working directory.
    where: the file of the document, for messages.

    Raises
    ------
    OnboardError: the file of the profile is missing or holds no mapping.

    >>> folder = Path("/models")
    >>> absolute_paths({"traffic": {"source": {"paths": ["t.jsonl"]}}}, folder, "x")["traffic"]["source"]["paths"]
    ['/models/t.jsonl']
    """
    places = _Places(base)
    _change(document, ("traffic", "source", "paths"), places.all)
    _change(document, ("engine", "model"), places.model)
    timings = [("engine",), *(("engine", "workers", role, "timing") for role in _WORKERS)]
    for timing in timings:
        _change(document, (*timing, "systems_paths"), places.roots)
        _change(document, (*timing, "systems_path"), places.one)
        _change(document, (*timing, "fpm_parquet_path"), places.one)
        _change(document, (*timing, "estimator_config", "fpm_interpolation", "fpm_parquet_path"), places.one)
        _change(document, (*timing, "estimator_config", "state_snapshot", "path"), places.one)
    profile = document.get("engine", {}).get("fpm_profile") if isinstance(document.get("engine"), dict) else None
    if isinstance(profile, str):
        path = places.one(profile)
        if not os.path.exists(path):
            raise OnboardError(f"{where}: engine.fpm_profile: no such file {path}", where)
        document["engine"]["fpm_profile"] = read_mapping(path)
    return document


class _Places:
    def __init__(self, base: Path) -> None:
        self._base = base

    def one(self, value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return value
        if value.startswith(_WORKING_DIRECTORY):
            return os.path.abspath(value.removeprefix(_WORKING_DIRECTORY))
        return os.path.normpath(self._base / os.path.expanduser(value))

    def all(self, values: Any) -> Any:
        return [self.one(value) for value in values] if isinstance(values, list) else values

    def roots(self, values: Any) -> Any:
        listed = [values] if isinstance(values, str) else values
        if not isinstance(listed, list):
            return values
        return [root if root == "default" else self.one(root) for root in listed]

    def model(self, value: Any) -> Any:
        """A folder with a checkpoint, or the identifier as it is."""
        path = self.one(value)
        return path if isinstance(path, str) and os.path.isfile(os.path.join(path, "config.json")) else value


def _change(document: dict[str, Any], place: tuple[str, ...], change: Any) -> None:
    *parents, last = place
    value: Any = document
    for name in parents:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, dict) and last in value:
        value[last] = change(value[last])
