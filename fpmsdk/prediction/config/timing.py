"""How passes are priced: by an estimator, by two constants, or by the built-in curve.

Source: predict-recommend.md sections 2.3 and 2.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.prediction.config.numbers import NotNegativeReal, Text

EstimationMode = Literal["auto", "op_level", "fpm_interpolation", "fpm_regression", "fpm_learned"]
POLICY_FIELDS = (
    "estimation_mode",
    "fallback_policy",
    "estimator_config",
    "database_mode",
    "transfer_policy",
    "systems_paths",
)
QUANTISATION_FIELDS = (
    "gemm_quant_mode",
    "moe_quant_mode",
    "fmha_quant_mode",
    "kvcache_quant_mode",
    "comm_quant_mode",
    "attention_backend",
)
# Older spellings of the estimation mode, each with fallback deny.
_FORWARD_MODELS = {"fpm": "fpm_interpolation", "op_level": "op_level"}


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) and value != "default" else value


class Policy(StrictDocument):
    """What chooses the estimator; a worker's timing replaces fields of the engine as a whole."""

    estimation_mode: EstimationMode | None = None
    fallback_policy: Literal["deny", "allow"] | None = None
    estimator_config: dict[str, Any] | None = None
    database_mode: Annotated[Literal["SILICON", "HYBRID", "EMPIRICAL", "SOL"], BeforeValidator(_upper)] | None = None
    transfer_policy: str | list[str] | None = None
    systems_paths: Annotated[list[Text] | Literal["default"], BeforeValidator(_listed)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, given: object) -> object:
        if not isinstance(given, Mapping) or "systems_path" not in given:
            return given
        fields = dict(given)
        path = fields.pop("systems_path")
        if "systems_paths" in fields:
            raise ValueError("systems_path is the older spelling of systems_paths; give one of them")
        if not isinstance(path, str) or "," in path:
            raise ValueError("systems_path names one directory; use systems_paths for several")
        return fields | {"systems_paths": [path]}

    def given_policy(self) -> dict[str, Any]:
        """The fields that are set, by name."""
        return {name: value for name in POLICY_FIELDS if (value := getattr(self, name)) is not None}


class DefaultTiming(Policy):
    """Passes priced by the estimator."""

    type: Literal["default"] = "default"
    fpm_parquet_path: Text | None = None
    gemm_quant_mode: Text | None = None
    moe_quant_mode: Text | None = None
    fmha_quant_mode: Text | None = None
    kvcache_quant_mode: Text | None = None
    comm_quant_mode: Text | None = None
    attention_backend: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _forward_model(cls, given: object) -> object:
        if not isinstance(given, Mapping) or "forward_model" not in given:
            return given
        fields = dict(given)
        name = fields.pop("forward_model")
        if name not in _FORWARD_MODELS:
            raise ValueError(f"forward_model is the older spelling of estimation_mode: fpm or op_level, found {name!r}")
        older = {"estimation_mode": _FORWARD_MODELS[name], "fallback_policy": "deny"}
        for field, value in older.items():
            if fields.setdefault(field, value) != value:
                raise ValueError(f"forward_model {name} means {field} {value}, found {fields[field]!r}; leave one out")
        return fields

    @model_validator(mode="after")
    def _one_table(self) -> Self:
        named = ((self.estimator_config or {}).get("fpm_interpolation") or {}).get("fpm_parquet_path")
        if self.fpm_parquet_path is not None and named not in (None, self.fpm_parquet_path):
            raise ValueError(
                f"fpm_parquet_path {self.fpm_parquet_path!r} and that of estimator_config {named!r} differ; give one"
            )
        return self


class FixedTiming(StrictDocument):
    """A constant for every pass with prompt tokens, and one for every pass with decode requests."""

    type: Literal["fixed"]
    prefill_ms: NotNegativeReal
    decode_ms: NotNegativeReal


class PolynomialTiming(StrictDocument):
    """The built-in curve over prompt tokens and the share of the cache in use."""

    type: Literal["polynomial"]


def _kind(value: Any) -> str:
    kind = value.get("type", "default") if isinstance(value, Mapping) else getattr(value, "type", "default")
    return kind if isinstance(kind, str) else str(kind)


Timing = Annotated[
    Annotated[DefaultTiming, Tag("default")]
    | Annotated[FixedTiming, Tag("fixed")]
    | Annotated[PolynomialTiming, Tag("polynomial")],
    Discriminator(_kind),
]
