"""Learned kinds of model: which forests a configuration names, whether they were trained for it, and what serves.

Source: regression-and-learned.md section 3.5.
"""

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from fpmsdk._ext.learned import ForestSet, LearnedEstimator
from fpmsdk.config.legacy import from_learned_config
from fpmsdk.config.schema import shown
from fpmsdk.errors import LearnedModelError, StateSnapshotError, StateSnapshotIOError
from fpmsdk.files import read_regular, sha256
from fpmsdk.learned.artifact import STORES_OF, Artifact, read_artifact, read_source
from fpmsdk.learned.identity import require_identity
from fpmsdk.learned.training_checkpoint import Read
from fpmsdk.perfmodel.corrected import CorrectedKind, correction_stores
from fpmsdk.perfmodel.kind import Kind, StageSources, Status, Verified
from fpmsdk.perfmodel.online_learner import require_worker_type
from fpmsdk.snapshot.identity import is_from_learned

if TYPE_CHECKING:
    from fpmsdk.perfmodel.select import Selection
    from fpmsdk.snapshot.manifest import RecordedFile
    from fpmsdk.snapshot.publish import Staging

# Where a snapshot keeps the forests.
FOREST_FILE = "learned/forest.json"


class FrozenKind(CorrectedKind):
    """Forests that do not change, corrected by what tuning observed unless that is disabled.

    Parameters
    ----------
    artifact: the forests.
    content: the bytes that they were read from.
    config: canonical configuration.
    identity_verified: whether the artifact says which deployment it was trained on, and it is this one.
    """

    def __init__(self, artifact: Artifact, content: bytes, config: dict[str, Any], *, identity_verified: bool) -> None:
        self.artifact = artifact
        self.content = content
        self._identity_verified = identity_verified
        self._forests = forest_set(artifact)
        estimator = LearnedEstimator(self._forests, correction_stores(config, "hybrid"))
        super().__init__("fpm_learned", estimator, config, "hybrid")

    def fresh(self) -> "FrozenKind":
        """An untuned model over the same forests."""
        return FrozenKind(self.artifact, self.content, self.config, identity_verified=self._identity_verified)

    def status(self) -> Status:
        """Counters for `diagnostics()`; forests answer from the start."""
        ready, retained, cells = self.correction_counters()
        return "learned_with_correction" if ready else "learned", True, retained, cells

    def store_diagnostics(self) -> list[dict[str, Any]]:
        """Workload kind and readiness of each store that the worker type can have; forests retain nothing."""
        return [
            {"workload_kind": kind, "ready": kind in self.artifact.stores, "retained_observations": 0}
            for kind in STORES_OF[self.artifact.worker_type]
        ]

    def readiness_report(self) -> dict[str, Any]:
        """A store is ready when it was trained; correction stores become ready one by one."""
        stores = [
            {
                "store": store["workload_kind"],
                "ready": store["ready"],
                "reason": None if store["ready"] else "no_trained_store",
                "retained_observations": 0,
            }
            for store in self.store_diagnostics()
        ]
        return {"kind": self.mode, "ready": True, "stores": stores, "correction": self.correction_report()}

    def learned_feature_names(self) -> list[str]:
        """Features in the order of the artifact."""
        return list(self.artifact.features)

    def learned_metadata(self) -> dict[str, Any]:
        """What the artifact says of its training."""
        metadata: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.artifact.metadata))
        return metadata

    def learned_online_diagnostics(self) -> dict[str, Any]:
        """Adaptation, whether the identity was verified, and pending observations, of which there are none."""
        return {"adaptation": "frozen", "identity_verified": self._identity_verified, "pending_observations": 0}

    def export_learned_artifact(self) -> dict[str, Any]:
        """The document that the forests were read from; corrections are no part of it."""
        document: dict[str, Any] = msgspec.json.decode(self.content)
        return document

    def sources(self) -> StageSources:
        """The bytes that the forests were read from, for a snapshot."""
        return self._stage

    def _stage(self, pinned: dict[str, Any], staging: "Staging", destination: str) -> "Iterator[RecordedFile]":
        estimator = pinned["estimator_config"]
        estimator["fpm_learned"] = estimator["fpm_learned"] | {
            "artifact_path": os.path.join(destination, FOREST_FILE),
            "checkpoint_path": None,
            "source_sha256": sha256(self.content),
        }
        yield staging.write(FOREST_FILE, self.content)


def forest_set(artifact: Artifact) -> ForestSet:
    """The compiled forests of an artifact."""
    forests = {kind: store.compiled(artifact.target) for kind, store in artifact.stores.items()}
    return ForestSet(artifact.worker_type, artifact.features, forests)


