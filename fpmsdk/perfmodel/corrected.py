"""Kinds of model whose estimates are corrected by what tuning observed: native ones and frozen forests.

Source: fpm-model.md section 6.
"""

from typing import TYPE_CHECKING, Any

from fpmsdk._ext.correction import CorrectionStore
from fpmsdk._ext.native import NATIVE_KINDS, NativeEstimator, NativeView
from fpmsdk.perfmodel.correction import DYNAMIC_STORE, FIXED_STORE, build_corrections
from fpmsdk.perfmodel.kind import Kind

if TYPE_CHECKING:
    from fpmsdk.snapshot.layout import StateLayout
    from fpmsdk.snapshot.state import StatePart


def correction_stores(config: dict[str, Any], automatic_mode: str) -> dict[str, CorrectionStore] | None:
    """The correction stores of a canonical configuration; None when correction is disabled.

    `automatic_mode` is as of `build_corrections`.
    """
    correction = config["estimator_config"]["correction"]
    return build_corrections(correction, automatic_mode) if correction["enabled"] else None


class CorrectedKind(Kind):
    """An estimator with one correction store per native workload kind, or without any.

    Parameters
    ----------
    mode, estimator, config: as of `Kind`.
    automatic_mode: what correction mode `auto` stands for.
    """

    def __init__(self, mode: str, estimator: NativeEstimator, config: dict[str, Any], automatic_mode: str) -> None:
        super().__init__(mode, estimator, config)
        self._corrected = estimator
        self._correction = config["estimator_config"]["correction"]
        self._automatic_mode = automatic_mode

    @property
    def serving(self) -> NativeView:
        """What has been learned by now."""
        serving = self.estimator.serving
        assert isinstance(serving, NativeView)
        return serving

    def state_layouts(self) -> "list[tuple[str, StateLayout]]":
        """The parts of the correction stores: the fixed grid, then the dynamic one."""
        return [
            (kind, layout)
            for kind, store in self._corrected.stores().items()
            for layout, part in ((FIXED_STORE, store.fixed), (DYNAMIC_STORE, store.dynamic))
            if part is not None
        ]

    def state_parts(self) -> "list[StatePart]":
        """The parts of the correction stores."""
        from fpmsdk.snapshot.state import StatePart

        return [
            StatePart(kind, layout, part.saved())
            for kind, store in self._corrected.stores().items()
            for layout, part in ((FIXED_STORE, store.fixed), (DYNAMIC_STORE, store.dynamic))
            if part is not None
        ]

    def install_part(self, part: "StatePart") -> None:
        """Take over one part of a saved correction store."""
        store = self._corrected.stores()[part.store]
        (store.restore_fixed if part.layout is FIXED_STORE else store.restore_dynamic)(part.arrays)

    @property
    def is_corrected(self) -> bool:
        """Whether online correction applies."""
        return bool(self._correction["enabled"])

    def correction_counters(self) -> tuple[bool, int, int]:
        """Whether some store is ready, retained observations, and cells with a ready factor."""
        tables = self.serving.tables()
        return (
            any(table.ready for table in tables),
            sum(table.retained for table in tables),
            sum(table.ready_cells for table in tables),
        )

    def correction_factors(self) -> list[float]:
        """Ready factors: prefill, decode, mixed."""
        return [factor for table in self.serving.tables() for factor in table.factors()]

    def correction_report(self) -> dict[str, Any]:
        """The part of `readiness_report()` that tells of correction."""
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
        return {
            "enabled": self.is_corrected,
            "mode": self._automatic_mode if mode == "auto" else mode,
            "ready": any(store["ready"] for store in stores),
            "stores": stores,
        }
