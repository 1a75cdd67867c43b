"""What static estimates are of."""

from fpmsdk.compat.static import StaticModel as BaseModel
from fpmsdk.compat.static import StaticModel as get_model

__all__ = ["BaseModel", "get_model"]
