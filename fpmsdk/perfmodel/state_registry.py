"""Every store that a saved state may hold; a new estimator adds its stores and layouts at the end.

A change of what is here, or of a layout, needs a new `STATE_LAYOUT_VERSION`. Source: snapshot.md section 4.
"""

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.native import NATIVE_KINDS
from fpmsdk.perfmodel.correction import DYNAMIC_STORE, FIXED_STORE
from fpmsdk.perfmodel.online_state import (
    CALIBRATION_STORES,
    CAUSAL_SELECTOR,
    LEARNER_STORE,
    ONLINE_MODEL,
    ONLINE_STORE,
    SELECTOR_STORE,
)
from fpmsdk.perfmodel.recursive_layouts import CHOICE, RECURSIVE_STORE
from fpmsdk.perfmodel.regression_layouts import LINEAR_STORE
from fpmsdk.perfmodel.spline_layout import SPLINE_STORE
from fpmsdk.snapshot.state import StateRegistry

STATES = StateRegistry(
    (*WORKLOAD_KINDS, *NATIVE_KINDS, *CALIBRATION_STORES, SELECTOR_STORE, LEARNER_STORE),
    {
        1: LINEAR_STORE,
        2: FIXED_STORE,
        3: DYNAMIC_STORE,
        4: SPLINE_STORE,
        5: RECURSIVE_STORE,
        6: CHOICE,
        7: CAUSAL_SELECTOR,
        8: ONLINE_MODEL,
        9: ONLINE_STORE,
    },
)
