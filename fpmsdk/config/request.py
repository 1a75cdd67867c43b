"""What callers may write that the canonical form does not know: presets, Python infinities, `default` roots.

Turns such a document into one that the strict layer reads; it refuses only what cannot be turned.
Source: fpm-model.md sections 2.4 and 3.1, clients.md section 2.2.
"""

import math
from collections.abc import Mapping
from typing import Any

from fpmsdk.config.schema import weight_name
from fpmsdk.config.systems import resolve_systems_paths
from fpmsdk.errors import ConfigError

TRANSFER_PRESETS = {
    "off": (),
    "conservative": ("xshape",),
    "balanced": ("xquant", "xshape"),
    "aggressive": ("xop", "xprofile", "xquant", "xshape"),
}
MODES_WITHOUT_DATA = ("fpm_regression", "fpm_learned")


def expand_request(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with transfer presets spelled out and non-finite feature weights named."""
    expanded = dict(document)
    if isinstance(policy := document.get("transfer_policy"), str):
        expanded["transfer_policy"] = expand_transfer_policy(policy)
    if isinstance(estimator := document.get("estimator_config"), Mapping):
        expanded["estimator_config"] = _expand_features(estimator)
    return expanded


def resolve_request(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return `expand_request` with `systems_paths` resolved on this machine where the mode uses data."""
    resolved = expand_request(document)
    entries = document.get("systems_paths", ())
    mode = document.get("estimation_mode", document.get("forward_model"))
    if not isinstance(entries, (list, tuple)):
        return resolved
    resolved["systems_paths"] = resolve_systems_paths(entries) if entries or mode not in MODES_WITHOUT_DATA else []
    return resolved


def expand_transfer_policy(policy: str) -> list[str]:
    """Return the sorted transfer kinds of a comma list of kinds and presets.

    >>> expand_transfer_policy("balanced, xop")
    ['xop', 'xquant', 'xshape']
    >>> expand_transfer_policy("off")
    []
    """
    presets = {kind: (kind,) for kind in TRANSFER_PRESETS["aggressive"]} | TRANSFER_PRESETS
    names = [name.strip().lower() for name in policy.split(",")]
    names = [name for name in names if name]
    unknown = [name for name in names if name not in presets]
    if unknown or not names:
        raise ConfigError(
            f"transfer_policy has no kind or preset {unknown[0] if unknown else policy!r}, "
            f"expected a comma list of {', '.join(presets)}",
            "transfer_policy",
        )
    return sorted({kind for name in names for kind in presets[name]})


def name_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which non-finite floats are the strings that carry them through JSON."""
    return {
        key: weight_name(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in weights.items()
    }


def _expand_features(estimator: Mapping[str, Any]) -> Mapping[str, Any]:
    features = estimator.get("features")
    return {**estimator, "features": name_weights(features)} if isinstance(features, Mapping) else estimator
