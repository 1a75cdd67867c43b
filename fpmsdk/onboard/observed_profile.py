"""A profile of observed resources: the measurement decides, and what was claimed before is compared with it.

Source: onboarding.md section 6.3 (observation to profile, layout claims).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fpmsdk.config.profile import CacheGroup, FpmModelProfile
from fpmsdk.documents.canonical import canonical_bytes
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.draft import declared_architecture, draft_notes, refuse_block_sizes
from fpmsdk.onboard.geometry import rank_geometry
from fpmsdk.onboard.intake import ModelConfig, check_experts
from fpmsdk.onboard.layouts import INKLING, check_layout
from fpmsdk.onboard.overrides import CLAIMED_GEOMETRY, DEPLOYMENT_FIELDS, MODEL_FIELDS
from fpmsdk.onboard.pilot import linear_rate
from fpmsdk.onboard.request import SupportRequest

_CLAIMS = (*CLAIMED_GEOMETRY, "max_num_tokens", "max_batch_size")
_COMPARED = "user override; compared with what the probe measured"
_ASSUMED = "user assumption"
_UNUSED = "user override; unused, since the probe measured the blocks"


def observed_profile(
    config: ModelConfig,
    request: SupportRequest,
    precision: Mapping[str, Any],
    resources: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> FpmModelProfile:
    """The profile of one deployment whose resources were observed.

    Parameters
    ----------
    config: the model's configuration that the engine loaded.
    request: the draft, without a profile of its own.
    precision: modes and backends that were launched and observed, under the names of a deployment.
    resources: what the observations amount to.
    overrides: checked statements of the user.

    Raises
    ------
    OnboardError: a statement contradicts the measurement or the configuration; names both values.
    """
    metadata = _metadata(config, overrides)
    architecture, named = declared_architecture(config, overrides)
    reasons = check_layout(config.raw, architecture, named, inkling=metadata["architecture"] == INKLING)
    if reasons and "cache_block_sizes" in overrides:
        raise refuse_block_sizes(reasons)
    check_experts(config.raw, architecture, metadata["num_experts"])
    rank_geometry(config, architecture, bool(reasons), request)
    for name in _CLAIMS:
        if name in overrides and not _agrees(name, overrides[name], resources):
            raise _contradiction(name, overrides[name], resources)
    for name in DEPLOYMENT_FIELDS:
        if name in overrides and overrides[name] != precision.get(name):
            raise OnboardError(
                f"resource_overrides.{name}: {overrides[name]!r} is not the observed {precision.get(name)!r}; correct "
                "or remove it",
                f"resource_overrides.{name}",
            )
    notes = draft_notes(config, architecture, reasons)
    if reasons:
        notes["cache_layout"] = f"measured by the runtime probe; config.json does not tell it ({', '.join(reasons)})"
    measured, layout = _in_claimed_layout(resources, overrides)
    provenance = {
        "method": "observed runtime resources with the metadata of a local model configuration",
        "config_sha256": config.sha256,
        **({"config_source_files": dict(config.source_files)} if config.source_files else {}),
        "config_notes": notes,
        "user_overrides": {name: {"value": value, "source": _source(name)} for name, value in overrides.items()},
        "source_profile_provenance": None,
        **layout,
    }
    return request.profile_of(
        {**metadata, "provenance": json.dumps(provenance, sort_keys=True, allow_nan=False)},
        {
            **({} if request.worker_type is None else {"worker_type": request.worker_type}),
            **precision,
            "resources": measured,
        },
        "observed profile",
    )


def linear_resources(resources: Mapping[str, Any]) -> dict[str, Any] | None:
    """Measured groups as a linear cache; None when a linear cache does not say the same as they.

    >>> group = {"name": "a", "kind": "attention", "num_layers": 2, "block_size_tokens": 16, "page_size_bytes": 1024,
    ...          "sliding_window": None}
    >>> linear_resources({"cache_layout": "grouped", "cache_groups": [group]})
    {'cache_layout': 'linear', 'kv_bytes_per_token': 64}
    """
    rate = linear_rate(_groups(resources))
    if rate is None:
        return None
    kept = {name: value for name, value in resources.items() if name != "cache_groups"}
    return kept | {"cache_layout": "linear", "kv_bytes_per_token": rate}


def measured_rate(resources: Mapping[str, Any]) -> Fraction | None:
    """Bytes per token of measured groups without windows, exactly; None when one has a window or is no attention."""
    groups = _groups(resources)
    if any(group.kind != "attention" or group.sliding_window is not None for group in groups):
        return None
    return sum((Fraction(group.page_size_bytes, group.block_size_tokens) for group in groups), Fraction(0))


def _groups(resources: Mapping[str, Any]) -> list[CacheGroup]:
    return [CacheGroup.model_validate(group) for group in resources.get("cache_groups") or ()]


def _metadata(config: ModelConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: config.suggestions[name] for name in MODEL_FIELDS if name in config.suggestions}
    for name in MODEL_FIELDS:
        if name not in overrides:
            continue
        known, stated = metadata.get(name), overrides[name]
        if known is not None and (stated > known if name == "context_length" else stated != known):
            raise OnboardError(
                f"resource_overrides.{name}: {stated!r} contradicts {known!r} of {config.path}; correct or remove it",
                f"resource_overrides.{name}",
            )
        metadata[name] = stated
    if missing := [name for name in MODEL_FIELDS if name not in metadata]:
        raise OnboardError(
            f"{config.path} does not tell {', '.join(missing)}; state them in resource_overrides", missing[0]
        )
    return metadata


def _agrees(name: str, stated: Any, resources: Mapping[str, Any]) -> bool:
    rate = measured_rate(resources)
    if name == "cache_groups":
        return _shapes(stated) == _shapes(resources["cache_groups"])
    if name == "kv_bytes_per_token":
        return rate is not None and rate == stated
    if name == "cache_layout" and stated == "linear":
        return rate is not None
    return bool(stated == resources.get(name))


def _shapes(groups: Any) -> list[bytes]:
    return sorted(canonical_bytes({**group, "name": ""}) for group in groups)


def _contradiction(name: str, stated: Any, resources: Mapping[str, Any]) -> OnboardError:
    rate = measured_rate(resources)
    found = {
        "kv_bytes_per_token": f"{rate}" if rate is not None else "cache groups that have no one rate",
        "cache_layout": "groups with windows or convolution state" if rate is None else "grouped",
    }.get(name, json.dumps(resources.get(name), sort_keys=True))
    return EvidenceError(
        f"resource_overrides.{name}: stated is {json.dumps(stated, sort_keys=True)}, measured is {found}; the "
        "measurement holds. Correct or remove the statement, or probe again if the runtime has changed",
        f"resource_overrides.{name}",
    )


def _in_claimed_layout(
    resources: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    claimed = [name for name in ("cache_layout", "kv_bytes_per_token") if name in overrides]
    claims_linear = overrides.get("cache_layout", "linear") == "linear" and bool(claimed)
    if not claims_linear:
        return dict(resources), {}
    what = " and ".join(claimed)
    linear = linear_resources(resources)
    if linear is None:
        rate = measured_rate(resources)
        sizes = sorted({group.block_size_tokens for group in _groups(resources)})
        reason = f"{rate} bytes per token are no whole number" if rate and rate.denominator != 1 else ""
        if len(sizes) > 1 or sizes == [1]:
            reason = f"blocks of {', '.join(map(str, sizes))} tokens have no one size above 1"
        return dict(resources), {
            "cache_layout_reason": f"grouped: the stated {what} agrees with the measurement, but {reason}"
        }
    return linear, {
        "cache_layout_reason": f"linear: the stated {what} agrees with the measured groups, which are full attention",
        "measured_cache_groups": resources["cache_groups"],
    }


def _source(name: str) -> str:
    if name in (*_CLAIMS, *DEPLOYMENT_FIELDS):
        return _COMPARED
    return _UNUSED if name == "cache_block_sizes" else _ASSUMED
