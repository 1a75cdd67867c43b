"""The canonical configuration of a forward-pass model: its class, its normal form, its errors' paths.

Imports nothing heavy; performance data, profiles and learned files are opened elsewhere.
"""

from fpmsdk.config.legacy import ForwardPassPerfOptions
from fpmsdk.config.model import ForwardPassPerfModelConfig
from fpmsdk.config.normalize import check_config, normalize_config, normalize_request, request_document
from fpmsdk.config.systems import packaged_systems_root, resolve_systems_paths

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
