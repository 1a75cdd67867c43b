"""The canonical configuration of a forward-pass model: its class, its normal form, its errors' paths.

Imports nothing heavy; performance data, profiles and learned files are opened elsewhere.
"""

from typing import TYPE_CHECKING, Any

from fpmsdk.config.normalize import check_config, normalize_config, normalize_request, request_document
from fpmsdk.config.systems import packaged_systems_root, resolve_systems_paths

if TYPE_CHECKING:
    from fpmsdk.config.legacy import ForwardPassPerfOptions
    from fpmsdk.config.model import ForwardPassPerfModelConfig

__all__ = [
    "ForwardPassPerfModelConfig",
    "ForwardPassPerfOptions",
    "check_config",
    "normalize_config",
    "normalize_request",
    "packaged_systems_root",
    "request_document",
    "resolve_systems_paths",
]


def __getattr__(name: str) -> Any:
    # Clients that configure with plain mappings never pay for the classes.
    from importlib import import_module

    home = {"ForwardPassPerfModelConfig": "model", "ForwardPassPerfOptions": "legacy"}.get(name)
    if home is None:
        raise AttributeError(f"module 'fpmsdk.config' has no attribute {name!r}")
    value = getattr(import_module(f"fpmsdk.config.{home}"), name)
    globals()[name] = value
    return value
