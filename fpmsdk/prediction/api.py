"""`fpmsdk.predict`: one prediction in this process, without files.

Source: predict-recommend.md section 14.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.deployment import ModelCache
from fpmsdk.prediction.documents import SEARCH_SECTIONS, read_document
from fpmsdk.prediction.preflight import checked_config
from fpmsdk.prediction.simulate import Simulation, TraceCache, simulate


def predict(
    config: PredictConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    models: ModelCache | None = None,
    traces: TraceCache | None = None,
) -> Simulation:
    """What a deployment makes of its workload; nothing is written.

    Parameters
    ----------
    config: path of a YAML file, its content as a mapping, or the model of either.
    overrides: `PATH=YAML` each, applied in order; not to a model.
    models, traces: what several predictions share, so that a table or a trace is read once.

    Returns
    -------
    `status` (completed, no_completed_requests, uncovered or failed), the figures of `prediction.json` in `report`,
    `records` and `to_pandas()` with a row for every request, `coverage` and `error`.

    Raises
    ------
    OnboardError: the configuration is faulty, or names what is not there.
    ConfigError, TraceError, TimingError, PerfDataNotAvailableError: the deployment or the workload cannot be built.

    Source: predict-recommend.md sections 2, 4 and 14.

    >>> import tempfile
    >>> import fpmsdk
    >>> from fpmsdk.sample.quickstart import write_quickstart
    >>> result = fpmsdk.predict(write_quickstart(tempfile.mkdtemp()), overrides=["traffic.stop.requests=8"])
    >>> result.status, result.report["completed_requests"], round(result.report["mean_ttft_ms"], 2)
    ('completed', 8, 47.14)
    """
    if not isinstance(config, PredictConfig):
        config = checked_config(read_document(config, overrides, forbidden=SEARCH_SECTIONS))
    return simulate(config, models=models, traces=traces)
