"""Declared state of spline stores; loaded with the first of them.

Source: regression-and-learned.md section 6; snapshot.md section 4.
"""

from fpmsdk._ext.spline_store import CLOCK_FIELDS, MAX_KNOTS, MAX_TERMS
from fpmsdk.perfmodel.regression_layouts import FIT_FIELDS, SAMPLER_FIELDS, STATISTICS_FIELDS
from fpmsdk.snapshot.layout import StateField, StateLayout

# Everything that tuning changes in one spline store. The last of the terms in use is followed by the target.
_SIZE = MAX_TERMS + 1
SPLINE_STORE = StateLayout(
    "spline_store",
    1,
    (
        *SAMPLER_FIELDS,
        *STATISTICS_FIELDS,
        StateField("sequence", "i8", ("rows",), "observations accepted before each slot's", minimum=0),
        StateField("clock", "i8", (len(CLOCK_FIELDS),), ", ".join(CLOCK_FIELDS), minimum=0),
        StateField("errors", "u1", ("errors",), "verdicts of the adaptive search, oldest first", maximum=1),
        *FIT_FIELDS,
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
