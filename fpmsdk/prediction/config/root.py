"""A whole configuration of one prediction, and the file that holds it.

Source: predict-recommend.md section 2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from pydantic import model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.prediction.config.engine import ROLES, Engine
from fpmsdk.prediction.config.execution import Evaluation, Execution
from fpmsdk.prediction.config.rules import check_rules
from fpmsdk.prediction.config.traffic import Stop, Traffic
from fpmsdk.prediction.config.worker import Worker
from fpmsdk.prediction.documents import SEARCH_SECTIONS, read_document


class PredictConfig(StrictDocument):
    """A whole configuration of one prediction.

    Source: predict-recommend.md section 2.

    >>> config = PredictConfig.model_validate({
    ...     "traffic": {"source": {"type": "synthetic", "input_tokens": 8, "output_tokens": 2},
    ...                 "load": {"type": "concurrency", "concurrency": 1}, "stop": {"requests": 4}},
    ...     "engine": {"model": "org/m", "hardware": "h200_sxm"}})
    >>> config.roles["aggregated"].kv_cache.block_size, config.execution.scheduler_rules
    (64, 'vllm')
    """

    traffic: Traffic = Traffic.model_construct(stop=Stop.model_construct(requests=100))
    engine: Engine
    evaluation: Evaluation = Evaluation.model_construct()
    execution: Execution = Execution.model_construct()

    @model_validator(mode="after")
    def _rules(self) -> Self:
        check_rules(self)
        return self

    @cached_property
    def roles(self) -> dict[str, Worker]:
        """The workers of the mode by role: aggregated, or prefill and decode."""
        workers = self.engine.workers
        return {role: getattr(workers, role) or Worker.model_construct() for role in ROLES[self.engine.mode]}


def read_config(source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> PredictConfig:
    r"""The configuration that a YAML file or a mapping holds.

    Parameters
    ----------
    source, overrides: as for `read_document`; no override may touch the sections of a search.

    Raises
    ------
    OnboardError: no such content; one line for every faulty field.
    OSError: the file cannot be read.

    Source: predict-recommend.md section 2.1.

    >>> import tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "predict.yaml"
    >>> traffic = "{source: {type: synthetic}, load: {type: concurrency}, stop: {requests: 4}}"
    >>> _ = file.write_text(f"traffic: {traffic}\nengine: {{model: org/m, hardware: h200_sxm}}")
    >>> read_config(file).traffic.source.input_tokens
    1024
    """
    return read_document(source, overrides, forbidden=SEARCH_SECTIONS).checked(PredictConfig)
