"""Declared state of the regression stores; the arithmetic over it is `ext/linear.pyx` and `ext/spline.pyx`.

Source: regression-and-learned.md section 6; snapshot.md section 4.
"""

from fpmsdk._ext.linear_store import CLOCK_FIELDS
from fpmsdk._ext.recursive import CLOCK_FIELDS as RECURSIVE_CLOCK_FIELDS
from fpmsdk._ext.spline_store import CLOCK_FIELDS as SPLINE_CLOCK_FIELDS
from fpmsdk._ext.spline_store import MAX_KNOTS, MAX_TERMS
from fpmsdk.snapshot.layout import StateField, StateLayout

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

# The rows of a linear model, its statistics and its fit.
_STATISTICS_FIELDS = (
    StateField("mean", "f8", ("axes+1",), "means of features and target", finite=False),
    StateField("scatter", "f8", ("axes+1", "axes+1"), "centred cross products", finite=False),
    StateField("features", "f8", ("rows", "axes"), "fit features of each slot", minimum=0.0),
    StateField("target_ms", "f8", ("rows",), "observed latency of each slot", minimum=0.0),
)
_FIT_FIELDS = (
    StateField("fit_intercept_ms", "f8", (1,), "intercept of the fit that serves"),
    StateField("fit_slope_ms", "f8", ("axes",), "slope per standardised axis, ms"),
    StateField("fit_mean", "f8", ("axes",), "mean used to standardise each axis"),
    StateField("fit_scale", "f8", ("axes",), "scale used to standardise each axis", minimum=0.0),
    StateField("fit_flags", "i8", (2,), "ready, bits of the active axes", minimum=0),
)

# Everything that tuning changes in one linear store.
LINEAR_STORE = StateLayout(
    "linear_store",
    2,
    (
        *SAMPLER_FIELDS,
        *_STATISTICS_FIELDS,
        StateField("clock", "i8", (len(CLOCK_FIELDS),), ", ".join(CLOCK_FIELDS), minimum=0),
        StateField("errors", "u1", ("errors",), "verdicts of the update policy, oldest first", maximum=1),
        *_FIT_FIELDS,
    ),
)

# Everything that tuning changes in one spline store. The last of the terms in use is followed by the target.
_SIZE = MAX_TERMS + 1
SPLINE_STORE = StateLayout(
    "spline_store",
    1,
    (
        *SAMPLER_FIELDS,
        *_STATISTICS_FIELDS,
        StateField("sequence", "i8", ("rows",), "observations accepted before each slot's", minimum=0),
        StateField("clock", "i8", (len(SPLINE_CLOCK_FIELDS),), ", ".join(SPLINE_CLOCK_FIELDS), minimum=0),
        StateField("errors", "u1", ("errors",), "verdicts of the adaptive search, oldest first", maximum=1),
        *_FIT_FIELDS,
        StateField("guard_min", "f8", (2,), "smallest retained feature per axis", finite=False),
        StateField("guard_max", "f8", (2,), "largest retained feature per axis", finite=False),
        StateField("scale", "f8", (2,), "feature units per scaled unit, of the last search", minimum=0.0),
        StateField("knot_count", "i8", (2,), "knots per axis", minimum=0, maximum=MAX_KNOTS),
        StateField("knots", "f8", (2, MAX_KNOTS), "positions of the knots, scaled", minimum=0.0),
        StateField("basis_mean", "f8", (_SIZE,), "means of terms and target", finite=False),
        StateField("basis_mean_rest", "f8", (_SIZE,), "rounding left over of each mean", finite=False),
        StateField("basis_scatter", "f8", (_SIZE, _SIZE), "centred cross products, upper triangle", finite=False),
        StateField("basis_scatter_rest", "f8", (_SIZE, _SIZE), "rounding left over of each", finite=False),
        StateField("spline_exists", "i8", (1,), "whether the last fit at the knots succeeded", minimum=0, maximum=1),
        StateField("spline_intercept_ms", "f8", (1,), "value of the spline at the origin"),
        StateField("spline_slope_ms", "f8", (MAX_TERMS,), "slope per term, ms per scaled unit", minimum=0.0),
        StateField("spline_sse", "f8", (1,), "sum of squared errors of the fit, ms^2", minimum=0.0),
    ),
)

_COEFFICIENTS = 5

# Everything that tuning changes in one recursive store; the first coefficient is that of the iteration itself.
RECURSIVE_STORE = StateLayout(
    "recursive_store",
    1,
    (
        StateField("coefficient_ms", "f8", (_COEFFICIENTS,), "ms per iteration and unit of each axis", minimum=0.0),
        StateField("level", "f8", (1,), "ln(latency just now / latency of the coefficients)", -100.0, 100.0),
        StateField("long_run_level", "f8", (1,), "mean of the level over the memory of the fit", -100.0, 100.0),
        StateField("mean_error", "f8", (1,), "mean relative error of recent answers", minimum=0.0, maximum=1.0),
        StateField("information", "f8", (_COEFFICIENTS, _COEFFICIENTS), "products of the work", minimum=0.0),
        StateField("moment_ms", "f8", (_COEFFICIENTS,), "products of work and latency", minimum=0.0),
        StateField("clock", "i8", (len(RECURSIVE_CLOCK_FIELDS),), "; ".join(RECURSIVE_CLOCK_FIELDS)),
    ),
)

# Everything that tuning changes in the choice of one store.
CHOICE = StateLayout(
    "automatic_choice",
    1,
    (
        StateField("mean_error", "f8", ("candidates",), "mean relative error of late", minimum=0.0, maximum=1.0),
        StateField("answers", "i8", ("candidates",), "answers that were judged", minimum=0),
        StateField("selected", "i8", (1,), "candidate that serves", minimum=0),
    ),
)
