"""Saves a tuned model as a snapshot directory.

Source: snapshot.md sections 1, 5 and 7.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from fpmsdk._ext.plain import PlainTemplate
from fpmsdk.config.state_snapshot import MANIFEST_FILE
from fpmsdk.errors import PerfDataNotAvailableError, StateSnapshotError, StateSnapshotIOError
from fpmsdk.files import read_regular, sha256
from fpmsdk.perfmodel.kind import Kind
from fpmsdk.perfmodel.state_registry import STATES
from fpmsdk.snapshot.digest import BackgroundDigest
from fpmsdk.snapshot.identity import identity_of, kind_of
from fpmsdk.snapshot.manifest import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    STATE_FILE,
    Manifest,
    PerfDataEntry,
    Producer,
    RecordedFile,
    encode_document,
    encode_manifest,
)
from fpmsdk.snapshot.mathlib import math_library_digest
from fpmsdk.snapshot.pinned import snapshot_path
from fpmsdk.snapshot.publish import Staging, publish, refuse_existing
from fpmsdk.snapshot.state import STATE_ENCODING, STATE_LAYOUT_VERSION
from fpmsdk.version import __version__

PERF_DB = "perf_db"
_PROFILE_LIMIT_BYTES = 1024**3


def save_state_snapshot(
    kind: Kind,
    config: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    include_perf_db: bool,
    tuning: AbstractContextManager[Any],
) -> dict[str, Any]:
    """Write the state of a model into a new directory.

    Parameters
    ----------
    kind, config: the model and the canonical configuration that repeats its selection.
    path: the directory, which must not exist.
    include_perf_db: whether to copy the performance data of a native model.
    tuning: held while the state is copied, so that it is that of a whole number of tuning calls.

    Returns
    -------
    The configuration that restores the model, as in its `config.json`.

    Raises
    ------
    StateSnapshotIOError, StateSnapshotError: as `ForwardPassPerfModel.save_state_snapshot`.
    """
    destination = snapshot_path(path)
    refuse_existing(destination)
    source = kind.data_source
    if source is not None:
        source.require_unchanged()
    digest = BackgroundDigest()
    with tuning:
        state, stage_sources = STATES.encode(kind.state_parts(), digest.update), kind.sources()
        diagnostics, readiness = kind.state_diagnostics(), kind.readiness_report()
    saved: dict[str, Any] = {}

    def write(staging: Staging) -> None:
        pinned = _without_snapshot(config)
        files = [staging.write(STATE_FILE, state, digest)]
        files += _copy_profile(pinned, staging, destination)
        files += stage_sources(pinned, staging, destination)
        if include_perf_db and source is not None:
            files += _pack(pinned, kind, staging, destination)
        manifest = encode_manifest(
            Manifest(
                schema_version=SCHEMA_VERSION,
                state_layout_version=STATE_LAYOUT_VERSION,
                producer=Producer(__version__, kind.engine_spec_schema_version, STATE_ENCODING),
                kind=kind_of(config),
                identity=identity_of(pinned),
                diagnostics=diagnostics,
                readiness=readiness,
                math_library_sha256=math_library_digest(),
                engine_spec_sha256=kind.engine_spec_sha256,
                perf_data_fingerprint=None if source is None else source.seen.digest,
                perf_data_entries=[] if source is None else [PerfDataEntry(*entry) for entry in source.seen.entries],
                files=files,
            )
        )
        staging.write(MANIFEST_FILE, manifest)
        pinned["estimator_config"]["state_snapshot"] = {
            "path": destination,
            "sha256": sha256(manifest),
            "on_tune": "reject",
        }
        staging.write(CONFIG_FILE, encode_document(pinned))
        saved.update(PlainTemplate(pinned).copy())

    publish(destination, write)
    return saved


def _without_snapshot(config: dict[str, Any]) -> dict[str, Any]:
    # A copy whose sections may be replaced; a restored model's own snapshot stays behind.
    estimator = {name: value for name, value in config["estimator_config"].items() if name != "state_snapshot"}
    return config | {"estimator_config": estimator}


def _copy_profile(pinned: dict[str, Any], staging: Staging, destination: str) -> Iterator[RecordedFile]:
    op_level = pinned["estimator_config"]["op_level"]
    profile = op_level.get("execution_profile")
    if profile is None:
        return
    ending = os.path.splitext(profile["path"])[1]
    name = f"execution_profile{ending if ending.isascii() and ending[1:].isalnum() else '.json'}"
    try:
        content = read_regular(profile["path"], limit_bytes=_PROFILE_LIMIT_BYTES)
    except OSError as fault:
        raise StateSnapshotIOError.of(fault, profile["path"]) from fault
    except ValueError as fault:
        raise StateSnapshotError(f"{profile['path']}: {fault}") from None
    if sha256(content) != profile["sha256"]:
        raise StateSnapshotError(
            f"{profile['path']}: expected SHA-256 {profile['sha256']!r}, found {sha256(content)!r}; the execution "
            "profile changed since the model was built"
        )
    moved = profile | {"path": os.path.join(destination, name)}
    pinned["estimator_config"]["op_level"] = op_level | {"execution_profile": moved}
    yield staging.write(name, content)


def _pack(pinned: dict[str, Any], kind: Kind, staging: Staging, destination: str) -> Iterator[RecordedFile]:
    from fpmsdk.perfdb import SystemsRoot
    from fpmsdk.perfdb.fingerprint import first_change, measure_fingerprint
    from fpmsdk.perfdb.pack import EXTERNAL_TABLE, SYSTEMS, packed_items

    source = kind.data_source
    assert source is not None
    digested = {}
    staging.directory(f"{PERF_DB}/{SYSTEMS}")
    for entry, relative, original in packed_items(
        SystemsRoot(source.root_path), source.system, source.external, source.seen
    ):
        place = f"{PERF_DB}/{relative}"
        if entry.kind == "directory":
            staging.directory(place)
        elif entry.kind == "unread":
            staging.link(entry.target, place)
        else:
            with open(original, "rb") as file:
                copied = staging.copy(file, place)
            digested[staging.path(place)] = (copied.size, copied.sha256)
            yield copied
    packed = staging.path(f"{PERF_DB}/{SYSTEMS}")
    external = None if source.external is None else staging.path(f"{PERF_DB}/{EXTERNAL_TABLE}")
    try:
        found = measure_fingerprint(SystemsRoot(packed), source.system, external, digested)
    except PerfDataNotAvailableError as fault:
        raise StateSnapshotError(f"include_perf_db: the copy cannot be read: {fault}") from fault
    if found != source.seen:
        raise StateSnapshotError(
            f"include_perf_db: the copy differs from the data at {first_change(source.seen.entries, found.entries)}; "
            "save without include_perf_db"
        )
    final = os.path.join(destination, PERF_DB)
    pinned["systems_paths"] = [os.path.join(final, SYSTEMS)]
    if source.external is not None:
        estimator = pinned["estimator_config"]
        estimator["fpm_interpolation"] = estimator["fpm_interpolation"] | {
            "fpm_parquet_path": os.path.join(final, EXTERNAL_TABLE)
        }
