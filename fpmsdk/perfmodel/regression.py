"""Regression estimators of a configuration: which stores, over which axes, with which declared state.

The arithmetic is `ext/linear.pyx`; source: regression-and-learned.md section 1.
"""

from typing import TYPE_CHECKING, Any

from fpmsdk._ext.linear_store import LinearStore
from fpmsdk._ext.regression import Regression, RegressionStore, RegressionView
from fpmsdk.config.validate_estimator import fitted_kinds
from fpmsdk.errors import ConfigError
from fpmsdk.perfmodel.kind import DecodeFrame, Kind, Status
from fpmsdk.perfmodel.regression_layouts import LINEAR_STORE

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

    def explain(self, metrics: Any, decode_frame: DecodeFrame) -> dict[str, Any]:
        """The estimate with the error to expect, of an estimator that judges its own answers."""
        if not {"recursive", "automatic"} & {self.config["estimator_config"]["fpm_regression"]["fit"]["kind"]}:
            raise self._lacks("explain", "a native estimator, or fit.kind recursive or automatic")
        latency_ms, store, expectation = self.serving.explain_iteration(metrics, decode_frame)
        expected_error, in_domain = expectation or (None, latency_ms == 0.0)
        return {
            "latency_ms": latency_ms,
            "native_latency_ms": None,
            "correction_factor": None,
            "max_rank": None,
            "in_domain": in_domain,
            "expected_error": expected_error,
            "store": store,
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
        """The parts of one store per workload kind."""
        return [(kind, part.layout) for kind, store in self._regression.stores().items() for part in store.parts()]

    def state_parts(self) -> "list[StatePart]":
        """Every store."""
        from fpmsdk.snapshot.state import StatePart

        return [
            StatePart(kind, part.layout, part.saved())
            for kind, store in self._regression.stores().items()
            for part in store.parts()
        ]

    def install_part(self, part: "StatePart") -> None:
        """Take over one saved store."""
        (store,) = (own for own in self._regression.stores()[part.store].parts() if own.layout is part.layout)
        store.restore(part.arrays)

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
    kinds = fitted_kinds(fit)
    linear = fit.get("linear") or {}
    # Fits over the feature axes come first, then the work that a recursive fit learns from.
    fit_axes = tuple(linear.get("feature_axes", DEFAULT_AXES)) if set(kinds) - {"recursive"} else ()
    sampling_axes = tuple(sampling.get("axes", DEFAULT_AXES)) if fit_axes else ()
    learned_axes = fit_axes + (_work_axes() if "recursive" in kinds else ())
    axes = learned_axes + tuple(axis for axis in sampling_axes if axis not in fit_axes)
    retained = tuple(sampling["bins_per_axis"]), sampling["max_observations"]
    settings = {
        "num_axes": len(fit_axes),
        "min_observations": regression["min_observations"],
        "singular_ridge_scale": fit["singular_ridge_scale"],
        "rebuild_interval": fit["rebuild_interval"],
        "non_negative": linear.get("non_negative", True),
        "update_policy": linear.get("update_policy", {"kind": "always"}),
    }

    # What most models do not fit with is loaded with the first that does: every compiled module costs the import.
    def new_store(kind: str) -> RegressionStore:
        if kind == "automatic":
            from fpmsdk._ext.automatic import AutomaticStore
            from fpmsdk.perfmodel.recursive_layouts import CHOICE

            return AutomaticStore(CHOICE, fit["automatic"], {candidate: new_store(candidate) for candidate in kinds})
        if kind == "recursive":
            from fpmsdk._ext.recursive import RecursiveStore
            from fpmsdk.perfmodel.recursive_layouts import RECURSIVE_STORE

            return RecursiveStore(RECURSIVE_STORE, fit["recursive"], regression["min_observations"], len(fit_axes))
        if kind == "spline":
            from fpmsdk._ext.spline_store import SplineStore
            from fpmsdk.perfmodel.spline_layout import SPLINE_STORE

            return SplineStore(SPLINE_STORE, settings | fit["spline"], *retained)
        return LinearStore(LINEAR_STORE, settings, tuple(axes.index(axis) for axis in sampling_axes), *retained)

    return Regression(
        config["worker_type"],
        _weights(estimator["features"]),
        axes,
        len(learned_axes),
        lambda: new_store(fit["kind"]),
    )


def _work_axes() -> tuple[str, ...]:
    from fpmsdk._ext.recursive import WORK_AXES

    return WORK_AXES


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
