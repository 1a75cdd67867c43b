"""Native kinds of model: estimates from data, corrected by what tuning observed.

Source: fpm-model.md sections 2.2, 2.3 and 6.
"""

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from fpmsdk._ext.native import NativeEngine, NativeEstimator
from fpmsdk.errors import PerfDataNotAvailableError, StateSnapshotError, UnlistedVersionError
from fpmsdk.opgraph.spec import SCHEMA_VERSION
from fpmsdk.perfdb import ResolvedVersion, SystemsRoot
from fpmsdk.perfdb.fingerprint import Fingerprint, fingerprint, first_change, known_fingerprint, measure_fingerprint
from fpmsdk.perfmodel.corrected import CorrectedKind, correction_stores
from fpmsdk.perfmodel.kind import DecodeFrame, Status


class DataSource(NamedTuple):
    """Performance data of a model: where they are, and what this process saw of them before it loaded any.

    `external` is a whole-forward table outside of the root. Of data that could not be read, `fault` says why.
    """

    root_path: str
    system: str
    external: str | None
    first_seen: Fingerprint | None
    fault: str = ""

    @property
    def seen(self) -> Fingerprint:
        """The fingerprint at the first load; raises `StateSnapshotError` when there is none."""
        if self.first_seen is None:
            raise StateSnapshotError(f"performance data under {self.root_path} cannot be pinned: {self.fault}")
        return self.first_seen

    def require_unchanged(self) -> None:
        """Raise `StateSnapshotError` unless the data are still what this process first loaded."""
        seen = self.seen
        known = known_fingerprint(self.root_path, self.system, self.external)
        try:
            now = measure_fingerprint(SystemsRoot(self.root_path), self.system, self.external)
        except (PerfDataNotAvailableError, ValueError) as fault:
            raise StateSnapshotError(
                f"performance data under {self.root_path} changed since this process loaded them: {fault}; restart the "
                "process"
            ) from fault
        for found in (now, known or seen):
            if found.digest != seen.digest:
                raise StateSnapshotError(
                    f"performance data under {self.root_path} changed since this process loaded them, first at "
                    f"{first_change(seen.entries, found.entries)}; restart the process and tune again"
                )


def load_source(root_path: str, system: str, external: str | None) -> DataSource:
    """The data of a model that is about to be built; call it before anything of the root is opened.

    Raises
    ------
    UnknownSystemError, PerfDataCorruptError: as opening the root would.
    """
    place = os.path.abspath(root_path)
    if (known := known_fingerprint(place, system, external)) is not None:
        return DataSource(place, system, external, known)
    root = SystemsRoot(place)
    root.spec(system)
    try:
        return DataSource(root.path, system, external, fingerprint(root, system, external))
    except PerfDataNotAvailableError as fault:
        # The model may not need what cannot be read; only a snapshot does.
        return DataSource(root.path, system, external, None, str(fault))


def external_table(config: Mapping[str, Any]) -> str | None:
    """Absolute path of the whole-forward table that a configuration names, None when it names none or needs none."""
    if config["estimation_mode"] != "fpm_interpolation":
        return None
    external = config["estimator_config"]["fpm_interpolation"].get("fpm_parquet_path")
    return None if external is None else os.path.abspath(external)


class NativeKind(CorrectedKind):
    """A native engine under a canonical configuration, with correction unless that is disabled."""

    def __init__(self, mode: str, engine: NativeEngine, config: dict[str, Any], source: DataSource) -> None:
        self._source = source
        super().__init__(mode, NativeEstimator(engine, correction_stores(config, "fixed")), config, "fixed")

    @property
    def data_source(self) -> DataSource:
        """The performance data that the model prices from."""
        return self._source

    @property
    def engine_spec_schema_version(self) -> int:
        """Version of the form of engine specifications."""
        return SCHEMA_VERSION

    def status(self) -> Status:
        """Counters for `diagnostics()`; a native model is always ready."""
        ready, retained, cells = self.correction_counters()
        return "aic_with_correction" if ready else "aic", True, retained, cells

    def detailed(self, metrics: Any, decode_frame: DecodeFrame) -> dict[str, Any]:
        """Latency, its native part, the factor and the slowest rank."""
        native_ms, factor, slowest, evidence = self.serving.estimate_parts(metrics, decode_frame)
        return {
            "latency_ms": native_ms * factor,
            "native_latency_ms": native_ms,
            "correction_factor": factor,
            "max_rank": slowest,
            "ranks": self.rank_evidence(evidence) if native_ms > 0.0 else [],
        }

    def explain(self, metrics: Any, decode_frame: DecodeFrame) -> dict[str, Any]:
        """The estimate with the measurements behind it and the error that their tables suggest."""
        native_ms, factor, slowest, evidence = self.serving.estimate_parts(metrics, decode_frame)
        ranks = [self.explained_rank(rank, parts) for rank, parts in enumerate(evidence)]
        return {
            "latency_ms": native_ms * factor,
            "native_latency_ms": native_ms,
            "correction_factor": factor,
            "max_rank": slowest,
            "in_domain": all(rank["in_domain"] for rank in ranks),
            "expected_error": None if slowest is None else ranks[slowest]["expected_error"],
            "ranks": ranks,
        }

    @abstractmethod
    def explained_rank(self, rank: int, parts: Any) -> dict[str, Any]:
        """One rank of an explanation, with `in_domain`, `expected_error` and its `lookups`, from its evidence."""

    def rank_evidence(self, evidence: list[Any]) -> list[dict[str, Any]]:
        """What the engine says of each rank, for the detailed estimate; engines that have nothing to say give []."""
        return []

    def readiness_report(self) -> dict[str, Any]:
        """A native model answers from the start; its correction stores become ready one by one."""
        return {"kind": self.mode, "ready": True, "stores": [], "correction": self.correction_report()}


def explicit_policy(policy: list[str] | None) -> list[str]:
    """The kinds of transfer that a configuration allows, in the order of the field; None allows all."""
    every = ["xshape", "xquant", "xprofile", "xop"]
    return every if policy is None else [kind for kind in every if kind in policy]


def resolve_version(root: SystemsRoot, config: dict[str, Any]) -> ResolvedVersion:
    """The backend version that a configuration means under one root."""
    system, backend = config["system"], config["backend"]
    root.spec(system)  # an unknown system is named before its versions are
    resolved = root.resolve_version(system, backend, config["backend_version"])
    if resolved.version is None:
        raise UnlistedVersionError(
            f"failed to find performance data roots: {root.path} has no {backend} data of {system} that would tell "
            "which version is meant; give backend_version, or a root with data"
        )
    return resolved
