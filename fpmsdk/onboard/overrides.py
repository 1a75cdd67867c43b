"""What a user states of a deployment's resources, over what its configuration or a probe tells.

Source: onboarding.md section 3.3 (override fields), section 6.3 (layout claims).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fpmsdk.config.modes import COMM_MODES, GEMM_MODES, KV_CACHE_MODES, MOE_MODES, RECORDED_FMHA_MODES
from fpmsdk.config.profile import MAX_BYTES, CacheGroup
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.errors import OnboardError

Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Text = Annotated[str, Field(min_length=1, pattern=r"\S")]
GroupName = Literal["full_attention", "sliding_attention", "full_convolution", "sliding_convolution"]

NON_KV_FIELDS = ("weights_bytes", "activations_bytes", "runtime_overhead_bytes", "comm_overhead_bytes")
_MODES = {
    "gemm_quant_mode": GEMM_MODES,
    "moe_quant_mode": MOE_MODES,
    "fmha_quant_mode": RECORDED_FMHA_MODES,
    "comm_quant_mode": COMM_MODES,
    "kv_cache_dtype": KV_CACHE_MODES,
}


class ResourceOverrides(StrictDocument):
    """Stated resources; a field that is not stated is absent, null is no statement.

    Bytes and limits are those of one rank. Use `checked_overrides`.
    Source: onboarding.md section 3.3.
    """

    architecture: Text | None = None
    context_length: Count | None = None
    num_experts: Annotated[int, Field(ge=0)] | None = None
    gemm_quant_mode: Text | None = None
    moe_quant_mode: Text | None = None
    fmha_quant_mode: Text | None = None
    comm_quant_mode: Text | None = None
    kv_cache_dtype: Text | None = None
    moe_backend: Text | None = None
    attention_backend: Text | None = None
    weights_bytes: Bytes | None = None
    activations_bytes: Bytes | None = None
    runtime_overhead_bytes: Bytes | None = None
    comm_overhead_bytes: Bytes | None = None
    kv_bytes_per_token: Annotated[int, Field(ge=1, le=MAX_BYTES)] | None = None
    cache_layout: Literal["linear", "grouped"] | None = None
    cache_block_sizes: Annotated[dict[GroupName, Count], Field(min_length=1)] | None = None
    cache_groups: Annotated[list[CacheGroup], Field(min_length=1)] | None = None
    max_num_tokens: Count | None = None
    max_batch_size: Count | None = None
    provenance: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _stated(cls, value: Any) -> Any:
        nothing = [name for name, item in value.items() if item is None] if isinstance(value, dict) else []
        if nothing:
            raise ValueError(f"{', '.join(nothing)}: null states nothing; leave it out")
        return value

    @field_validator(*_MODES)
    @classmethod
    def _known_mode(cls, name: str, info: Any) -> str:
        accepted = _MODES[info.field_name]
        if name not in accepted:
            raise ValueError(f"must be one of {', '.join(accepted)}, found {name!r}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> ResourceOverrides:
        groups = self.cache_groups
        if groups is not None:
            if len({group.name for group in groups}) < len(groups):
                raise ValueError("cache_groups: names must be unique")
            if self.kv_bytes_per_token is not None or self.cache_layout == "linear":
                raise ValueError("cache_groups contradict kv_bytes_per_token and cache_layout linear; state one layout")
        if self.kv_bytes_per_token is not None and self.cache_layout == "grouped":
            raise ValueError("kv_bytes_per_token contradicts cache_layout grouped; state one layout")
        total = sum(getattr(self, name) or 0 for name in NON_KV_FIELDS)
        if total > MAX_BYTES:
            raise ValueError(f"{', '.join(NON_KV_FIELDS)}: together at most 2**53 bytes, found {total}")
        return self


def checked_overrides(value: Any, where: str = "resource_overrides") -> dict[str, Any]:
    """Stated resources as plain values, with groups written out in full; empty for None.

    Parameters
    ----------
    value: a flat mapping, or None.
    where: the file or input it came from, for the message.

    Raises
    ------
    OnboardError: a field is unknown, malformed or contradicts another; one line a field.

    Example
    -------
    >>> checked_overrides({"kv_cache_dtype": "bfloat16", "max_batch_size": 4})
    {'kv_cache_dtype': 'bfloat16', 'max_batch_size': 4}
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise OnboardError(f"{where}: expected a flat mapping, found {value!r}", where)
    stated = checked(ResourceOverrides, value, where)
    document = stated.model_dump(mode="json")
    return {name: document[name] for name in value}
