"""From a document to the typed, defaults-filled configuration; relations between fields are checked later."""

from collections.abc import Mapping
from typing import Any

from fpmsdk.config.estimator import ESTIMATOR_CONFIG, contextual_defaults
from fpmsdk.config.fields import CONFIG
from fpmsdk.config.jsontext import JsonFault, read_json
from fpmsdk.config.schema import SchemaFault
from fpmsdk.errors import ConfigError


def parse_text(text: str) -> Any:
    """Return the JSON value of a configuration text, or raise `ConfigError`."""
    try:
        return read_json(text)
    except JsonFault as fault:
        raise _config_error(fault.path, str(fault)) from None


def parse_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored form of `fields.CONFIG`, defaults filled in.

    Raises: `ConfigError` whose `path` is the dotted path of the first unknown, repeated, missing or
    ill-typed field.
    Source: fpm-model.md section 3, rules 1 to 5.
    """
    try:
        parsed = CONFIG.read(document)
        defaults = contextual_defaults(parsed)
        if not defaults:
            return parsed
        written = _laid_over(defaults, document.get("estimator_config", {}))
        return parsed | {"estimator_config": ESTIMATOR_CONFIG.read(written, "estimator_config")}
    except SchemaFault as fault:
        raise _config_error(fault.path, fault.reason) from None


def _config_error(path: str, reason: str) -> ConfigError:
    return ConfigError(f"invalid forward-pass config at {path}{': ' if path else ''}{reason}", path)


def _laid_over(defaults: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(written)
    for key, value in defaults.items():
        if key not in written:
            merged[key] = value
        elif isinstance(value, Mapping):
            merged[key] = _laid_over(value, written[key])
    return merged
