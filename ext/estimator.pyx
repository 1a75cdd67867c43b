"""The immutable view of what a model learned: one estimate for one iteration.

Not an estimator: the subclasses hold the fitted coefficients.
"""

from libc.math cimport NAN

from fpmsdk._ext.declarations cimport FpmRank


cdef class ServingView:
    """A frozen estimator. `estimate` answers in ms; NaN means not ready, an empty iteration is 0.0."""

    cdef double estimate(self, const FpmRank* ranks, Py_ssize_t num_ranks) noexcept nogil:
        return NAN
