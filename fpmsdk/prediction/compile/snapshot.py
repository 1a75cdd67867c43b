"""A saved model as what prices a role: the deployment must be that of the model, in everything the configuration says.

Source: predict-recommend.md sections 2.3 and 4 (step 4), snapshot.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fpmsdk.errors import ConfigError

# Where the files of a model lie is not part of what it is.
_PLACES = frozenset(("fpm_parquet_path", "artifact_path", "checkpoint_path", "path"))
_SNAPSHOT = "state_snapshot"


def restored_config(given: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The canonical configuration that restores the saved model which a role's estimator settings name.

    Parameters
    ----------
    given: the settings as the prediction states them, with `estimator_config.state_snapshot`; what is left out is that
        of the snapshot.

    Raises
    ------
    ConfigError: the model was saved of another deployment; every difference is told.
    StateSnapshotError: there is no such snapshot, or it is damaged.
    """
    from fpmsdk.perfmodel.inspection import inspect_state_snapshot  # few predictions need it

    section = given["estimator_config"][_SNAPSHOT]
    where = f"engine.workers.{role}.timing"
    if not isinstance(section, Mapping) or not isinstance(section.get("path"), str):
        raise ConfigError(f"{where}: estimator_config.state_snapshot is a mapping with the path of a folder", where)
    saved = inspect_state_snapshot(section["path"])["identity"]
    asked = {name: value for name, value in given.items() if name != "systems_paths"}
    asked["estimator_config"] = {key: value for key, value in asked["estimator_config"].items() if key != _SNAPSHOT}
    asked.setdefault("estimation_mode", "auto")
    if differences := list(_differences(asked, saved, "")):
        raise ConfigError(
            f"{where}: the snapshot {section['path']} is of another deployment: {'; '.join(differences)}", where
        )
    estimator = _with_places(saved["estimator_config"], asked["estimator_config"])
    return {
        **saved,
        "systems_paths": given.get("systems_paths", []),
        "estimator_config": {**estimator, _SNAPSHOT: dict(section)},
    }


def _differences(asked: Any, saved: Any, path: str) -> Iterator[str]:
    """Where a value that is asked for is not what was saved."""
    if isinstance(asked, Mapping) and isinstance(saved, Mapping):
        for name, value in asked.items():
            if name not in _PLACES:
                yield from _differences(value, saved.get(name), f"{path}.{name}" if path else name)
    elif isinstance(asked, list) and isinstance(saved, list) and len(asked) == len(saved):
        for i, (one, other) in enumerate(zip(asked, saved, strict=True)):
            yield from _differences(one, other, f"{path}[{i}]")
    elif asked != saved:
        yield f"{path} is {asked!r}, the snapshot has {saved!r}"


def _with_places(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the snapshot, with the files where the configuration says."""
    merged = dict(saved)
    for name, value in asked.items():
        if name in _PLACES:
            merged[name] = value
        elif isinstance(value, Mapping) and isinstance(saved.get(name), Mapping):
            merged[name] = _with_places(saved[name], value)
    return merged
