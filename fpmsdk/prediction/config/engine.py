"""What is served, where, and by which workers.

Source: predict-recommend.md sections 2.3 and 2.6.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.prediction.config.numbers import NotNegativeReal, Positive, PositiveReal, Text
from fpmsdk.prediction.config.timing import Policy
from fpmsdk.prediction.config.worker import Worker

ROLES = {"aggregated": ("aggregated",), "disaggregated": ("prefill", "decode")}
# Fields that describe the kernels of the estimated engine; only an estimator reads them.
MODEL_CONTROLS = (
    "enable_eplb",
    "wideep_num_slots",
    "moe_backend",
    "moe_kernel_source",
    "attention_backend",
    "gemm_quant_mode",
    "moe_quant_mode",
    "kvcache_quant_mode",
    "fmha_quant_mode",
    "comm_quant_mode",
)


class Workers(StrictDocument):
    """The workers of the mode: aggregated, or prefill and decode."""

    aggregated: Worker | None = None
    prefill: Worker | None = None
    decode: Worker | None = None


class KvTransfer(StrictDocument):
    """How a prompt's cache goes from a prefill to a decode worker; without a bandwidth it takes no time."""

    bytes_per_token: Positive | Literal["auto"] = "auto"
    bandwidth_gb_per_second: PositiveReal | None = None
    timing_mode: Literal["destination_missing", "full_prompt"] = "destination_missing"


class Speculation(StrictDocument):
    """Drafts by n-grams: how many tokens, and how often each is accepted."""

    kind: Literal["ngram"]
    num_speculative_tokens: Annotated[int, Field(ge=1, le=5)]
    acceptance_rates: list[Annotated[float, Field(ge=0, le=1, strict=False)]]
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 42

    @model_validator(mode="after")
    def _rate_of_each(self) -> Self:
        if len(self.acceptance_rates) != self.num_speculative_tokens:
            raise ValueError(
                f"acceptance_rates needs one rate for each of {self.num_speculative_tokens} num_speculative_tokens, "
                f"found {len(self.acceptance_rates)}"
            )
        return self


class Tokenization(StrictDocument):
    """Time that a prompt spends before it is admitted."""

    workers: Positive = 1
    base_ms: NotNegativeReal = 0.0
    per_input_token_us: NotNegativeReal = 0.0


class Engine(Policy):
    """What is served, where, and how its passes are priced."""

    mode: Literal["aggregated", "disaggregated"] = "aggregated"
    model: Text
    hardware: Text
    backend: Literal["vllm"] = "vllm"
    backend_version: Text | None = None
    context_length: Positive | Literal["max"] = "max"
    fpm_profile: dict[str, Any] | None = None
    nextn: Annotated[int, Field(ge=0, le=5)] = 0
    nextn_accepted: NotNegativeReal | None = None
    enable_chunked_prefill: bool | None = None
    enable_eplb: bool | None = None
    wideep_num_slots: Positive | None = None
    moe_backend: Text | None = None
    moe_kernel_source: Text | None = None
    attention_backend: Text | None = None
    gemm_quant_mode: Text | None = None
    moe_quant_mode: Text | None = None
    kvcache_quant_mode: Text | None = None
    fmha_quant_mode: Text | None = None
    comm_quant_mode: Text | None = None
    decoder_replay: bool = False
    speculation: Speculation | None = None
    workers: Workers = Workers.model_construct()
    kv_transfer: KvTransfer | None = None
    tokenization: Tokenization | None = None

    @model_validator(mode="after")
    def _accepted_drafts(self) -> Self:
        if (self.nextn > 0) != (self.nextn_accepted is not None):
            raise ValueError("nextn and nextn_accepted need each other")
        if self.nextn_accepted is not None and self.nextn_accepted > self.nextn:
            raise ValueError(f"nextn_accepted must be at most nextn {self.nextn}, found {self.nextn_accepted}")
        if self.nextn and self.speculation is not None:
            raise ValueError("nextn and speculation exclude each other; leave one out")
        return self
