"""The configuration file of a prediction, as a strict document.

Only what one aggregated worker with estimator timing needs; what a field means for the replay is in `compile.py`.
Source: predict-recommend.md section 2.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.errors import OnboardError
from fpmsdk.files import UnfitFileError, read_regular

MAX_CONFIG_BYTES = 16 * 2**20

Positive = Annotated[int, Field(ge=1)]
Milliseconds = Annotated[float, Field(gt=0, strict=False)]


class SyntheticSource(StrictDocument):
    """Requests of one length."""

    type: Literal["synthetic"]
    input_tokens: Positive = 1024
    output_tokens: Positive = 128
    cached_prefix_tokens: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _prefix_fits(self) -> Self:
        if self.cached_prefix_tokens > self.input_tokens:
            raise ValueError(f"cached_prefix_tokens must be at most input_tokens {self.input_tokens}")
        return self


class TraceSource(StrictDocument):
    """One file of recorded requests. `nested_timestamp_basis` belongs to Weka plays, `block_size` to Mooncake rows."""

    type: Literal["trace"]
    paths: Annotated[list[str], Field(min_length=1, max_length=1)]
    format: Literal["mooncake", "weka"] = "mooncake"
    block_size: Positive | None = None
    nested_timestamp_basis: Literal["absolute", "relative"] | None = None

    @model_validator(mode="after")
    def _options_of_the_format(self) -> Self:
        if self.format == "weka" and self.block_size is not None:
            raise ValueError("block_size belongs to format mooncake; a Weka play states its own")
        if self.format != "weka" and self.nested_timestamp_basis is not None:
            raise ValueError("nested_timestamp_basis belongs to format weka")
        return self


class ConcurrencyLoad(StrictDocument):
    """A closed loop with so many requests in flight."""

    type: Literal["concurrency"]
    concurrency: Positive = 10


class TimestampsLoad(StrictDocument):
    """Arrivals of the trace; `agentic_lanes` plays at once where the source holds plays."""

    type: Literal["trace_timestamps"]
    speedup: Annotated[float, Field(gt=0, strict=False)] = 1.0
    agentic_lanes: Positive | None = None


class Stop(StrictDocument):
    """How many requests a synthetic source makes: a count, or so many for each one in flight."""

    requests: Positive | None = None
    requests_per_load_unit: Annotated[float, Field(gt=0, strict=False)] | None = None

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if (self.requests is None) == (self.requests_per_load_unit is None):
            raise ValueError("give exactly one of requests and requests_per_load_unit")
        return self


class Traffic(StrictDocument):
    """Which requests arrive, and when."""

    source: Annotated[SyntheticSource | TraceSource, Field(discriminator="type")]
    load: Annotated[ConcurrencyLoad | TimestampsLoad, Field(discriminator="type")]
    stop: Stop | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.source, SyntheticSource):
            if self.stop is None:
                raise ValueError("synthetic traffic needs an end; add stop: {requests: 100}")
            if not isinstance(self.load, ConcurrencyLoad):
                raise ValueError("synthetic traffic has no timestamps; use load type concurrency")
            return self
        if self.stop is not None:
            raise ValueError("a trace ends by itself; leave stop out")
        lanes = isinstance(self.load, TimestampsLoad) and self.load.agentic_lanes is not None
        if lanes != (self.source.format == "weka"):
            raise ValueError("Weka plays need load type trace_timestamps with agentic_lanes, other traces take none")
        return self


class Parallelism(StrictDocument):
    """Sizes of one worker, and how many workers serve."""

    replicas: Positive = 1
    tensor: Positive = 1
    pipeline: Literal[1] = 1
    attention_data: Positive = 1
    moe_tensor: Positive = 1
    moe_expert: Positive = 1


class Scheduler(StrictDocument):
    """Limits of one attention-DP rank; what is left out is the limit of the profile."""

    max_batched_tokens: Positive | None = None
    max_sequences: Positive | None = None


class Capacity(StrictDocument):
    """Cache of one rank: what the memory of the profile leaves, or so many blocks."""

    type: Literal["default", "fixed"] = "default"
    memory_fraction: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    cuda_graph_reserved_bytes: Annotated[int, Field(ge=0, le=2**53)] = 0
    blocks: Positive | None = None

    @model_validator(mode="after")
    def _fields_of_the_type(self) -> Self:
        if (self.type == "fixed") != (self.blocks is not None):
            raise ValueError("type fixed needs blocks, type default has none")
        if self.type == "fixed" and (self.memory_fraction is not None or self.cuda_graph_reserved_bytes):
            raise ValueError("type fixed takes no memory_fraction and no cuda_graph_reserved_bytes")
        return self


class KvCache(StrictDocument):
    """Cache of one rank; `bytes_per_token` is read by transfers alone, which an aggregated worker has none of."""

    block_size: Annotated[int, Field(ge=2)] = 64
    prefix_caching: bool = True
    bytes_per_token: Positive | Literal["auto"] = "auto"
    capacity: Capacity = Capacity()


class Policy(StrictDocument):
    """How passes are priced; a field that a worker's timing leaves out is that of the engine."""

    estimation_mode: Literal["auto", "op_level", "fpm_interpolation"] | None = None
    fallback_policy: Literal["deny", "allow"] | None = None
    estimator_config: dict[str, Any] | None = None
    systems_paths: list[str] | Literal["default"] | None = None


