"""Serving engines of static estimates by name."""

from fpmsdk.compat.static import StaticBackend as get_backend

__all__ = ["get_backend"]
