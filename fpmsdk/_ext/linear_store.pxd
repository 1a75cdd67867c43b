"""The linear store: a linear model and the policy that says when it is fitted anew."""

from libc.stdint cimport int64_t

from fpmsdk._ext.linear cimport LinearFit
from fpmsdk._ext.regression cimport StoreView
from fpmsdk._ext.row_store cimport RowStore

cdef struct UpdatePolicy:
    bint on_error                        # error_threshold; otherwise a fit after every row
    int64_t trigger
    int64_t cooldown
    int64_t startup_observations


cdef class LinearView(StoreView):
    cdef LinearFit fit
    cdef int num_axes


cdef class LinearStore(RowStore):
    cdef UpdatePolicy policy

    cdef bint fit_is_due(self, bint has_prior) noexcept nogil
