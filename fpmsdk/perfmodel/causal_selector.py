"""The causal selector as a kind of model: a corrected frozen forest and an online one, of which the closer answers.

Source: regression-and-learned.md section 5.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from fpmsdk._ext.causal_selector import KEYS, CausalEstimator, CausalView
from fpmsdk._ext.correction import CorrectionStore
from fpmsdk._ext.learned import ForestSet
from fpmsdk.errors import LearnedModelError, UnsupportedQueryError
from fpmsdk.learned.artifact import Artifact, read_artifact
from fpmsdk.learned.identity import learned_identity
from fpmsdk.learned.runtime_checkpoint import is_runtime_manifest, runtime_files
from fpmsdk.learned.training_checkpoint import Read
from fpmsdk.perfmodel.correction import DYNAMIC_STORE, FIXED_STORE, build_corrections
from fpmsdk.perfmodel.kind import Kind, StageSources, Status
from fpmsdk.perfmodel.learned_online import ONLINE_FOLDER, OnlineReports, stage_checkpoint
from fpmsdk.perfmodel.online_learner import Learned, load_learner, pinned_manifest, runtime_checkpoint
from fpmsdk.perfmodel.online_state import CALIBRATION_STORES, CAUSAL_SELECTOR, SELECTOR_STORE, calibration_name

if TYPE_CHECKING:
    from fpmsdk.snapshot.layout import StateLayout
    from fpmsdk.snapshot.manifest import RecordedFile
    from fpmsdk.snapshot.publish import Staging
    from fpmsdk.snapshot.state import StatePart

# Where a snapshot keeps the frozen forests.
STABLE_FILE = "learned/forest.json"


class CausalKind(Kind):
    """Both experts with their evidence.

    Parameters
    ----------
    stable: artifact of the frozen forests.
    learned: the learner of the other expert.
    config: canonical configuration.
    """

    def __init__(self, stable: Artifact, learned: Learned, config: dict[str, Any]) -> None:
        self._stable = stable
        self._learned = learned
        estimator = config["estimator_config"]
        forests = {kind: store.compiled(stable.target) for kind, store in stable.stores.items()}
        calibrations: dict[tuple[str, str], CorrectionStore] = {
            (workload, query): store
            for workload in stable.stores
            for query, store in build_corrections(estimator["correction"], "hybrid").items()
        }
        self._selector = estimator.get("selector", DEFAULT_SELECTOR)
        self._causal = CausalEstimator(
            ForestSet(stable.worker_type, stable.features, forests),
            learned.learner,
            calibrations,
            self._selector,
            CAUSAL_SELECTOR.allocate(),
        )
        super().__init__("fpm_learned", self._causal, config)
        self._reports = OnlineReports(learned, self._causal, config)

    @property
    def serving(self) -> CausalView:
        """What has been learned by now."""
        return self._causal.serving

    @property
    def is_corrected(self) -> bool:
        """Whether online correction applies: that of the stable expert always does."""
        return True

    def status(self) -> Status:
        """Counters for `diagnostics()`; forests answer from the start."""
        tables = self.serving.calibrations().values()
        retained = sum(table.retained for table in tables) + self._reports.retained()
        return "learned_causal_selector", True, retained, sum(table.ready_cells for table in tables)

    def store_diagnostics(self) -> list[dict[str, Any]]:
        """Workload kind, readiness and rows that the learning expert retains, of each store."""
        return self._reports.store_diagnostics()

    def correction_factors(self) -> list[float]:
        """Ready factors of the calibrations, key by key."""
        return [factor for table in self.serving.calibrations().values() for factor in table.factors()]

    def readiness_report(self) -> dict[str, Any]:
        """Readiness of each store, and of the calibrations of its types of query."""
        calibrations = [
            {
                "workload_kind": f"{workload}, {query}",
                "ready": table.ready,
                "reason": None if table.ready else "below_min_observations",
                "retained_observations": table.retained,
                "ready_buckets": table.ready_cells,
            }
            for (workload, query), table in self.serving.calibrations().items()
        ]
        correction = {
            "enabled": True,
            "mode": "hybrid",
            "ready": any(store["ready"] for store in calibrations),
            "stores": calibrations,
        }
        return {"kind": self.mode, "ready": True, "stores": self._reports.readiness(), "correction": correction}

    def learned_feature_names(self) -> list[str]:
        """Features in the order of the artifact."""
        return list(self._stable.features)

    def learned_metadata(self) -> dict[str, Any]:
        """What the artifact says of its training."""
        metadata: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self._stable.metadata))
        return metadata

    def learned_online_diagnostics(self) -> dict[str, Any]:
        """Counters of the learning expert."""
        return self._reports.diagnostics()

    def learned_selector_diagnostics(self) -> dict[str, Any]:
        """Evidence and selection of the twelve keys, and the calibrations of trained stores."""
        calibration = [
            {
                "store": workload,
                "query_type": query,
                "ready": table.ready,
                "ready_buckets": table.ready_cells,
                "retained_observations": table.retained,
            }
            for (workload, query), table in self.serving.calibrations().items()
        ]
        return {
            "calibration": calibration,
            "config": dict(self._selector),
            "identity_verified": True,
            "loss": "unbounded_fractional_ape",
            "scope": "forest_store_and_query_type",
            "states": self._causal.states(),
            "worker_type": self._stable.worker_type,
        }

    def flush_updates(self) -> None:
        """Run a batch in every store of the learning expert with rows that wait or have grown too old."""
        self._causal.flush()

    def export_learned_artifact(self) -> dict[str, Any]:
        """Refused: a forest alone cannot hold what both experts know."""
        raise UnsupportedQueryError(
            "export_learned_artifact needs one forest per store; a causal selector has two and their evidence: use "
            "save_state_snapshot"
        )

    def save_online_checkpoint(self, path: str) -> None:
        """Refused: an online checkpoint holds one of the two experts."""
        raise UnsupportedQueryError(
            "save_online_checkpoint needs adaptation online; a causal selector has two experts and their evidence: "
            "use save_state_snapshot"
        )

    # --- saved state ---

    def state_layouts(self) -> "list[tuple[str, StateLayout]]":
        """Both parts of every calibration, then the evidence."""
        parts = [
            (calibration_name(*key), layout) for key in self._causal.stores() for layout in (FIXED_STORE, DYNAMIC_STORE)
        ]
        return [*parts, (SELECTOR_STORE, CAUSAL_SELECTOR)]

    def state_parts(self) -> "list[StatePart]":
        """Copies of every calibration and of the evidence."""
        from fpmsdk.snapshot.state import StatePart

        parts = [
            StatePart(calibration_name(*key), layout, part.saved())
            for key, store in self._causal.stores().items()
            for layout, part in ((FIXED_STORE, store.fixed), (DYNAMIC_STORE, store.dynamic))
            if part is not None
        ]
        return [*parts, StatePart(SELECTOR_STORE, CAUSAL_SELECTOR, self._causal.saved())]

    def install_part(self, part: "StatePart") -> None:
        """Take over one saved part."""
        if part.layout is CAUSAL_SELECTOR:
            self._causal.restore(part.arrays)
            return
        store = self._causal.stores()[KEYS[CALIBRATION_STORES.index(part.store)]]
        (store.restore_fixed if part.layout is FIXED_STORE else store.restore_dynamic)(part.arrays)

    def state_diagnostics(self) -> dict[str, Any]:
        """What a restored model must report again."""
        return super().state_diagnostics() | {
            "learned": self._reports.state_diagnostics(),
            "selector": self.learned_selector_diagnostics(),
        }

    def sources(self) -> StageSources:
        """Both experts as of now, for a snapshot."""
        checkpoint = runtime_checkpoint(
            self._learned,
            self.config,
            learned_identity(self.config),
            self._reports.rejected(),
            source_path="",
        )
        files, stable = runtime_files(checkpoint), self._stable.to_json_bytes()

        def stage(pinned: dict[str, Any], staging: "Staging", destination: str) -> "Iterator[RecordedFile]":
            yield from stage_checkpoint(files, pinned, staging, destination)
            yield staging.write(STABLE_FILE, stable)

        return stage


DEFAULT_SELECTOR = {"alpha": 0.4, "margin": 0.05, "warmup": 5, "persistence": 1}


def build_causal(config: dict[str, Any], read: Read, snapshot_path: str | None) -> CausalKind:
    """The causal selector that a canonical configuration names.

    Parameters
    ----------
    read: gives the content of a file by its path.
    snapshot_path: of the saved state that is being restored, None otherwise.

    Raises
    ------
    LearnedModelError: as `load_learner`, or a runtime checkpoint outside a saved state: it lacks the other expert.
    PerfDataNotAvailableError: a file cannot be read.
    """
    resumes = is_runtime_manifest(pinned_manifest(config, read))
    if resumes and snapshot_path is None:
        raise LearnedModelError(
            "learned forward-pass model: adaptation causal_selector needs a training checkpoint; "
            f"{config['estimator_config']['fpm_learned']['checkpoint_path']} is a runtime checkpoint of one expert",
            "checkpoint_path",
        )
    learned = load_learner(config, read)
    stable = learned.artifact
    if resumes:
        assert snapshot_path is not None
        stable = read_artifact(read(os.path.join(snapshot_path, STABLE_FILE)))
        if set(stable.stores) != set(learned.artifact.stores) or stable.features != learned.artifact.features:
            raise LearnedModelError(
                f"learned forward-pass model: {STABLE_FILE}: expected the stores and features of {ONLINE_FOLDER}, "
                "found others",
                STABLE_FILE,
            )
    return CausalKind(stable, learned, config)
