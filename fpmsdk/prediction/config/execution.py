"""What a result is held against, and by which rules and means it is computed.

Source: predict-recommend.md sections 2.6 and 11.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.prediction.config.numbers import Fraction, NotNegativeReal, Positive, PositiveReal


class SlaBounds(StrictDocument):
    """Bounds in ms for goodput; `e2e_ms` excludes the other two."""

    ttft_ms: PositiveReal | None = None
    itl_ms: PositiveReal | None = None
    e2e_ms: PositiveReal | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.e2e_ms is not None and (self.ttft_ms is not None or self.itl_ms is not None):
            raise ValueError("e2e_ms excludes ttft_ms and itl_ms; leave one kind out")
        return self

    @property
    def is_bound(self) -> bool:
        """Whether any bound is set."""
        return not (self.ttft_ms is self.itl_ms is self.e2e_ms is None)


class Evaluation(StrictDocument):
    """What the result is held against."""

    sla: SlaBounds | None = None


class Resources(StrictDocument):
    """Limits of the process that simulates; they have nothing to do with the simulated GPUs."""

    memory_limit_gb: PositiveReal | Literal["auto"] = "auto"
    available_memory_fraction: Fraction = 0.9
    reserve_memory_gb: NotNegativeReal = 1.0
    reserve_memory_fraction: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.0
    cpu_limit: Positive | Literal["auto"] = "auto"
    initialization_timeout_seconds: PositiveReal = 60.0
    shutdown_timeout_seconds: PositiveReal = 5.0


class Execution(StrictDocument):
    """Rules of the simulated scheduler and of mixed passes, and limits of the process."""

    mixed_pass_pricing: Literal["composed", "separate"] = "composed"
    scheduler_rules: Literal["vllm", "simulator"] = "vllm"
    resources: Resources = Resources.model_construct()
