"""Regression estimators of a configuration: which stores, over which axes, with which declared state.

The arithmetic is `ext/linear.pyx`; source: regression-and-learned.md section 1.
"""

from typing import TYPE_CHECKING, Any

from fpmsdk._ext.linear_store import LinearStore
from fpmsdk._ext.regression import Regression, RegressionStore, RegressionView
from fpmsdk._ext.spline_store import SplineStore
from fpmsdk.errors import ConfigError
from fpmsdk.perfmodel.kind import DecodeFrame, Kind, Status
from fpmsdk.perfmodel.regression_layouts import LINEAR_STORE, SPLINE_STORE

if TYPE_CHECKING:
    from fpmsdk.snapshot.layout import StateLayout
    from fpmsdk.snapshot.state import StatePart

DEFAULT_AXES = ("attention", "moe")


class RegressionKind(Kind):
    """Regression stores under a canonical configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._regression = build_regression(config)
        super().__init__("fpm_regression", self._regression, config)

    @property
    def serving(self) -> RegressionView:
        """What has been learned by now."""
        return self._regression.serving

    def status(self) -> Status:
        """Counters for `diagnostics()`."""
        serving = self._regression.serving
        return "fallback_regression", serving.ready, serving.retained_observations, 0

    def detailed(self, metrics: Any, decode_frame: DecodeFrame) -> dict[str, Any]:
        """The estimate alone; a regression has no parts."""
        return {
            "latency_ms": self.serving.estimate_iteration(metrics, decode_frame),
            "native_latency_ms": None,
            "correction_factor": None,
            "max_rank": None,
            "ranks": [],
        }

    def store_diagnostics(self) -> list[dict[str, Any]]:
        """Workload kind, readiness and retained observations of each store, and what else it tells of itself."""
        return [
            {"workload_kind": kind, "ready": view.ready, "retained_observations": view.retained_observations}
            | view.details()
            for kind, view in self.serving.stores().items()
        ]

    def state_layouts(self) -> "list[tuple[str, StateLayout]]":
        """One store per workload kind."""
        return [(kind, store.layout) for kind, store in self._regression.stores().items()]

    def state_parts(self) -> "list[StatePart]":
        """Copies of every store."""
        from fpmsdk.snapshot.state import StatePart

        return [StatePart(kind, store.layout, store.saved()) for kind, store in self._regression.stores().items()]

    def install_part(self, part: "StatePart") -> None:
        """Take over one saved store."""
        self._regression.stores()[part.store].restore(part.arrays)

    def readiness_report(self) -> dict[str, Any]:
        """Readiness of each store; there is no correction."""
        serving = self.serving
        minimum = self.config["estimator_config"]["fpm_regression"]["min_observations"]
        stores = [
            {
                "store": kind,
                "ready": view.ready,
                "reason": None if view.ready else _reason(view.retained_observations, minimum),
                "retained_observations": view.retained_observations,
            }
            for kind, view in serving.stores().items()
        ]
        return {"kind": self.mode, "ready": serving.ready, "stores": stores, "correction": None}


def _reason(retained: int, min_observations: int) -> str:
    return "below_min_observations" if retained < min_observations else "no_usable_fit"


def build_regression(config: dict[str, Any]) -> Regression:
    """The regression estimator of a normalised configuration.

    Parameters
    ----------
    config: result of `fpmsdk.config.normalize_config`.

    Raises
    ------
    ConfigError: a feature weight is not finite and positive.
    """
    estimator = config["estimator_config"]
    regression = estimator["fpm_regression"]
    fit, sampling = regression["fit"], regression["sampling"]
    linear = fit.get("linear") or {}
    fit_axes = tuple(linear.get("feature_axes", DEFAULT_AXES))
    sampling_axes = tuple(sampling.get("axes", DEFAULT_AXES))
    axes = fit_axes + tuple(axis for axis in sampling_axes if axis not in fit_axes)
    retained = tuple(sampling["bins_per_axis"]), sampling["max_observations"]
    settings = {
        "num_axes": len(fit_axes),
        "min_observations": regression["min_observations"],
        "singular_ridge_scale": fit["singular_ridge_scale"],
        "rebuild_interval": fit["rebuild_interval"],
        "non_negative": linear.get("non_negative", True),
        "update_policy": linear.get("update_policy", {"kind": "always"}),
    }

    def new_store() -> RegressionStore:
        if fit["kind"] == "spline":
            return SplineStore(SPLINE_STORE, settings | fit["spline"], *retained)
        return LinearStore(LINEAR_STORE, settings, tuple(axes.index(axis) for axis in sampling_axes), *retained)

    return Regression(config["worker_type"], _weights(estimator["features"]), axes, len(fit_axes), new_store)


def _weights(features: dict[str, Any]) -> tuple[float, float, float]:
    weights = []
    for name in ("attention_kv_weight", "prefill_attention_pair_weight", "ffn_token_weight"):
        weight = float(features[name])
        if not 0.0 < weight < float("inf"):
            path = f"estimator_config.features.{name}"
            raise ConfigError(
                f"invalid engine config: {path}: expected a finite number above 0 for a regression model, "
                f"found {features[name]!r}",
                path,
            )
        weights.append(weight)
    return weights[0], weights[1], weights[2]
