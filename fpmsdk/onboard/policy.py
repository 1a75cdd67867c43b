"""The validation policy: how much is repeated, withheld and compared, and which deviations still pass.

Source: onboarding.md section 8.1.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.documents.yaml_files import read_yaml
from fpmsdk.errors import OnboardError

POLICY_V1: Final = "aisimulate-onboarding-validation-policy/v1"
POLICY_V2: Final = "aisimulate-onboarding-validation-policy/v2"

Ratio = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class RepeatabilityPolicy(StrictDocument):
    """Independent launches of every cell, and how far their latencies may scatter.

    `max_points_per_cell` bounds a `bounded` comparison only, which is diagnostic; `max_cv` is sample standard deviation
    over mean, `max_source_relative_difference` |median / source - 1|, both dimensionless.
    """

    comparison_mode: Literal["full_grid", "bounded"] = "full_grid"
    samples: Annotated[int, Field(ge=2)] = 5
    max_points_per_cell: Count = 12
    max_attempts_per_sample: Count = 2
    max_cv: Ratio = 0.05
    max_source_relative_difference: Ratio = 0.05


class InterpolationPolicy(StrictDocument):
    """Measured points withheld from a table, and how well the rest must predict them."""

    max_points_per_phase: Count = 16
    seed: Annotated[int, Field(ge=0)] = 42
    max_p95_relative_error: Ratio = 0.20
    max_unsupported_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0


class ServingPolicy(StrictDocument):
    """How close a matched serving run must come to its prediction."""

    max_latency_p95_relative_error: Ratio = 0.20
    max_throughput_relative_error: Ratio = 0.20
    max_dispatch_delay_ms: Ratio = 5.0
    max_dispatch_delay_fraction: Ratio = 0.01


class ValidationPolicy(StrictDocument):
    """What a validation does and accepts; every field has a default.

    >>> ValidationPolicy().repeatability.samples
    5
    """

    schema_version: Literal[
        "aisimulate-onboarding-validation-policy/v1", "aisimulate-onboarding-validation-policy/v2"
    ] = POLICY_V2
    repeatability: RepeatabilityPolicy = RepeatabilityPolicy()
    interpolation: InterpolationPolicy = InterpolationPolicy()
    serving: ServingPolicy = ServingPolicy()

    @model_validator(mode="before")
    @classmethod
    def _bounded_in_version_1(cls, document: Any) -> Any:
        # Version 1 knew bounded subsets only. Read again, it stays what it was.
        if not isinstance(document, dict) or document.get("schema_version") != POLICY_V1:
            return document
        repeatability = document.get("repeatability", {})
        if not isinstance(repeatability, dict):
            return document
        if repeatability.get("comparison_mode", "bounded") != "bounded":
            raise ValueError(
                f"repeatability.comparison_mode: a policy of version 1 is bounded, found "
                f"{repeatability['comparison_mode']!r}; write a policy of version 2 and start a fresh validation"
            )
        return {**document, "repeatability": {**repeatability, "comparison_mode": "bounded"}}

    def document(self) -> dict[str, Any]:
        """The plain values of every field, defaults included."""
        return self.model_dump(mode="json")


def load_policy(path: str | os.PathLike[str] | None) -> ValidationPolicy:
    """The policy that a JSON or YAML file holds.

    Parameters
    ----------
    path: the file; None for the defaults.

    Raises
    ------
    OnboardError: no such file, neither JSON nor YAML, a repeated key, an unknown field or a value out of range; one
        line for every faulty field.

    Source: onboarding.md section 8.1.

    >>> load_policy(None).interpolation.seed
    42
    """
    if path is None:
        return ValidationPolicy()
    return checked(ValidationPolicy, _read(path), os.fspath(path))


def _read(path: str | os.PathLike[str]) -> Any:
    # JSON first: YAML 1.1 takes 1e-05 for a text.
    try:
        return read_document(path, follow_links=True)
    except FileNotFoundError:
        raise OnboardError(f"{path}: no such policy file; name a JSON or YAML file", os.fspath(path)) from None
    except OnboardError:
        return read_yaml(path)
