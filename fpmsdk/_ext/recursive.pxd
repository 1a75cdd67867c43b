"""Recursive least squares over the work of an iteration, with a level on top that follows drift."""

from libc.stdint cimport int64_t

from fpmsdk._ext.regression cimport RegressionStore, StoreView

cdef enum:
    NUM_WORK_AXES = 4
    NUM_COEFFICIENTS = 5                 # one for the iteration itself, one for each axis


cdef class RecursiveView(StoreView):
    cdef int first_axis
    cdef double coefficient_ms[NUM_COEFFICIENTS]
    cdef double level
    cdef double long_run_level
    cdef double recent_error
    cdef double remembered               # observations, forgotten ones counted in part
    cdef double information[NUM_COEFFICIENTS * NUM_COEFFICIENTS]


cdef class RecursiveStore(RegressionStore):
    cdef double forgetting, outlier_bound, level_gain
    cdef int64_t min_observations
    cdef int first_axis                  # place of the work among the projected features
    # State, owned by `arrays`.
    cdef double* coefficient_ms          # [coefficients], none negative
    cdef double* level                   # ln(latency just now / latency of the coefficients)
    cdef double* long_run_level
    cdef double* mean_error          # mean absolute relative error of recent answers
    cdef double* information             # [coefficients, coefficients], weighted products of the work
    cdef double* moment_ms               # [coefficients], weighted products of work and latency
    cdef int64_t* clock

    cdef int bind(self) except -1
    cdef double follow(self, double surprise) noexcept nogil
    cdef void settle_coefficients(self) noexcept nogil