def build_learned(config: dict[str, Any], verified: Verified) -> Kind:
    """The learned kind that a canonical configuration names.

    Raises
    ------
    LearnedModelError: the source is malformed, changed since it was pinned, or was made for another deployment.
    PerfDataNotAvailableError: it cannot be read; `StateSnapshotIOError` where it belongs to a saved state.
    """
    estimator = config["estimator_config"]
    snapshot = estimator.get("state_snapshot")
    try:
        return _build(config, verified, None if snapshot is None else snapshot["path"])
    except LearnedModelError as fault:
        if snapshot is None:
            raise
        raise StateSnapshotError(str(fault)) from None


def _build(config: dict[str, Any], verified: Verified, snapshot_path: str | None) -> Kind:
    learned = config["estimator_config"]["fpm_learned"]
    if learned["checkpoint_path"] is not None:
        return _of_checkpoint(config, _reader(verified, snapshot_path), snapshot_path)
    content = _pinned_content(config, learned["artifact_path"], verified)
    artifact = read_artifact(content)
    identity_verified = False
    if not is_from_learned(config):
        require_worker_type(artifact, config)
        if artifact.identity is not None:
            require_identity(artifact.identity, config, learned["artifact_path"])
            identity_verified = True
    return FrozenKind(artifact, content, config, identity_verified=identity_verified)


def _of_checkpoint(config: dict[str, Any], read: Read, snapshot_path: str | None) -> Kind:
    # Each adaptation loads what it needs.
    adaptation = config["estimator_config"]["fpm_learned"]["adaptation"]
    if adaptation == "online":
        from fpmsdk.perfmodel.learned_online import build_online

        return build_online(config, read)
    if adaptation == "causal_selector":
        from fpmsdk.perfmodel.causal_selector import build_causal

        return build_causal(config, read, snapshot_path)
    from fpmsdk.perfmodel.online_learner import checkpoint_artifact

    artifact, content = checkpoint_artifact(config, read)
    return FrozenKind(artifact, content, config, identity_verified=True)


def _reader(verified: Verified, snapshot_path: str | None) -> Read:
    def read(path: str) -> bytes:
        if path in verified:
            return verified[path]
        return read_source(path) if snapshot_path is None else _read_in_snapshot(path)

    return read


def _pinned_content(config: dict[str, Any], path: str, verified: Verified) -> bytes:
    estimator = config["estimator_config"]
    snapshot, pinned = estimator.get("state_snapshot"), estimator["fpm_learned"]["source_sha256"]
    if path in verified:
        content = verified[path]
    elif snapshot is None:
        content = read_source(path)
    elif is_from_learned(config):
        raise StateSnapshotError(
            "estimator_config.fpm_learned.artifact_path: expected the forests of the snapshot, "
            f"{os.path.join(snapshot['path'], FOREST_FILE)!r}, found {shown(path)}"
        )
    else:
        content = _read_in_snapshot(path)
    if sha256(content) != pinned.lower():
        message = f"{path}: expected SHA-256 {pinned!r}, as source_sha256 pins it, found {sha256(content)!r}"
        if snapshot is not None:
            raise StateSnapshotError(message)
        raise LearnedModelError(f"learned forward-pass model: {message}; it changed since it was pinned", path)
    return content


def _read_in_snapshot(path: str) -> bytes:
    from fpmsdk.config.learned_source import SOURCE_LIMIT_BYTES

    try:
        return read_regular(path, limit_bytes=SOURCE_LIMIT_BYTES)
    except OSError as fault:
        raise StateSnapshotIOError.of(fault, path) from fault
    except ValueError as fault:
        raise StateSnapshotError(f"{path}: {fault}") from None


def select_from_learned(source: Any, options: Mapping[str, Any] | None) -> "Selection":
    """The model of an artifact alone, which no deployment is known of.

    Parameters
    ----------
    source: path of an artifact, its JSON text (which starts with ``{``), or its document as a mapping.
    options: flat tuning options of the correction.

    Raises
    ------
    LearnedModelError: the artifact is malformed.
    ConfigError: an option is.
    PerfDataNotAvailableError: the file cannot be read.
    """
    from fpmsdk.perfmodel.select import Selection

    content = _source_bytes(source)
    artifact = read_artifact(content)
    config = from_learned_config(artifact.worker_type, sha256(content), options)
    return Selection(FrozenKind(artifact, content, config, identity_verified=False), "fpm_learned", config, None, ())


def _source_bytes(source: Any) -> bytes:
    if isinstance(source, Mapping):
        try:
            return msgspec.json.encode(dict(source))
        except (TypeError, ValueError, OverflowError, RecursionError) as fault:
            raise LearnedModelError(f"learned forward-pass model: the mapping is no JSON document: {fault}") from None
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source.encode("utf-8", "surrogatepass")
    return read_source(os.fspath(source))
