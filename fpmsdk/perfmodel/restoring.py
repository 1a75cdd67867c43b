"""Restores a saved model: every check of the contract in its order, then a fresh model that takes over the state.

Source: snapshot.md section 6.
"""

import os
from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import PerfDataNotAvailableError, StateSnapshotError
from fpmsdk.perfmodel.kind import Kind, Verified
from fpmsdk.perfmodel.select import Selection, select
from fpmsdk.perfmodel.state_registry import STATES
from fpmsdk.snapshot.directory import SnapshotDirectory
from fpmsdk.snapshot.identity import first_difference
from fpmsdk.snapshot.manifest import STATE_FILE, Manifest
from fpmsdk.snapshot.mathlib import math_library_digest
from fpmsdk.snapshot.pinned import open_pinned
from fpmsdk.snapshot.state import StatePart

NATIVE_MODES = ("op_level", "fpm_interpolation")
_PACKED = "perf_db/"


def restore(config: dict[str, Any]) -> Selection:
    """The model of the snapshot that a canonical configuration pins.

    Raises
    ------
    StateSnapshotIOError, StateSnapshotError: at the first check that fails; there is no partly restored model.
    """
    snapshot = open_pinned(config)
    state, verified, digested = _read_files(snapshot)
    if config["estimation_mode"] in NATIVE_MODES:
        _check_data(config, snapshot.manifest, digested)
    if snapshot.manifest.math_library_sha256 != math_library_digest():
        raise StateSnapshotError(
            f"{snapshot.path}: math_library_sha256: expected {math_library_digest()!r}, that of this machine, found "
            f"{snapshot.manifest.math_library_sha256!r}; the snapshot was written with another C math library, whose "
            "last bits differ: restore it where it was written, or tune again"
        )
    selection = select(config, verified)
    kind = selection.kind
    if kind.engine_spec_sha256 != snapshot.manifest.engine_spec_sha256:
        raise StateSnapshotError(
            f"{snapshot.path}: engine_spec_sha256: expected {snapshot.manifest.engine_spec_sha256!r}, found "
            f"{kind.engine_spec_sha256!r}; the model's configuration or what compiles it has changed since the save"
        )
    install_state(kind, state, os.path.join(snapshot.path, STATE_FILE))
    if difference := first_difference(snapshot.manifest.diagnostics, kind.state_diagnostics(), "diagnostics"):
        raise StateSnapshotError(f"{snapshot.path}: {difference}")
    if difference := first_difference(snapshot.manifest.readiness, kind.readiness_report(), "readiness"):
        raise StateSnapshotError(f"{snapshot.path}: {difference}")
    return selection


def install_state(kind: Kind, content: bytes | memoryview, where: str) -> None:
    """Let a freshly built model take over the state in some bytes.

    Parameters
    ----------
    where: path of the bytes for errors.

    Raises
    ------
    StateSnapshotError: they are not what tuning under this configuration leaves behind; `kind` is unusable then.
    """
    try:
        parts = STATES.decode(content)
    except StateSnapshotError as fault:
        raise StateSnapshotError(f"{where}, {fault}") from None
    expected = [(store, layout.name) for store, layout in kind.state_layouts()]
    found = [(part.store, part.layout.name) for part in parts]
    if difference := first_difference([list(pair) for pair in expected], [list(pair) for pair in found], "stores"):
        raise StateSnapshotError(f"{where}: {difference}")
    for part in parts:
        _install(kind, part, where)
    kind.estimator.republish()


def _install(kind: Kind, part: StatePart, where: str) -> None:
    try:
        kind.install_part(part)
    except StateSnapshotError as fault:
        raise StateSnapshotError(f"{where}, store {part.name}: {fault}") from None


def _read_files(snapshot: SnapshotDirectory) -> tuple[memoryview, Verified, dict[str, tuple[int, str]]]:
    # The state; contents of other files by path; of packed data, which are loaded lazily, only size and digest.
    state, verified, digested = memoryview(b""), {}, {}
    for file in snapshot.manifest.files:
        path = os.path.join(snapshot.path, file.path)
        if file.path == STATE_FILE:
            state = snapshot.read_large(file)
        elif file.path.startswith(_PACKED):
            snapshot.read_large(file)
            digested[path] = (file.size, file.sha256)
        else:
            verified[path] = snapshot.read(file)
    return state, verified, digested


def _check_data(config: Mapping[str, Any], manifest: Manifest, digested: dict[str, tuple[int, str]]) -> None:
    from fpmsdk.perfdb import SystemsRoot
    from fpmsdk.perfdb.fingerprint import Entry, accept_fingerprint, first_change, measure_fingerprint
    from fpmsdk.perfmodel.native import external_table

    if len(config["systems_paths"]) != 1:
        raise StateSnapshotError(
            f"systems_paths: expected the one root that the snapshot was saved over, found {config['systems_paths']}"
        )
    root = SystemsRoot(config["systems_paths"][0])
    system, external = config["system"], external_table(config)
    try:
        measured = measure_fingerprint(root, system, external, digested)
    except (PerfDataNotAvailableError, ValueError) as fault:
        raise StateSnapshotError(f"performance data under {root.path} cannot be compared: {fault}") from fault
    if measured.digest != manifest.perf_data_fingerprint:
        saved = tuple(Entry(e.kind, e.name, e.size_bytes, e.sha256, e.target) for e in manifest.perf_data_entries)
        raise StateSnapshotError(
            f"performance data under {root.path} have changed since the save, first at "
            f"{first_change(saved, measured.entries)}; restore with the data of the save, or tune again"
        )
    known = accept_fingerprint(root, system, external, measured)
    if known.digest != measured.digest:
        raise StateSnapshotError(
            f"performance data under {root.path} changed after this process had first loaded them, at "
            f"{first_change(known.entries, measured.entries)}; what it would restore with them is not certain: restart "
            "the process"
        )
