"""Persistence of what tuning changes: the declared layout of estimator state."""

from fpmsdk.snapshot.layout import StateField, StateLayout

__all__ = ["StateField", "StateLayout"]
