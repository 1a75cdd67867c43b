"""The form of the model that exchanges configurations as JSON text."""

from fpmsdk.compat.textual import TextualPerfModel as RustForwardPassPerfModel

__all__ = ["RustForwardPassPerfModel"]
