"""Declared state of recursive stores and of the choice among several; loaded with the first of them.

Source: regression-and-learned.md section 6; snapshot.md section 4.
"""

from fpmsdk._ext.recursive import CLOCK_FIELDS
from fpmsdk.snapshot.layout import StateField, StateLayout

_COEFFICIENTS = 5

# Everything that tuning changes in one recursive store; the first coefficient is that of the iteration itself.
RECURSIVE_STORE = StateLayout(
    "recursive_store",
    1,
    (
        StateField("coefficient_ms", "f8", (_COEFFICIENTS,), "ms per iteration and unit of each axis", 0.0, 1e30),
        StateField("level", "f8", (1,), "ln(latency just now / latency of the coefficients)", -100.0, 100.0),
        StateField("long_run_level", "f8", (1,), "mean of the level over the memory of the fit", -100.0, 100.0),
        StateField("mean_error", "f8", (1,), "mean relative error of recent answers", minimum=0.0, maximum=1.0),
        StateField("information", "f8", (_COEFFICIENTS, _COEFFICIENTS), "products of the work", 0.0, 1e70),
        StateField("moment_ms", "f8", (_COEFFICIENTS,), "products of work and latency", 0.0, 1e45),
        StateField("clock", "i8", (len(CLOCK_FIELDS),), "; ".join(CLOCK_FIELDS), -(1 << 62), 1 << 62),
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
