"""The names of the facade. Each loads its module on first use: an import of the Planner loads no data and no table."""

from importlib import import_module
from typing import Any

_HOME = {
    "ForwardPassPerfModelConfig": "fpmsdk.config",
    "ForwardPassPerfOptions": "fpmsdk.config",
    "ModelConfig": "fpmsdk.compat.static",
    "RuntimeConfig": "fpmsdk.compat.static",
    "RustForwardPassPerfModel": "fpmsdk.perfmodel.model",
    "compile_engine": "fpmsdk.compat.static",
}
_RENAMED = {"RustForwardPassPerfModel": "ForwardPassPerfModel"}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} of fpmsdk has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value
