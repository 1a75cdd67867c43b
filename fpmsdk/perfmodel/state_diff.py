"""What differs between two saved states, store by store and field by field. Reads files, builds no model.

Source: snapshot.md section 3.
"""

import os
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmsdk.errors import StateSnapshotError
from fpmsdk.learned.runtime_checkpoint import read_runtime_checkpoint
from fpmsdk.learned.training_checkpoint import MANIFEST_FILE as RUNTIME_MANIFEST
from fpmsdk.perfmodel.learned_online import ONLINE_FOLDER
from fpmsdk.perfmodel.state_registry import STATES
from fpmsdk.snapshot.directory import SnapshotDirectory, open_snapshot
from fpmsdk.snapshot.identity import first_difference
from fpmsdk.snapshot.manifest import STATE_FILE, Manifest
from fpmsdk.snapshot.pinned import snapshot_path
from fpmsdk.snapshot.state import StatePart

if TYPE_CHECKING:
    from fpmsdk.snapshot.layout import Arrays


def diff_snapshots(before: str | PathLike[str], after: str | PathLike[str]) -> dict[str, Any]:
    """Compare the states of two snapshots.

    Parameters
    ----------
    before, after: their directories.

    Returns
    -------
    `equal` (every byte of the states), `kind` (of both), `identity` (the first differing field of the two models, None
    when it is the same model), and `stores`: `store`, `layout`, `rows` (before, after; None where the store is missing
    or retains none), `only` (``before`` or ``after`` where the other one is missing), `changed`, and `fields`, those
    that differ: `field`, `elements` (before, after), `changed_elements` and `largest_change`, both None where the
    lengths differ.

    Raises
    ------
    StateSnapshotIOError, StateSnapshotError: one of them cannot be read.
    """
    snapshots = [open_snapshot(snapshot_path(path)) for path in (before, after)]
    contents = [_states(snapshot) for snapshot in snapshots]
    parts = [_parts(content, snapshot) for content, snapshot in zip(contents, snapshots, strict=True)]
    names = list(dict.fromkeys((*parts[0], *parts[1])))
    one, other = (snapshot.manifest for snapshot in snapshots)
    return {
        "equal": contents[0] == contents[1],
        "kind": [one.kind, other.kind],
        "identity": first_difference(_identity(one), _identity(other), "identity"),
        "stores": [_store(parts[0].get(name), parts[1].get(name)) for name in names],
    }


def _identity(manifest: Manifest) -> dict[str, Any]:
    identity = manifest.identity
    learned = identity["estimator_config"].get("fpm_learned")
    if learned is None or learned["adaptation"] == "frozen":
        return identity
    # The source of a saved learner is its own checkpoint, which is state.
    return identity | {
        "estimator_config": identity["estimator_config"] | {"fpm_learned": learned | {"source_sha256": None}}
    }


def _states(snapshot: SnapshotDirectory) -> dict[str, bytes]:
    """Encoded states by file: that of the model, and that of its learner where it has one."""
    files = {os.path.join(snapshot.path, file.path): file for file in snapshot.manifest.files}
    states = {STATE_FILE: snapshot.read(files[os.path.join(snapshot.path, STATE_FILE)])}
    learner = os.path.join(snapshot.path, ONLINE_FOLDER)
    if os.path.join(learner, RUNTIME_MANIFEST) in files:
        checkpoint = read_runtime_checkpoint(learner, lambda path: snapshot.read(files[os.fspath(path)]))
        states[f"{ONLINE_FOLDER}/{STATE_FILE}"] = checkpoint.state.parts
    return states


def _parts(states: dict[str, bytes], snapshot: SnapshotDirectory) -> dict[str, StatePart]:
    parts: dict[str, StatePart] = {}
    for file, content in states.items():
        try:
            parts |= {part.name: part for part in STATES.decode(content)}
        except StateSnapshotError as fault:
            raise StateSnapshotError(f"{snapshot.path}/{file}, {fault}") from None
    return parts


def _store(before: StatePart | None, after: StatePart | None) -> dict[str, Any]:
    either = before or after
    assert either is not None
    both = before is not None and after is not None
    fields = _fields(before.arrays, after.arrays) if before is not None and after is not None else []
    return {
        "store": either.store,
        "layout": either.layout.name,
        "rows": [None if part is None else part.layout.dims(part.arrays).get("rows") for part in (before, after)],
        "only": None if both else "after" if before is None else "before",
        "changed": not both or bool(fields),
        "fields": fields,
    }


def _fields(before: "Arrays", after: "Arrays") -> list[dict[str, Any]]:
    changed = []
    for name, old in before.items():
        new = after[name]
        if old.tobytes() == new.tobytes() and old.shape == new.shape:
            continue
        differing = largest = None
        if old.shape == new.shape:
            with np.errstate(invalid="ignore"):  # bounds of an empty store are infinite
                change = np.abs(new.astype(np.float64) - old.astype(np.float64))
            finite = change[np.isfinite(change)]
            differing, largest = int(np.count_nonzero(old != new)), float(finite.max(initial=0.0))
        changed.append(
            {
                "field": name,
                "elements": [old.size, new.size],
                "changed_elements": differing,
                "largest_change": largest,
            }
        )
    return changed
