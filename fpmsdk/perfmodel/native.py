"""Native kinds of model: estimates from data, corrected by what tuning observed.

Source: fpm-model.md sections 2.2, 2.3 and 6.
"""

from abc import abstractmethod
from typing import Any

from fpmsdk._ext.native import NATIVE_KINDS, NativeEngine, NativeEstimator, NativeView
from fpmsdk.errors import UnlistedVersionError
from fpmsdk.perfdb import ResolvedVersion, SystemsRoot
from fpmsdk.perfmodel.correction import build_corrections
from fpmsdk.perfmodel.kind import DecodeFrame, Kind, Status


class NativeKind(Kind):
    """A native engine under a canonical configuration, with correction unless that is disabled."""

    def __init__(self, mode: str, engine: NativeEngine, config: dict[str, Any]) -> None:
        self._correction = config["estimator_config"]["correction"]
        stores = build_corrections(self._correction, "fixed") if self._correction["enabled"] else None
        super().__init__(mode, NativeEstimator(engine, stores), config)

    @property
    def serving(self) -> NativeView:
        """What has been learned by now."""
        serving = self.estimator.serving
        assert isinstance(serving, NativeView)
        return serving

    @property
    def is_corrected(self) -> bool:
        """Whether online correction applies."""
        return bool(self._correction["enabled"])

    def status(self) -> Status:
        """Counters for `diagnostics()`; a native model is always ready."""
        tables = self.serving.tables()
        return (
            "aic_with_correction" if any(table.ready for table in tables) else "aic",
            True,
            sum(table.retained for table in tables),
            sum(table.ready_cells for table in tables),
        )

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

    def correction_factors(self) -> list[float]:
        """Ready factors: prefill, decode, mixed."""
        return [factor for table in self.serving.tables() for factor in table.factors()]

    def readiness_report(self) -> dict[str, Any]:
        """A native model answers from the start; its correction stores become ready one by one."""
        mode = self._correction.get("mode", "auto")
        stores = [
            {
                "workload_kind": kind,
                "ready": table.ready,
                "reason": None if table.ready else "below_min_observations",
                "retained_observations": table.retained,
                "ready_buckets": table.ready_cells,
            }
            for kind, table in zip(NATIVE_KINDS, self.serving.tables(), strict=False)
        ]
        correction = {
            "enabled": self.is_corrected,
            "mode": "fixed" if mode == "auto" else mode,
            "ready": any(store["ready"] for store in stores),
            "stores": stores,
        }
        return {"kind": self.mode, "ready": True, "stores": [], "correction": correction}


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
