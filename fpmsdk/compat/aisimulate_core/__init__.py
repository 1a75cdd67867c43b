"""What clients import of the package of this name, made of fpmsdk. Importing it loads nothing else."""

from importlib import import_module
from typing import Any

from fpmsdk import __version__

FPMSDK_ALIAS = True
__all__ = ["RustForwardPassPerfModel", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "RustForwardPassPerfModel":
        raise AttributeError(f"module 'aisimulate_core' of fpmsdk has no attribute {name!r}")
    return import_module("fpmsdk.compat.textual").TextualPerfModel