class Timing(Policy):
    """Passes priced by the estimator."""

    type: Literal["default"] = "default"


class Worker(StrictDocument):
    """One kind of worker."""

    parallelism: Parallelism = Parallelism()
    scheduler: Scheduler = Scheduler()
    kv_cache: KvCache = KvCache()
    timing: Timing = Timing()


class Workers(StrictDocument):
    """The workers of aggregated serving."""

    aggregated: Worker = Worker()


class Engine(Policy):
    """What is served, where, and how its passes are priced."""

    mode: Literal["aggregated"] = "aggregated"
    model: Annotated[str, Field(min_length=1)]
    hardware: Annotated[str, Field(min_length=1)]
    backend: Literal["vllm"] = "vllm"
    backend_version: Annotated[str, Field(min_length=1)] | None = None
    context_length: Positive | Literal["max"] = "max"
    fpm_profile: dict[str, Any] | None = None
    speculation: None = None
    workers: Workers = Workers()


class SlaBounds(StrictDocument):
    """Bounds in ms for goodput; `e2e_ms` excludes the other two."""

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class Evaluation(StrictDocument):
    """What the result is held against."""

    sla: SlaBounds | None = None


class Execution(StrictDocument):
    """Rules of the simulated scheduler and of mixed passes."""

    mixed_pass_pricing: Literal["composed", "separate"] = "composed"
    scheduler_rules: Literal["vllm", "simulator"] = "vllm"


class PredictConfig(StrictDocument):
    """A whole configuration of one prediction.

    Source: predict-recommend.md section 2.

    >>> config = PredictConfig.model_validate({
    ...     "traffic": {"source": {"type": "synthetic", "input_tokens": 8, "output_tokens": 2},
    ...                 "load": {"type": "concurrency", "concurrency": 1}, "stop": {"requests": 4}},
    ...     "engine": {"model": "org/m", "hardware": "h200_sxm"}})
    >>> config.engine.workers.aggregated.kv_cache.block_size, config.execution.scheduler_rules
    (64, 'vllm')
    """

    traffic: Traffic
    engine: Engine
    evaluation: Evaluation = Evaluation()
    execution: Execution = Execution()


def read_config(path: str | os.PathLike[str]) -> PredictConfig:
    r"""The configuration that a YAML file holds.

    Parameters
    ----------
    path: a YAML mapping of at most 16 MiB.

    Raises
    ------
    OnboardError: no such file content; one line for every faulty field.
    OSError: it cannot be read.

    Source: predict-recommend.md section 2.1.

    >>> import tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "predict.yaml"
    >>> traffic = "{source: {type: synthetic}, load: {type: concurrency}, stop: {requests: 4}}"
    >>> _ = file.write_text(f"traffic: {traffic}\nengine: {{model: org/m, hardware: h200_sxm}}")
    >>> read_config(file).traffic.source.input_tokens
    1024
    """
    where = os.fspath(path)
    try:
        content = yaml.safe_load(read_regular(path, limit_bytes=MAX_CONFIG_BYTES))
    except (UnfitFileError, UnicodeDecodeError, yaml.YAMLError) as fault:
        raise OnboardError(f"{where}: not a YAML configuration: {fault}", where) from None
    if not isinstance(content, dict):
        raise OnboardError(f"{where}: a configuration is a YAML mapping of sections", where)
    return checked(PredictConfig, content, where)
