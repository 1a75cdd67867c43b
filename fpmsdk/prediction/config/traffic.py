"""Which requests arrive, and when.

Source: predict-recommend.md section 3.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.prediction.config.numbers import Fraction, NotNegative, NotNegativeReal, Positive, PositiveReal, Text


class SyntheticSource(StrictDocument):
    """Requests of one length."""

    type: Literal["synthetic"]
    input_tokens: Positive = 1024
    output_tokens: Positive = 128
    cached_prefix_tokens: NotNegative = 0

    @model_validator(mode="after")
    def _prefix_fits(self) -> Self:
        if self.cached_prefix_tokens > self.input_tokens:
            raise ValueError(f"cached_prefix_tokens must be at most input_tokens {self.input_tokens}")
        return self


class Session(StrictDocument):
    """Turns of one user, and how many users begin alike."""

    turns: Annotated[int, Field(ge=2)] = 4
    shared_prefix_ratio: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    prefix_groups: NotNegative = 0
    inter_turn_delay_ms: NotNegativeReal = 0.0

    @model_validator(mode="after")
    def _groups_share(self) -> Self:
        if self.shared_prefix_ratio > 0 and not self.prefix_groups:
            raise ValueError("shared_prefix_ratio needs prefix_groups of 1 or more")
        return self


class SessionSource(StrictDocument):
    """Sessions whose prompts repeat all that was said before."""

    type: Literal["synthetic-session"]
    new_input_tokens_per_turn: Positive = 1024
    output_tokens_per_turn: Positive = 128
    session: Session = Session.model_construct()


class TraceSource(StrictDocument):
    """Recorded requests in one file, those of `dynamo` in several.

    `nested_timestamp_basis` belongs to Weka plays, `block_size` to Mooncake rows and, as a check, to Dynamo events.
    """

    type: Literal["trace"]
    paths: Annotated[list[Text], Field(min_length=1)]
    format: Literal[
        "mooncake", "mooncake-delta", "dynamo", "aiperf", "azure", "burstgpt", "guidellm", "recorded", "parquet", "weka"
    ] = "mooncake"
    block_size: Positive | None = None
    nested_timestamp_basis: Literal["absolute", "relative"] | None = None

    @model_validator(mode="after")
    def _options_of_the_format(self) -> Self:
        if self.format != "dynamo" and len(self.paths) > 1:
            raise ValueError(
                f"paths: format {self.format} has one file, found {len(self.paths)}; only dynamo has several"
            )
        if self.format not in ("mooncake", "mooncake-delta", "dynamo") and self.block_size is not None:
            raise ValueError(f"block_size belongs to mooncake rows; format {self.format} has none, or states its own")
        if self.format != "weka" and self.nested_timestamp_basis is not None:
            raise ValueError("nested_timestamp_basis belongs to format weka")
        return self


class ConcurrencyLoad(StrictDocument):
    """A closed loop with so many requests in flight."""

    type: Literal["concurrency"]
    concurrency: Positive = 10


class _Rate(StrictDocument):
    requests_per_second: PositiveReal | None = None
    sessions_per_second: PositiveReal | None = None

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if (self.requests_per_second is None) == (self.sessions_per_second is None):
            raise ValueError("give exactly one of requests_per_second and sessions_per_second")
        return self

    @property
    def per_second(self) -> float:
        """Arrivals of requests or sessions in a second."""
        rate = self.requests_per_second if self.sessions_per_second is None else self.sessions_per_second
        assert rate is not None
        return rate


class PoissonLoad(_Rate):
    """Arrivals with exponential gaps, the first at 0."""

    type: Literal["poisson"]
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 42


class ConstantRateLoad(_Rate):
    """Arrivals at equal gaps."""

    type: Literal["constant_rate"]


class TimestampsLoad(StrictDocument):
    """Arrivals of the trace; `agentic_lanes` plays at once where the source holds plays."""

    type: Literal["trace_timestamps"]
    speedup: PositiveReal = 1.0
    agentic_lanes: Positive | None = None


class KvCapacityLoad(StrictDocument):
    """A closed loop with so many requests in flight as fill this share of the cache."""

    type: Literal["kv_capacity_fraction"]
    fraction: Fraction


class Stop(StrictDocument):
    """When traffic ends: a count of requests or sessions, so many for each unit of load, or a simulated time."""

    requests: Positive | None = None
    requests_per_load_unit: PositiveReal | None = None
    sessions: Positive | None = None
    sessions_per_load_unit: PositiveReal | None = None
    max_virtual_time_seconds: PositiveReal | None = None

    def counts(self) -> dict[str, float]:
        """The conditions that count, by name."""
        names = ("requests", "requests_per_load_unit", "sessions", "sessions_per_load_unit")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


Source = Annotated[SyntheticSource | SessionSource | TraceSource, Field(discriminator="type")]
Load = Annotated[
    ConcurrencyLoad | PoissonLoad | ConstantRateLoad | TimestampsLoad | KvCapacityLoad, Field(discriminator="type")
]


class Traffic(StrictDocument):
    """Which requests arrive, and when; left out, 100 requests of 1024 and 128 tokens, ten in flight."""

    source: Source = SyntheticSource.model_construct(type="synthetic")
    load: Load = ConcurrencyLoad.model_construct(type="concurrency")
    stop: Stop | None = None

    @model_validator(mode="before")
    @classmethod
    def _assumed(cls, given: object) -> object:
        return {"stop": {"requests": 100}} if given == {} else given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.source, TraceSource):
            self._check_trace(self.source)
        else:
            self._check_synthetic(sessions=isinstance(self.source, SessionSource))
        return self

    def _check_synthetic(self, *, sessions: bool) -> None:
        unit = "sessions" if sessions else "requests"
        counts = {} if self.stop is None else self.stop.counts()
        if not counts:
            raise ValueError(f"synthetic traffic needs an end; add stop: {{{unit}: 100}}")
        if len(counts) > 1:
            raise ValueError(f"stop: give exactly one count, found {' and '.join(counts)}")
        if not next(iter(counts)).startswith(unit):
            raise ValueError(f"stop: this source counts {unit}; use {unit} or {unit}_per_load_unit")
        if isinstance(self.load, TimestampsLoad):
            raise ValueError(
                "load: synthetic traffic has no timestamps; use type concurrency, poisson, constant_rate or "
                "kv_capacity_fraction"
            )
        if isinstance(self.load, _Rate) and getattr(self.load, f"{unit}_per_second") is None:
            raise ValueError(f"load: this source counts {unit}; use {unit}_per_second")
        if isinstance(self.load, KvCapacityLoad) and sessions:
            raise ValueError("load: kv_capacity_fraction counts requests; use a synthetic source, or type concurrency")

    def _check_trace(self, source: TraceSource) -> None:
        if self.stop is not None and self.stop.counts():
            raise ValueError("stop: a trace ends by itself; only max_virtual_time_seconds may cut it")
        plays = source.format == "weka"
        if plays and self.stop is not None:
            raise ValueError("stop: plays run to their end; leave stop out")
        if isinstance(self.load, ConcurrencyLoad):
            if plays:
                raise ValueError("load: format weka needs type trace_timestamps")
        elif not isinstance(self.load, TimestampsLoad):
            raise ValueError("load: a trace needs type trace_timestamps or concurrency")
        lanes = isinstance(self.load, TimestampsLoad) and self.load.agentic_lanes is not None
        if lanes != plays:
            raise ValueError("Weka plays need load type trace_timestamps with agentic_lanes, other traces take none")
