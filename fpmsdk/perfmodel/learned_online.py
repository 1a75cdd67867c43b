"""The online kind of learned models: forests that learn from telemetry, without a correction.

Source: regression-and-learned.md section 4.
"""

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from fpmsdk._ext.estimator import Estimator
from fpmsdk._ext.learned_online import OnlineEstimator
from fpmsdk.errors import LearnedModelError
from fpmsdk.files import sha256, write_directory
from fpmsdk.learned.artifact import STORES_OF
from fpmsdk.learned.identity import learned_identity
from fpmsdk.learned.online_seed import ids_digest
from fpmsdk.learned.runtime_checkpoint import runtime_files
from fpmsdk.learned.training_checkpoint import MANIFEST_FILE, Read
from fpmsdk.perfmodel.kind import Kind, StageSources, Status
from fpmsdk.perfmodel.online_learner import (
    Learned,
    controls_of,
    load_learner,
    published_artifact,
    runtime_checkpoint,
)

if TYPE_CHECKING:
    from fpmsdk._ext.online import OnlineStore
    from fpmsdk.snapshot.layout import StateLayout
    from fpmsdk.snapshot.manifest import RecordedFile
    from fpmsdk.snapshot.publish import Staging
    from fpmsdk.snapshot.state import StatePart

# Where a snapshot keeps the checkpoint.
ONLINE_FOLDER = "online"

# Reasons for which an iteration counts as rejected; one without work does not.
_REJECTED = ("zero_wall_time", "negative_wall_time", "non_finite_wall_time", "non_finite_target")

# Reported, but no state.
_MEASURED = ("training_state_bytes", "history_grouping_ms")

# Counters that `diagnostics` calls by the names of the public peer; rows at hand are told beside them.
_CONTROLS_OF_STORES = (
    "history_bin_grouping",
    "history_weight",
    "history_weight_ramp_observations",
    "mutable_tree_tail",
    "recent_max_age_observations",
    "update_step",
)


class OnlineReports:
    """What is reported of a learner, whichever kind of model it belongs to.

    Parameters
    ----------
    learned: the learner.
    estimator: what learns; counts iterations that taught nothing.
    config: canonical configuration.
    """

    def __init__(self, learned: Learned, estimator: Estimator, config: dict[str, Any]) -> None:
        self._learned = learned
        self._estimator = estimator
        self._config = config

    def rejected(self) -> int:
        """Iterations with work and without a valid time, over the whole life of the learner."""
        skipped = self._estimator.skipped_iterations()
        return self._learned.rejected + sum(skipped[reason] for reason in _REJECTED)

    def retained(self) -> int:
        """Recent and pending rows over all stores."""
        counters = [store.counters() for store in self._learned.learner.trained().values()]
        return sum(counts["recent_rows"] + counts["pending_rows"] for counts in counters)

    def diagnostics(self) -> dict[str, Any]:
        """Counters of the model and of every store."""
        controls = controls_of(self._config)
        stores = {kind: self._store(kind, store) for kind, store in self._learned.learner.trained().items()}
        return {
            "adaptation": controls["adaptation"],
            "derivative_refresh": controls["derivative_refresh"],
            "identity_verified": True,
            "model_version": sum(store["publications"] for store in stores.values()),
            "rejected_observations": self.rejected(),
            "stores": stores,
            "training_state_bytes": sum(store["training_state_bytes"] for store in stores.values()),
            "update_mode": controls["update_mode"],
        }

    def state_diagnostics(self) -> dict[str, Any]:
        """`diagnostics` without what is measured and not kept."""
        report = {name: value for name, value in self.diagnostics().items() if name not in _MEASURED}
        report["stores"] = {
            kind: {name: value for name, value in store.items() if name not in _MEASURED}
            for kind, store in report["stores"].items()
        }
        return report

    def _store(self, kind: str, store: "OnlineStore") -> dict[str, Any]:
        controls = controls_of(self._config)
        history_weight, recent_weight = store.weights()
        ids = store.retained_row_ids()
        rows, groups = store.forest.history_rows, store.forest.num_groups
        return {
            **store.counters(),
            **{name: controls[name] for name in _CONTROLS_OF_STORES},
            "anchor_rows": rows,
            "historical_original_ids_sha256": store.history_ids_sha256() if controls["history_bin_grouping"] else None,
            "historical_storage_rows": groups,
            "history_compression_ratio": rows / groups,
            "history_grouping_ms": self._learned.grouping_ms[kind],
            "history_row_weight": history_weight,
            "recent_row_weight": recent_weight,
            "recent_sampling": "fifo",
            "retained_row_ids": ids.tolist(),
            "retained_row_ids_sha256": ids_digest(ids).hex(),
            "training_state_bytes": store.nbytes(),
        }

    def store_diagnostics(self) -> list[dict[str, Any]]:
        """Workload kind, readiness and retained rows of each store that the worker type can have."""
        trained = self._learned.learner.trained()
        found = []
        for kind in STORES_OF[self._learned.artifact.worker_type]:
            counts = trained[kind].counters() if kind in trained else None
            found.append(
                {
                    "workload_kind": kind,
                    "ready": counts is not None,
                    "retained_observations": counts["recent_rows"] + counts["pending_rows"] if counts else 0,
                }
            )
        return found

    def readiness(self) -> list[dict[str, Any]]:
        """Readiness of each store: those that were trained answer."""
        return [
            {
                "store": store["workload_kind"],
                "ready": store["ready"],
                "reason": None if store["ready"] else "no_trained_store",
                "retained_observations": store["retained_observations"],
            }
            for store in self.store_diagnostics()
        ]


