"""The version of this package; what a file says it was written by."""

__version__ = "0.1.0"
