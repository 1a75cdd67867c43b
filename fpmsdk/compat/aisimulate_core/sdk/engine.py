"""Engine specifications."""

from fpmsdk.compat.static import compile_engine

__all__ = ["compile_engine"]