class OnlineKind(Kind):
    """Forests that learn.

    Parameters
    ----------
    learned: the learner, which belongs to the model from then on.
    config: canonical configuration.
    """

    def __init__(self, learned: Learned, config: dict[str, Any]) -> None:
        self._learned = learned
        self._online = OnlineEstimator(learned.learner)
        super().__init__("fpm_learned", self._online, config)
        self._reports = OnlineReports(learned, self._online, config)

    def status(self) -> Status:
        """Counters for `diagnostics()`; forests answer from the start."""
        return "learned_online", True, self._reports.retained(), 0

    def store_diagnostics(self) -> list[dict[str, Any]]:
        """Workload kind, readiness and retained rows of each store that the worker type can have."""
        return self._reports.store_diagnostics()

    def readiness_report(self) -> dict[str, Any]:
        """Readiness of each store; there is no correction."""
        return {"kind": self.mode, "ready": True, "stores": self._reports.readiness(), "correction": None}

    def learned_feature_names(self) -> list[str]:
        """Features in the order of the artifact."""
        return list(self._learned.artifact.features)

    def learned_metadata(self) -> dict[str, Any]:
        """What the artifact says of its training."""
        metadata: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self._learned.artifact.metadata))
        return metadata

    def learned_online_diagnostics(self) -> dict[str, Any]:
        """Counters of the model and of every store."""
        return self._reports.diagnostics()

    def flush_updates(self) -> None:
        """Run a batch in every store with rows that wait or have grown too old."""
        self._online.flush()

    def export_learned_artifact(self) -> dict[str, Any]:
        """The forests as they are now as an artifact's document; what they learn from is no part of it."""
        document: dict[str, Any] = msgspec.json.decode(published_artifact(self._learned).to_json_bytes())
        return document

    def save_online_checkpoint(self, path: str) -> None:
        """Write the learner into a new directory that `checkpoint_path` may name."""
        write_checkpoint(path, self._files(self._learned.source_path))

    def state_layouts(self) -> "list[tuple[str, StateLayout]]":
        """None: all of the state is the checkpoint's."""
        return []

    def state_parts(self) -> "list[StatePart]":
        """None: all of the state is the checkpoint's."""
        return []

    def install_part(self, part: "StatePart") -> None:
        """Nothing to take over: the learner was built from its checkpoint."""

    def state_diagnostics(self) -> dict[str, Any]:
        """What a restored model must report again."""
        return super().state_diagnostics() | {"learned": self._reports.state_diagnostics()}

    def sources(self) -> StageSources:
        """The checkpoint as of now, for a snapshot."""
        return functools.partial(stage_checkpoint, self._files(""))

    def _files(self, source_path: str) -> dict[str, bytes]:
        checkpoint = runtime_checkpoint(
            self._learned,
            self.config,
            learned_identity(self.config),
            self._reports.rejected(),
            source_path=source_path,
        )
        return runtime_files(checkpoint)


def stage_checkpoint(
    files: dict[str, bytes], pinned: dict[str, Any], staging: "Staging", destination: str
) -> "Iterator[RecordedFile]":
    """Write the files of a runtime checkpoint into a snapshot, and name it in the snapshot's configuration."""
    estimator = pinned["estimator_config"]
    estimator["fpm_learned"] = estimator["fpm_learned"] | {
        "checkpoint_path": os.path.join(destination, ONLINE_FOLDER),
        "source_sha256": sha256(files[MANIFEST_FILE]),
    }
    for name, content in files.items():
        yield staging.write(f"{ONLINE_FOLDER}/{name}", content)


def write_checkpoint(path: str, files: dict[str, bytes]) -> None:
    """Write a checkpoint's files into a new directory, whole or not at all.

    Raises
    ------
    LearnedModelError: something is there, or the path is empty.
    OSError: it cannot be written.
    """
    if not path:
        raise LearnedModelError("learned forward-pass model: a checkpoint takes a new directory, found ''", "path")
    try:
        write_directory(path, files)
    except FileExistsError:
        message = f"learned forward-pass model: {path}: the destination exists; a checkpoint takes a new directory"
        raise LearnedModelError(message, path) from None


def build_online(config: dict[str, Any], read: Read) -> OnlineKind:
    """The online kind that a canonical configuration names.

    Raises
    ------
    LearnedModelError, PerfDataNotAvailableError: as `load_learner`.
    """
    return OnlineKind(load_learner(config, read), config)
