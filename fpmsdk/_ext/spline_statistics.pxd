"""Sufficient statistics of a spline at fixed knots, with compensated sums, and the fit that they give."""

from libc.stdint cimport int64_t

from fpmsdk._ext.nnls cimport NNLS_TERMS
from fpmsdk._ext.spline cimport SplineModel, SplineRows

cdef enum:
    STATISTICS_SIZE = NNLS_TERMS + 1     # terms and, after the last of them, the target

cdef enum:
    BASIS_COUNT = 0                      # rows in the statistics
    BASIS_MUTATIONS                      # additions and removals since the last load
    BASIS_DAMAGED                        # a removal cancelled too many digits
    NUM_BASIS_CLOCKS


cdef class SplineStatistics:
    cdef int64_t rebuild_interval        # 0: never
    cdef int num_terms
    # State, owned by the arrays of the store. Matrices have rows of STATISTICS_SIZE; only the
    # upper triangle is used.
    cdef double* mean
    cdef double* mean_rest               # what rounding has lost of each sum so far
    cdef double* scatter
    cdef double* scatter_rest
    cdef int64_t* clock

    cdef int bind(self, dict arrays, int64_t* clock) except -1
    cdef void load(self, SplineRows rows) noexcept nogil
    cdef void add(self, const double* terms, double target_ms) noexcept nogil
    cdef void remove(self, const double* terms, double target_ms) noexcept nogil
    cdef bint rebuild_required(self) noexcept nogil
    # False where the rows have to decide.
    cdef bint fit(self, SplineModel* model) noexcept nogil
    cdef void change(self, const double* terms, double target_ms, double sign) noexcept nogil
