"""One kind of worker: its sizes, the limits of its scheduler, its cache, and what prices its passes.

Source: predict-recommend.md section 2.4.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.prediction.config.numbers import Fraction, NotNegativeReal, Positive, Text
from fpmsdk.prediction.config.timing import DefaultTiming, Timing

# Defaults of these models are constructed, not validated: validating them would build a validator of every part beside
# that of the whole configuration, which is half of the time that reading a file takes.
LARGEST = 2**64 - 1


class Parallelism(StrictDocument):
    """Sizes of one worker, and how many workers serve."""

    replicas: Positive = 1
    tensor: Positive = 1
    pipeline: Positive = 1
    attention_data: Positive = 1
    moe_tensor: Positive = 1
    moe_expert: Positive = 1
    prefill_context: Positive | None = None
    decode_context: Positive | None = None

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.tensor * self.pipeline * self.attention_data * (self.prefill_context or 1)


class Scheduler(StrictDocument):
    """Limits of one attention-DP rank; what is left out is the limit of the profile, or vLLM's usual one."""

    max_batched_tokens: Positive | None = None
    max_sequences: Positive | None = None
    prefill_schedule_interval: Positive = 1


class Capacity(StrictDocument):
    """Cache of one rank: a share of the memory, so many blocks, or so many bytes."""

    type: Literal["default", "fixed"] = "default"
    memory_fraction: Fraction | None = None
    cuda_graph_reserved_bytes: Annotated[int, Field(ge=0, le=2**53)] = 0
    blocks: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    bytes: Annotated[int, Field(ge=1, le=LARGEST)] | None = None

    @model_validator(mode="after")
    def _fields_of_the_type(self) -> Self:
        sizes = (self.blocks is not None) + (self.bytes is not None)
        if sizes != (self.type == "fixed"):
            raise ValueError("type fixed needs one of blocks and bytes, type default has none")
        if self.type == "fixed" and (self.memory_fraction is not None or self.cuda_graph_reserved_bytes):
            raise ValueError("type fixed takes no memory_fraction and no cuda_graph_reserved_bytes")
        return self


class KvCache(StrictDocument):
    """Cache of one rank; `bytes_per_token` is read by transfers and by a capacity in bytes."""

    block_size: Annotated[int, Field(ge=2)] = 64
    prefix_caching: bool = True
    bytes_per_token: Positive | Literal["auto"] = "auto"
    capacity: Capacity = Capacity.model_construct()

    @model_validator(mode="after")
    def _bytes_hold_a_block(self) -> Self:
        size = self.capacity.bytes
        if size is None:
            return self
        if self.bytes_per_token == "auto" or "block_size" not in self.model_fields_set:
            raise ValueError("capacity in bytes needs block_size and bytes_per_token as numbers")
        block_bytes = self.block_size * self.bytes_per_token
        if block_bytes > LARGEST or size < block_bytes:
            raise ValueError(f"capacity.bytes must hold at least one block of {block_bytes} bytes, found {size}")
        return self

    @property
    def num_blocks(self) -> int | None:
        """Blocks of a fixed capacity."""
        if self.capacity.bytes is None or self.bytes_per_token == "auto":
            return self.capacity.blocks
        return self.capacity.bytes // (self.block_size * self.bytes_per_token)


class Worker(StrictDocument):
    """One kind of worker."""

    hardware: Text | None = None
    context_length: Positive | None = None
    startup_seconds: NotNegativeReal = 0.0
    parallelism: Parallelism = Parallelism.model_construct()
    scheduler: Scheduler = Scheduler.model_construct()
    kv_cache: KvCache = KvCache.model_construct()
    timing: Timing = DefaultTiming.model_construct()
