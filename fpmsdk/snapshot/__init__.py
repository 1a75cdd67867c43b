"""Persistence of what tuning changes: the declared layout of estimator state, its bytes, and the directory around them.

Arrays and files only; which stores an estimator has is known above. Source: snapshot.md.
"""

from fpmsdk.snapshot.layout import StateField, StateLayout

__all__ = ["StateField", "StateLayout"]
