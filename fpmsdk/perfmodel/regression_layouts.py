"""Declared state of linear stores, and the parts of it that stores of other kinds share.

Source: regression-and-learned.md section 6; snapshot.md section 4.
"""

from fpmsdk._ext.linear_store import CLOCK_FIELDS
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
STATISTICS_FIELDS = (
    StateField("mean", "f8", ("axes+1",), "means of features and target", finite=False),
    StateField("scatter", "f8", ("axes+1", "axes+1"), "centred cross products", finite=False),
    StateField("features", "f8", ("rows", "axes"), "fit features of each slot", minimum=0.0),
    StateField("target_ms", "f8", ("rows",), "observed latency of each slot", minimum=0.0),
)
FIT_FIELDS = (
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
        *STATISTICS_FIELDS,
        StateField("clock", "i8", (len(CLOCK_FIELDS),), ", ".join(CLOCK_FIELDS), minimum=0),
        StateField("errors", "u1", ("errors",), "verdicts of the update policy, oldest first", maximum=1),
        *FIT_FIELDS,
    ),
)
