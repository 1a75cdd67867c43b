"""Regression estimators of a configuration: which stores, over which axes, with which declared state.

The arithmetic is `ext/linear.pyx`; source: regression-and-learned.md section 1.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fpmsdk._ext.automatic import AutomaticStore
from fpmsdk._ext.linear_store import CLOCK_FIELDS, LinearStore
from fpmsdk._ext.recursive import WORK_AXES, RecursiveStore
from fpmsdk._ext.regression import Regression, RegressionStore, RegressionView
from fpmsdk.config.validate_estimator import fitted_kinds
from fpmsdk.errors import ConfigError, MissingCapabilityError
from fpmsdk.perfmodel.kind import DecodeFrame, Kind, Status
from fpmsdk.perfmodel.recursive import CHOICE, RECURSIVE_STORE
from fpmsdk.snapshot.layout import StateField, StateLayout

if TYPE_CHECKING:
    from fpmsdk.snapshot.state import StatePart

# What the bucketed sampler keeps; shared by every store that retains rows in buckets. Fields that show the length of a
# dimension precede those that need it, so that a saved state can be read without its configuration.
SAMPLER_FIELDS = (
    StateField("axis_min", "f8", ("sampling_axes",), "lower bound of each sampling axis", finite=False),
    StateField("axis_max", "f8", ("sampling_axes",), "upper bound of each sampling axis", finite=False),
    StateField("extent", "i8", (3,), "rows, occupied buckets, slot of the next row", minimum=0),
    StateField("coordinates", "f8", ("rows", "sampling_axes"), "retention coordinates of each slot"),
    StateField("order", "i4", ("rows",), "slots bucket by bucket, oldest first", minimum=0),
    StateField("bucket_key", "i8", ("buckets",), "keys of the occupied buckets, ascending", minimum=0),
    StateField("bucket_start", "i4", ("buckets+1",), "first position of each bucket in `order`", minimum=0),
)

# Everything that tuning changes in one linear store.
LINEAR_STORE = StateLayout(
    "linear_store",
    2,
    (
        *SAMPLER_FIELDS,
        StateField("mean", "f8", ("axes+1",), "means of features and target", finite=False),
        StateField("scatter", "f8", ("axes+1", "axes+1"), "centred cross products", finite=False),
        StateField("features", "f8", ("rows", "axes"), "fit features of each slot", minimum=0.0),
        StateField("target_ms", "f8", ("rows",), "observed latency of each slot", minimum=0.0),
        StateField("clock", "i8", (len(CLOCK_FIELDS),), ", ".join(CLOCK_FIELDS), minimum=0),
        StateField("errors", "u1", ("errors",), "verdicts of the update policy, oldest first", maximum=1),
        StateField("fit_intercept_ms", "f8", (1,), "intercept of the fit that serves"),
        StateField("fit_slope_ms", "f8", ("axes",), "slope per standardised axis, ms"),
        StateField("fit_mean", "f8", ("axes",), "mean used to standardise each axis"),
        StateField("fit_scale", "f8", ("axes",), "scale used to standardise each axis", minimum=0.0),
        StateField("fit_flags", "i8", (2,), "ready, bits of the active axes", minimum=0),
    ),
)

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

    def state_layouts(self) -> list[tuple[str, StateLayout]]:
        """The parts of one store per workload kind."""
        return [(kind, part.layout) for kind, store in self._regression.stores().items() for part in store.parts()]

    def state_parts(self) -> "list[StatePart]":
        """Copies of every store."""
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
    MissingCapabilityError: the fit kind has no implementation in this release.
    """
    estimator = config["estimator_config"]
    regression = estimator["fpm_regression"]
    fit, sampling = regression["fit"], regression["sampling"]
    kinds = fitted_kinds(fit)
    if "spline" in kinds:
        raise MissingCapabilityError("spline")
    linear = fit.get("linear") or {}
    fit_axes = tuple(linear.get("feature_axes", DEFAULT_AXES)) if set(kinds) - {"recursive"} else ()
    work_axes = WORK_AXES if "recursive" in kinds else ()
    sampling_axes = tuple(sampling.get("axes", DEFAULT_AXES)) if fit_axes else ()
    axes = fit_axes + work_axes + tuple(axis for axis in sampling_axes if axis not in fit_axes)
    settings = {
        "num_axes": len(fit_axes),
        "min_observations": regression["min_observations"],
        "singular_ridge_scale": fit["singular_ridge_scale"],
        "rebuild_interval": fit["rebuild_interval"],
        "non_negative": linear.get("non_negative", True),
        "update_policy": linear.get("update_policy", {"kind": "always"}),
    }

    def new_linear() -> LinearStore:
        return LinearStore(
            LINEAR_STORE,
            settings,
            tuple(axes.index(axis) for axis in sampling_axes),
            tuple(sampling["bins_per_axis"]),
            sampling["max_observations"],
        )

    def new_recursive() -> RecursiveStore:
        return RecursiveStore(RECURSIVE_STORE, fit["recursive"], regression["min_observations"], len(fit_axes))

    new: dict[str, Callable[[], RegressionStore]] = {"standardized_nnls": new_linear, "recursive": new_recursive}

    def new_automatic() -> AutomaticStore:
        return AutomaticStore(CHOICE, fit["automatic"], {kind: new[kind]() for kind in kinds})

    return Regression(
        config["worker_type"],
        _weights(estimator["features"]),
        axes,
        len(fit_axes) + len(work_axes),
        new_automatic if fit["kind"] == "automatic" else new[fit["kind"]],
    )


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
