"""Correction stores of a configuration: one per workload kind, with their declared state.

The arithmetic is `ext/correction.pyx`; source: fpm-model.md section 6.
"""

from typing import Any

from fpmsdk._ext.correction import DYNAMIC_EXTENT_FIELDS, CorrectionStore, DynamicLocalStore, FixedStore
from fpmsdk.perfmodel.regression_layouts import SAMPLER_FIELDS
from fpmsdk.snapshot.layout import StateField, StateLayout

FIXED_STORE = StateLayout(
    "fixed_correction",
    2,
    (
        *SAMPLER_FIELDS,
        StateField("ratio", "f8", ("rows",), "observed / native of each slot", minimum=0.0),
        StateField("cell_factor", "f8", ("buckets",), "median of each occupied bucket", minimum=0.0),
    ),
)

DYNAMIC_STORE = StateLayout(
    "dynamic_local_correction",
    2,
    (
        StateField("axis_min", "f8", ("axes",), "lower bound of each log1p coordinate", finite=False),
        StateField("axis_max", "f8", ("axes",), "upper bound of each log1p coordinate", finite=False),
        StateField("extent", "i8", (len(DYNAMIC_EXTENT_FIELDS),), ", ".join(DYNAMIC_EXTENT_FIELDS), minimum=0),
        StateField("recent", "f8", ("recent",), "latest ratios, newest last", minimum=0.0),
        StateField("coordinates", "f8", ("rows", "axes"), "log1p coordinates, chronological", minimum=0.0),
        StateField("ratio", "f8", ("rows",), "observed / native, chronological", minimum=0.0),
        StateField("sequence", "i8", ("rows",), "number of each observation", minimum=0),
        StateField("cell_key", "i8", ("cells",), "populated cells, ascending", minimum=0),
        StateField("cell_factor", "f8", ("cells",), "factor of each populated cell", minimum=0.0),
        StateField("global_factor", "f8", (1,), "median of the latest ratios", minimum=0.0),
    ),
)

# Workload coordinates of each kind, by the configured limit of their range.
KINDS = {
    "prefill": ("max_num_tokens",),
    "decode": ("max_batch_size", "max_kv_tokens"),
    "mixed": ("max_num_tokens", "max_kv_tokens"),
}


def build_corrections(correction: dict[str, Any], automatic_mode: str) -> dict[str, CorrectionStore]:
    """The correction stores of a model, by workload kind.

    Parameters
    ----------
    correction: `estimator_config.correction` of a normalised configuration.
    automatic_mode: what mode `auto` stands for: ``fixed`` for native models, ``hybrid`` for learned ones.

    Example
    -------
    >>> from fpmsdk.config import normalize_config
    >>> config = normalize_config({"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"})
    >>> stores = build_corrections(config["estimator_config"]["correction"], "fixed")
    >>> all(stores["prefill"].observe((512.0,), observed_ms=12.0, native_ms=10.0) for _ in range(5))
    True
    >>> stores["prefill"].table.factor((600.0,))
    1.2
    """
    mode = correction.get("mode", "auto")
    mode = automatic_mode if mode == "auto" else mode
    bins = tuple(correction["sampling"]["bins_per_axis"])
    limits = (correction["sampling"]["max_observations"], correction["min_observations"])
    bounds = correction["factor_bounds"]
    stores = {}
    for kind, axes in KINDS.items():
        # A single axis gets as many cells as the grid of two.
        kind_bins = bins if len(axes) == 2 else (bins[0] * bins[1],)
        maxima = tuple(float(correction[axis]) for axis in axes)
        fixed = FixedStore(FIXED_STORE, maxima, kind_bins, *limits) if mode in ("fixed", "hybrid") else None
        dynamic = DynamicLocalStore(DYNAMIC_STORE, kind_bins, *limits) if mode != "fixed" else None
        stores[kind] = CorrectionStore(fixed, dynamic, len(axes), bounds["min"], bounds["max"])
    return stores
