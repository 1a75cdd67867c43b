"""Which model a snapshot belongs to: its configuration, without the places of files, compared field by field.

Source: snapshot.md sections 3 and 6.
"""

import marshal
from collections.abc import Mapping
from typing import Any

from fpmsdk.config.estimator import DEFAULT_AXES
from fpmsdk.config.learned_source import FROM_LEARNED
from fpmsdk.config.schema import shown

# Places of files: their content is pinned by digests, and a copy may lie elsewhere.
_PLACES = (
    ("op_level", "execution_profile", "path"),
    ("fpm_interpolation", "fpm_parquet_path"),
    ("fpm_learned", "artifact_path"),
    ("fpm_learned", "checkpoint_path"),
)


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The identity in a canonical configuration.

    Example
    -------
    >>> identity_of({"tp": 2, "systems_paths": ["/data"], "estimator_config": {"state_snapshot": {}}})
    {'tp': 2, 'systems_paths': [], 'estimator_config': {}}
    """
    estimator = {name: value for name, value in config["estimator_config"].items() if name != "state_snapshot"}
    for path in _PLACES:
        estimator = _blanked(estimator, path)
    return {**config, "systems_paths": [], "estimator_config": estimator}


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind of state that models of a canonical configuration with an explicit mode have."""
    estimator, mode = config["estimator_config"], str(config["estimation_mode"])
    if mode == "op_level":
        return "execution_profile" if estimator["op_level"].get("execution_profile") else mode
    if mode == "fpm_learned":
        return "from_learned" if is_from_learned(config) else f"learned_{estimator['fpm_learned']['adaptation']}"
    if mode != "fpm_regression":
        return mode
    fit, sampling = estimator["fpm_regression"]["fit"], estimator["fpm_regression"]["sampling"]
    if fit["kind"] != "standardized_nnls":
        return f"regression_{fit['kind']}"
    chosen = (fit.get("linear") or {}).get("feature_axes", DEFAULT_AXES) != DEFAULT_AXES or "axes" in sampling
    return "regression_selected" if chosen else "regression_linear"


def is_from_learned(config: Mapping[str, Any]) -> bool:
    """Whether a canonical configuration is the placeholder of a model that was built from an artifact alone."""
    return bool(config["estimation_mode"] == "fpm_learned" and config["model"] == config["system"] == FROM_LEARNED)


def _blanked(section: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    value = section.get(name)
    if value is None:
        return section
    return section | {name: _blanked(value, tuple(rest)) if rest else ""}


def first_difference(expected: Any, found: Any, path: str = "") -> str | None:
    """Place and values of the first difference in declared order; None when all is equal, types included.

    Example
    -------
    >>> first_difference({"tp": 1, "pp": 1}, {"tp": 1, "pp": 1.0})
    'pp: expected 1, found 1.0'
    """
    try:
        # Format 0 tells types apart and depends on nothing but the values and their order.
        if marshal.dumps(expected, 0) == marshal.dumps(found, 0):
            return None
    except ValueError:
        pass  # nested too deeply, or not only plain values
    return _difference(expected, found, path)


def _difference(expected: Any, found: Any, path: str) -> str | None:
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in (*expected, *(name for name in found if name not in expected)):
            inner = f"{path}.{name}" if path else name
            if name not in expected or name not in found:
                side, value = ("expected", expected) if name in expected else ("found", found)
                other = "found" if side == "expected" else "expected"
                return f"{inner}: {side} {shown(value[name])}, {other} nothing"
            if difference := _difference(expected[name], found[name], inner):
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return next(filter(None, (_difference(one, other, f"{path}[{i}]") for i, (one, other) in pairs)), None)
    if type(expected) is type(found) and expected == found and repr(expected) == repr(found):
        return None
    return f"{path}: expected {shown(expected)}, found {shown(found)}"
