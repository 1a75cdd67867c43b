"""The linear store: a linear model and the policy that says when it is fitted anew."""

from libc.stdint cimport int64_t, uint8_t

from fpmsdk._ext.linear cimport LinearFit, LinearModel
from fpmsdk._ext.regression cimport RegressionStore, StoreView

cdef struct UpdatePolicy:
    bint on_error                        # error_threshold; otherwise a fit after every row
    double relative_tolerance
    double absolute_tolerance_ms
    int64_t window
    int64_t trigger
    int64_t cooldown
    int64_t startup_observations


cdef class LinearView(StoreView):
    cdef LinearFit fit
    cdef int num_axes


cdef class LinearStore(RegressionStore):
    cdef UpdatePolicy policy
    cdef LinearModel model
    cdef int64_t row_capacity, error_capacity
    # State, owned by `arrays`.
    cdef int64_t* clock
    cdef uint8_t* errors                 # verdicts of the update policy, oldest first

    cdef int bind(self) except -1
    cdef bint fit_is_due(self, bint has_prior) noexcept nogil
    cdef void judge_prior(self, double prior_ms, double target_ms) noexcept nogil
