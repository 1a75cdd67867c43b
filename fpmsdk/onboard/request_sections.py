"""The sections of an onboarding request: who is onboarded, what is tried, in which shape, within which limits.

What holds between sections is in `request.py`. Source: onboarding.md section 2.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.onboard.choices import GraphMode, GraphPolicy, ModelKind, Objective

# A cap on the context that is proposed, never an assumed limit of a model.
REFERENCE_CONTEXT_TOKENS = 256_000
# Limits of a scheduler for which neither the request nor a profile names others.
DEFAULT_MAX_NUM_TOKENS = 8192
DEFAULT_MAX_BATCH_SIZE = 256
DEFAULT_PREFILL_CAPTURE = 2048
DEFAULT_MEMORY_FRACTION = 0.9

# Graph settings of one serving role; older requests have none and are written without them.
ROLE_GRAPH_FIELDS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
TOPOLOGY_FIELDS = ("tensor_parallel", "attention_data_parallel", "moe_tensor_parallel", "moe_expert_parallel")

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]

_MUTABLE = frozenset({"main", "master", "latest", "head"})
_SYSTEM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class RequestIdentity(StrictDocument):
    """The model, the runtime and the hardware, every one of them pinned.

    `framework_version` labels the data and is None until an image tells its version; `runtime_framework_version` is
    the package version seen in that image. `interconnect` is free text such as `nvswitch`, `pcie` or `none`.
    Source: onboarding.md section 2.
    """

    model: str
    model_revision: str
    model_kind: ModelKind
    framework: Literal["vllm"] = "vllm"
    framework_version: str | None = None
    runtime_framework_version: str | None = None
    gpu: str
    interconnect: str
    sm: Count | None = None
    tokenizer_revision: str | None = None
    chat_template_revision: str | None = None
    aisimulate_revision: str | None = None

    @field_validator(
        "model",
        "model_revision",
        "framework_version",
        "runtime_framework_version",
        "gpu",
        "interconnect",
        "tokenizer_revision",
        "chat_template_revision",
        "aisimulate_revision",
    )
    @classmethod
    def _some_text(cls, value: str | None) -> str | None:
        if value is None:
            return None
        value = value.strip()
        if not value or "\0" in value:
            raise ValueError(f"must be text other than blanks, without NUL, found {value!r}")
        return value

    @field_validator(
        "model_revision", "framework_version", "tokenizer_revision", "chat_template_revision", "aisimulate_revision"
    )
    @classmethod
    def _pinned(cls, value: str | None) -> str | None:
        if value is not None and value.lower() in _MUTABLE:
            raise ValueError(f"must name one revision or version, not a moving one; pin it, found {value!r}")
        return value

    @field_validator("framework_version", "runtime_framework_version")
    @classmethod
    def _path_safe(cls, value: str | None) -> str | None:
        if value is not None and (value in (".", "..") or re.search(r"[\s/\\]", value)):
            raise ValueError(
                "must be a literal label that can name a directory: no blanks, slashes or backslashes, not '.' or "
                f"'..', found {value!r}"
            )
        return value

    @field_validator("gpu")
    @classmethod
    def _system(cls, value: str) -> str:
        if not _SYSTEM_NAME.fullmatch(value):
            raise ValueError(f"must be the name of a described system such as h200_sxm, not a path, found {value!r}")
        return value

    @model_serializer(mode="wrap")
    def _write(self, write: Any) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if self.runtime_framework_version is None:
            document.pop("runtime_framework_version", None)  # older requests keep their bytes
        return document


class LatencyTargets(StrictDocument):
    """Targets of the synthetic example, in milliseconds. Source: onboarding.md section 2."""

    ttft_ms: Positive = 1000.0
    tpot_ms: Positive = 100.0


class ExampleWorkload(StrictDocument):
    """The synthetic example that generated configurations run; never part of what is collected.

    Source: onboarding.md section 2.
    """

    input_tokens: Count = 1024
    output_tokens: Count = 128
    concurrency: Count = 1
    request_count: Count = 4
    slo: LatencyTargets = Field(default_factory=LatencyTargets)

    @model_validator(mode="after")
    def _enough_requests(self) -> ExampleWorkload:
        if self.request_count < self.concurrency:
            raise ValueError(
                f"request_count {self.request_count} must be at least concurrency {self.concurrency}; raise it"
            )
        return self


class SearchSection(StrictDocument):
    """Topology and context limit of one worker, with what a recommendation looks for.

    Unset sizes are 1, except `moe_tensor_parallel` of a MoE model, which is then `tensor_parallel`.
    `context_length` is the runtime's limit of one request, in tokens; it has been in this section always.
    Source: onboarding.md section 2.
    """

    tensor_parallel: Count = 1
    attention_data_parallel: Count | None = None
    moe_tensor_parallel: Count | None = None
    moe_expert_parallel: Count | None = None
    context_length: Count = REFERENCE_CONTEXT_TOKENS
    objective: Objective = "throughput"
    seed: Annotated[int, Field(ge=0)] = 42


class CollectionSection(StrictDocument):
    """Limits and graph policy of the engine that is measured; tokens and sequences are those of one rank.

    Source: onboarding.md section 2.
    """

    max_num_tokens: Annotated[int, Field(ge=2)] | None = None
    max_batch_size: Count | None = None
    # Requests from before the policy existed mean `explicit` and are written without it.
    prefill_cudagraph_policy: GraphPolicy = "explicit"
    max_prefill_cudagraph_size: Count | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    cudagraph_mode: GraphMode | None = None
    cudagraph_capture_sizes: list[Count] | None = None
    max_cudagraph_capture_size: Count | None = None

    @model_serializer(mode="wrap")
    def _write(self, write: Any) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if "prefill_cudagraph_policy" not in self.model_fields_set:
            document.pop("prefill_cudagraph_policy", None)
        for name in ROLE_GRAPH_FIELDS:
            if document.get(name, 0) is None:
                del document[name]
        return document

    @model_validator(mode="after")
    def _graphs_agree(self) -> CollectionSection:
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        explicit = self.prefill_cudagraph_policy == "explicit"
        if not explicit and self.max_prefill_cudagraph_size is not None:
            raise ValueError(
                "prefill_cudagraph_policy runtime takes no max_prefill_cudagraph_size, found "
                f"{self.max_prefill_cudagraph_size}; leave it out or use the policy explicit"
            )
        if sizes is not None and (not sizes or sizes != sorted(set(sizes))):
            raise ValueError(f"cudagraph_capture_sizes must increase strictly and not be empty, found {sizes}")
        if sizes and largest is not None and sizes[-1] != largest:
            raise ValueError(
                f"max_cudagraph_capture_size {largest} must be the largest of cudagraph_capture_sizes, {sizes[-1]}"
            )
        captures = sizes is not None or largest is not None
        if self.cudagraph_mode == "NONE" and (captures or explicit):
            raise ValueError(
                "cudagraph_mode NONE takes no capture settings; leave them out, with prefill_cudagraph_policy runtime"
            )
        if captures and explicit:
            raise ValueError(
                "cudagraph_capture_sizes and max_cudagraph_capture_size need prefill_cudagraph_policy runtime"
            )
        return self

    @property
    def has_role_graphs(self) -> bool:
        """Whether graph settings of a serving role are stated."""
        return any(getattr(self, name) is not None for name in ROLE_GRAPH_FIELDS)

    @property
    def memory_fraction(self) -> float:
        """The fraction of a GPU's memory that the engine may use."""
        return DEFAULT_MEMORY_FRACTION if self.gpu_memory_utilization is None else self.gpu_memory_utilization
