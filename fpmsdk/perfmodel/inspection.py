"""What a snapshot says of itself, without a model and without performance data.

Source: snapshot.md section 1; fpm-model.md section 8.
"""

from os import PathLike
from typing import Any

import msgspec

from fpmsdk.config.fields import CONFIG
from fpmsdk.config.schema import SchemaFault
from fpmsdk.errors import StateSnapshotError
from fpmsdk.perfmodel.topology import deployment_topology
from fpmsdk.snapshot.directory import open_snapshot
from fpmsdk.snapshot.identity import first_difference
from fpmsdk.snapshot.pinned import snapshot_path


def inspect_state_snapshot(path: str | PathLike[str]) -> dict[str, Any]:
    """Identity, topology and readiness of a saved model, read off its manifest.

    Parameters
    ----------
    path: directory of the snapshot.

    Returns
    -------
    `schema_version`, `state_layout_version`, `producer`, `kind`, `identity`, `topology` (as `deployment_topology()`),
    `readiness` (as `readiness_report()`), `diagnostics`, `engine_spec_sha256`, `perf_data_fingerprint` (None for kinds
    without data), `files` (path, size in bytes, SHA-256 of each) and `manifest_sha256`.

    Raises
    ------
    StateSnapshotIOError: no snapshot there, or it cannot be read.
    StateSnapshotError: of another version, or malformed. The files themselves are not looked at.

    Example
    -------
    >>> import tempfile
    >>> from fpmsdk import ForwardPassPerfModel
    >>> model = ForwardPassPerfModel.best_available(
    ...     {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode",
    ...      "estimation_mode": "fpm_regression"})
    >>> folder = tempfile.mkdtemp() + "/saved"
    >>> _ = model.save_state_snapshot(folder)
    >>> inspect_state_snapshot(folder)["kind"]
    'regression_linear'
    """
    snapshot = open_snapshot(snapshot_path(path))
    manifest = snapshot.manifest
    try:
        canonical = CONFIG.write(CONFIG.read(manifest.identity))
    except SchemaFault as fault:
        raise StateSnapshotError(f"{snapshot.path}: identity: {fault}") from None
    if difference := first_difference(canonical, manifest.identity, "identity"):
        raise StateSnapshotError(f"{snapshot.path}: {difference}")
    correction = manifest.readiness.get("correction")
    corrected = isinstance(correction, dict) and correction.get("enabled") is True
    return {
        "schema_version": manifest.schema_version,
        "state_layout_version": manifest.state_layout_version,
        "producer": msgspec.to_builtins(manifest.producer),
        "kind": manifest.kind,
        "identity": manifest.identity,
        "topology": deployment_topology(canonical, corrected=corrected),
        "readiness": manifest.readiness,
        "diagnostics": manifest.diagnostics,
        "engine_spec_sha256": manifest.engine_spec_sha256,
        "perf_data_fingerprint": manifest.perf_data_fingerprint,
        "files": [msgspec.to_builtins(file) for file in manifest.files],
        "manifest_sha256": snapshot.sha256,
    }
