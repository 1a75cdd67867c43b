"""Settings of static estimates."""

from fpmsdk.compat.static import ModelConfig, RuntimeConfig

__all__ = ["ModelConfig", "RuntimeConfig"]
